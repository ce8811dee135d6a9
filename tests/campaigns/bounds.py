"""Measures which share of the bounds right trainings use: several networks, batches and dtypes.

Each network of `torch_networks.py` is trained with each size of a batch and in each dtype: in one
process, which is the reference, once more with permuted examples, and in two processes with DDP.
Of each node is listed which share of its bound a training uses. A cycle is a seed: even ones train
with SGD, odd ones with AdamW. Fails if a training is not clean, or a share is more than half.
"""

import itertools
import json
import pathlib

from cases.runner import Runner
from lockstep.answer.text import sentence_of
from lockstep.comparison import compare_traces
from lockstep.data.file import load
from lockstep.engine.verdict import CLEAN

from . import check

PROGRAM = pathlib.Path(__file__).with_name("torch_networks.py").read_text("utf-8")
BEGIN = 'if __name__ == "__main__":'
NETWORKS = ("MLP", "BatchNorm", "BatchNorm and SiLU", "GroupNorm", "transformer")
GLOBAL_BATCH_SIZES = (16, 128, 512, 2048)
MOST = 0.5  # Of the bound.
TIMEOUT_SEC = 240
ALONE = {
    "case": "bounds/network", "framework": "torch", "bug": "", "processes": 1, "arguments": [],
    "launched": False, "own_weights": False,
}  # fmt: skip


def record(runner, path, source, *, processes=1, replay=None, permute=None):
    """Runs a program that records two steps; loads the recording."""
    asked = {"steps": 2, "replay": replay and str(replay), "permute": permute}

    def variables(file):
        return {"LOCKSTEP_RECORD": json.dumps({**asked, "path": file})}

    training = ["python", json.dumps({**ALONE, "source": source, "processes": processes})]
    runner.run(training, str(path), asked, variables, TIMEOUT_SEC)
    return load(path)


def measured(runner, folder, **constants):
    """Records a network; returns node → the largest share of its bound, and what is not clean."""
    folder.mkdir(parents=True)
    lines = [f"{name} = {value!r}" for name, value in constants.items()]
    source = PROGRAM.replace(BEGIN, "\n".join([*lines, "", BEGIN]))
    first = folder / "one.npz"
    one = record(runner, first, source)
    two = record(runner, folder / "two.npz", source, processes=2, replay=first)
    permuted = record(runner, folder / "permuted.npz", source, replay=first, permute=1)
    shares, found = {}, []
    for how, traces in (("", [one, two]), (", permuted", [one, two, permuted])):
        for verdict in compare_traces(traces, {}).values():
            shares |= {f"{m.node}{how}": m.share for m in verdict.measured}
            found += [] if verdict.status == CLEAN else [sentence_of(verdict)]
    return shares, found


def run(folder, options, counts):
    """Measures each network, dtype and size of a batch; yields the largest shares of each."""
    first = options.seed % 10**6
    cases = itertools.product(NETWORKS, ("float32", "bfloat16"), GLOBAL_BATCH_SIZES)
    with Runner(folder / "kept") as runner:
        for network, dtype, size in cases:
            told = [f"{network}, {dtype}, batch of {size}"]
            if not options.wants(told[0]):
                continue
            constants = {"GLOBAL_BATCH_SIZE": size, "BFLOAT16": dtype != "float32"}
            for seed in range(first, first + options.cycles):
                place = folder / told[0] / str(seed)
                shares, found = measured(runner, place, NETWORK=network, SEED=seed, **constants)
                listed = ", ".join(f"{node} {share:.2g}" for node, share in shares.items())
                told += [f"    shares of the bounds: {listed}", *found]
                counts["comparisons"] += 1
                counts["findings"] += len(found)
                counts["comparisons above half of a bound"] += max(shares.values()) > MOST
            yield "\n".join(told)
    check(not counts["findings"], "a right program has a finding")
    above = counts["comparisons above half of a bound"]
    check(not above, "a right program uses more than half of a bound")
