"""Runs the scripts of `examples/trainers`: the right program and a mistake, in two processes.

Each is compared with the right program in one process by `lockstep run`. A trainer needs an
interpreter that has it: that of `make frameworks`, or `LOCKSTEP_PACKAGE_PYTHON`, as in
`LOCKSTEP_TRL_PYTHON`. With `LOCKSTEP_TRAINERS_PAGE=docs/trainers.md` the table of the page is
written anew. Fails if a right program has a fault, or a wrong one has none.
"""

import collections
import os
import pathlib
import subprocess
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from lockstep import trainings
from lockstep.answer.causes import words_of
from lockstep.answer.verdict import Verdict
from lockstep.data.file import TraceError
from lockstep.launch import TrainingError
from tests.verifier.recorder_scripts import interpreter

from . import Options, check
from .scripts import ROOT, shown

SCRIPTS = ROOT / "examples" / "trainers"
HEADER = "| Trainer | Lines | Right program | Wrong program | Its verdict |"
RIGHT = "right"


class Mistake(NamedTuple):
    """A wrong program.

    Attributes:
        told: what is wrong, for the page.
        details: those of the faults that it must have; empty if it must have one of any name.
    """

    told: str
    details: tuple[str, ...] = ()


class Trainer(NamedTuple):
    """A trainer, and the script that trains with it.

    Attributes:
        title: its name, in which VERSION is that of the package.
        script: name of the script, without suffix.
        package: what an interpreter must have.
        lines: number of lines that the recording adds.
        wrong: last argument of the script → the mistake.
        arguments: those before it; the reference has `of_reference` in their place.
        is_launched: whether one process needs `torchrun`, too.
    """

    title: str
    script: str
    package: str
    lines: int
    wrong: Mapping[str, Mistake]
    arguments: tuple[str, ...] = ()
    of_reference: tuple[str, ...] = ()
    is_launched: bool = False

    @property
    def path(self) -> pathlib.Path:
        """The script."""
        return SCRIPTS / f"{self.script}.py"

    def command(self, num_processes: int, *arguments: str) -> list[str]:
        """Returns the command that runs the script in a number of processes."""
        launch = ["-m", "torch.distributed.run", f"--nproc_per_node={num_processes}"]
        launch = launch if self.is_launched or num_processes > 1 else []
        python = interpreter(self.package)
        path = f"PATH={os.path.dirname(python)}{os.pathsep}{os.environ['PATH']}"  # As of ninja.
        return ["env", path, python, *launch, str(self.path), *arguments]


def _engine(stage: str, wrong: Mapping[str, Mistake]) -> Trainer:
    title = f"DeepSpeed VERSION, {f'ZeRO stage {stage}' if stage > '0' else 'stage 0'}"
    return Trainer(title, "deepspeed_engine", "deepspeed", 2, wrong, (stage,), ("0",), True)


_TOKENS = "`average_tokens_across_devices=False`"
_GAS = Mistake("`gradient_accumulation_steps` left at 1")
_DIVIDED = Mistake("the loss is divided by the number of micro-batches, as the engine does")
_UNWRAPPED = Mistake("the loop calls `accelerator.unwrap_model(model)`", ("not_all_reduced",))
_SAMPLER = Mistake("`use_distributed_sampler=False`", ("same_examples", "other_examples"))
_LOCAL = Mistake("each rank divides by its own number of tokens")
TRAINERS = (
    Trainer(
        "Transformers VERSION `Trainer`", "transformers_trainer", "transformers", 2,
        {"tokens": Mistake(_TOKENS, ("mean_of_means",))},
    ),
    Trainer("Accelerate VERSION", "accelerate_loop", "accelerate", 2, {"unwrapped": _UNWRAPPED}),
    Trainer("Lightning VERSION", "lightning_module", "lightning", 4, {"sampler": _SAMPLER}),
    Trainer("TRL VERSION `SFTTrainer`", "trl_sft", "trl", 2, {"tokens": Mistake(_TOKENS)}),
    Trainer(
        "PEFT VERSION LoRA, `Trainer`", "peft_lora", "peft", 2,
        {"alpha": Mistake("half of `lora_alpha`")},
    ),
    Trainer(
        "torchtune VERSION, steps of its recipes", "torchtune_steps", "torchtune", 2,
        {"mean": Mistake("gradients not multiplied by the number of ranks"), "local": _LOCAL},
        is_launched=True,
    ),
    Trainer(
        "a loop like nanochat's, PyTorch VERSION", "nanochat_loop", "torch", 2,
        {
            "accumulation": Mistake("the loss is not divided by the number of micro-batches"),
            "sum": Mistake("gradients are summed, not averaged"),
        },
    ),
    _engine("0", {"gas": _GAS, "divided": _DIVIDED}),
    _engine("1", {"gas": _GAS, "divided": _DIVIDED}),
    _engine("2", {"gas": _GAS, "divided": _DIVIDED}),
    Trainer(
        "torchtitan VERSION, debug Llama, FSDP2", "torchtitan_llama", "torchtitan", 2,
        {"local": _LOCAL}, is_launched=True,
    ),
)  # fmt: skip


def verdicts_of(trainer: Trainer, keep: pathlib.Path) -> dict[str, Verdict]:
    """Runs a trainer's right program and its mistakes; name → verdict."""
    names = {RIGHT: (), **{name: (name,) for name in trainer.wrong}}
    variants = {
        name: trainer.command(2, *trainer.arguments, *added) for name, added in names.items()
    }
    reference = trainer.command(1, *trainer.of_reference)
    return trainings.verify_trainings(reference, variants, trainings.Settings(keep=keep))


def version_of(package: str) -> str:
    """Returns the version that the interpreter of a package has of it."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run(
        [interpreter(package), "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip().partition("+")[0]


def run(folder: pathlib.Path, options: Options, counts: collections.Counter) -> Iterator[str]:
    """Runs the trainers; yields what is found of each."""
    os.environ["PYTHONPATH"] = str(ROOT)
    rows = []
    for number, trainer in enumerate(TRAINERS):
        if not options.wants(f"{trainer.title} {trainer.script}"):
            continue
        if not interpreter(trainer.package):
            counts["not tried"] += 1
            rows.append(_row(trainer, "", [f"not tried: {trainer.package} is not installed"]))
            yield rows[-1]
            continue
        version = version_of(trainer.package)
        try:
            verdicts = verdicts_of(trainer, folder / str(number))
        except (TrainingError, TraceError, ValueError) as error:
            counts["refused"] += 1
            rows.append(_row(trainer, version, [f"not recorded: {error}".partition("\n")[0]]))
            yield f"{rows[-1]}\n{error}"
            continue
        for name, verdict in verdicts.items():
            mistake = trainer.wrong.get(name)
            counts[f"{'wrong' if mistake else RIGHT} {word_of(verdict, mistake)}"] += 1
            title = trainer.title.replace("VERSION", version)
            yield "\n    ".join([f"{title}: {name}", *map(shown, verdict.findings)])
        rows.append(_row(trainer, version, *_cells(trainer, verdicts)))
        yield rows[-1]
    if (path := os.environ.get("LOCKSTEP_TRAINERS_PAGE")) and not options.only:
        write_page(pathlib.Path(path), rows)
    check(not counts["right accused"] and not counts["refused"], "a right program is not clean")
    check(not counts["wrong passed"], "a wrong program has no fault")
    check(not counts["wrong misnamed"], "a wrong program has other faults than listed")


def word_of(verdict: Verdict, mistake: Mistake | None) -> str:
    """Returns in a word what a verdict is worth; without a mistake, on a right program."""
    if mistake is None:
        return "clean" if verdict.ok else "accused"
    if not verdict.faults:
        return "passed"
    is_named = not mistake.details or {f.detail for f in verdict.faults} == {*mistake.details}
    return "found" if is_named else "misnamed"


def _cells(trainer: Trainer, verdicts: Mapping[str, Verdict]) -> Iterator[list[str]]:
    """Yields the last cells of each line of a trainer."""
    right = verdicts[RIGHT]
    first = "; ".join([right.status, *dict.fromkeys(f.detail for f in right.faults)])
    for name, mistake in trainer.wrong.items():
        faults = verdicts[name].faults
        details = dict.fromkeys(words_of(fault.detail) for fault in faults)
        yield [first, mistake.told, ", ".join(details) or verdicts[name].status]
        first = ""


def _row(trainer: Trainer, version: str, *cells: list[str]) -> str:
    """Returns the lines of a trainer in the table, one for each of the last cells."""
    title = trainer.title.replace(" VERSION", f" {version}" if version else "")
    first = [f"[{title}](../{trainer.path.relative_to(ROOT)})", str(trainer.lines)]
    lines = []
    for number, each in enumerate(cells):
        row = [*(["", ""] if number else first), *each, "", ""][:5]
        lines.append("|" + "".join(f" {cell} |" if cell else " |" for cell in row))
    return "\n".join(lines)


def write_page(path: pathlib.Path, rows: list[str]) -> None:
    """Replaces the table of the page."""
    lines = path.read_text("utf-8").split("\n")
    start = lines.index(HEADER)
    end = lines.index("", start)
    lines[start:end] = [HEADER, "| --- | --- | --- | --- | --- |", *rows]
    path.write_text("\n".join(lines), "utf-8")
