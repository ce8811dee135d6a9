"""Measures which share of the bounds right trainings use: several networks, batches and dtypes.

Each network of `torch_networks.py` is trained with each size of a batch and in each dtype: in one
process, which is the reference, once more with permuted examples, and in two processes with DDP. Of
gradients and of all recorded state is listed which share of its bound a step uses. A cycle is a
seed: even ones train with SGD, odd ones with AdamW. Fails if a comparison has a finding, or a share
is more than half.
"""

import collections
import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lockstep.comparison import compare_traces
from lockstep.data.file import load
from lockstep.data.trace import Trace
from lockstep.explain.pairing import widen
from lockstep.reference import StepPair, common_steps, match_traces, tolerance_of
from lockstep.stages.claim import Claim

from . import Options, check
from .scripts import Servers, record, running_servers, shown

PROGRAM = pathlib.Path(__file__).with_name("torch_networks.py")
CONSTANTS = 'NETWORK, GLOBAL_BATCH_SIZE, BFLOAT16, SEEDS = "MLP", 16, False, (0,)'
NETWORKS = ("MLP", "BatchNorm", "BatchNorm and SiLU", "GroupNorm", "transformer")
GLOBAL_BATCH_SIZES = (16, 128, 512, 2048)
MOST = 0.5  # Of the bound.


class Measured(NamedTuple):
    """What the recordings of a seed show.

    Attributes:
        shares: "gradients", "gradients with permuted examples" or a kind of state → the largest
            share of its bound.
        findings: what the comparison reports, in words.
    """

    shares: dict[str, float]
    findings: list[str]


def measured(one: Trace, two: Trace, permuted: Trace) -> Measured:
    """Compares the recordings of a seed."""
    shares: collections.defaultdict[str, float] = collections.defaultdict(float)
    for name, order in (("gradients", None), ("gradients with permuted examples", permuted)):
        tolerance = tolerance_of(one, order, {}, None)
        for reference, step in common_steps(one, two):
            pair = StepPair(reference, step, match_traces(one, two, {}), tolerance)
            check(pair.is_comparable, f"step {step.number} is not compared")
            widen(pair)
            right = [(1.0, pair.gradients.reference)]
            for given in pair.gradients.given:
                shares[name] = max(shares[name], *tolerance.shares(given, right).values())
            for change in Claim(pair).changes:
                kind = change.variable.kind
                shares[kind] = max(shares[kind], change.share or 0.0)
    told = list[str]()
    for traces in ([one, two], [one, two, permuted]):
        for verdict in compare_traces(traces, {}).values():
            told += map(shown, verdict.findings)
    return Measured(shares, told)


def _recorded(
    servers: Servers, network: str, number: int, is_short: bool, seeds: Sequence[int],
    folder: pathlib.Path,
) -> Iterator[tuple[Trace, Trace, Trace]]:  # fmt: skip
    """Records a network with all seeds; yields the three recordings of each."""
    source = PROGRAM.read_text("utf-8")
    check(source.count(CONSTANTS) == 1, f"{PROGRAM.name} has other constants")
    constants = CONSTANTS.split("=")[0]
    source = source.replace(CONSTANTS, f"{constants}= {network!r}, {number}, {is_short}, {seeds!r}")
    for num_replicas, *files in (
        (1, "one.npz"), (1, "permuted.npz", "one.npz", "1"), (2, "two.npz", "one.npz"),
    ):  # fmt: skip
        failed = record(servers, source, PROGRAM.stem, folder, num_replicas, *files)
        check(not failed, f"{network}, batch of {number}: {failed}")
    for seed in seeds:
        one, two, permuted = (
            load(folder / f"{kind}{seed}.npz") for kind in ("one", "two", "permuted")
        )
        yield one, two, permuted


def run(folder: pathlib.Path, options: Options, counts: collections.Counter) -> Iterator[str]:
    """Measures each network, dtype and size of a batch; yields the largest shares of each."""
    first = options.seed % 10**6
    seeds = tuple(range(first, first + options.cycles))
    cases = itertools.product(NETWORKS, (False, True), GLOBAL_BATCH_SIZES)
    with running_servers([PROGRAM.stem]) as servers:
        for index, (network, is_short, number) in enumerate(cases):
            name = f"{network}, {'bfloat16' if is_short else 'float32'}, batch of {number}"
            if not options.wants(name):
                continue
            told = [name]
            for traces in _recorded(servers, network, number, is_short, seeds, folder / f"{index}"):
                found = measured(*traces)
                shares = ", ".join(f"{kind} {share:.2g}" for kind, share in found.shares.items())
                told += [f"    shares of the bounds: {shares}", *found.findings]
                counts["comparisons"] += 1
                counts["findings"] += len(found.findings)
                is_within = max(found.shares.values()) <= MOST
                counts["comparisons above half of a bound"] += not is_within
            yield "\n".join(told)
    check(not counts["findings"], "a right program has a finding")
    above = counts["comparisons above half of a bound"]
    check(not above, "a right program uses more than half of a bound")
