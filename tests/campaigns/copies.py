"""Makes each bug of `strategy_bugs.toml` in a copy of the program, and runs `verify` there.

Says whether `verify` catches the bug, and whether its first fault or its error names it. Bugs that
are not caught, or not named, are counted. Before them, the unchanged program runs with the same
flags. Fails if that is not clean, or if a copy ends before a step was verified.
"""

import collections
import json
import os
import pathlib
import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from app.runtime.errors import AllReduceError, MismatchError

from . import Options, check
from .harness import Program
from .mutations import Mutation, copy_with

LIST = pathlib.Path(__file__).with_name("strategy_bugs.toml")
COMMON = "--device=cpu --dataset=synthetic --recipe=fast --learning_rate=0.05"
STEPS = {  # Model → small batches; of LeNet with a short last one, and of the next epoch.
    "lenet": "--steps=5 --epochs=3 --num_train_examples=100 --global_batch_size=40",
    "resnet9": "--steps=2 --epochs=2 --num_train_examples=30 --global_batch_size=11",
}
NARROW = Mutation(  # Takes seconds, and has the same kinds of layers.
    "ResNet-9 of few channels",
    "models/resnet9.py",
    """    x = _convolve(images, 32, kernel_initializer, "stem", halve=True)
    x = _convolve(x, 64, kernel_initializer, "stage0")
    for name, width in [("stage1", 96), ("stage2", 128)]:
""",
    """    x = _convolve(images, 4, kernel_initializer, "stem", halve=True)
    x = _convolve(x, 6, kernel_initializer, "stage0")
    for name, width in [("stage1", 8)]:
""",
)
TIMEOUT_SEC = 900  # A prediction that nothing explains is computed in many wrong ways.
CAUGHT = MismatchError.exit_code, AllReduceError.exit_code
NOT_CAUGHT = 0, 3, 7  # Clean, not compared, or a training that diverges without a fault.


class Bug(NamedTuple):
    """A bug of the list.

    Attributes:
        mutation: the bug; its name says what is wrong.
        flags: flags of `verify`, from the strategy to the data.
        words: parts of the first fault, or of the error, that name the bug.
    """

    mutation: Mutation
    flags: str
    words: Sequence[str]


def listed() -> list[Bug]:
    """Returns the bugs of the list."""
    bugs = []
    for entry in tomllib.loads(LIST.read_text("utf-8"))["bug"]:
        model = entry.get("model", "lenet")
        flags = f"{entry['flags']} --model={model} {STEPS[model]} {COMMON}"
        mutation = Mutation(*(entry[key] for key in ("name", "file", "old", "new")))
        bugs.append(Bug(mutation, flags, entry["words"]))
    return bugs


def _verify(folder: pathlib.Path, flags: str, *bugs: Mutation) -> tuple[int, str]:
    """Runs `verify` in a copy of the program; returns its exit code and its answer in a line."""
    copy, out = copy_with(folder, NARROW, *bugs), folder / "out"
    command = [sys.executable, str(copy / "main.py"), "verify", "--overwrite", f"--out={out}"]
    environment = {"PYTHONPATH": os.pathsep.join([str(copy)])}
    program = Program([*command, *shlex.split(flags)], folder / "output.txt", environment)
    try:
        code = program.wait(TIMEOUT_SEC)
    finally:
        program.kill_all()
    if code not in (MismatchError.exit_code, *NOT_CAUGHT):
        return code, program.text().strip().splitlines()[-1]
    (training,) = json.loads((out / "verify.json").read_bytes())["trainings"].values()
    faults = [finding for finding in training["findings"] if finding["status"] == "fault"]
    if not faults:
        return code, training["sentence"]
    first = faults[0]
    where = ", ".join([*first["items"][:3], *first["tensors"][:2]])
    named = " of ".join(dict.fromkeys((first["detail"], first["cause"])))
    return code, f"{first['stage']}: {named} ({where}): {first['text']}"


def run(folder: pathlib.Path, options: Options, counts: collections.Counter) -> Iterator[str]:
    """Verifies the unchanged program with all flags, then each bug; yields what is found."""
    bugs = [bug for bug in listed() if options.wants(bug.mutation.name)]
    for flags in dict.fromkeys(bug.flags for bug in bugs):
        code, answer = _verify(folder, flags)
        counts["right programs"] += 1
        check(code == 0, f"unchanged, {flags}: exit code {code}: {answer}")
        yield f"unchanged, {flags}: clean"
    for mutation, flags, words in bugs:
        code, answer = _verify(folder, flags, mutation)
        check(code in (*CAUGHT, *NOT_CAUGHT), f"{mutation.name}: exit code {code}: {answer}")
        is_caught = code in CAUGHT
        is_named = is_caught and any(word in answer for word in words)
        counts["bugs"] += 1
        counts["bugs caught"] += is_caught
        counts["bugs named"] += is_named
        told = "caught, named" if is_named else "caught, NOT NAMED" if is_caught else "NOT CAUGHT"
        told += "" if is_named else f" (right: {', '.join(words)})"
        yield f"{mutation.file}: {mutation.name}: {told}\n    exit code {code}: {answer}"
