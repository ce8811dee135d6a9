"""Compares two trainings with each other: the traces of their steps, or their final weights."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from app.records.history import Summary
from app.runtime.console import count
from app.runtime.errors import DataError
from app.verification.output import DIFFERENT, EQUAL, IDENTICAL, OTHER_TRAINING, Pair
from lockstep.data.trace import OF_COPIES, STATISTIC, WEIGHT, About, Trace
from lockstep.numeric.arrays import Named, all_same_bits, relative_norm, same_bits

EXPECTED = "different, as expected"
_OF_SHARDS = ("data", "y_pred", "loss", "raw", "own_before", "own_after")


def largest_difference(
    first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]
) -> tuple[str, float, float]:
    """Compares arrays of equal names in float64.

    Returns:
        The name of the array with the largest difference, "" if all are bitwise identical; the
        difference, NaN if an element is NaN; and that over the largest magnitude in the array.

    Raises:
        ValueError: the names differ.
    """
    if list(first) != list(second):
        raise ValueError("states of different models cannot be compared")
    worst, largest, relative = "", 0.0, 0.0
    for name in first:
        if same_bits(first[name], second[name]):
            continue
        a, b = np.asarray(first[name], np.float64), np.asarray(second[name], np.float64)
        with np.errstate(invalid="ignore"):
            absolute = float(np.max(np.abs(a - b)))
        if not worst or absolute > largest or np.isnan(absolute):
            worst, largest = name, absolute
            relative = absolute / (float(max(np.max(np.abs(a)), np.max(np.abs(b)))) or 1.0)
    return worst, largest, relative


def compare_traces(
    names: tuple[str, str], traces: tuple[Trace, Trace], *, has_fault: bool = False
) -> Pair:
    """Compares all arrays that two trainings have in common.

    With other numbers of shards, these are the arrays of the copies.

    Args:
        names: names of the trainings.
        traces: their traces.
        has_fault: whether a step of one of them has a fault.
    """
    first, second = traces
    by_shard = first.about.shards == second.about.shards
    kinds = (*_OF_SHARDS, *OF_COPIES) if by_shard else OF_COPIES
    if all(
        _have_same_bits(first, second, position, kind)
        for position in range(len(first.steps))
        for kind in kinds
    ):
        return Pair(names, IDENTICAL)
    tensor, absolute, relative = largest_difference(*map(_last_weights, traces))
    where = f"weights, {tensor}" if tensor else ""
    outcome, why = EQUAL, ""
    parts = [normalised_by(trace.about) for trace in traces]
    if parts[0] != parts[1]:
        outcome, how = OTHER_TRAINING, list(map(_normalised, parts))
        one, two = (trace.named(0, "sums", 0) or {} for trace in traces)
        why = (
            f"{' and '.join(names)} are two trainings by design, not by a fault: BatchNorm"
            f" normalises {how[0]} in {names[0]} and {how[1]} in {names[1]}; the first gradients"
            f" are {relative_norm(two, one):.1%} apart"
        )
    return Pair(names, DIFFERENT if has_fault else outcome, absolute, relative, where, why)


def _have_same_bits(first: Trace, second: Trace, position: int, kind: str) -> bool:
    """Returns whether both have the same arrays of a kind; copies are also those of the first."""

    def arrays(trace: Trace, item: int) -> Named:
        recorded = trace.arrays(position, kind, item) or []
        return {str(index): array for index, array in enumerate(recorded) if array is not None}

    items = itertools.zip_longest(first.items(kind), second.items(kind), fillvalue=0)
    return all(all_same_bits(arrays(first, a), arrays(second, b)) for a, b in items)


def _last_weights(trace: Trace) -> Named:
    named = trace.named(len(trace.steps) - 1, "after", 0) or {}
    return {name: array for name, array in named.items() if trace.kinds[name] == WEIGHT}


def normalised_by(about: About) -> tuple[int, ...]:
    """Returns the sizes of the parts of a batch that BatchNorm normalises; empty without it."""
    if not any(variable.kind == STATISTIC for variable in about.variables):
        return ()
    return (1,) if about.syncs_batch_norm else tuple(int(shard.weight) for shard in about.shards)


def _normalised(sizes: Sequence[int]) -> str:
    """Returns the parts that BatchNorm normalises in words."""
    if len(sizes) == 1:
        return "the whole batch"
    shares = f" of {':'.join(map(str, sizes))}" if len(set(sizes)) > 1 else ""
    return f"each of {len(sizes)} shards{shares}"


def pair_lines(pairs: Sequence[Pair], num_steps: int) -> list[str]:
    """Returns the verdict in one sentence, a line for each pair that differs, and explanations."""
    lines, after = [_summarize(pairs)], f"after {count(num_steps, 'step')}"
    for pair in pairs:
        if pair.outcome != IDENTICAL:
            lines.append(
                f"{' and '.join(pair.trainings)}: weights {after} differ by at most"
                f" {pair.absolute:.2g} ({pair.relative:.2g} of the largest, in {pair.where})"
            )
    return [*lines, *dict.fromkeys(pair.why for pair in pairs if pair.outcome != IDENTICAL)]


def _summarize(pairs: Sequence[Pair]) -> str:
    outcomes = {pair.outcome for pair in pairs}
    if outcomes <= {IDENTICAL}:
        return "All trainings end with bitwise identical weights."
    if DIFFERENT in outcomes:
        return "Weights differ that should be bitwise identical."
    same = [f"{', '.join(names[:-1])} and {names[-1]}" for names in _identical(pairs)]
    if not same:
        return "The trainings end with different weights, as expected."
    return f"{'; '.join(same)} end with bitwise identical weights; the others differ, as expected."


def _identical(pairs: Sequence[Pair]) -> list[list[str]]:
    """Returns the groups of trainings that end with bitwise identical weights."""
    groups = list[list[str]]()
    for pair in pairs:
        if pair.outcome == IDENTICAL:
            group = next((g for g in groups if not set(g).isdisjoint(pair.trainings)), [])
            if not group:
                groups.append(group)
            group += [name for name in pair.trainings if name not in group]
    return groups


def compare_weights(summaries: Sequence[Summary], states: Sequence[Named]) -> list[Pair]:
    """Compares the final weights of each pair of runs from equal initial weights.

    The outcome of a pair is `DIFFERENT` if both should be bitwise identical and are not.

    Raises:
        DataError: the runs were trained on different images.
    """
    if len({summary.dataset_sha256 for summary in summaries}) > 1:
        found = ", ".join(f"{s.strategy} on {s.dataset}" for s in summaries)
        raise DataError(
            f"trained on different images: {found}; give the data set with --dataset and use"
            " --overwrite"
        )
    runs = zip(summaries, states, strict=True)
    return [_compare(*one, *two) for one, two in itertools.combinations(runs, 2)]


def _compare(first: Summary, state: Named, second: Summary, other: Named) -> Pair:
    names = first.strategy, second.strategy
    tensor, absolute, relative = largest_difference(_weights(state), _weights(other))
    if not tensor:
        return Pair(names, IDENTICAL)
    reason = _why_different(first, second, state)
    outcome, why = EXPECTED, f"A difference is expected: {reason}."
    if not reason:
        outcome = DIFFERENT
        why = f"{' and '.join(names)} add in the same order, so their weights should be bitwise"
        why += " identical."
    return Pair(names, outcome, absolute, relative, tensor, why)


def _weights(state: Named) -> Named:
    """Returns the variables of the model, without the state of the optimizer."""
    prefix = "model/"
    return {n.removeprefix(prefix): array for n, array in state.items() if n.startswith(prefix)}


def _why_different(first: Summary, second: Summary, state: Named) -> str:
    """Returns why the weights of two runs may differ; "" if they should be bitwise identical."""
    splits_differently = first.num_shards != second.num_shards
    if splits_differently and any(name.endswith("/moving_mean") for name in state):
        return (
            "each shard is normalised with its own statistics (--batch_norm=average), so the number"
            " of shards is part of the training"
        )
    if splits_differently and any("seed_generator" in name for name in state):
        return (
            "random layers draw different numbers on each replica, so the number of replicas is"
            " part of the training"
        )
    if splits_differently or first.all_reduce != second.all_reduce:
        return "the summation order differs, and training amplifies rounding errors"
    if first.cpu_kernels != second.cpu_kernels:
        return (
            "the kernels of the CPU, which round differently, are not the same"
            f" ({first.cpu_kernels}; {second.cpu_kernels})"
        )
    return ""
