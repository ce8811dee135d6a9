"""Explains outputs and gradients by statistics that each replica has of its own examples.

Those of all replicas give the reference's: a mean or an extreme value of theirs, or a variance as
the mean of their variances and the variance of their means.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np

from lockstep.answer.text import first_names
from lockstep.data.trace import STATISTIC
from lockstep.numeric.arrays import EPS, MARGIN, dense, distance, factor_of, norm
from lockstep.reference import StepPair

_CLOSE = 1e-4  # Relative to the change of a statistic.
_OF_SPREAD = 1e-3  # Relative; of small differences of variances.
_UNUSED = "BatchNorm", "InstanceNorm"  # Layers that do not use their statistics in training.
_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "mean": np.mean,
    "largest": np.max,
    "smallest": np.min,
}


class _Statistic(NamedTuple):
    """A statistic before and after the step of the whole batch, and after it on each copy."""

    old: np.ndarray
    new: np.ndarray
    own: list[np.ndarray]

    @property
    def allowed(self) -> float:
        """The distance up to which a value is that of the whole batch."""
        return _CLOSE * distance(self.new, self.old) + MARGIN * EPS * norm(self.new)

    def is_given_by(self, reduce: Callable[..., Any]) -> bool:
        """Returns whether the copies' values together are that of the whole batch."""
        return distance(reduce(self.own, axis=0), self.new) <= self.allowed


def _statistics(pair: StepPair) -> dict[str, _Statistic]:
    """Returns the statistics that both recordings have; empty of a single copy."""
    if len(pair.second.copies) < 2 or not pair.has("before", "after"):
        return {}
    old, new = (pair.first.named(kind)[0] for kind in ("before", "after"))
    copies = [pair.matching.to_first(own) for own in pair.second.named("after")]
    return {
        name: _Statistic(dense(old[name]), dense(new[name]), [dense(own[name]) for own in copies])
        for name in pair.first.of_kind(STATISTIC)
        if all(name in own for own in (old, new, *copies)) and new[name].dtype.kind == "f"
    }


def used_apart(pair: StepPair, shards: Collection[int]) -> tuple[str, str] | None:
    """Returns cause and sentence if layers change and use statistics of each replica's own.

    The replicas that have other ones than the reference are those whose outputs differ.

    Args:
        pair: the step.
        shards: those whose outputs differ.
    """
    if pair.second.trace.model_axes:
        return None
    unused = {
        name
        for layer in pair.first.trace.about.layers
        if any(kind in str(layer.get("class")) for kind in _UNUSED)
        for name in layer.get("weights", ())
    }
    apart, given = set[int](), dict[str, list[str]]()
    for name, each in _statistics(pair).items():
        if name in unused:
            continue
        far = {c for c, own in enumerate(each.own) if distance(own, each.new) > each.allowed}
        apart |= far
        for word, reduce in _REDUCTIONS.items():
            if far and distance(each.new, each.old) > each.allowed and each.is_given_by(reduce):
                given.setdefault(word, []).append(name)
    if not given or apart != {*shards}:
        return None
    of = "; ".join(f"{word}: {first_names(names)}" for word, names in given.items())
    text = "statistics that layers change and use in this step are those of each replica's own"
    text += f" examples, which give those of the first recording together ({of})"
    return "diverged_replicas", text


def normalised_apart(pair: StepPair) -> str:
    """Returns a sentence if each replica normalises its own examples; else "".

    Of traces without layers, whose moving statistics show it.
    """
    if any(step.trace.about.layers for step, _ in pair.both):
        return ""
    layers: dict[str, dict[str, _Statistic]] = {}
    for name, each in _statistics(pair).items():
        layer, _, last = name.replace("/", ".").rpartition(".")
        kind = next((kind for kind in ("mean", "var") if kind in last.lower()), "")
        layers.setdefault(layer, {})[kind] = each
    for layer, own in layers.items():
        if {"mean", "var"} <= own.keys() and _are_of_parts(own["mean"], own["var"]):
            return (
                f"each replica normalises its own examples: the means that {layer} averages"
                " have the mean of the first recording, and the variances lack their spread"
            )
    return ""


def _are_of_parts(mean: _Statistic, variance: _Statistic) -> bool:
    """Returns whether moving statistics of each copy are those of its equal part of a batch.

    Moving averages add a share of each, which the variances give.
    """
    spread = np.var(mean.own, axis=0)
    apart = variance.new - np.mean(variance.own, axis=0)  # The spread of what is averaged · share.
    share = factor_of([spread], [apart])
    rounding = MARGIN * EPS * (norm(variance.new) + norm(variance.old))
    return bool(
        0 < share <= 1
        and spread.size > 1
        and mean.is_given_by(np.mean)
        and distance(spread, share * apart) <= _OF_SPREAD * norm(spread) + rounding
        and norm(spread) > 2 * rounding
    )
