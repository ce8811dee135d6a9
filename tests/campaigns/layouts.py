"""Compares right trainings in many layouts, seeds and dtypes with one process: all are clean.

Each program of `cases/programs` that has layouts runs in each layout and dtype, with as many seeds
as there are cycles. Fails if one is not clean.
"""

import itertools

from cases.heads import FOLDER
from lockstep.comparison import compare_traces
from lockstep.data.file import load
from lockstep.engine.verdict import CLEAN

from . import check
from .recording import changed, record, shown, torch_server

NUM_STEPS = 3
LAYOUTS = (  # Program, number of processes, constants of the program.
    ("torch_layouts", 2, {"LAYOUT": "ddp"}),
    ("torch_layouts", 2, {"LAYOUT": "fsdp"}),
    ("torch_layouts", 2, {"LAYOUT": "tp"}),
    ("torch_layouts", 2, {"LAYOUT": "sp"}),
    ("torch_layouts", 4, {"LAYOUT": "fsdp_tp"}),
    ("torch_layouts", 4, {"LAYOUT": "fsdp_sp"}),
    ("torch_tp", 2, {}),
    ("torch_tp", 4, {"SEQUENCE_PARALLEL": True}),
    ("torch_tp", 2, {"PARALLEL_LOSS": True}),
    ("torch_cp", 2, {}),
    ("torch_cp", 4, {}),
    ("torch_pp", 2, {"MICRO_BATCHES": 4}),
    ("torch_pp", 4, {"SCHEDULE": "1F1B"}),
)


def run(folder, options, counts):
    """Records and compares all layouts in float32 and bfloat16; yields what is found of each."""
    first = options.seed % 10**6
    with torch_server() as server:
        for is_short, (program, processes, layout) in itertools.product((False, True), LAYOUTS):
            constants = {**layout, "BFLOAT16": is_short}
            told_of = ", ".join(f"{key} = {value!r}" for key, value in constants.items())
            name = f"{program} in {processes} processes: {told_of}"
            if not options.wants(name):
                continue
            told = [name]
            for seed in range(first, first + options.cycles):
                source = changed(FOLDER / "programs" / f"{program}.py", **constants, SEED=seed)
                one = folder / f"{program}: {told_of}" / f"one{seed}.npz"
                if not one.exists():
                    record(server, source, one, steps=NUM_STEPS)
                two = folder / name / f"two{seed}.npz"
                record(server, source, two, steps=NUM_STEPS, processes=processes, replay=one)
                (verdict,) = compare_traces([load(one), load(two)], {}).values()
                told += [f"    seed {seed}: {shown(verdict)}"] * (verdict.status != CLEAN)
                counts["comparisons"] += 1
            counts["findings"] += len(told) - 1
            yield "\n".join(told)
    check(not counts["findings"], "a right program has a finding")
