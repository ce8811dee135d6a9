"""Checks one recording without a reference: properties of any correct training."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from app.verification.recordings.recorded_step import (
    CLIPPED_FIRST,
    SEED,
    STATE,
    STATISTIC,
    WEIGHT,
    Named,
    RecordedStep,
)
from app.verification.recordings.reduction_check import check_reduction
from app.verification.recordings.trace_arrays import (
    all_finite,
    factor,
    relative_distances,
    same_bits,
    total_norm,
)
from app.verification.recordings.trace_finding import TraceFinding, fault
from app.verification.recordings.update_check import check_update
from lockstep.verdict import BY_DESIGN

_SCALED = 1e-5  # Relative deviation of a clipped gradient's elements from a common factor.
_CAUSES_OF_DIVERGENCE = ("start", "all-reduce", "clipping", "update")
_DIFFERENT_PART = 0.9
_SAME_PART = 0.5  # Replicas that share a larger part of their examples are a fault.


def check_step(step: RecordedStep) -> Iterator[tuple[str, list[TraceFinding]]]:
    """Checks one step; yields each stage that could be checked, with its findings."""
    several = step.trace.num_replicas > 1
    has_states = step.has("before") and step.has("after")
    earlier: list[TraceFinding] = []
    for stage, findings in _before_agreement(step, several=several, has_states=has_states):
        earlier += findings
        yield stage, findings
    if several and has_states:
        causes = [each.cause for each in earlier if each.stage in _CAUSES_OF_DIVERGENCE]
        yield "agreement", list(_equal_states(step, "after", causes))


def _before_agreement(
    step: RecordedStep, *, several: bool, has_states: bool
) -> Iterator[tuple[str, list[TraceFinding]]]:
    """Checks all stages except the last."""
    if several and has_states:
        yield "start", list(_equal_states(step, "before"))
    if several and step.has("data"):
        yield "examples", list(_different_examples(step))
    if several and (random := list(_random_states(step))):
        yield "random numbers", [finding for found in random for finding in found]
    if step.has("loss"):
        yield "loss", list(_finite_loss(step))
    if several and (found := check_reduction(step)) is not None:
        yield "all-reduce", found
    if (clipping := list(_clipping(step))) or step.gradients("clipped", 0) is not None:
        yield "clipping", clipping
    if (updates := check_update(step)) is not None:
        yield "update", updates
    if several and has_states and step.state("after", 0, STATISTIC):
        yield "statistics", list(_local_statistics(step))


def check_steps_together(steps: Sequence[RecordedStep]) -> Iterator[TraceFinding]:
    """Checks that no two steps use the same random numbers."""
    for earlier, later in itertools.combinations(steps, 2):
        for replica in later.replicas:
            if not _draws(earlier, replica) or not _draws(later, replica):
                continue
            first, second = earlier.arrays("random", replica), later.arrays("random", replica)
            if first and second and _all_same(first, second):
                yield fault(
                    "random numbers",
                    "random_numbers_repeated",
                    f"step {later.number} starts from the random state of step {earlier.number}",
                    later.number,
                    replicas=(replica,),
                )


def repeated_batches(steps: Sequence[RecordedStep]) -> list[tuple[int, int]]:
    """Returns pairs of steps with the same examples in the same order on every replica."""
    pairs = []
    for earlier, later in itertools.combinations(steps, 2):
        data = [(earlier.arrays("data", r), later.arrays("data", r)) for r in later.replicas]
        if all(a and b and _all_same(a, b) for a, b in data):
            pairs.append((earlier.number, later.number))
    return pairs


def rows_of(arrays: Sequence[np.ndarray] | None) -> Counter[bytes]:
    """Counts equal examples by the bytes of their first array, the inputs."""
    if not arrays:
        return Counter()
    return Counter(np.ascontiguousarray(row).tobytes() for row in arrays[0])


def _all_same(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> bool:
    return len(first) == len(second) and all(
        same_bits(a, b) for a, b in zip(first, second, strict=True)
    )


def _equal_states(
    step: RecordedStep, when: str, causes: Sequence[str] = ()
) -> Iterator[TraceFinding]:
    """Finds replicas whose weights or optimizer state differ from those of replica 0.

    Args:
        step: the step to check.
        when: "before" or "after" the step.
        causes: earlier findings of the step that explain the difference.
    """
    first = step.state(when, 0, WEIGHT, STATE)
    for replica in step.replicas[1:]:
        other = step.state(when, replica, WEIGHT, STATE)
        names = tuple(n for n in first if n in other and not same_bits(first[n], other[n]))
        if names:
            distances = relative_distances(
                [other[name] for name in names], [first[name] for name in names]
            )
            because = f", because of: {causes[0].replace('_', ' ')}" if causes else ""
            yield fault(
                "start" if when == "before" else "agreement",
                causes[0] if causes else "diverged_replicas",
                f"{len(names)} of {len(first)} variables of replica {replica} differ from those of"
                f" replica 0 {when} the step{because}",
                step.number,
                replicas=(replica,),
                tensors=names,
                distance=max(distances),
            )


def _local_statistics(step: RecordedStep) -> Iterator[TraceFinding]:
    """Finds moving statistics that differ between replicas."""
    first = step.state("after", 0, STATISTIC)
    for replica in step.replicas[1:]:
        other = step.state("after", replica, STATISTIC)
        names = tuple(n for n in first if n in other and not same_bits(first[n], other[n]))
        if names:
            distances = relative_distances(
                [other[name] for name in names], [first[name] for name in names]
            )
            yield TraceFinding(
                "statistics",
                BY_DESIGN,
                "local_statistics",
                "each replica normalises its own examples and has moving statistics that differ"
                " from those of replica 0",
                (step.number,),
                (replica,),
                names,
                max(distances),
            )


def _different_examples(step: RecordedStep) -> Iterator[TraceFinding]:
    """Finds replicas that train on the same examples."""
    rows = [rows_of(step.arrays("data", replica)) for replica in step.replicas]
    for first, second in itertools.combinations(step.replicas, 2):
        shared = (rows[first] & rows[second]).total()
        size = min(rows[first].total(), rows[second].total())
        # In data with few distinct examples, replicas share many of them.
        are_different = all(
            len(rows[r]) >= _DIFFERENT_PART * rows[r].total() for r in (first, second)
        )
        if size and shared > _SAME_PART * size and are_different:
            yield fault(
                "examples",
                "same_examples",
                f"replicas {first} and {second} train on the same examples: {shared} of {size}",
                step.number,
                replicas=(first, second),
            )


def _draws(step: RecordedStep, replica: int) -> bool:
    """Returns whether a replica uses random numbers in the step.

    A generator that no layer uses may have the same state on all replicas, as after one
    `manual_seed`. Without its state after the step, the random layers decide; a recording without
    layers has the keys that the script passes to its step.
    """
    before, after = step.arrays("random", replica), step.arrays("random_after", replica)
    if before is None or after is not None:
        return before is not None and not _all_same(before, after or [])
    return not step.trace.layers or step.has_random_layers


def _random_states(step: RecordedStep) -> Iterator[list[TraceFinding]]:
    """Finds replicas that use the same random numbers; yields nothing if none are used."""
    seeds = [step.state("before", replica, SEED) for replica in step.replicas]
    later = [step.state("after", replica, SEED) for replica in step.replicas]
    drawn = [
        n
        for n in seeds[0]
        if any(not same_bits(s[n], t[n]) for s, t in zip(seeds, later, strict=True))
    ]
    for first, second in itertools.combinations(step.replicas, 2):
        both_draw = _draws(step, first) and _draws(step, second)
        if not both_draw and not drawn:
            continue
        states = step.arrays("random", first) or [], step.arrays("random", second) or []
        equal = tuple(n for n in drawn if same_bits(seeds[first][n], seeds[second][n]))
        if equal or (both_draw and _all_same(*states)):
            yield [
                fault(
                    "random numbers",
                    "same_random_numbers",
                    f"replicas {first} and {second} draw from the same random state",
                    step.number,
                    replicas=(first, second),
                    tensors=equal,
                )
            ]
        else:
            yield []


def _finite_loss(step: RecordedStep) -> Iterator[TraceFinding]:
    for replica in step.replicas:
        if not all_finite(step.arrays("loss", replica) or []):
            yield fault(
                "loss", "not_finite", "the loss is not finite", step.number, replicas=(replica,)
            )


def _clipping(step: RecordedStep) -> Iterator[TraceFinding]:
    """Finds clipping on only some replicas, and clipping before the sum."""
    source = "raw" if step.trace.order == CLIPPED_FIRST else "sums"
    factors = []
    for replica in step.replicas:
        before, after = step.gradients(source, replica), step.gradients("clipped", replica)
        if before is None or after is None:
            return
        factors.append(_common_factor(after, before))
    if len(factors) < 2:
        return
    if source == "raw" and any(each != 1 for each in factors):
        norms = ", ".join(
            f"{total_norm(list((step.gradients('raw', r) or {}).values())):.4g}"
            for r in step.replicas
        )
        yield fault(
            "clipping",
            "clipped_before_the_sum",
            f"each replica clips its own gradient, of norm {norms}, before the sum",
            step.number,
            replicas=tuple(r for r in step.replicas if factors[r] != 1),
        )
        return
    if source == "sums" and any(
        abs(each - factors[0]) > _SCALED * abs(factors[0]) for each in factors
    ):
        clipping = tuple(r for r in step.replicas if factors[r] != 1)
        listed = ", ".join(f"{each:.4g}" for each in factors)
        yield fault(
            "clipping",
            "clipped_on_one_replica",
            f"the replicas scale the same gradient by different factors: {listed}",
            step.number,
            replicas=clipping,
        )


def _common_factor(after: Named, before: Named) -> float:
    """Returns the factor by which gradients were scaled; 1 if they are bitwise identical."""
    if all(same_bits(after[name], before[name]) for name in before):
        return 1.0
    found = factor(list(after.values()), list(before.values()))
    return found if abs(found - 1) > 1e-7 else 1.0
