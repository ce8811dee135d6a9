"""Rows of the node `raw` where an oracle computes: what a shard would send with a known fault."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from lockstep.context import Context
from lockstep.explain.raw_rows import Raw
from lockstep.explain.rows import Meaning, Row, computed
from lockstep.explain.solve import solve
from lockstep.explain.states import other_steps
from lockstep.numeric.arrays import Named, dense, total_norm
from lockstep.oracles import Batch

_CLOSE = 1e-4  # Relative; of norms that are clipped to one number.


def rows_of_shard(context: Context, shard: int) -> Iterator[Row]:
    """Yields rows of wrong gradients of a shard, the most specific first."""
    raw, state, ask = context.named("raw"), context.state(shard), context.actual[shard]
    variant = partial(computed_variant, context, shard)
    yield Row("frozen", "the gradients are 0", [(0.0, raw[shard])])
    if context.previous and context.previous.has("data"):
        older = {"state": context.previous.state(shard), "data": context.previous.data[shard]}
        yield variant("stale_gradient", "those of the previous step", **older)
    for other in context.shards:
        if other != shard:
            text = f"the gradients are those that {context.trace.name_of('raw', other)} sends"
            # With predictions of its own examples, only its gradients can be those of another one.
            is_own = context.has("y_pred") and not context.is_wrong("forward")
            detail = "repeated_gradient" if is_own else "same_examples"
            yield Row(detail, text, [(1.0, raw[other])])
    norms, right = [total_norm(own) for own in raw], context.gradients(shard)
    is_one_norm = len(norms) > 1 and np.ptp(norms) < _CLOSE * max(norms)
    if is_one_norm and norms[shard] < total_norm(right):
        text = f"each shard clips its own gradient to norm {norms[0]:.4g}, not their sum"
        factor = norms[shard] / total_norm(right)
        yield Row("clipped_before_the_sum", text, [(factor, right)])
    for name, value in state.items():
        if name.endswith("loss_scale") and value.ndim == 0 and value != 1:
            text = f"the gradients are multiplied by the loss scale, {float(value):g}"
            yield Row("loss_scale_left", text, [(float(value), context.gradients(shard))])
    for factor in (len(context.shards), 0) if context.has("loss") else ():
        cause = "regulariser_repeated" if factor else "regulariser_missing"
        text = f"those of a loss that contains regularisation {factor} times"
        yield variant(cause, text, scales=(ask.scales[0], ask.scales[1] * factor))
    for detail, targets, moved in other_targets(context, shard):
        yield variant(detail, f"those for {targets}", data=moved)
    for cause, text, predict in context.oracle.backward_faults(ask):
        yield computed(cause, f"the gradients are {text}", predict)
    for cause, text, changes in other_steps(context, shard):
        yield variant(cause, text, **changes)


def computed_variant(context: Context, shard: int, detail: str, text: str, **changes: Any) -> Row:
    """Returns the row of a shard's gradients in another step; see `Context.gradients`."""
    text = f"the gradients are {text}"
    return computed(detail, text, context.gradients, shard, **changes)


def rows_of_synchronized(context: Context) -> Iterator[Row]:
    """Yields rows of a wrong sum of gradients of layers that normalise over all shards."""
    sizes = context.sizes
    text = (
        "the gradients are those of a BatchNorm that normalises each shard of"
        f" {'/'.join(map(str, sizes))} examples separately; it is to normalise over all"
        f" {sum(sizes)} of the batch together"
    )
    yield computed("local_statistics", text, context.sum_by_size)


def rows_of_whole(
    context: Context, sent: Sequence[Named], right: Named, wrong: Sequence[str]
) -> Iterator[Row]:
    """Yields rows of shards whose gradients do not add up to that of the whole batch.

    Args:
        context: the step.
        sent: for each shard, its gradients.
        right: the gradient of the whole batch.
        wrong: names of the weights whose gradients differ.
    """
    what = f"the sum of the gradients over {len(sent)} replicas"
    raw = Raw(sent, 1.0, right, _meanings, what, "the gradient of the whole batch")
    if not context.has("loss"):
        yield from raw.of_sizes(context.sizes)
    if weights := _weights_of_shards(context):
        shown = "/".join(f"{weight:.3g}" for weight in weights)
        reason = f"shares {shown} of the sample weights, or unmasked steps"
        yield raw.of_shares(weights, "weighted_mean_of_means", reason)
    yield from raw.of_factor()
    if regular := context.oracle.regular_gradients(context.state(0), context.used):
        apart = {name: dense(raw.total[name]) - dense(right[name]) for name in wrong}
        (extra,), _ = solve(apart, [regular])
        cause = "regulariser_repeated" if extra > 0 else "regulariser_missing"
        text = "the replicas' gradients contain {:.4g} times the regularisation of one device"
        expression = [(1.0, raw.total), (-float(extra), regular)]
        yield Row(cause, text.format(1 + extra), expression)


def _meanings(times: float) -> list[Meaning]:
    """Returns what a factor of the sum over the shards means."""
    if times < 1:
        return [Meaning("scaled_gradient", "the loss is divided more than once")]
    reason = "the loss is the mean over a replica's examples, not divided by the number of replicas"
    return [Meaning("scalar_loss_not_divided", reason)]


def _weights_of_shards(context: Context) -> list[float]:
    """Returns the fractions of the shards' sample weights, or of their unmasked steps."""
    if not context.has("mask"):
        return []
    sums = []
    for ask, masks in zip(context.actual, context.arrays("mask"), strict=True):
        arrays = [mask for mask in masks if mask.ndim] + context.oracle.targets(ask.data)[1]
        sums.append(sum(float(np.sum(array)) for array in arrays))
    return [number / sum(sums) for number in sums] if sum(sums) else []


def other_targets(context: Context, shard: int) -> Iterator[tuple[str, str, Batch]]:
    """Yields cause, targets in words, and the examples of a shard with these targets."""
    data = context.actual[shard].data
    num_inputs, _ = context.oracle.targets(data)
    inputs, own = data[:num_inputs], data[num_inputs:]
    text = "targets shifted by one example relative to the inputs"
    for shift in (1, -1):
        yield "labels_shifted", text, inputs + [np.roll(array, shift, axis=0) for array in own]
    for other in context.shards:
        targets = context.data[other][num_inputs:]
        if other != shard and [a.shape for a in targets] == [a.shape for a in own]:
            text = f"the targets of {context.trace.name_of('data', other)}"
            yield "other_targets", text, inputs + targets
