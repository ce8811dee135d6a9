"""Explains outputs by statistics that a forward pass changes and uses, of each replica's own."""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from lockstep.answer.text import first_names
from lockstep.context import Context
from lockstep.data.trace import STATISTIC
from lockstep.numeric.arrays import EPS, MARGIN, dense, distance, norm
from lockstep.reference import StepPair

_CLOSE = 1e-4  # Relative to the change of a statistic.
_UNUSED = "BatchNorm", "InstanceNorm"  # Layers that do not use their statistics in training.
_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "mean": np.mean,
    "largest": np.max,
    "smallest": np.min,
}


def own_statistics(pair: StepPair, shards: Collection[int]) -> tuple[str, str] | None:
    """Returns cause and sentence if replicas use statistics of their own examples.

    Those of all replicas give the reference's, as a mean or as the largest; and the replicas that
    have other ones than the reference are those whose outputs differ.

    Args:
        pair: the step.
        shards: those whose outputs differ.
    """
    step = pair.second
    if len(step.copies) < 2 or step.trace.model_axes or not pair.has("before", "after"):
        return None
    copies = [pair.matching.to_first(own) for own in step.named("after")]
    before, right = (pair.first.named(kind)[0] for kind in ("before", "after"))
    apart, given = set[int](), dict[str, list[str]]()
    for name in _used(pair.first):
        if name not in before or any(name not in own for own in (right, *copies)):
            continue
        allowed = _CLOSE * distance(right[name], before[name]) + MARGIN * EPS * norm(right[name])
        own = [dense(each[name]) for each in copies]
        far = {c for c, each in enumerate(own) if distance(each, right[name]) > allowed}
        apart |= far
        for word, reduce in _REDUCTIONS.items():
            is_given = distance(reduce(own, axis=0), right[name]) <= allowed
            if far and is_given and distance(right[name], before[name]) > allowed:
                given.setdefault(word, []).append(name)
    if not given or apart != {*shards}:
        return None
    of = "; ".join(f"{word}: {first_names(names)}" for word, names in given.items())
    text = "statistics that layers change and use in this step are those of each replica's own"
    text += f" examples, which give those of the first recording together ({of})"
    return "diverged_replicas", text


def _used(step: Context) -> list[str]:
    """Returns the statistics that layers may use in the step in which they change."""
    unused = {
        name
        for layer in step.trace.about.layers
        if any(kind in str(layer.get("class")) for kind in _UNUSED)
        for name in layer.get("weights", ())
    }
    kinds = {name: step.named("after")[0].get(name) for name in step.of_kind(STATISTIC)}
    return [n for n, a in kinds.items() if n not in unused and np.asarray(a).dtype.kind == "f"]
