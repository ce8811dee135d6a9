"""Checks weights and optimizer state after the update."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from lockstep.answer.text import count
from lockstep.answer.verdict import NOT_COMPARED, Finding
from lockstep.context import Context
from lockstep.data.trace import OF_GRADIENTS, SEED, WEIGHT
from lockstep.explain.rows import choose, explained_apart, share_of
from lockstep.explain.update_rows import update_rows
from lockstep.numeric.arrays import (
    EPS,
    MARGIN,
    TINY,
    Array,
    Named,
    Rows,
    all_same_bits,
    are_finite,
    by_blocks,
    dense,
    farthest,
    is_within,
    length,
    same_bits,
)
from lockstep.numeric.sampling import by_part, with_sums
from lockstep.numeric.tolerance import Expression, value_of
from lockstep.oracles.rules import RuleOracle
from lockstep.reference import StepPair

_OTHER_RULE = "unexplained", "the optimizer makes a different update with these gradients"
_SHOW_THE_RULE = 8  # Elements that an update moves as it should: another rule moves them, too.


def check_update(context: Context) -> Iterator[Finding]:
    """Checks the update of each copy, with the gradients that it applies."""
    context = context.for_rules
    updates = [bool(own) for own in context.named("after")]
    if any(updates) and not all(updates):
        text = "nothing of this step was recorded on these replicas: they update no weights in it"
        states = zip(updates, context.named("before"), strict=True)
        # Arrays of other kinds show that the recording continues without this one.
        items = [copy for copy, known in enumerate(states) if not any(known)]
        if items:
            yield context.found("update", "not_updated", text, kind="after", items=items)
    oracle = context.updater
    if oracle is None or not context.has("after"):
        return
    if not isinstance(oracle, RuleOracle):
        skips_unseen = oracle.scales_loss and not oracle.records_overflow
        if skips_unseen and (context.overflows or not context.has("raw")):
            yield from _check_skipped(context)
            return
        if not context.applied(0):
            yield from _check_unseen(context)
            return
        weights = set(context.of_kind(WEIGHT))
    elif all(are_finite(context.applied(copy)) for copy in context.copies):
        weights = set(oracle.rules)
    else:
        yield from _skipped_by_some(context)
        return
    context.mark_checked("update")
    before, after = context.starts, context.named("after")
    updated = weights | oracle.tracks
    watched = [n for n in context.trace.keys if n in updated and all(n in each for each in after)]
    last: tuple[Named, Named] | None = None  # State and gradients of the copy before.
    for copy, own in enumerate(after):
        given = {n: before[copy][n] for n in watched if n in before[copy]}, context.applied(copy)
        if last is None or not all(map(all_same_bits, given, last)):
            expected, reach = context.updated(before[copy], given[1]), Named()
        last = given
        differing = [name for name in watched if not same_bits(own[name], expected[name])]
        allowed, wrong = dict.fromkeys(watched, 0.0), []
        for name in differing:
            bound = reach or least_bounds(context, before[copy], expected, [name])
            allowed[name] = length(bound[name])
            if not is_within(own[name], expected[name], bound[name]):
                wrong.append(name)
        if wrong and not reach:
            reach = rounding_bounds(context, before[copy], given[1])
            wrong = [n for n in wrong if not is_within(own[n], expected[n], reach[n])]
            allowed |= {name: length(reach[name]) for name in differing}
        for name, far in allowed.items():
            same = name not in differing
            context.measure(
                "update", name, "after", copy, own[name], expected[name], far, same=same
            )
        if wrong:
            yield from _explain(context, copy, expected, reach, wrong)


def least_bounds(context: Context, before: Named, after: Named, names: Iterable[str]) -> Named:
    """Returns the part of `rounding_bounds` that needs no other update: of the last addition."""

    def size(part: np.ndarray) -> np.ndarray:
        return np.where(np.isfinite(part), np.abs(part), 0)

    assert context.updater is not None
    units, found = context.updater.units, Named()
    for n in names:
        if n in units:
            times = MARGIN * units[n]
            bound = by_blocks(
                lambda new, old, times=times: times * (size(new) + size(old)) + TINY,
                after[n], before.get(n, 0),
            )  # fmt: skip
            found[n] = with_sums(bound, context.trace.num_sums(bound.shape))
    return found


def rounding_bounds(context: Context, before: Named, sums: Named) -> Named:
    """Returns the possible rounding error of each element of the optimizer's update.

    Repeats the update from gradients and states changed by one unit in the last place.
    """
    generator, oracle = np.random.default_rng(context.position), context.updater
    assert oracle is not None
    base, units = context.updated(before, sums), oracle.units
    apart = {name: np.zeros(array.shape) for name, array in base.items()}

    def near(array: Array, unit: float) -> Array:
        if isinstance(array, Rows):
            return array._replace(values=near(array.values, unit))
        if not np.issubdtype(array.dtype, np.floating):
            return array
        array = np.asarray(array)
        return array * (1 + unit * generator.choice([-1, 1], array.shape)).astype(array.dtype)

    for _ in range(3):
        # Step counters of schedules and accumulated factors are not changed.
        state = {
            n: near(a, units.get(n, EPS)) if context.trace.kinds[n] != SEED and a.ndim else a
            for n, a in before.items()
        }
        gradients = {n: near(g, units[n]) for n, g in sums.items()}
        if isinstance(oracle, RuleOracle):
            moved = oracle.rounded(generator).update(state, gradients)
        else:
            moved = context.updated(state, gradients)
        for name, array in moved.items():
            far = np.abs(dense(array) - dense(base[name]))
            apart[name] = np.maximum(apart[name], np.where(np.isfinite(far), far, 0))

    def of_rounding(apart: np.ndarray) -> np.ndarray:
        return MARGIN * (apart + np.sqrt(np.mean(apart**2)))

    least, num_sums = least_bounds(context, before, base, apart), context.trace.num_sums
    return {n: least[n] + by_part(of_rounding, num_sums(apart[n].shape), apart[n]) for n in least}


def _explain(
    context: Context, copy: int, expected: Named, bounds: Named, wrong: Sequence[str]
) -> Iterator[Finding]:
    """Explains an update that differs from the optimizer's."""
    before, after = context.starts[copy], context.named("after")[copy]
    kinds = context.trace.kinds
    if not are_finite(context.applied(copy)):
        text = "a gradient overflows, so that every copy must skip the step, but this copy does not"
        yield context.found(
            "update", "overflow_not_skipped", text, kind="after", items=(copy,), tensors=wrong
        )
        return
    counters = [name for name in wrong if name.endswith("iteration")]
    others = [name for name in wrong if name not in counters]
    # A wrong weight may result from a wrong state: one explanation for both.
    weights = [name for name in others if kinds[name] == WEIGHT] or others
    bound = _BoundOfUpdate(context, before, after, bounds)
    rows = update_rows(context, copy, expected, weights) if weights else ()
    chosen, unknown = choose(after, weights, rows, bound, right=expected)
    variables = context.trace.variables
    # A weight follows from its state: one that is wrong throughout is another rule.
    many = {variables[n].of for n in wrong if not _are_few(_is_wrong(after, expected, bounds, n))}
    many |= {n for n in wrong if _mixes_elements(context, n)}
    alone = _alone(before, after, expected, bounds, unknown)
    alone |= {n: _OTHER_RULE for n in unknown if n in many and alone[n][0] != "not_finite"}
    chosen += explained_apart(unknown, alone.__getitem__)
    for row, names, _ in chosen:
        predicted = {n: a for _, term in row.terms for n, a in term.items()} if counters else {}
        counted = [n for n in counters if n in predicted and same_bits(after[n], predicted[n])]
        counters = [name for name in counters if name not in counted]
        yield context.found(
            "update", row.detail, row.text, kind="after", items=(copy,), tensors=[*names, *counted],
            distance=farthest(after, expected, names),
        )  # fmt: skip
    if {row.detail for row, *_ in chosen} == {"changed_on_its_own"} and len(weights) < len(others):
        states = [name for name in others if name not in weights]
        yield from _explain(context, copy, expected, bounds, states)
    if counters:
        made = int(after[counters[0]]) - int(before[counters[0]])
        yield context.found(
            "update", "schedule_stepped_too_often" if made else "not_updated",
            f"`iterations` advances by {made} in one step, so a learning rate schedule runs {made}"
            " times as fast",
            kind="after", items=(copy,), tensors=counters,
        )  # fmt: skip


def _mixes_elements(context: Context, name: str) -> bool:
    """Returns whether rounding of few elements, or another rule, moves all elements of a weight."""
    rules = context.updater.rules if isinstance(context.updater, RuleOracle) else {}
    return name in rules and rules[name].mixes_elements


class _BoundOfUpdate:
    """How far rounding can move what an update leaves.

    What it does to a weight and to its state has one cause: a row explains both, or neither.

    Args:
        context: the step.
        before, after: the variables of a copy.
        bounds: see `rounding_bounds`.
    """

    def __init__(self, context: Context, before: Named, after: Named, bounds: Named):
        self._context, self._before, self._bounds = context, before, bounds
        self._groups: dict[str, list[str]] = {name: [name] for name in bounds if name in after}
        for key, variable in context.trace.variables.items():
            if key in self._groups and variable.of in self._groups:
                self._groups[variable.of].append(key)
                self._groups[key] = self._groups[variable.of]

    def shares(
        self, observed: Named, expression: Expression, names: Sequence[str] | None = None
    ) -> dict[str, float]:
        """Returns name → largest distance of its elements, and of its state, over their bound."""
        found = {}
        for name in self._groups if names is None else names:
            group = self._groups[name]
            if all(any(each in term for _, term in expression) for each in group):
                values = {n: value_of(expression, n, np.shape(observed[n])) for n in group}
                # What is predicted may be larger than what is expected: so is its rounding.
                least = least_bounds(self._context, self._before, values, group)
                found[name] = max(
                    share_of(observed[n], values[n], np.maximum(self._bounds[n], least[n]))
                    for n in group
                )
        return found


def _alone(
    before: Named, after: Named, expected: Named, bounds: Named, names: Sequence[str]
) -> dict[str, tuple[str, str]]:
    """Returns cause and text of variables that no hypothesis explains."""
    few, found = dict[str, int](), dict[str, tuple[str, str]]()
    for name in names:
        wrong = _is_wrong(after, expected, bounds, name)
        moved = dense(expected[name]) != dense(before.get(name, 0.0))
        num = int(np.sum(wrong))
        if not are_finite([after[name]]) and are_finite([expected[name]]):
            text = "NaN or infinite, although weights and gradients are finite"
            found[name] = "not_finite", text
        elif not _are_few(wrong):
            found[name] = _OTHER_RULE
        elif np.count_nonzero(~wrong & moved) < _SHOW_THE_RULE:
            text = f"{_differing(num, wrong.size)}: too few to tell another rule from a change"
            found[name] = "unexplained", f"{text} outside of the update"
        else:
            few[name] = num
    total = _differing(sum(few.values()), sum(np.size(after[name]) for name in few))
    text = f"{total}, and all other elements are right"
    return found | dict.fromkeys(few, ("changed_on_its_own", text))


def _is_wrong(after: Named, expected: Named, bounds: Named, name: str) -> np.ndarray:
    return np.asarray(~(np.abs(dense(after[name]) - dense(expected[name])) <= bounds[name]))


def _are_few(wrong: np.ndarray) -> bool:
    return int(np.sum(wrong)) <= max(1, wrong.size // 100)


def _differing(number: int, total: int) -> str:
    if total == 1:
        return "the only element differs from the update"
    return f"{number} of {total} elements {'differs' if number == 1 else 'differ'} from the update"


def _changed(context: Context) -> dict[str, list[int]]:
    """Returns weight → the copies on which it changes."""
    pairs = list(zip(context.named("before"), context.named("after"), strict=True))
    return {
        name: copies
        for name in context.of_kind(WEIGHT)
        if (
            copies := [
                c
                for c, (b, a) in enumerate(pairs)
                if name in b and name in a and not same_bits(b[name], a[name])
            ]
        )
    }


def _check_unseen(context: Context) -> Iterator[Finding]:
    """Reports that a step changes weights without the optimizer, so that little can be checked."""
    if changed := _changed(context):
        context.mark_checked("update")
        yield context.found(
            "update", "update_not_seen",
            "weights change, and the compiled optimizer was given no gradients: gradients,"
            " all-reduce and update could not be checked",
            tensors=changed, status=NOT_COMPARED,
        )  # fmt: skip


def _skipped_by_some(context: Context) -> Iterator[Finding]:
    """Finds copies that apply gradients that overflow, while others skip the step."""
    changed = _changed(context)
    moved = {copy for found in changed.values() for copy in found}
    odd = [copy for copy in sorted(moved) if not are_finite(context.applied(copy))]
    if odd and len(moved) < len(context.copies):
        context.mark_checked("update")
        yield context.found(
            "update", "overflow_not_skipped",
            "gradients overflow: these copies apply them, and the others skip the step",
            kind="after", items=odd, tensors=changed,
        )  # fmt: skip


def is_skipped(context: Context) -> bool:
    """Returns whether a step leaves all weights on each copy as they were."""
    is_known = context.has("before", "after") and all(context.named("after"))
    return is_known and not _changed(context)


def skips_overflow(context: Context) -> bool:
    """Returns whether a step with gradients that are NaN or infinite leaves all weights."""
    gradients = (own for kind in OF_GRADIENTS for own in context.named(kind))
    return is_skipped(context) and not all(map(are_finite, gradients))


def compare_skipped(pair: StepPair) -> Iterator[Finding]:
    """Finds copies that make an update, where gradients overflow and the reference makes none."""
    changed = _changed(pair.second)
    if copies := sorted({copy for found in changed.values() for copy in found}):
        pair.second.mark_checked("update")
        text = (
            "gradients overflow in the first recording, which skips the step; here,"
            f" {count('weight', len(changed))} {'changes' if len(changed) == 1 else 'change'}"
        )
        yield pair.second.found(
            "update", "overflow_not_skipped", text, kind="after", items=copies, tensors=changed
        )


def _check_skipped(context: Context) -> Iterator[Finding]:
    """Checks a step that one device skips, or that was skipped, because gradients overflowed."""
    context.mark_checked("update")
    overflows, changed = context.overflows, _changed(context)
    if context.has("raw"):
        names = ", ".join(context.trace.name_of("raw", shard) for shard in overflows)
        yield context.found(
            "update", "overflow_not_skipped",
            f"gradients overflow on {names}, and the step is not skipped: infinite gradients are"
            " applied",
            items=overflows,
        )  # fmt: skip
        return
    whole = context.right[0]._replace(data=context.whole)
    if not overflows and context.oracle.compute(whole).raw:
        text = "the step is skipped although gradients overflow on no replica"
        yield context.found("update", "not_updated", text)
    if changed:
        copies = sorted({copy for found in changed.values() for copy in found})
        text = "weights change in a skipped step"
        yield context.found(
            "update", "changed_on_its_own", text, kind="after", items=copies, tensors=changed
        )
