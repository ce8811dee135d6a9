"""Measures which share of the bounds right trainings use: several networks, batches and dtypes.

Each network of `torch_networks.py` is trained with each size of a batch and in each dtype: in one
process, which is the reference, once more with permuted examples, and in two processes with DDP.
Of the gradients of the whole batch is listed how far they are apart, and of all recorded state
which share of its bound a step uses. A cycle is a seed: even ones train with SGD, odd ones with
AdamW. Fails if a comparison has a finding, or a share is more than half.
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
from lockstep.numeric.arrays import EPS, UNITS, Named, distance, norm
from lockstep.reference import StepPair, common_steps, match_traces, tolerance_of
from lockstep.stages.claim import Claim

from . import Options, check
from .scripts import Servers, record, running_servers, shown

PROGRAM = pathlib.Path(__file__).with_name("torch_networks.py")
CONSTANTS = 'NETWORK, GLOBAL_BATCH_SIZE, BFLOAT16, SEEDS = "MLP", 16, False, (0,)'
NETWORKS = ("MLP", "BatchNorm", "BatchNorm and SiLU", "GroupNorm", "transformer")
GLOBAL_BATCH_SIZES = (16, 128, 512, 2048)
MOST = 0.5  # Of the bound.


class Gradient(NamedTuple):
    """How far the gradient of a weight is from that of the reference; all are norms.

    Attributes:
        residual: ‖reference − Σ c·t‖, for the gradients t of the processes and their factors c.
        size: Σ |c|·‖t‖.
        largest: the largest size of all weights in this step.
        spread: ‖reference − gradient with permuted examples‖.
    """

    residual: float
    size: float
    largest: float
    spread: float


class Measured(NamedTuple):
    """What the recordings of a seed show.

    Attributes:
        gradients: of each weight in each step.
        share: the largest share that a gradient uses of the bound without permuted examples.
        permuted_share: the same of the bound that is computed from permuted examples.
        state: kind of state → the largest share of its bound.
        findings: what the comparison reports, in words.
    """

    gradients: list[Gradient]
    share: float
    permuted_share: float
    state: dict[str, float]
    findings: list[str]


def measured(one: Trace, two: Trace, permuted: Trace) -> Measured:
    """Compares the recordings of a seed."""
    tolerances = [tolerance_of(one, order, {}, None) for order in (None, permuted)]
    others = {step.number: (own, step) for own, step in common_steps(one, permuted)}
    gradients, state = list[Gradient](), dict[str, float]()
    shares: list[list[float]] = [[], []]
    for reference, step in common_steps(one, two):
        matching = match_traces(one, two, {})
        for own_shares, tolerance in zip(shares, tolerances, strict=True):
            pair = StepPair(reference, step, matching, tolerance)
            check(pair.is_comparable, f"step {step.number} is not compared")
            widen(pair)
            terms = pair.gradients
            right = [(1.0, terms.reference)]
            own_shares += [max(pair.tolerance.shares(g, right).values()) for g in terms.given]
        own = StepPair(*others[step.number], match_traces(one, permuted, {}), tolerances[0])
        gradients += _apart(pair, own.gradients.given[0])
        for change in Claim(pair).changes:
            kind = change.variable.kind
            state[kind] = max(state.get(kind, 0.0), change.share or 0.0)
    told = list[str]()
    for traces in ([one, two], [one, two, permuted]):
        for verdict in compare_traces(traces, {}).values():
            told += map(shown, verdict.findings)
    return Measured(gradients, max(shares[0]), max(shares[1]), state, told)


def _apart(pair: StepPair, permuted: Named) -> Iterator[Gradient]:
    """Yields how far the gradient of each weight is from the reference."""
    terms = pair.gradients
    first, second = terms.reference, terms.given[0]
    sizes = {name: sum(terms.share * norm(own[name]) for own in terms.raw) for name in first}
    largest = max(sizes.values())
    for name in first:
        residual = distance(second[name], first[name])
        spread = distance(permuted[name], first[name])
        yield Gradient(residual, sizes[name], largest, spread)


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


def told(name: str, found: Sequence[Measured], unit: float) -> str:
    """Returns the largest of each measure, of some seeds, in words."""
    gradients = [gradient for one in found for gradient in one.gradients]
    alone = max(g.residual / (unit * g.size) for g in gradients if g.size)
    floored = max(g.residual / (unit * (g.size + g.largest)) for g in gradients)
    spread = max(g.spread / (unit * (g.size + g.largest)) for g in gradients)
    kinds = dict.fromkeys(kind for one in found for kind in one.state)
    state = ", ".join(f"{k} {max(one.state.get(k, 0.0) for one in found):.2g}" for k in kinds)
    share, permuted = max(x.share for x in found), max(x.permuted_share for x in found)
    lines = [
        f"{name}: gradients use {share:.2g} of the bound, {permuted:.2g} with permuted examples;",
        f"    residual {alone:.2g} u·size, {floored:.2g} u·(size + largest);",
        f"    with permuted examples {spread:.2g} u·(size + largest);",
        f"    shares of state: {state}",
        *(f"    {finding}" for one in found for finding in one.findings),
    ]
    return "\n".join(lines)


def run(folder: pathlib.Path, options: Options, counts: collections.Counter) -> Iterator[str]:
    """Measures each network, dtype and size of a batch; yields the largest shares of each."""
    first = options.seed % 10**6
    seeds, above = tuple(range(first, first + options.cycles)), 0
    cases = [
        (f"{network}, {'bfloat16' if is_short else 'float32'}, batch of {number}", *case)
        for case in itertools.product(NETWORKS, (False, True), GLOBAL_BATCH_SIZES)
        for network, is_short, number in [case]
    ]
    with running_servers([PROGRAM.stem]) as servers:
        for index, (name, network, is_short, number) in enumerate(cases):
            if not options.wants(name):
                continue
            place = folder / f"{index}"
            traces = _recorded(servers, network, number, is_short, seeds, place)
            found = [measured(*each) for each in traces]
            for one in found:
                largest = max(one.share, one.permuted_share, *one.state.values())
                counts["comparisons"] += 1
                counts["findings"] += len(one.findings)
                above += not largest <= MOST
            yield told(name, found, UNITS["bfloat16"] if is_short else EPS)
    counts["comparisons above half of a bound"] = above
    check(not counts["findings"], "a right program has a finding")
    check(not above, "a right program uses more than half of a bound")
