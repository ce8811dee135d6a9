"""Rows of the node `raw` where an oracle computes: what a shard would send with a known fault."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from lockstep.context import Context
from lockstep.explain.rows import Row, computed
from lockstep.explain.states import other_steps
from lockstep.numeric.arrays import add_named
from lockstep.oracles import Batch


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
            yield Row("same_examples", text, [(1.0, raw[other])])
    for name, value in state.items():
        if name.endswith("loss_scale") and value.ndim == 0 and value != 1:
            text = f"the gradients are multiplied by the loss scale, {float(value):g}"
            yield Row("loss_scale_left", text, [(float(value), context.gradients(shard))])
    for factor in (len(context.shards), 0) if context.has("loss") else ():
        cause = "regulariser_repeated" if factor else "regulariser_missing"
        text = f"those of a loss that contains regularisation {factor} times"
        yield variant(cause, text, scales=(ask.scales[0], ask.scales[1] * factor))
    for moved in shifted_targets(context, ask.data):
        yield variant("labels_shifted", "those for targets shifted by one example", data=moved)
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
    sizes, num = context.sizes, len(context.shards)
    text = (
        f"the gradients are those of a BatchNorm that normalises each shard of"
        f" {'/'.join(map(str, sizes))} examples separately; it is to normalise over all"
        f" {sum(sizes)} of the batch together"
    )
    asks = [
        context.ask(shard, scales=(size / sum(sizes), 1 / num), starts=None)
        for shard, size in enumerate(sizes)
    ]
    yield computed(
        "local_statistics", text, lambda: add_named([context.compute(ask).raw for ask in asks])
    )


def shifted_targets(context: Context, data: Batch) -> Iterator[Batch]:
    """Yields examples with their targets shifted by one example, in both directions."""
    num_inputs, _ = context.oracle.targets(data)
    for shift in (1, -1):
        yield data[:num_inputs] + [np.roll(array, shift, axis=0) for array in data[num_inputs:]]
