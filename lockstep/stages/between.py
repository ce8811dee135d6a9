"""Finds state that changes between two steps, and not so in the reference: the node `between`."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lockstep.answer.text import count
from lockstep.answer.verdict import FAULT, Finding
from lockstep.context import Context
from lockstep.data.trace import STATE, STATISTIC
from lockstep.numeric import state_bounds as bounds
from lockstep.numeric.arrays import Named, dense, norm, same_bits
from lockstep.numeric.sampling import by_part
from lockstep.stages.claim import Claim, Variable


def between(previous: Claim, claim: Claim, found: Sequence[Finding]) -> Iterator[Finding]:
    """Finds state that changes between the end of a step and the start of the next one.

    What does not change in the reference may change no bit; what does, as an average of weights or
    the weights of a second optimizer, has to change equally within rounding.

    Args:
        previous: the step before.
        claim: the step.
        found: findings of both steps, which this would repeat.
    """
    first, second = claim.pair.first, claim.pair.second
    has_own = second.trace.about.replayed is None or second.has("replaced")
    is_known = previous.pair.second.has("after") and previous.pair.first.has("after")
    if first.trace.about.replayed or not (has_own and is_known):
        return
    if any(f.status == FAULT and f.stage != "start" for f in found if f.steps[0] < second.number):
        return  # The change may be a consequence.
    known = {name for f in found if f.stage == "start" for name in f.tensors}
    starts = second.named("replaced" if second.has("replaced") else "before")
    lost, changed = dict[str, list[int]](), dict[str, list[int]]()
    for variable in claim.variables:
        if known & {variable.first, variable.second, variable.weight}:
            continue
        for copy in second.copies:
            ends = previous.pair.second.ends
            own = _moved(ends[copy], starts[copy], variable.second)
            of_first = _moved(previous.pair.first.ends[0], first.named("before")[0],
                              variable.first)  # fmt: skip
            if own is None or of_first is None or not (np.any(own[0]) or np.any(of_first[0])):
                continue
            if _is_like_copy_0(variable, copy, starts):
                continue
            if _differ(previous, variable, copy, of_first, variable.as_first(own[0])):
                is_lost = variable.kind == STATE and not norm(starts[copy].get(variable.second, 0))
                (lost if is_lost else changed).setdefault(variable.second, []).append(copy)
    if lost:
        text = (
            f"{count('array', len(lost))} of optimizer state are 0 or missing after the last step"
        )
        yield _found_between(second, "reset_state", text, lost)
    if changed:
        text = (
            f"{count('variable', len(changed))} changed between the end of the last step and this"
            " one, and not so in the reference"
        )
        yield _found_between(second, "changed_on_its_own", text, changed)


def _found_between(
    step: Context, cause: str, text: str, found: Mapping[str, Sequence[int]]
) -> Finding:
    copies = sorted({copy for own in found.values() for copy in own})
    items = copies if len(copies) < len(step.copies) else ()
    return step.found("start", cause, text, kind="before", items=items, tensors=found)


def _moved(end: Named, start: Named, key: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the change of a variable between two steps, and its size; None if it is unknown."""
    if key not in end or not start:
        return None
    old = dense(end[key])
    new = dense(start[key]) if key in start else np.zeros_like(old)
    if new.shape != old.shape:
        return None
    if key in start and same_bits(start[key], end[key]):
        return np.zeros_like(old), np.abs(old)
    return new - old, np.abs(old)


def _is_like_copy_0(variable: Variable, copy: int, starts: Sequence[Named]) -> bool:
    """Returns whether a buffer has the value of copy 0, which DDP sends to all before a step."""
    key = variable.second
    is_known = variable.kind == STATISTIC and copy and key in starts[0] and key in starts[copy]
    return bool(is_known) and same_bits(starts[0][key], starts[copy][key])


def _differ(
    previous: Claim, variable: Variable, copy: int, first: tuple[np.ndarray, np.ndarray],
    second: np.ndarray,
) -> bool:  # fmt: skip
    """Returns whether a change between two steps is not that of the reference."""
    change, size = first
    if change.shape != second.shape:
        return False  # A part, which its rank owns.
    if not np.any(change):
        return bool(np.any(second))
    if not previous.changes:
        return False  # The step before started from another state.
    spread = previous.spread(variable, copy, change.shape)
    num_sums = previous.pair.first.trace.num_sums(change.shape)
    allowed = by_part(bounds.of_start, num_sums, change, size, spread)
    return not bool(np.all(np.abs(second - change) <= allowed))
