"""Measures which share of the bounds right trainings use: several networks, batches and dtypes.

Each network of `torch_networks.py` is trained with each size of a batch and in each dtype: in one
process, which is the reference, once more with permuted examples, and in two processes with DDP.
Of each node is listed which share of its bound a training uses. A cycle is a seed: even ones train
with SGD, odd ones with AdamW. Fails if a training is not clean, or a share is more than half.
"""

import collections
import itertools
import pathlib
from collections.abc import Iterator

from cases.runner import Server
from lockstep.comparison import compare_traces
from lockstep.data.file import load
from lockstep.data.trace import Trace
from lockstep.engine.verdict import CLEAN

from . import Options, check
from .recording import changed, record, shown, torch_server

PROGRAM = pathlib.Path(__file__).with_name("torch_networks.py")
NUM_STEPS = 2
NETWORKS = ("MLP", "BatchNorm", "BatchNorm and SiLU", "GroupNorm", "transformer")
GLOBAL_BATCH_SIZES = (16, 128, 512, 2048)
MOST = 0.5  # Of the bound.


def measured(one: Trace, two: Trace, permuted: Trace) -> tuple[dict[str, float], list[str]]:
    """Compares the recordings of a seed.

    Returns:
        Node, and of which reference → the largest share of its bound; and what is not clean.
    """
    shares, told = dict[str, float](), list[str]()
    for how, traces in (("", [one, two]), (", permuted", [one, two, permuted])):
        for verdict in compare_traces(traces, {}).values():
            shares |= {f"{m.node}{how}": m.share for m in verdict.measured}
            told += [] if verdict.status == CLEAN else [shown(verdict)]
    return shares, told


def _recorded(
    server: Server, network: str, number: int, is_short: bool, seed: int, folder: pathlib.Path
) -> list[Trace]:
    """Records a network: in one process, in two, and in one with permuted examples."""
    source = changed(
        PROGRAM, NETWORK=network, GLOBAL_BATCH_SIZE=number, BFLOAT16=is_short, SEED=seed
    )
    one, two, permuted = (folder / f"{kind}{seed}.npz" for kind in ("one", "two", "permuted"))
    record(server, source, one, steps=NUM_STEPS)
    record(server, source, two, steps=NUM_STEPS, processes=2, replay=one)
    record(server, source, permuted, steps=NUM_STEPS, replay=one, permute=1)
    return [load(path) for path in (one, two, permuted)]


def run(folder: pathlib.Path, options: Options, counts: collections.Counter) -> Iterator[str]:
    """Measures each network, dtype and size of a batch; yields the largest shares of each."""
    first = options.seed % 10**6
    cases = itertools.product(NETWORKS, (False, True), GLOBAL_BATCH_SIZES)
    with torch_server() as server:
        for network, is_short, number in cases:
            name = f"{network}, {'bfloat16' if is_short else 'float32'}, batch of {number}"
            if not options.wants(name):
                continue
            told = [name]
            for seed in range(first, first + options.cycles):
                traces = _recorded(server, network, number, is_short, seed, folder / name)
                shares, found = measured(*traces)
                listed = ", ".join(f"{node} {share:.2g}" for node, share in shares.items())
                told += [f"    shares of the bounds: {listed}", *found]
                counts["comparisons"] += 1
                counts["findings"] += len(found)
                is_within = max(shares.values()) <= MOST
                counts["comparisons above half of a bound"] += not is_within
            yield "\n".join(told)
    check(not counts["findings"], "a right program has a finding")
    above = counts["comparisons above half of a bound"]
    check(not above, "a right program uses more than half of a bound")
