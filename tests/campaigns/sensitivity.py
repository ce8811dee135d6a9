"""Finds the smallest relative fault that a comparison reports, and that it places rightly.

`cases/programs/torch_ddp.py` is recorded in one process, with permuted examples, and in two
processes with each fault in the sizes 1e-2 to 1e-7: a loss or a learning rate times 1 + size, and
gradients that the backward pass returns times 1 + size, in all steps. Each is compared in float32
and with autocast to bfloat16, with and without the permuted recording. Fails if a training without
a fault has a finding, or if a fault of 1e-2 is not found in float32.
"""

import itertools

import numpy as np

from cases.heads import FOLDER
from lockstep.comparison import compare_traces
from lockstep.data.file import load
from lockstep.engine.verdict import CLEAN, FAULT
from lockstep.numeric.arrays import dense, norm

from . import check
from .recording import changed, record, shown, torch_server

PROGRAM, NUM_STEPS = FOLDER / "programs" / "torch_ddp.py", 4
SIZES = (0.0, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7)
WEIGHT = "features.2.weight"  # The largest one.
NODES = {  # Fault → nodes that are right.
    "whole loss": ("loss",),
    "loss of one replica": ("loss",),
    "one gradient": ("gradient",),
    "one element of a gradient": ("gradient",),
    "gradient of the smallest norm": ("gradient",),
    "learning rate": ("update",),
}
_FORWARD = """        output = self.model(x)
        loss = self.criterion(output, y)
"""
_WITH_FAULT = """        with torch.autocast(x.device.type, torch.bfloat16, enabled=BFLOAT16):
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


def source_of(**constants) -> str:
    """Returns the program with a fault."""
    usual = {"FAULT": "", "SIZE": 0.0, "BFLOAT16": False, "NAME": "", "ELEMENTS": ()}
    changes = (_FORWARD, _WITH_FAULT), (_MODEL, _HOOKS + _MODEL), ("lr=0.1", _RATE)
    return changed(PROGRAM, *changes, **(usual | constants))


def constants_of(fault, one):
    """Returns which weight has the fault, and its elements with the largest gradients."""
    names = one.about.gradients
    steps = [one.arrays(position, "raw", 0) for position in range(len(one.steps))]
    gradients = [dict(zip(names, arrays, strict=True)) for arrays in steps]
    name = WEIGHT
    if fault == "gradient of the smallest norm":
        name = min(names, key=lambda key: norm(gradients[0][key]))
    elements = tuple(int(np.argmax(np.abs(dense(own[name])))) for own in gradients)
    return {"FAULT": fault, "NAME": name, "ELEMENTS": elements}


def smallest(are_found) -> str:
    """Returns the smallest of the sizes that are found together with all larger ones."""
    number = len([*itertools.takewhile(bool, are_found)])
    return f"{SIZES[number]:.0e}" if number else "none"


def nodes_of(files, one, *permuted):
    """Returns for each size of a fault the node of the verdict; "" if there is no fault."""
    verdicts = []
    for file in files:
        verdicts += compare_traces([one, load(file), *permuted], {}).values()
    right, *wrong = verdicts
    check(right.status == CLEAN, f"{files[0].stem}, no fault: {shown(right)}")
    return [each.place.node if each.place and each.status == FAULT else "" for each in wrong]


def run(folder, options, counts):
    """Records each fault in each dtype; yields the smallest sizes that are found, and placed."""
    missed = []
    with torch_server() as server:
        for dtype in ("float32", "bfloat16"):
            place, usual = folder / dtype, {"BFLOAT16": dtype == "bfloat16"}
            given = {"steps": NUM_STEPS, "replay": place / "one.npz"}
            source = source_of(**usual)
            one = load(record(server, source, place / "one.npz", steps=NUM_STEPS))
            permuted = load(record(server, source, place / "permuted.npz", permute=1, **given))
            for fault in [f for f in NODES if options.wants(f)]:
                constants = usual | constants_of(fault, one)
                files = [place / f"{fault.replace(' ', '_')}{size}.npz" for size in SIZES]
                for size, file in zip(SIZES, files, strict=True):
                    own = source_of(SIZE=size, **constants)
                    record(server, own, file, processes=2, **given)
                for how, more in (("alone", []), ("with permuted examples", [permuted])):
                    nodes = nodes_of(files, one, *more)
                    are_placed = [node in NODES[fault] for node in nodes]
                    name = f"{fault}, {dtype}, {how}"
                    missed += [name] if dtype == "float32" and not nodes[0] else []
                    counts["comparisons"] += len(nodes)
                    counts["faults found"] += sum(map(bool, nodes))
                    counts["right places"] += sum(are_placed)
                    told = ", ".join(dict.fromkeys(filter(None, nodes))) or "nothing"
                    found, placed = smallest(nodes), smallest(are_placed)
                    yield f"{name}: found from {found}, at the right place from {placed} ({told})"
    check(not missed, f"not found at 1e-2: {'; '.join(missed)}")
