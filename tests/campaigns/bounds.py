"""Measures which share of the bounds right trainings use: several networks, batches and dtypes.

Each network of `torch_networks.py` is trained with each size of a batch and in each dtype: in one
process, which is the reference, once more with permuted examples, and in two processes with DDP.
Of each node is listed which share of its bound a training uses. A cycle is a seed: even ones train
with SGD, odd ones with AdamW. Fails if a training is not clean, or a share is more than half.
"""

import itertools
import pathlib

from lockstep.comparison import compare_traces
from lockstep.data.file import load
from lockstep.engine.verdict import CLEAN

from . import check
from .recording import changed, record, shown, torch_server

PROGRAM = pathlib.Path(__file__).with_name("torch_networks.py")
NETWORKS = ("MLP", "BatchNorm", "BatchNorm and SiLU", "GroupNorm", "transformer")
GLOBAL_BATCH_SIZES = (16, 128, 512, 2048)
MOST = 0.5  # Of the bound.


def measured(server, source, folder):
    """Records a network; returns node → the largest share of its bound, and what is not clean."""
    one = record(server, source, folder / "one.npz", steps=2)
    two = record(server, source, folder / "two.npz", steps=2, processes=2, replay=one)
    permuted = record(server, source, folder / "permuted.npz", steps=2, replay=one, permute=1)
    shares, found = {}, []
    for how, paths in (("", [one, two]), (", permuted", [one, two, permuted])):
        for verdict in compare_traces([load(path) for path in paths], {}).values():
            shares |= {f"{m.node}{how}": m.share for m in verdict.measured}
            found += [] if verdict.status == CLEAN else [shown(verdict)]
    return shares, found


def run(folder, options, counts):
    """Measures each network, dtype and size of a batch; yields the largest shares of each."""
    first = options.seed % 10**6
    with torch_server() as server:
        for network, dtype, size in itertools.product(
            NETWORKS, ("float32", "bfloat16"), GLOBAL_BATCH_SIZES
        ):
            told = [f"{network}, {dtype}, batch of {size}"]
            if not options.wants(told[0]):
                continue
            for seed in range(first, first + options.cycles):
                constants = {"GLOBAL_BATCH_SIZE": size, "BFLOAT16": dtype != "float32"}
                source = changed(PROGRAM, NETWORK=network, SEED=seed, **constants)
                shares, found = measured(server, source, folder / told[0] / str(seed))
                listed = ", ".join(f"{node} {share:.2g}" for node, share in shares.items())
                told += [f"    shares of the bounds: {listed}", *found]
                counts["comparisons"] += 1
                counts["findings"] += len(found)
                counts["comparisons above half of a bound"] += max(shares.values()) > MOST
            yield "\n".join(told)
    check(not counts["findings"], "a right program has a finding")
    above = counts["comparisons above half of a bound"]
    check(not above, "a right program uses more than half of a bound")
