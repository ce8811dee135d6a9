"""Finds the same examples in a step of two traces, and puts their arrays side by side."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lockstep.context import Context
from lockstep.explain.targets import targets_of
from lockstep.numeric.arrays import distance, norm, ratio
from lockstep.reference import StepPair
from lockstep.step import has_batch_norms

KINDS = ("data", "y_pred", "y_grad", "y_other")
_EQUAL = 1e-5  # Relative difference of outputs in float32 that rounding alone makes.
_BY_ROUNDING = 3e-5  # Relative difference of outputs.
Place = tuple[int, int]  # Number of a forward pass, and row.
Pairs = list[tuple[np.ndarray, np.ndarray]]


class Part(NamedTuple):
    """Arrays of one forward pass; their first axis is the examples.

    Attributes:
        shard: the shard.
        number: number of the forward pass of the shard.
        smoothings: label smoothing of each output; 0 if it is unknown.
        arrays: kind, or "targets" → arrays. The latter have no columns if they are unknown.
    """

    shard: int
    number: int
    smoothings: list[float]
    arrays: dict[str, list[np.ndarray]]


class Matched(NamedTuple):
    """The examples of one forward pass that both traces have.

    Attributes:
        shard: the shard of the second trace.
        smoothings: label smoothing of each output in both.
        pairs: kind, or "targets" → arrays of both traces; empty if their shapes differ.
    """

    shard: int
    smoothings: list[tuple[float, float]]
    pairs: dict[str, Pairs]


class Located(NamedTuple):
    """The examples of one forward pass that both traces have, and where they are.

    Attributes:
        part: the forward pass of the second trace.
        rows: rows in it.
        sources: for each row, the forward pass of the first trace, and the row in it.
    """

    part: Part
    rows: list[int]
    sources: list[tuple[Part, int]]


def matched_examples(pair: StepPair) -> list[Matched]:
    """Returns arrays of the examples that `located_examples` finds."""
    found = []
    for located in located_examples(pair):
        part = located.part
        pairs = {kind: pairs_of(kind, located) for kind in part.arrays}
        smoothings = list(zip(located.sources[0][0].smoothings, part.smoothings, strict=False))
        found.append(Matched(part.shard, smoothings, pairs))
    return found


def have_equal_outputs(pair: StepPair) -> bool:
    """Returns whether the outputs of all examples agree, from equal weights and examples."""
    if not (pair.computes_the_same and pair.has("data", "y_pred")):
        return False
    found, num = matched_examples(pair), 0
    for matched in found:
        outputs = matched.pairs["y_pred"]
        num += len(outputs[0][0]) if outputs else 0
        if any(distance(b, a) > _EQUAL * norm(a) for a, b in outputs):
            return False
    return 0 < num == sum(pair.second.sizes)


def shards_with_right_outputs(pair: StepPair) -> set[int]:
    """Returns the shards of the second trace of which an example has its right outputs."""
    if not (pair.computes_the_same and pair.has("data", "y_pred")):
        return set()
    return {
        matched.shard
        for matched in matched_examples(pair)
        for a, b in matched.pairs["y_pred"]
        if any(norm(x) and distance(y, x) <= _EQUAL * norm(x) for x, y in zip(a, b, strict=True))
    }


def widen_bound(pair: StepPair) -> None:
    """Widens the bound of gradients that differ, as far as what is recorded of the step says.

    Shards send parts that may cancel in the sum.

    Ranks of a model round parts of an activation to 16 bits. Layers that normalise a batch, and a
    GPU's kernels for batches of another size, add in another order: units whose inputs are nearly 0
    may turn over.
    """
    if pair.is_comparable and not pair.are_gradients_right:
        widen(pair)


def widen(pair: StepPair) -> None:
    """Widens the bound of gradients."""
    pair.measure_terms()
    pairs = [each for matched in matched_examples(pair) for each in matched.pairs["y_pred"]]
    apart = [ratio(distance(b, a), norm(a)) for a, b in pairs]
    pair.enlarge(max(apart, default=0.0))
    on_gpu = {step.trace.about.device for step, _ in pair.both} & {"cuda", "gpu"}
    # Outputs that are not recorded may differ.
    is_rounding = 0 < max(apart, default=_BY_ROUNDING) <= _BY_ROUNDING
    if is_rounding and (has_batch_norms(pair.second) or on_gpu):
        pair.allow_ties()


def located_examples(pair: StepPair) -> list[Located]:
    """Finds the examples whose inputs are bitwise equal, for each forward pass of the second.

    Inputs that occur twice in a trace are left out.
    """
    first, second = parts_of(pair.first), parts_of(pair.second)
    places: list[dict[int, Place]] = []
    for num_leaves in (1, None):  # All arrays, if few examples have another first one.
        places = [_places(parts, num_leaves) for parts in (first, second)]
        if len(places[1]) > sum(map(_num_rows, second)) / 2:
            break
    found = []
    for number, part in enumerate(second):
        common = [k for k, (own, _) in places[1].items() if own == number and k in places[0]]
        if common:
            rows = [places[1][key][1] for key in common]
            sources = [(first[n], row) for n, row in (places[0][key] for key in common)]
            found.append(Located(part, rows, sources))
    return found


def parts_of(step: Context) -> list[Part]:
    """Returns the forward passes of a step in order."""
    parts = []
    for shard in step.shards:
        count = step.trace.micro_batches(step.position, shard)
        for number in range(count):
            arrays = {}
            for kind in KINDS:
                found = step.arrays(kind)[shard] if step.has(kind) else []
                each = len(found) // count
                arrays[kind] = found[number * each :][:each] if each * count == len(found) else []
            size = next((len(a) for a in arrays["data"] if a.ndim), 0)
            rows = {k: [a for a in own if a.ndim and len(a) == size] for k, own in arrays.items()}
            outputs = zip(rows["y_pred"], rows["y_grad"], strict=False)
            read = [targets_of(*each) for each in outputs if np.shape(each[0]) == each[1].shape]
            rows["targets"] = [targets for targets, _ in read]
            smoothings = [smoothing for _, smoothing in read]
            parts.append(Part(shard, number, smoothings, rows))
    return parts


def _num_rows(part: Part) -> int:
    return len(part.arrays["data"][0]) if part.arrays["data"] else 0


def _places(parts: Sequence[Part], num_leaves: int | None) -> dict[int, Place]:
    """Returns hash of the inputs → place of each example whose inputs occur once."""
    found: dict[int, list[Place]] = {}
    for number, part in enumerate(parts):
        leaves = [_comparable(array) for array in part.arrays["data"][:num_leaves]]
        for row in range(_num_rows(part)):
            key = hash(b"".join(leaf[row].tobytes() for leaf in leaves))
            found.setdefault(key, []).append((number, row))
    return {key: places[0] for key, places in found.items() if len(places) == 1}


def _comparable(array: np.ndarray) -> np.ndarray:
    """Returns an array in the dtype that any framework may use for it."""
    kinds = {"f": np.float32, "i": np.int64, "u": np.int64, "b": np.int64}
    return array.astype(kinds.get(array.dtype.kind, array.dtype))


def pairs_of(kind: str, located: Located) -> Pairs:
    """Returns the arrays of a kind for the same examples in both traces."""
    part, rows, sources = located
    found = []
    for index, own in enumerate(part.arrays[kind]):
        others = [p.arrays[kind][index][row] for p, row in sources if index < len(p.arrays[kind])]
        if len(others) < len(rows) or {other.shape for other in others} != {own.shape[1:]}:
            return []
        found.append((_comparable(np.stack(others)), _comparable(own[rows])))
    return found
