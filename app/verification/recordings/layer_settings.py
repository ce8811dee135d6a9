"""Explains other gradients by the layers of two scripts: their settings and statistics."""

import itertools
from collections.abc import Iterator
from typing import Any

from app.verification.recordings.recorded_step import RecordedStep
from app.verification.recordings.step_pair import StepPair

Cause = tuple[str, str]  # A key of `REMEDIES`, and a sentence.


def local_statistics(pair: StepPair) -> Iterator[Cause]:
    """Yields a cause if BatchNorm normalises each replica's examples apart."""
    for step, which in ((pair.second, "second"), (pair.first, "first")):
        if step.trace.num_replicas > 1 and (count := num_local_norms(step)):
            yield (
                "local_statistics",
                f"{count} BatchNorm layers of the {which} recording normalise the examples of"
                " each replica apart",
            )


def num_local_norms(step: RecordedStep) -> int:
    """Returns how many BatchNorm layers of a recording are not synchronized."""
    return sum(
        kind_of(layer) == "batchnorm"
        and "Sync" not in str(layer.get("class"))
        and not layer.get("synchronized")
        for layer in step.trace.layers
    )


def other_settings(pair: StepPair) -> Iterator[Cause]:
    """Yields causes for settings of layers that differ: read from the recordings, not computed."""
    layers = [
        [layer for layer in step.trace.layers if kind_of(layer)]
        for step in (pair.first, pair.second)
    ]
    if [kind_of(layer) for layer in layers[0]] != [kind_of(layer) for layer in layers[1]]:
        return
    differences: dict[str, list[str]] = {}
    for a, b in zip(*layers, strict=True):
        for setting in ("epsilon", "padding", "strides", "dilation", "rate"):
            x, y = _canonical(a, setting), _canonical(b, setting)
            if x is not None and y is not None and x != y:
                differences.setdefault(setting, []).append(
                    f"{b.get('name')}: {a.get(setting)} and {b.get(setting)}"
                )
    causes = {"epsilon": "other_batch_norm_epsilon", "padding": "other_padding"}
    for setting, texts in differences.items():
        more = f" and {len(texts) - 1} more layers" if len(texts) > 1 else ""
        yield (
            causes.get(setting, "other_layer_settings"),
            f"the {setting} of layers differs: {texts[0]}{more}",
        )


def kind_of(layer: Any) -> str:
    """Returns "norm", "conv", … for layers of any framework; "" for others."""
    name = str(layer.get("class", "")).lower()
    kinds = ("batchnorm", "layernorm", "conv", "dropout")
    return next((kind for kind in kinds if kind in name), "")


def _canonical(layer: Any, setting: str) -> Any:
    """Returns a setting in one form for all frameworks; None if the layer has none."""
    value = layer.get(setting)
    if value is None:
        return None
    if setting == "padding":
        strides = _pair_of(layer.get("strides"))
        if isinstance(value, str):
            if value.lower() == "valid":
                return "none"
            return "both sides" if all(s == 1 for s in strides) else "at the end"
        return "none" if not any(_pair_of(value)) else "both sides"
    if setting in ("strides", "dilation"):
        return _pair_of(value)
    return round(float(value), 12) if isinstance(value, int | float) else value


def _pair_of(value: Any) -> tuple[int, ...]:
    values = list(itertools.chain(value if isinstance(value, list | tuple) else [value or 1]))
    return tuple(values * 2 if len(values) == 1 else values)
