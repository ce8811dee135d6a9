"""Explains state of optimizers that follows values beside the gradients, as those of curvature."""

from collections.abc import Mapping, Sequence

import numpy as np

from lockstep.explain.kept import Change, recurrences, slots_of, states_of
from lockstep.explain.solve import solve
from lockstep.numeric.arrays import Named, dense, is_far, norm
from lockstep.reference import StepPair

_CLOSE = 1e-3  # Relative; of state that is a sum.


def other_values(
    pair: StepPair, wrong: Sequence[Change], compared: Sequence[Change]
) -> tuple[str, str] | None:
    """Returns cause and sentence of wrong state that is no sum of gradients or of their squares.

    Args:
        pair: the step.
        wrong: weights and state that change differently.
        compared: all that was compared.
    """
    slots = sorted({x.slot for x in wrong if x.slot})
    groups = {slot: {x.weight: x for x in compared if x.slot == slot} for slot in slots}
    if not groups or {x.weight for x in wrong} != {x.weight for x in wrong if x.slot}:
        return None
    if any(_is_of_gradients(pair, group) for group in groups.values()):
        return None
    what = f"the optimizer's state {', '.join(map(repr, slots))} follows"
    keys = {key for slot in slots for key in _keys_of(pair, slot)}
    apart = {name for name, *_ in pair.second.unlike_first("after")}
    if keys & apart and not keys & {name for name, *_ in pair.second.unlike_first("before")}:
        return "diverged_replicas", f"{what} values of each replica, which are not the gradients"
    text = f"{what} other values, which are not the gradients"
    first, second = (
        {f"{slot}/{n}": dense(x.after[i]) for slot, g in groups.items() for n, x in g.items()}
        for i in (0, 1)
    )
    old = {f"{slot}/{n}": dense(x.before[0]) for slot, g in groups.items() for n, x in g.items()}
    (times, kept), known = solve(second, [first, old])
    if known[0] and np.isfinite(times) and _are_sums(second, [(times, first), (kept, old)]):
        text = f"{what} values that are {times:.6g} times as large, and not the gradients"
    return "other_statistics", text


def starts_from_zero(pair: StepPair, weights: Sequence[str]) -> tuple[str, str] | None:
    """Returns cause and sentence if a copy updates each weight with state that starts from 0.

    The reference gives X' = β · X + c · gradient, or of its square; the copy leaves c · gradient.

    Args:
        pair: the step.
        weights: the reference's names of weights that are wrong, or whose state is.
    """
    found = {weight: _slot_from_zero(pair, weight) for weight in weights}
    if not found or not all(found.values()):
        return None
    slots = ", ".join(sorted({repr(slot) for slot in found.values()}))
    return "reset_state", f"the optimizer's state {slots} of these weights starts from 0 again"


def _slot_from_zero(pair: StepPair, weight: str) -> str:
    gradient = dense(pair.gradients.reference_applied[weight])
    for slot, keys in slots_of(pair, weight, pair.in_second(weight)).items():
        state = states_of(pair.first, keys[0])[0]
        if state is None or state[1].shape != gradient.shape or not norm(state[0]):
            continue
        old, new = state
        others = [own[1] for own in states_of(pair.second, keys[1]) if own]
        for kept, times, power in recurrences({"": old}, {"": new}, {"": gradient}):
            is_kept = abs(kept) * norm(old) > 10 * _CLOSE * norm(new)
            from_zero = times * gradient**power
            if is_kept and any(
                own.shape == new.shape and not is_far(from_zero, own, _CLOSE) for own in others
            ):
                return slot
    return ""


def _keys_of(pair: StepPair, slot: str) -> list[str]:
    slots = pair.second.trace.slots
    return [own[slot] for own in slots.values() if slot in own]


def _is_of_gradients(pair: StepPair, group: Mapping[str, Change]) -> bool:
    """Returns whether the reference's state may follow its gradients or their squares."""
    applied = pair.gradients.reference_applied
    if any(n not in applied or applied[n].shape != x.after[0].shape for n, x in group.items()):
        return True  # It may have means of them.
    new = {name: dense(change.after[0]) for name, change in group.items()}
    old = {name: dense(change.before[0]) for name, change in group.items()}
    for power in (1, 2):
        terms = [old, {name: applied[name] ** power for name in group}]
        factors, _ = solve(new, terms)
        if not np.isfinite(factors).all() or _are_sums(new, [*zip(factors, terms, strict=True)]):
            return True
    return False


def _are_sums(values: Named, expression: Sequence[tuple[float, Named]]) -> bool:
    """Returns whether arrays are sums of terms, to a few digits."""
    return all(
        norm(value - np.sum([times * term[name] for times, term in expression], axis=0))
        <= _CLOSE * norm(value)
        for name, value in values.items()
    )
