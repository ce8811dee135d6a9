"""Predicts the gradients that a shard would send with a known fault."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from lockstep.context import Context
from lockstep.explain.hypothesis import Hypothesis
from lockstep.explain.states import other_steps
from lockstep.numeric.arrays import Named, add_named, scaled_all
from lockstep.oracles import Batch


def gradient_hypotheses(context: Context, shard: int) -> Iterator[Hypothesis]:
    """Yields hypotheses about wrong gradients of a shard."""
    raw, state = context.named("raw"), context.state(shard)
    predict = partial(partial, context.gradients, shard)
    yield "frozen", "0", lambda: scaled_all(raw[shard], 0.0)
    if context.previous and context.previous.has("data"):
        older, data = context.previous.state(shard), context.previous.data[shard]
        yield "stale_gradient", "those of the previous step", predict(state=older, data=data)
    for other in context.shards:
        if other != shard:
            text = f"those that {context.trace.name_of('raw', other)} sends"
            yield "same_examples", text, partial(raw.__getitem__, other)
    for name, value in state.items():
        if name.endswith("loss_scale") and value.ndim == 0 and value != 1:
            text = f"multiplied by the loss scale, {float(value):g}"
            yield "loss_scale_left", text, partial(_times, predict(), float(value))
    of_data, of_regular = context.actual[shard].scales
    for factor in (len(context.shards), 0) if context.has("loss") else ():
        cause = "regulariser_repeated" if factor else "regulariser_missing"
        text = f"those of a loss that contains regularisation {factor} times"
        yield cause, text, predict(scales=(of_data, of_regular * factor))
    for moved in shifted_targets(context, context.actual[shard].data):
        yield "labels_shifted", "those for targets shifted by one example", predict(data=moved)
    yield from context.oracle.backward_faults(context.ask(shard))
    for cause, text, changes in other_steps(context, shard):
        yield cause, text, predict(**changes)


def synchronized_hypotheses(context: Context) -> Iterator[Hypothesis]:
    """Yields hypotheses about a wrong sum of gradients of layers that normalise over all shards."""
    sizes, num = context.sizes, len(context.shards)
    asks = [
        context.ask(shard, scales=(size / sum(sizes), 1 / num), starts=None)
        for shard, size in enumerate(sizes)
    ]
    text = (
        f"those of a BatchNorm that normalises each shard of {'/'.join(map(str, sizes))} examples"
        f" separately; it is to normalise over all {sum(sizes)} of the batch together"
    )
    yield "local_statistics", text, lambda: add_named([context.compute(a).raw for a in asks])


def _times(predict: Callable[[], Named], factor: float) -> Named:
    return scaled_all(predict(), factor)


def shifted_targets(context: Context, data: Batch) -> Iterator[Batch]:
    """Yields examples with their targets shifted by one example, in both directions."""
    num_inputs, _ = context.oracle.targets(data)
    for shift in (1, -1):
        yield data[:num_inputs] + [np.roll(array, shift, axis=0) for array in data[num_inputs:]]
