"""Predicts the gradients that a shard would send with a known fault."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from lockstep.arithmetic import scaled_all
from lockstep.context import Context
from lockstep.hypotheses.of_states import other_states
from lockstep.oracles import Batch
from lockstep.trace import Named

Hypothesis = tuple[str, str, Callable[[], Named]]  # Cause, text, gradients to send.


def gradient_hypotheses(context: Context, shard: int) -> Iterator[Hypothesis]:
    """Yields hypotheses about wrong gradients of a shard."""
    raw, state = context.named("raw"), context.state(shard)
    predict = partial(partial, context.gradients, shard)
    others = [other for other in context.shards if other != shard]
    names = {other: context.trace.name_of("raw", other) for other in others}
    yield "frozen", "0", lambda: scaled_all(raw[shard], 0.0)
    if old := context.earlier("raw"):
        yield "stale_gradient", "those of the previous step", lambda: old[shard]
    if context.follows and context.trace.has(context.position - 1, "data"):
        position = context.position - 1
        data = context.trace.arrays(position, "data", shard)
        older = predict(state=context.state(shard, position), data=data)
        yield "stale_gradient", "those of the previous step", older
    for other in others:
        yield "same_examples", f"those that {names[other]} sends", partial(raw.__getitem__, other)
    for name, value in state.items():
        if name.endswith("loss_scale") and value.ndim == 0 and value != 1:
            text = f"multiplied by the loss scale, {float(value):g}"
            yield "loss_scale_left", text, partial(_times, predict(), float(value))
    of_data, of_regular = context.actual[shard].scales
    for factor in (len(context.shards), 0) if context.has("loss") else ():
        cause = "regulariser_repeated" if factor else "regulariser_missing"
        text = f"those of a loss that contains regularisation {factor} times"
        yield cause, text, predict(scales=(of_data, of_regular * factor))
    if context.modal_layers:
        text = "those of the model in inference mode"
        yield "inference_mode", text, predict(off=context.modal_layers)
    for other in others if context.oracle.random_layers else ():
        text = f"those with the seeds of replica {other}"
        yield "same_random_numbers", text, predict(state=context.with_seeds_of(other, state))
    for moved in shifted_targets(context, context.actual[shard].data):
        yield "labels_shifted", "those for targets shifted by one example", predict(data=moved)
    for other in others:
        text, starts = f"those for the examples of {names[other]}", context.actual[other].starts
        yield "same_examples", text, predict(data=context.data[other], starts=starts)
    yield from context.oracle.backward_faults(context.ask(shard))
    for cause, text, changes in other_states(context, shard):
        yield cause, text, predict(**changes)


def _times(predict: Callable[[], Named], factor: float) -> Named:
    return scaled_all(predict(), factor)


def shifted_targets(context: Context, data: Batch) -> Iterator[Batch]:
    """Yields examples with their targets shifted by one example, in both directions."""
    num_inputs, _ = context.oracle.targets(data)
    for shift in (1, -1):
        yield data[:num_inputs] + [np.roll(array, shift, axis=0) for array in data[num_inputs:]]
