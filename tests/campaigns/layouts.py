"""Compares right trainings in many layouts, seeds and dtypes with one process: no finding at all.

Each program of `zoo/scripts` that has layouts starts once in each layout and dtype, and records as
many seeds as there are cycles. Fails if a comparison has a finding.
"""

import collections
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

from lockstep.comparison import compare_traces
from lockstep.data.file import load

from . import Options, check
from .scripts import Entry, Servers, record, running_servers, shown

LAYOUTS = (  # Script, number of processes, constants of the script.
    ("torch_layouts", 2, "LAYOUT = 'ddp'"),
    ("torch_layouts", 2, "LAYOUT = 'fsdp'"),
    ("torch_layouts", 2, "LAYOUT = 'tp'"),
    ("torch_layouts", 2, "LAYOUT = 'sp'"),
    ("torch_layouts", 4, "LAYOUT = 'fsdp_tp'"),
    ("torch_layouts", 4, "LAYOUT = 'fsdp_sp'"),
    ("torch_tp", 2, ""),
    ("torch_tp", 4, "SEQUENCE_PARALLEL = True"),
    ("torch_tp", 2, "PARALLEL_LOSS = True"),
    ("torch_cp", 2, ""),
    ("torch_cp", 4, ""),
    ("torch_pp", 2, "MICRO_BATCHES = 4"),
    ("torch_pp", 4, "SCHEDULE = '1F1B'"),
)
# Records one seed after another in the same processes.
EACH_SEED = """
def each_seed(rank, world_size, recording):
    global SEED
    for SEED in range({first}, {first} + {number}):
        given = dict(recording)
        for key in ("path", "replay"):
            if given.get(key):
                given[key] = given[key].replace(".npz", f"{{SEED}}.npz")
        main(rank, world_size, given)
"""


class Case(NamedTuple):
    """A program in a layout and a dtype."""

    script: str
    processes: int
    constants: str

    def source(self, first: int, number: int) -> str:
        """Returns the program that records so many seeds."""
        begin = 'if __name__ == "__main__":\n    start(main)'
        each = EACH_SEED.format(first=first, number=number)
        new = f"{self.constants}\n{each}\n\n{begin.replace('main)', 'each_seed)')}"
        return Entry(self.script, "", ((begin, new),)).source


def run(folder: pathlib.Path, options: Options, counts: collections.Counter) -> Iterator[str]:
    """Records and compares all layouts in float32 and bfloat16; yields what is found of each."""
    cases = [
        Case(script, processes, f"{constants}\nBFLOAT16 = {is_short}")
        for is_short in (False, True)
        for script, processes, constants in LAYOUTS
    ]
    first, references = options.seed % 10**6, dict[str, pathlib.Path]()
    with running_servers({case.script for case in cases}) as servers:
        for number, case in enumerate(cases):
            constants = ", ".join(filter(None, case.constants.split("\n")))
            name = f"{case.script} in {case.processes} processes: {constants}"
            if not options.wants(name):
                continue
            alone = case._replace(processes=1)
            one = references.setdefault(f"{alone}", folder / f"{number}")
            if one == folder / f"{number}":
                _record(servers, alone, one, first, options.cycles, "one.npz")
            _record(servers, case, one, first, options.cycles, f"layout{number}.npz", "one.npz")
            told = [name]
            for each in range(first, first + options.cycles):
                traces = [load(one / f"{file}{each}.npz") for file in ("one", f"layout{number}")]
                for verdict in compare_traces(traces, {}).values():
                    told += [f"    seed {each}: {shown(finding)}" for finding in verdict.findings]
                    counts["findings"] += len(verdict.findings)
                counts["comparisons"] += 1
            yield "\n".join(told)
    check(not counts["findings"], "a right program has a finding")


def _record(
    servers: Servers, case: Case, folder: pathlib.Path, first: int, number: int, *files: str
) -> None:
    source = case.source(first, number)
    failed = record(servers, source, case.script, folder, case.processes, *files)
    check(not failed, f"{case}: {failed}")
