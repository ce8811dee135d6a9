"""Checks weights and optimizer state after the update."""

from collections.abc import Iterator

from .context import StepContext
from .distances import add, bytes_of, distance, is_within, norm, ratio_of, same_bits
from .findings import Finding
from .recorder_imports import Sparse
from .update_bounds import rounding_bounds
from .update_hypotheses import why_update


def check_update(context: StepContext) -> Iterator[Finding]:
    """Checks the update of each replica, with the gradients that it applies."""
    if context.one.scales_loss and (context.overflows or not context.has("raw")):
        yield from check_skipped_update(context)
        return
    if not context.sums_of(0):
        yield from check_unseen_update(context)
        return
    context.mark_checked()
    one, checked = context.one, {}
    own = {id(variable) for variable in one.optimizer.variables}
    watched = [
        i for i, (kind, variable) in enumerate(zip(context.kinds, one.state, strict=True))
        if kind == "weight" or id(variable) in own
    ]  # fmt: skip
    for r in context.replicas:
        before, sums, after = (
            context.per_replica("before")[r],
            context.sums_of(r),
            context.per_replica("after")[r],
        )
        key = tuple(bytes_of(a) for a in [*(before[i] for i in watched), *sums])
        if key not in checked:
            checked[key] = context.updated(before, sums), rounding_bounds(context, before, sums)
        expected, bounds = checked[key]
        if wrong := [i for i in watched if not is_within(after[i], expected[i], bounds[i])]:
            context.update_is_wrong = True
            yield from why_update(context, r, expected, bounds, wrong)
    yield from check_rows_summed_first(context)


def check_rows_summed_first(context: StepContext) -> Iterator[Finding]:
    """Checks whether summing repeated rows of an embedding's gradient changes the update.

    On one device, the optimizer receives the gradient of a table row by row, with several rows for
    a repeated token. Lockstep's strategies send the sum of these rows.
    """
    sums, raws = list(context.sums_of(0)), [own.raw for own in context.own]
    rows = [i for i, g in enumerate(raws[0]) if isinstance(g, Sparse)]
    if not context.recording.whole_loss or not rows or isinstance(sums[rows[0]], Sparse):
        return
    before, summed = context.per_replica("before")[0], list(sums)
    for i in rows:
        joined = add([raw[i] for raw in raws])
        clipped = ratio_of(norm(sums[i]), norm(joined))  # Factor of the clipping.
        values = (joined.values * clipped).astype(sums[i].dtype)
        sums[i] = joined._replace(values=values)
    expected, other = context.updated(before, summed), context.updated(before, sums)
    bounds, names = rounding_bounds(context, before, summed), context.recording.gradients
    tables = [context.paths.index(names[i]) for i in rows]
    apart = [i for i in tables if not is_within(other[i], expected[i], bounds[i])]
    if not apart:
        return
    distances = [
        ratio_of(distance(other[i], expected[i]), distance(expected[i], before[i])) for i in apart
    ]
    yield context.found(
        "rows_summed_first",
        "the gradient of an embedding has one row for each token; the rows of a token are"
        " summed before the update, and Keras' optimizer takes them one by one: the update is"
        f" {max(distances):.1%} another one",
        design=True, tensors=tuple(context.paths[i] for i in apart), distance=max(distances),
    )  # fmt: skip


def check_unseen_update(context: StepContext) -> Iterator[Finding]:
    """Reports that a step changes weights without the optimizer, so that little can be checked."""
    pairs = list(zip(context.per_replica("before"), context.per_replica("after"), strict=True))
    changed = [
        i
        for i, kind in enumerate(context.kinds)
        if kind == "weight" and not all(same_bits(before[i], after[i]) for before, after in pairs)
    ]
    if changed:
        context.mark_checked()
        yield context.found(
            "update_not_seen",
            "weights change, and the compiled optimizer was given no gradients: gradients,"
            " all-reduce and update could not be checked",
            tensors=tuple(context.paths[i] for i in changed), design=True,
        )  # fmt: skip


def check_skipped_update(context: StepContext) -> Iterator[Finding]:
    """Checks a step that one device skips, or that was skipped, because gradients overflowed."""
    context.mark_checked()
    overflows = context.overflows
    if context.has("raw"):
        context.update_is_wrong = True
        yield context.found(
            "overflow_not_skipped",
            f"gradients overflow on replica {', '.join(map(str, overflows))} but not on replica"
            " 0, the only one that Keras checks: the step is not skipped and applies infinite"
            " gradients",
            replicas=tuple(overflows),
        )
        return
    if not overflows and context.one.step(context.per_replica("before")[0], context.whole).raw:
        yield context.found(
            "not_updated", "the step is skipped although gradients overflow on no replica"
        )
    for r in context.replicas:
        before, after = context.per_replica("before")[r], context.per_replica("after")[r]
        if changed := [
            context.paths[i]
            for i, kind in enumerate(context.kinds)
            if kind == "weight" and not same_bits(before[i], after[i])
        ]:
            yield context.found(
                "changed_on_its_own", "weights change in a skipped step",
                replicas=(r,), tensors=tuple(changed),
            )  # fmt: skip
