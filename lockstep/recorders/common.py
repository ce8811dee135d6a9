"""What the recorders share: what is asked of them, names of frameworks, and of files."""

import contextlib
import itertools
import json
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lockstep.data import about as description
from lockstep.data.file import TraceError, load
from lockstep.data.trace import LAST_STEP, MOST_STEPS, REDUCE_FIRST
from lockstep.numeric.sampling import Sample
from lockstep.recording import VARIABLE, described

FORMAT: dict[str, Any] = {"format": description.FORMAT, "version": description.VERSION}
DEFAULT_STEPS = (0, 1, 2)  # A shorter training has recorded all that was asked for.
USUAL_SAMPLE, LEAST_SAMPLE = 4096, 16  # Elements of an array.
MOST_WHOLE_BYTES = 64 << 20  # Of all weights.
Path = str | os.PathLike[str]


def require(condition: Any, message: str) -> None:
    """Raises ValueError if a condition does not hold."""
    if not condition:
        raise ValueError(message)


def require_type(key: str, value: Any, kinds: Any, what: str) -> None:
    """Raises ValueError if an argument has another type; `what` says what it has to be."""
    require(isinstance(value, kinds), f"{key}: must be {what}, and is {described(value)}")


def require_models(model: Any, kind: type, name: str) -> None:
    """Raises ValueError unless an argument is a model of a class, or a list of several."""
    for each in model if isinstance(model, list | tuple) and model else [model]:
        require_type("model", each, kind, f"a {name}, or a list of several")


def check_version(recorder: str, framework: str, version: str, oldest: tuple[int, int]) -> None:
    """Raises ImportError if a framework is older than the oldest one that can be recorded."""
    if numbers_of(version) < oldest:
        required = ".".join(map(str, oldest))
        raise ImportError(f"{recorder}: {framework} {version}, needs {required} or newer")


def numbers_of(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


# --- Names of frameworks -------------------------------------------------------------------------


def private(framework: str, owner: Any, name: str) -> Any:
    """Returns an attribute that is not public, of a framework given with its version.

    Raises:
        RuntimeError: it has none, so that what it does would not be seen.
    """
    if not hasattr(owner, name):
        where = getattr(owner, "__name__", type(owner).__name__)
        raise RuntimeError(
            f"{framework} has no {where}.{name}, which is observed; use another version of it, or"
            " update Lockstep"
        )
    return getattr(owner, name)


def attribute(framework: str, name: str) -> Callable[[Any], Any]:
    """Returns a function from an object to its attribute of a name; see `private`."""
    return lambda owner: private(framework, owner, name)


def method(framework: str, name: str) -> Callable[..., Any]:
    """Returns a function that calls the method of a name of its first argument; see `private`."""
    return lambda owner, *args, **options: private(framework, owner, name)(*args, **options)


class Hooks(contextlib.ExitStack):
    """Replaces functions of instances, classes and modules in a `with` block."""

    def hook(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Makes `owner.name(...)` call `wrapper(inner, ...)`, where `inner` is what it was."""
        inner, hidden = getattr(owner, name), vars(owner).get(name)
        assign = type.__setattr__ if isinstance(owner, type) else object.__setattr__
        assign(owner, name, lambda *args, **options: wrapper(inner, *args, **options))
        if hidden is None:
            self.callback(delattr, owner, name)
        else:  # Another hook, which was there before, or the method of a class.
            self.callback(assign, owner, name, hidden)


# --- What is asked of a recorder -----------------------------------------------------------------


def request_of(path: Path | None, **options: Any) -> "Request | None":
    """Returns what the script and the command ask of a recorder; None if nothing is recorded.

    Args:
        path: `*.npz`; None to record only if the command says so.
        **options: those that the recorder has, with the values of the script. The command decides
            what is replayed, permuted and run by shard, and keeps the start of its first run, from
            which the next ones start; it may decide the others.

    Raises:
        ValueError: the file cannot be written, or the recorder lacks an option of the command.
    """
    if command := json.loads(os.environ.get(VARIABLE) or "null"):
        given = {key: x for key, x in command.items() if x is not None and x is not False}
        path = given.pop("path")
        for key in given.keys() - options.keys():
            raise ValueError(f"{key}: cannot be recorded in this framework; leave it out")
        own = {"replay": None, "permute": None, "shards": None, "start": "replay" not in given}
        options |= {key: x for key, x in own.items() if key in options} | given
    if path is None:
        return None
    require_type("path", path, str | bytes | os.PathLike, "that of an .npz file")
    name = os.fsdecode(path)
    is_file = (
        name.endswith(".npz") and "\0" not in name and os.path.isdir(os.path.dirname(name) or ".")
    )
    require(is_file, f"{name}: must be an .npz file in a folder that exists")
    return Request(name, **options)


class Request:
    """What a script asks of a recorder.

    Args:
        path: the file to write.
        steps: numbers of steps to record, from `first_step`, or how many of the first.
        replay, permute, names: as the recorders take them.
        first_step: number of the first step of this process.
        sample: number of elements of sampled arrays; 0 for whole arrays; None to do as `replay`, or
            to sample large models only, see `choose_sample`.
        start: whether a sampled recording has the whole state before its first step.
        modules: the modules that are recorded, too: a pattern, or whether all are.
        shards: "each" to compute every part of the batch of `replay` for itself; or None.

    Attributes:
        path, replay, permute, names, first_step, modules, shards: the same.
        wanted: the numbers of the steps to record. By default, a sampled recording has the first
            one: `choose_sample` removes the others.
        sample: how large arrays are sampled; None for whole arrays.

    Raises:
        ValueError: there is no such step, no such sample, or `shards` is wrong.
    """

    def __init__(
        self, path: str, *, steps: int | Iterable[int] = DEFAULT_STEPS, replay: Path | None = None,
        permute: int | None = None, names: Mapping[str, str] | None = None, first_step: int = 0,
        sample: int | None = None, start: bool = False, modules: bool | str = False,
        shards: str | None = None,
    ) -> None:  # fmt: skip
        require_type("replay", replay, str | os.PathLike | None, "the path of a recording")
        require_type("names", names, Mapping | None, "a mapping of names")
        self.path, self.replay = path, None if replay is None else os.fspath(replay)
        self.permute, self.names, self.first_step = permute, names or {}, first_step
        self.modules, self.shards = modules, shards
        is_known = shards is None or (shards == "each" and self.replay)
        require(is_known, f"shards={shards!r}: must be 'each', with replay= and in one process")
        self.wanted = wanted_steps(steps, first_step)
        self._is_default, self._start = steps is DEFAULT_STEPS, start
        is_number = type(sample) is int and (sample == 0 or LEAST_SAMPLE <= sample < 2**32)
        is_right = sample is None or is_number
        require(is_right, f"sample={sample}: must be {LEAST_SAMPLE} or more, or 0 for whole arrays")
        is_seed = permute is None or (isinstance(permute, int) and abs(permute) < 2**63)
        require(is_seed, f"permute={permute!r}: must be a whole number, the seed of the order")
        self._is_chosen = sample is not None or self.replay is not None
        found = sample_in(self.replay) if sample is None and self.replay else {}
        self._take(Sample(sample) if sample else Sample(**found) if found else None)

    def choose_sample(self, size_bytes: int) -> None:
        """Samples a model whose weights have many bytes together, unless the script has chosen."""
        if not self._is_chosen and size_bytes > MOST_WHOLE_BYTES:
            self._take(Sample(USUAL_SAMPLE))
        self._is_chosen = True

    def _take(self, sample: Sample | None) -> None:
        self.sample = sample
        if sample and self._is_default:  # Later steps would start from other states.
            self.wanted.intersection_update({min(self.wanted)})

    @property
    def keeps_start(self) -> bool:
        """Whether the whole state before the first step is kept beside its samples."""
        return self._start and self.sample is not None

    def about(
        self, framework: str, error: BaseException | None, replayed: Any
    ) -> dict[str, Any]:  # fmt: skip
        """Returns what all recorders write of a recording that ends, maybe with an error.

        `replayed` has the name of the other recording and what was not loaded, if there is one.
        """
        return {
            **FORMAT,
            "framework": framework,
            "order": REDUCE_FIRST,
            "permuted": self.permute,
            "replayed": replayed.name if replayed else None,
            "not_loaded": [*replayed.not_loaded] if replayed else [],
            "asked": [] if self._is_default else sorted(self.wanted),
            "ended_with": in_words(error),
            "sample": self.sample._asdict() if self.sample else {},
        }


def sample_in(path: str) -> Mapping[str, int]:
    """Returns how a recording is sampled; empty if it is whole, or cannot be read."""
    try:
        return load(path).about.sample
    except TraceError:  # Reading it for the replay raises an error that says why.
        return {}


def wanted_steps(steps: int | Iterable[int], first_step: int = 0) -> set[int]:
    """Returns the numbers of the steps to record.

    Raises:
        ValueError: there is none, or one before the first step of this process.
    """
    is_number = hasattr(first_step, "__index__") and first_step >= 0
    require(is_number, f"first_step={first_step}: must be a number from 0")
    wanted, start = list[int](), first_step if steps is DEFAULT_STEPS else 0
    with contextlib.suppress(TypeError):
        if isinstance(steps, Iterable):
            numbers = itertools.islice(steps, MOST_STEPS + 1)
            wanted = [start + operator.index(number) for number in numbers]
        elif not isinstance(steps, bool) and 0 < operator.index(steps) <= MOST_STEPS:
            wanted = [first_step + number for number in range(steps)]
    is_right = wanted and first_step <= min(wanted) <= max(wanted) < LAST_STEP
    is_right = is_right and len(wanted) <= MOST_STEPS
    text = f"steps={steps!r}: must be numbers from {first_step}, or at most {MOST_STEPS:,} steps"
    require(is_right, text)
    return {*wanted}


def in_words(error: BaseException | None) -> str:
    """Returns the exception that ended the training in one line; "" for none and `sys.exit(0)`."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return ""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return "".join(c for c in text if c.isprintable())[:200].removesuffix(": ").removesuffix(":")


def axes_between(theirs: str, mine: str, ndim: int) -> tuple[int, ...]:
    """Returns the permutation of axes from a layout, such as "HWIO", to another one."""
    if theirs and sorted(theirs) == sorted(mine):
        return tuple(map(theirs.index, mine))
    return tuple(range(ndim))


def rank_path(path: str, rank: int) -> str:
    """Returns the file of a rank."""
    return f"{path.removesuffix('.npz')}.rank{rank}.npz"
