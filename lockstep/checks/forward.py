"""Checks each shard's predictions."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from lockstep.arithmetic import (
    MARGIN,
    add_named,
    are_finite,
    norm,
    relative_distance,
    relative_norm,
)
from lockstep.context import Context, Facts
from lockstep.hypotheses.of_states import other_states
from lockstep.verdict import Finding


def check_forward(context: Context) -> Iterator[Finding | Facts]:
    """Checks predictions, and whether they depend on the other examples of a shard."""
    if not (context.computes and context.has("y_pred")):
        return
    context.mark_checked()
    for shard in context.shards:
        actual = context.arrays("y_pred")[shard]
        if shard in context.facts.exact:
            context.measure("predictions", "y_pred", shard, actual[0], actual[0], 0.0, same=True)
            continue
        expected = context.expected(shard)
        allowed = MARGIN * expected.spread.forward
        apart = relative_distance(actual, expected.step.y_pred)
        for got, right in zip(actual, expected.step.y_pred, strict=True):
            context.measure("predictions", "y_pred", shard, got, right, allowed * norm(right))
        if apart <= allowed:
            continue
        cause, text, facts = _why(context, shard, allowed)
        yield facts
        yield context.found(
            cause, text, kind="y_pred", items=(shard,), distance=apart, allowed=allowed
        )
    if len(context.shards) > 1 and not context.oracle.synchronizes:
        yield from _mixing(context)


def _mixing(context: Context) -> Iterator[Finding]:
    """Finds layers whose results for an example depend on the other examples of its shard."""
    oracle = context.oracle
    if not oracle.may_mix:
        return
    allowed = MARGIN * max(context.expected(shard).spread.forward for shard in context.shards)
    if _apart(context, oracle.random_layers) <= allowed:
        return
    statistics = [oracle.layer_names[index] for index in oracle.layers_with_statistics]
    gradient = _gradient_apart(context)
    if statistics and _apart(context, context.modal_layers) <= allowed:
        yield context.found(
            "local_statistics",
            f"{', '.join(statistics[:3])} normalise{'s' * (len(statistics) == 1)} over each"
            " replica's examples, not over the whole batch, whose gradient differs by"
            f" {gradient:.1%}. In inference mode, shards and batch agree",
            design=True, tensors=statistics, distance=gradient,
        )  # fmt: skip
    else:
        yield context.found(
            "mixes_examples",
            "the prediction for an example depends on other examples of its shard; the gradient"
            f" of the whole batch differs by {gradient:.1%}",
            design=True, distance=gradient,
        )  # fmt: skip


def _apart(context: Context, off: Sequence[int]) -> float:
    """Returns the distance of predictions by shard from those of the whole batch."""
    state, shards = context.state(0), context.data

    def predict(data: list[np.ndarray]) -> list[np.ndarray]:
        ask = context.ask(0, state=state, data=data, off=tuple(off), starts=None)
        return context.oracle.compute(ask).y_pred

    parts = [predict(data) for data in shards]
    joined = [np.concatenate(each) for each in zip(*parts, strict=True)]
    whole = [np.concatenate(each) for each in zip(*shards, strict=True)]
    return relative_distance(joined, predict(whole))


def _gradient_apart(context: Context) -> float:
    """Returns the distance of the shards' summed gradients from that of the whole batch."""
    state, num = context.state(0), sum(context.sizes)

    def gradients(data: list[np.ndarray], scales: tuple[float, float]) -> dict:
        ask = context.ask(0, state=state, data=data, scales=scales, off=(), starts=None)
        return context.oracle.compute(ask).raw

    shares = [(size / num, 1 / len(context.shards)) for size in context.sizes]
    parts = [gradients(data, own) for data, own in zip(context.data, shares, strict=True)]
    joined = [np.concatenate(each) for each in zip(*context.data, strict=True)]
    whole = gradients(joined, (1.0, 1.0))
    if any(part.keys() != whole.keys() for part in parts):  # One of them overflows.
        return np.nan
    return relative_norm(add_named(parts), whole)


def _why(context: Context, shard: int, allowed: float) -> tuple[str, str, Facts]:
    """Explains predictions that differ from those for the shard's own examples."""
    y_pred, facts, oracle = context.arrays("y_pred")[shard], context.facts, context.oracle

    def fits(**changes: object) -> bool:
        found = oracle.compute(context.ask(shard, **{"starts": None, **changes})).y_pred
        same = [p.shape for p in found] == [p.shape for p in y_pred]
        return same and relative_distance(y_pred, found) <= allowed

    if not are_finite(y_pred):
        right = are_finite(context.expected(shard).step.y_pred)
        if right:
            return "not_finite", "predictions are NaN or infinite, and finite on one device", facts
    if oracle.synchronizes and fits():
        text = (
            f"BatchNorm normalises the {context.sizes[shard]} examples of each shard separately; it"
            f" is to normalise over all {sum(context.sizes)} of the batch"
        )
        return "local_statistics", text, facts
    if context.modal_layers and fits(off=context.modal_layers):
        off = dataclasses.replace(facts, off=facts.off | {shard})
        return "inference_mode", "the predictions are those of the model in inference mode", off
    for other in context.shards if oracle.random_layers else ():
        if fits(state=context.with_seeds_of(other, context.state(shard))):
            drawn = dataclasses.replace(facts, drawn_as={**facts.drawn_as, shard: other})
            if other != shard:
                text = f"predictions are those with the seeds of replica {other}"
                return "same_random_numbers", text, drawn
    for other in context.shards:
        if other != shard and fits(data=context.data[other]):
            name = context.trace.name_of("data", other)
            return "same_examples", f"the predictions are those for the examples of {name}", facts
    for cause, text, changes in other_states(context, shard):
        if fits(**changes):
            states = {**facts.states, shard: changes}
            return cause, f"the predictions are {text}", dataclasses.replace(facts, states=states)
    wrong = dataclasses.replace(facts, wrong=facts.wrong | {"forward"})
    return "unexplained", "one device makes other predictions for the same examples", wrong
