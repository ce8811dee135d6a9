"""Finds the smallest relative fault that a comparison reports, and the smallest that it names.

The script `torch_ddp.py` of the zoo is recorded in one process, with permuted examples, and in two
processes with each fault in the sizes 1e-2 to 1e-7: a loss or a learning rate times 1 + size, and
gradients that the backward pass returns times 1 + size, in all steps. Each is compared in float32
and with autocast to bfloat16, with and without the permuted recording. Fails if a training without
a fault has a finding, or if a fault of 1e-2 is not found in float32.
"""

import collections
import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lockstep.comparison import compare_traces
from lockstep.data.file import load
from lockstep.data.trace import Trace
from lockstep.numeric.arrays import dense, norm

from . import Options, check
from .scripts import Entry, Servers, record, running_servers, shown

SCRIPT = "torch_ddp"
SIZES = (0.0, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7)
WEIGHT = "features.2.weight"  # The largest one.
CAUSES = {  # Fault → causes that are right.
    "whole loss": ("scaled_gradient", "other_loss"),
    "loss of one replica": ("scaled_gradient", "other_loss"),
    "one gradient": ("scaled_gradient", "other_backward"),
    "one element of a gradient": ("other_backward", "unexplained"),
    "gradient of the smallest norm": ("scaled_gradient", "other_backward"),
    "learning rate": ("other_learning_rate",),
}
_FORWARD = """        output = self.model(x)
        loss = self.criterion(output, y)
"""
_WITH_FAULT = """        with torch.autocast("cpu", torch.bfloat16, enabled=BFLOAT16):
            output = self.model(x)
            loss = self.criterion(output, y)
        if FAULT == "whole loss" or (FAULT == "loss of one replica" and self.rank == 1):
            loss = loss * (1 + SIZE)
"""
_MODEL = "        self.model = DistributedDataParallel(self.network)\n"
_HOOKS = """        weights = dict(self.network.named_parameters())
        if FAULT in ("one gradient", "gradient of the smallest norm"):
            weights[NAME].register_hook(lambda gradient: gradient * (1 + SIZE))
        if FAULT == "one element of a gradient":
            elements = iter(ELEMENTS)

            def change_element(gradient):
                changed = gradient.clone()
                changed.view(-1)[next(elements, 0)] *= 1 + SIZE  # Later steps are not recorded.
                return changed

            weights[NAME].register_hook(change_element)
"""
_RATE = 'lr=0.1 * (1 + SIZE * (FAULT == "learning rate"))'
_EACH_SIZE = """
def each_size(rank, world_size, recording):
    global SIZE
    for SIZE in SIZES:
        torch.manual_seed(0)
        path = recording["path"].replace(".npz", f"{SIZE}.npz")
        main(rank, world_size, {**recording, "path": path})
"""


def source_of(sizes: Sequence[float], **constants: Any) -> str:
    """Returns the script that records once for each size of a fault."""
    begin, start = 'if __name__ == "__main__":', "    start(main)"
    given = {"FAULT": "", "SIZE": 0.0, "BFLOAT16": False, "NAME": "", "ELEMENTS": ()}
    lines = [f"{key} = {value!r}" for key, value in (given | constants).items()]
    lines.append(f"SIZES = {tuple(sizes)!r}")
    changes = (
        (_FORWARD, _WITH_FAULT),
        (_MODEL, _HOOKS + _MODEL),
        ("lr=0.1", _RATE),
        (f"{begin}\n{start}", "\n".join([*lines, _EACH_SIZE, begin, "    start(each_size)"])),
    )
    return Entry(SCRIPT, "", changes).source


def constants_of(fault: str, one: Trace) -> dict[str, Any]:
    """Returns which weight has the fault, and its elements with the largest gradients."""
    names = one.about.gradients
    gradients = [
        dict(zip(names, one.arrays(position, "raw", 0) or [], strict=True))
        for position in range(len(one.steps))
    ]
    name = WEIGHT
    if fault == "gradient of the smallest norm":
        name = min(names, key=lambda key: norm(gradients[0][key]))
    elements = tuple(int(np.argmax(np.abs(dense(own[name])))) for own in gradients)
    return {"FAULT": fault, "NAME": name, "ELEMENTS": elements}


def smallest(are_found: Sequence[bool]) -> str:
    """Returns the smallest of the sizes that are found together with all larger ones."""
    number = len([*itertools.takewhile(bool, are_found)])
    return f"{SIZES[number]:.0e}" if number else "none"


def causes_of(file: pathlib.Path, references: Sequence[Trace]) -> list[str]:
    """Returns for each size of a fault the cause of the first finding; "" if there is none.

    Args:
        file: its recordings, but for the sizes in their names.
        references: the recording of one process, and of that with permuted examples, if any.
    """
    one, *permuted = references
    verdicts = []
    for size in SIZES:
        traces = [one, load(file.with_name(f"{file.stem}{size}.npz")), *permuted]
        verdicts += list(compare_traces(traces, {}).values())[1:]
    right, *wrong = verdicts
    check(not right.findings, f"{file.stem}, no fault: {'; '.join(map(shown, right.findings))}")
    return [verdict.faults[0].detail if verdict.faults else "" for verdict in wrong]


def _references(servers: Servers, folder: pathlib.Path, *, is_short: bool) -> list[Trace]:
    source = source_of([0.0], BFLOAT16=is_short)
    for files in (("one.npz",), ("permuted.npz", "one0.0.npz", "1")):
        failed = record(servers, source, SCRIPT, folder, 1, *files)
        check(not failed, f"{SCRIPT} with one replica: {failed}")
    return [load(folder / f"{kind}0.0.npz") for kind in ("one", "permuted")]


def run(folder: pathlib.Path, options: Options, counts: collections.Counter) -> Iterator[str]:
    """Records each fault in each dtype; yields the smallest sizes that are found and named."""
    missed = list[str]()
    with running_servers([SCRIPT]) as servers:
        for dtype in ("float32", "bfloat16"):
            place, is_short = folder / dtype, dtype == "bfloat16"
            references = _references(servers, place, is_short=is_short)
            for fault in [f for f in CAUSES if options.wants(f)]:
                constants = constants_of(fault, references[0])
                source = source_of(SIZES, BFLOAT16=is_short, **constants)
                file = f"{fault.replace(' ', '_')}.npz"
                failed = record(servers, source, SCRIPT, place, 2, file, "one0.0.npz")
                check(not failed, f"{fault}: {failed}")
                for number, how in ((1, "alone"), (2, "with permuted examples")):
                    causes = causes_of(place / file, references[:number])
                    are_named = [cause in CAUSES[fault] for cause in causes]
                    name = f"{fault}, {dtype}, {how}"
                    missed += [name] if not (is_short or causes[0]) else []
                    counts["comparisons"] += len(causes)
                    counts["faults found"] += sum(map(bool, causes))
                    counts["faults named"] += sum(are_named)
                    found, named = smallest(list(map(bool, causes))), smallest(are_named)
                    told = ", ".join(dict.fromkeys(filter(None, causes))) or "nothing"
                    yield f"{name}: found from {found}, named from {named} ({told})"
    check(not missed, f"not found at 1e-2: {'; '.join(missed)}")
