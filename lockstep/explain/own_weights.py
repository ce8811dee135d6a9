"""Explains what an optimizer leaves that has weights of its own, whatever its rule.

An optimizer may reduce gradients itself, update a float32 copy or a part of the weights, and send
what it has. What it leaves tells then that its gradients are right, although no state shows them.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from lockstep.answer.text import count
from lockstep.data.match import Pair
from lockstep.explain.decays import other_decay
from lockstep.explain.kept import states_of
from lockstep.explain.used import used_gradients
from lockstep.numeric.arrays import EPS, is_far, norm, same_bits
from lockstep.reference import StepPair

_CLOSE = 1e-3  # Relative to the largest change of a weight.
_LEAST = 0.1  # Part of the elements of all weights that are updated, or not.


def own_weights(pair: StepPair) -> tuple[str, str, list[str]] | None:
    """Returns cause, sentence, and the checked recording's names of weights; None if unknown."""
    if not pair.has("before", "after"):
        return None
    names = [n for n in pair.matching.pairs if n.first in pair.gradients.names]
    return _not_updated(pair, names) or _decayed(pair, names) or _other_weights(pair, names)


def reduces_otherwise(pair: StepPair) -> bool:
    """Returns whether an optimizer of an unknown rule leaves equal weights, but not the right ones.

    If copies apply different gradients, the optimizer reduces them, or its updates, itself: unless
    its state shows that the owner of a weight uses its own gradient, and sends what it leaves.
    """
    names = [n for n in pair.matching.pairs if n.first in pair.gradients.names]
    ends, is_right = pair.second.named("after"), True
    if len(ends) < 2 or pair.rules() or not pair.has("before"):
        return False
    for name, (old, new, _, own_new) in _arrays(pair, names, 0):
        if not all(name in own and same_bits(own[name], ends[0][name]) for own in ends):
            return False
        is_right &= own_new.shape == new.shape and norm(own_new - new) <= _CLOSE * norm(new - old)
    used = used_gradients(pair, [each.second for each in names])
    applied = [pair.second.applied(copy) for copy in pair.second.copies]
    is_own = used is not None and all(
        any(not is_far(own[name], given.get(name, 0.0), _CLOSE) for given in applied)
        for own in used.of_copies
        for name in own
    )
    return not is_right and not is_own


def _arrays(
    pair: StepPair, names: Sequence[Pair], copy: int
) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Yields weight → it before and after the step, in the reference and on a copy."""
    for each in names:
        first, second = states_of(pair.first, each.first)[0], states_of(pair.second, each.second)
        if first and (own := second[copy]):
            yield each.second, [*first, *(each.as_first(array) for array in own)]


def _not_updated(pair: StepPair, names: Sequence[Pair]) -> tuple[str, str, list[str]] | None:
    """Explains weights of which some elements stay as they were, and all others are right."""
    odd, kept, right = dict[str, None](), 0, 0
    for copy in pair.second.copies:
        for name, (old, new, own_old, own_new) in _arrays(pair, names, copy):
            if own_new.shape != new.shape:
                return None
            allowed = _CLOSE * np.max(np.abs(new - old), initial=0) + 4 * EPS * np.abs(new)
            is_right = np.abs(own_new - new) <= allowed
            is_kept = (own_new == own_old) & ~is_right
            if not np.all(is_right | is_kept):
                return None
            kept, right = kept + int(np.sum(is_kept)), right + int(np.sum(is_right))
            odd.update({name: None} if np.any(is_kept) else {})
    if min(kept, right) < _LEAST * (kept + right):
        return None
    text = f"{kept} of {kept + right} elements stay as they were, and all others are updated"
    return "not_updated", f"{text} as in the first recording", [*odd]


def _decayed(pair: StepPair, names: Sequence[Pair]) -> tuple[str, str, list[str]] | None:
    """Explains weights that another multiple of the weight is taken from, equally on each copy."""
    found = [
        other_decay({
            name: (old, new - old, own_new - own_old, EPS * np.abs(new))
            for name, (old, new, own_old, own_new) in _arrays(pair, names, copy)
        }, "the changes")
        for copy in pair.second.copies
    ]  # fmt: skip
    return found[0] if all(each == found[0] for each in found) else None


def _other_weights(pair: StepPair, names: Sequence[Pair]) -> tuple[str, str, list[str]] | None:
    """Explains weights that are those of the reference and a number that no step changes.

    Each step starts from the weights of the reference, and the optimizer from its own.
    """
    number = pair.second.number
    for other in [each for each in pair.steps() if abs(each.second.number - number) == 1]:
        offsets = [_offsets(each, names) for each in (pair, other)]
        if not all(offsets) or offsets[0].keys() != offsets[1].keys():
            continue
        sizes = {key: norm(far) for key, far in offsets[0].items()}
        if min(sizes.values()) and all(
            norm(offsets[1][key] - far) <= _CLOSE * sizes[key] for key, far in offsets[0].items()
        ):
            wrong = [n for n, (copy) in offsets[0] if not copy]
            text = f"the optimizer updates {count('weight', len(wrong))} of its own, which differ"
            text += " from those with which gradients are computed by the same in each step"
            return "stale_weights", text, wrong
    return None


def _offsets(pair: StepPair, names: Sequence[Pair]) -> dict[tuple[str, int], np.ndarray]:
    """Returns by how much each weight differs after the step, if it did not before; else {}."""
    found = {}
    for copy in pair.second.copies:
        for name, (old, new, own_old, own_new) in _arrays(pair, names, copy):
            if own_new.shape != new.shape or np.any(old != own_old):
                return {}
            found[name, copy] = own_new - new
    return found if any(map(np.any, found.values())) else {}
