"""Runs a reference and its variants, and compares their recordings.

Each training records itself: it has `with lockstep.record(model, optimizer):`, or a recorder whose
path may be None. The variable `LOCKSTEP_RECORD` gives the recorder its file, steps, replay and
permute. `python -m lockstep run` and `lockstep.assert_same_training` both call `verify_trainings`.
"""

import contextlib
import dataclasses
import json
import operator
import os
import pathlib
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

try:
    import fcntl
except ImportError:  # Not on Windows.
    fcntl = None  # type: ignore[assignment]

from lockstep.answer.text import one_line
from lockstep.comparison import compare_pair
from lockstep.data.file import TraceError, load
from lockstep.data.trace import MOST_STEPS, Trace
from lockstep.engine.resume import first_step_of, renumbered
from lockstep.engine.verdict import (
    FAULT,
    GRADIENT,
    NOT_COMPARED,
    NOT_VERIFIED,
    NOTHING,
    OUTPUTS,
    Verdict,
)
from lockstep.recording import VARIABLE
from lockstep.running.launch import (
    Training,
    TrainingError,
    last_lines,
    require_program,
    require_training,
    run_training,
)

REFERENCE = "reference"
_PERMUTED = f"{REFERENCE}, examples permuted"
_NUM_BEFORE = 10  # First steps of a reference, to compare a training that resumes.
_BY_PARTS = "the reference was run once for each rank's part of the batch"


@dataclasses.dataclass(frozen=True)
class Settings:
    """How trainings are recorded and compared.

    Attributes:
        steps: numbers of the steps to record, from 0; or the number of first steps.
        names: name of a weight in the variants → its name in the reference, if they do not match.
        tolerance: relative difference of gradients to allow; None to compute it from a second run
            of the reference with permuted examples.
        modules: whether recorders of PyTorch record all modules; or a pattern of their names.
        timeout_sec: time limit of each run.
        keep: folder for recordings and what the trainings print; None to keep nothing.

    Raises:
        ValueError: a value is wrong.
    """

    steps: int | Sequence[int] = 2
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tolerance: float | None = None
    modules: bool | str = False
    timeout_sec: float = 300
    keep: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        _numbers(self.steps)
        if self.tolerance is not None and not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance: {self.tolerance!r} is not at least 0 and less than 1")
        if not self.timeout_sec > 0:
            raise ValueError(f"timeout_sec: {self.timeout_sec!r} is not a positive number")


def _numbers(steps: int | Sequence[int]) -> list[int]:
    """Returns the numbers of the steps to record.

    Raises:
        ValueError: they are not whole numbers from 0 in ascending order.
    """
    try:
        number = operator.index(steps)  # type: ignore[arg-type]
        if number > MOST_STEPS:
            raise ValueError(f"steps: {number} are more than {MOST_STEPS:,}")
        given = range(number)
    except TypeError:
        given = steps  # type: ignore[assignment]
    try:
        wanted = [operator.index(step) for step in given]
    except TypeError:
        wanted = []
    if not wanted or wanted != sorted({*wanted}) or wanted[0] < 0:
        raise ValueError(f"steps: {steps!r} are no whole numbers from 0 in ascending order")
    return wanted


def verify_trainings(
    reference: Training,
    variants: Mapping[str, Training],
    settings: Settings,
    resumes: Mapping[str, tuple[Training, Training]] | None = None,
    run: Callable[..., None] = run_training,
) -> dict[str, Verdict]:
    """Records trainings in processes of their own, and compares each variant with the reference.

    Shows on standard error what is running. A variant with a fault is run a second time, which
    tells a bug from a race or broken hardware. In PyTorch, modules are recorded then, if the fault
    is in a pass of the model: the first wrong one is named.

    Args:
        reference: the training on one device, which is never interrupted.
        variants: name → another way to run it.
        settings: how they are recorded and compared.
        resumes: name → a training that saves a checkpoint and ends, and the one that resumes.
        run: runs a training as `run_training` does; another one shows its own progress.

    Returns:
        Name of the variant, or of the training that resumes → its verdict.

    Raises:
        TrainingError: a training failed, reached its time limit or recorded nothing; of several
            variants, that one is not verified.
        ValueError: an argument is wrong, or the recordings have nothing in common.
    """
    resumes = resumes or {}
    parts = {f"{name}, {what}": training for name, both in resumes.items()
             for what, training in zip(("interrupted", "resumed"), both, strict=True)}  # fmt: skip
    for name, training in {REFERENCE: reference, **variants, **parts}.items():
        require_training(name, training)
        require_program(name, training)
    with _folder(settings.keep) as folder:
        session = _Session(folder, settings, reference, run, is_long=bool(resumes))
        session.announce([*variants, *parts])
        session.record_reference()
        files = {name: f"variant{i}{_in_file_name(name)}" for i, name in enumerate(variants, 1)}
        verdicts = dict[str, Verdict]()
        for name, file in files.items():
            try:
                verdicts[name] = session.verdict_of(name, variants[name], file)
            except TrainingError as error:
                if len(variants) + len(resumes) == 1:
                    raise
                # The others have a verdict.
                why = one_line(": ".join([error.text, *error.tail.splitlines()[-1:]]))
                verdicts[name] = Verdict(NOT_VERIFIED, missing=(why,), training=name)
        for name, verdict in verdicts.items():
            if verdict.status == FAULT:
                file = f"{files[name]}-second"
                verdicts[name] = session.repeated(verdict, variants[name], file)
        for i, (name, both) in enumerate(resumes.items(), 1):
            file = f"resumed{i}{_in_file_name(name)}"
            verdicts[name] = session.verdict_of_resumed(name, *both, file)
    return verdicts


@contextlib.contextmanager
def _folder(keep: str | os.PathLike[str] | None) -> Iterator[pathlib.Path]:
    """Yields the folder for recordings, which is removed if it is not to be kept."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="lockstep-", ignore_cleanup_errors=True) as folder:
            yield pathlib.Path(folder)
    else:
        pathlib.Path(keep).mkdir(parents=True, exist_ok=True)
        with _locked(keep):
            yield pathlib.Path(keep).absolute()


@contextlib.contextmanager
def _locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Locks a folder: another run would compare recordings that this one makes.

    File systems without locks are let through.
    """
    if fcntl is None:
        yield
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            text = "is the folder of a run that has not ended; pass another one"
            raise BlockingIOError(error.errno, text, os.fspath(folder)) from None
        except OSError:
            pass
        yield
    finally:
        os.close(number)


def _in_file_name(name: str) -> str:
    short = re.sub(r"\W+", "-", name, flags=re.ASCII).strip("-")[:40]
    return f"-{short}" if short else ""


class _Session:
    """Records trainings in a folder, and compares variants with the reference."""

    def __init__(
        self, folder: pathlib.Path, settings: Settings, reference: Training,
        run: Callable[..., None], *, is_long: bool,
    ) -> None:  # fmt: skip
        self._folder, self._settings, self._reference = folder, settings, reference
        self._run, self._is_shown = run, run is run_training
        self._steps = _numbers(settings.steps)  # Of the reference.
        if is_long and isinstance(settings.steps, int):
            self._steps = [*range(max(_NUM_BEFORE, settings.steps))]
        self._is_long = is_long
        self._files: list[str] = []  # Of the reference: as it is, and with permuted examples.
        self._modules = settings.modules
        self._with_modules = ""  # The file of the reference, once modules are needed.
        self._can_run_by_parts = False

    def announce(self, names: Sequence[str]) -> None:
        """Says which trainings are run, one after another: two at once may exhaust a device."""
        first = [REFERENCE] if self._settings.tolerance is not None else [REFERENCE, _PERMUTED]
        listed = "; ".join(map(one_line, [*first, *names]))
        if self._is_shown:
            text = f"{len(first) + len(names)} trainings, and more where one differs: {listed}"
            with contextlib.suppress(OSError):
                print(text, file=sys.stderr, flush=True)

    def record_reference(self) -> None:
        """Records the reference, and without a given tolerance also with permuted examples."""
        one = self._record(REFERENCE, self._reference, "reference", steps=self._steps)
        about, self._files = load(one).about, [one]
        # A verdict says which steps the reference lacks, as it ends early or skips updates.
        self._steps = [*about.steps] or self._steps
        self._can_run_by_parts = about.framework != "jax" and about.num_replicas == 1
        if self._settings.tolerance is None:
            given = {"replay": one, "permute": 1}
            self._files.append(self._record(_PERMUTED, self._reference, "permuted", **given))

    def verdict_of(self, name: str, training: Training, file: str) -> Verdict:
        """Records a variant and returns its verdict.

        Layers such as BatchNorm and dropout mix or draw for each rank. Where that is all that may
        differ, the reference is run again, in one process, once for each rank's part of the batch.
        """
        path = self._record(name, training, file, replay=self._files[0])
        verdict = self._verdict(name, [*self._files, path])
        if verdict.status != NOT_COMPARED or not self._can_run_by_parts:
            return verdict
        names = {own: other for other, own in self._settings.names.items()}
        given = {"replay": path, "shards": "each", **({"names": names} if names else {})}
        title = f"{REFERENCE} for each part of {name}"
        try:
            parts = self._record(title, self._reference, f"{file}-reference", **given)
            second = self._verdict(name, [*self._files, path], parts)
        except (TrainingError, ValueError) as error:
            lines = (getattr(error, "tail", "") or str(error)).splitlines()
            note = f"{_BY_PARTS}, which failed: {one_line(lines[-1] if lines else error)}"
            return dataclasses.replace(verdict, remarks=(*verdict.remarks, note))
        note = _BY_PARTS
        if second.status == NOT_COMPARED:
            note += "; its parts do not have the examples and random numbers of the ranks"
        return dataclasses.replace(second, remarks=(*second.remarks, note))

    def repeated(self, verdict: Verdict, training: Training, file: str) -> Verdict:
        """Runs a variant with a fault again, and returns its verdict with what that shows.

        Modules are recorded then, if the fault is in a pass of the model: the first wrong one is
        its place.
        """
        title, kept = f"{verdict.training}, second run", (self._files, self._modules)
        second: Verdict | None = None
        if self._lacks_modules(verdict):
            self._modules, name = True, f"{REFERENCE} with modules"
            # Memory may be short for modules, and a recording with them may not fit the others.
            with contextlib.suppress(TrainingError, ValueError):
                self._with_modules = self._with_modules or self._record(
                    name, self._reference, "modules", replay=self._files[0]
                )
                self._files = [self._with_modules, *self._files[1:]]
                second = self.verdict_of(title, training, file)
            self._files, self._modules = kept
        second = second or self.verdict_of(title, training, file)
        if _place_of(second) != _place_of(verdict):
            note = (
                "not reproducible: a second run from the same states has another verdict; look for"
                " a race, an uninitialised buffer or broken hardware"
            )
            return dataclasses.replace(verdict, remarks=(*verdict.remarks, note))
        note = "reproducible: a second run from the same states has the same fault"
        found = second if second.place and second.place.module else verdict
        remarks = *verdict.remarks, note
        return dataclasses.replace(found, training=verdict.training, remarks=remarks)

    def _lacks_modules(self, verdict: Verdict) -> bool:
        """Returns whether modules, which are not recorded, would say more of a fault."""
        is_in_pass = verdict.place is not None and verdict.place.node in (OUTPUTS, GRADIENT)
        is_whole = not load(self._files[0]).about.sample
        return is_in_pass and is_whole and verdict.framework == "torch" and not self._modules

    def _verdict(self, name: str, files: Sequence[str], by_parts: str = "") -> Verdict:
        """Returns the verdict on the last recording, compared with the first one."""
        first, *others = [load(file) for file in files]
        if self._is_long:  # The training may have fewer steps.
            first = renumbered(first, 0, first)
        return self._judged(name, [first, *others], load(by_parts) if by_parts else None)

    def _judged(
        self, name: str, traces: Sequence[Trace], by_parts: Trace | None = None, *,
        is_resumed: bool = False,
    ) -> Verdict:  # fmt: skip
        reference, *permuted, training = traces
        with self._progress(f"{name}: comparing", is_passing=True) as progress:
            verdict = compare_pair(
                reference, training, permuted[0] if permuted else None, by_parts,
                self._settings.names, tolerance=self._settings.tolerance, resumed=is_resumed,
                on_step=progress.update,
            )  # fmt: skip
        return dataclasses.replace(verdict, training=name, reference="reference training")

    def verdict_of_resumed(
        self, name: str, first: Training, second: Training, file: str, number: int | None = None
    ) -> Verdict:
        """Runs a training that is interrupted, and the one that resumes; returns its verdict.

        Args:
            name: a name.
            first: the training that saves a checkpoint and ends, or is killed.
            second: the training that resumes.
            file: name for recordings.
            number: the step to resume from, with the state of the reference; None to find it out,
                and to leave the training its own state.
        """
        trained, notes = 0, list[str]()
        try:
            path = self._record(f"{name}, interrupted", first, f"{file}-interrupted", steps=[0])
            trained = load(path).about.trained
        except TrainingError as error:
            if not error.has_ended:
                raise
            notes.append(error.text)
        steps = self._settings.steps
        given: dict[str, Any] = {"steps": steps if isinstance(steps, int) else len(steps)}
        if number is not None:
            known = [step for step in load(self._files[0]).steps if step >= number]
            given |= {"replay": self._files[0], "first_step": number, "steps": known}
        try:
            path = self._record(f"{name}, resumed", second, f"{file}-resumed", **given)
        except TrainingError as error:
            raise TrainingError("; ".join([error.text, *notes]), error.tail) from None
        names, own = self._settings.names, load(path)
        reference, *permuted = [load(each) for each in self._files]
        at = number or first_step_of(reference, own, names, trained)
        if at not in reference.steps[not reference.steps[0] :]:
            listed = ", ".join(map(str, reference.steps))
            raise TrainingError(
                f"{name}: it resumes with step {at}, and the reference is recorded in steps"
                f" {listed}: pass numbers around it, as in --steps=99,100,101"
                if at
                else f"{name}: it resumes with the weights of none of steps {listed} of the"
                " reference: pass first_step= to lockstep.record in the process that resumes"
            )
        own = renumbered(own, at - own.steps[0], reference)
        verdict = self._judged(name, [reference, *permuted, own], is_resumed=True)
        if number is None and verdict.status in (NOTHING, NOT_COMPARED, NOT_VERIFIED):
            # Another layout has trained the same weights with other rounding.
            return self.verdict_of_resumed(name, first, second, file, at)
        notes.append(f"the resumed training begins with step {at}")
        return dataclasses.replace(verdict, remarks=(*notes, *verdict.remarks))

    def _progress(self, title: str, done: str = "", *, is_passing: bool = False) -> "_Progress":
        return _Progress(title, done, is_passing=is_passing, is_silent=not self._is_shown)

    def _record(self, title: str, training: Training, file: str, **given: Any) -> str:
        """Runs a training that records itself, and returns the path of the recording.

        Raises:
            TrainingError: it failed, or wrote none.
        """
        settings, path = self._settings, self._folder / f"{file}.npz"
        for old in (path, *self._folder.glob(f"{file}.rank*.npz")):
            old.unlink(missing_ok=True)
        steps = self._steps[: len(_numbers(settings.steps))]
        usual = {"path": str(path), "steps": steps, "modules": self._modules}
        options = json.dumps({**usual, "replay": None, "permute": None, **given})
        with self._progress(f"{title}: running", "recorded") as progress:
            try:
                self._run(
                    training, {VARIABLE: options}, self._folder / f"{file}.log",
                    settings.timeout_sec, progress.update,
                )  # fmt: skip
            except TrainingError as error:
                text = f"{title}: the training {error.text}"
                raise TrainingError(text, error.tail, has_ended=error.has_ended) from None
            try:
                load(path)
            except TraceError as unread:
                is_there = path.exists() or any(self._folder.glob(f"{file}.rank*.npz"))
                what = f" that can be read ({unread})" if is_there else ""
                text = f"{title}: the training recorded nothing{what}; put its steps into"
                text = f"{text} `with lockstep.record(model, optimizer):`"
                raise TrainingError(text, last_lines(self._folder / f"{file}.log")) from None
        return str(path)


def _place_of(verdict: Verdict) -> tuple[Any, ...]:
    """Returns what two verdicts on equal runs have in common; modules may join tensors."""
    place = verdict.place
    return (verdict.status, place and (place.node, place.step, place.ranks))


class _Progress:
    """Shows on standard error what is running, in a `with` block.

    A terminal has one line that is updated in place; a file has one line at the start and one at
    the end.

    Args:
        title: what is running, as in "reference: running".
        done: what is said at the end in place of the last word.
        is_passing: whether only a terminal shows it, and only until the end.
        is_silent: whether nothing is shown.
    """

    def __init__(
        self, title: str, done: str = "", *, is_passing: bool = False, is_silent: bool = False
    ) -> None:
        self._title, self._done = one_line(title), done
        self._is_passing = is_passing or is_silent
        self._is_terminal = sys.stderr.isatty() and not is_silent
        self._start, self._shown_sec, self._width = time.monotonic(), -1, 0

    def update(self) -> None:
        """Shows the time once a second on a terminal."""
        seconds = int(time.monotonic() - self._start)
        if self._is_terminal and seconds > self._shown_sec:
            self._shown_sec = seconds
            self._show(f"{self._title}, {seconds} s")

    def _show(self, text: str, end: str = "") -> None:
        if self._is_terminal:
            columns = shutil.get_terminal_size().columns - 1
            text = text if len(text) <= columns else f"…{text[1 - columns :]}"
            self._width, text = len(text), f"\r{text:<{self._width}}"
        with contextlib.suppress(OSError):  # Whatever reads it may have ended.
            print(text, end=end, file=sys.stderr, flush=True)

    def __enter__(self) -> "_Progress":
        if self._is_terminal:
            self.update()
        elif not self._is_passing:
            self._show(self._title, "\n")
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self._is_passing:
            if self._is_terminal:
                self._show("", "\r")
            return
        how = self._done if error is None else "failed"
        how = how if error is None or isinstance(error, Exception) else "interrupted"
        seconds = time.monotonic() - self._start
        self._show(f"{self._title.rpartition(' ')[0]} {how}, {seconds:.0f} s", "\n")
