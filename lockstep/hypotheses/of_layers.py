"""Explains different gradients by the layers of two scripts: their settings, a flattened order."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.arithmetic import dense, distance, norm
from lockstep.context import Context
from lockstep.reference import StepPair
from lockstep.trace import STATISTIC, Array

_MOST_INNER = 4096
# Another order of inputs changes the loss, which scales the examples of a batch, so that the rows
# of a gradient agree only in their size.
_ALIKE, _MORE_ALIKE = 0.5, 0.3
_BY_CHANCE = 6  # Times 1 / sqrt(n), the standard deviation of a correlation of n random values.
_SAME_BATCH = 1e-4
Layer = Mapping[str, Any]

BOTH_SIDES, AT_THE_END = "on both sides", "more at the end"
KINDS = ("batchnorm", "layernorm", "conv", "dropout")
SETTINGS = {  # Setting → its cause.
    "epsilon": "other_batch_norm_epsilon",
    "padding": "other_padding",
    "strides": "other_layer_settings",
    "dilation": "other_layer_settings",
    "rate": "other_layer_settings",
}


def kind_of(layer: Layer) -> str:
    """Returns "batchnorm", "conv", … for layers of any framework; "" for other layers."""
    name = str(layer.get("class", "")).lower()
    return next((kind for kind in KINDS if kind in name), "")


def num_local_norms(step: Context) -> int:
    """Returns how many BatchNorm layers normalise the examples of a shard on their own."""
    off = set.intersection(*(step.trace.in_evaluation(step.position, s) for s in step.shards))
    is_local = [
        "Sync" not in str(layer.get("class")) and not layer.get("synchronized")
        for layer in step.trace.about.layers
        if kind_of(layer) == "batchnorm" and layer.get("name") not in off
    ]
    return 0 if step.trace.about.syncs_batch_norm else sum(is_local)


def other_settings(pair: StepPair) -> Iterator[tuple[str, str]]:
    """Yields cause and text of settings of layers that differ, read from the traces.

    Layers are compared in order if both scripts have equally many of a kind. A setting is omitted
    if the next BatchNorm receives the same batch in both traces.
    """
    layers, others = (_padded_layers(step.trace.about.layers) for step in (pair.first, pair.second))
    differences: dict[str, list[str]] = {}
    for kind in KINDS:
        first, second = ([x for x in own if kind_of(x) == kind] for own in (layers, others))
        for a, b in zip(first, second, strict=True) if len(first) == len(second) else ():
            for setting in SETTINGS:
                x, y = _canonical(a, setting), _canonical(b, setting)
                if None not in (x, y) and x != y and not _has_no_effect(pair, layers, a):
                    differences.setdefault(setting, []).append(
                        f"{b.get('name')}: {_shown(a, setting)} in the first recording and"
                        f" {_shown(b, setting)} in the second"
                    )
    for setting, texts in differences.items():
        more = f"; and of {len(texts) - 1} more" if len(texts) > 1 else ""
        yield SETTINGS[setting], f"the {setting} of layers differs: {texts[0]}{more}"


def _padded_layers(layers: Sequence[Layer]) -> list[Layer]:
    """Returns the layers; a convolution without padding gets that of the layer before it."""
    found: list[Layer] = []
    before: Any = None
    for layer in layers:
        if "zeropad" in str(layer.get("class")).lower():
            before = layer.get("padding")
            continue
        if before and kind_of(layer) == "conv" and _canonical(layer, "padding") in (None, "none"):
            layer = {**layer, "padding": before}
        before = None
        found.append(layer)
    return found


def _has_no_effect(pair: StepPair, layers: Sequence[Layer], layer: Layer) -> bool:
    """Returns whether the BatchNorm behind a layer receives the same batch in both traces."""
    position = [each is layer for each in layers].index(True)
    norms = [each for each in layers[position + 1 :] if kind_of(each) == "batchnorm"]
    first, second = pair.states("after")
    own = norms[0].get("weights", ()) if norms else ()
    means = [n for n in pair.first.of_kind(STATISTIC) if n in own and n in first and "mean" in n]
    apart = [distance(second[n], first[n]) > _SAME_BATCH * norm(first[n]) for n in means]
    return bool(means) and not any(apart)


def _canonical(layer: Layer, setting: str) -> Any:
    """Returns a setting in a form common to all frameworks; None if the layer has none."""
    value = layer.get(setting)
    if value is None:
        return None
    if setting == "padding":
        if isinstance(value, str) and value.lower() == "same":
            strides = _pair_of(layer.get("strides"))
            return BOTH_SIDES if all(s == 1 for s in strides) else AT_THE_END
        amounts = [] if isinstance(value, str) else _amounts(value)
        if not any(map(any, amounts)):
            return "none"
        return BOTH_SIDES if all(before == after for before, after in amounts) else AT_THE_END
    if setting in ("strides", "dilation"):
        return _pair_of(value)
    return round(float(value), 12) if isinstance(value, int | float) else value


def _shown(layer: Layer, setting: str) -> str:
    """Returns a setting as in the script, and its meaning."""
    value = layer.get(setting)
    if setting == "padding":
        return f"{str(value).replace(' ', '')} ({_canonical(layer, setting)})"
    return str(value)


def _amounts(padding: Any) -> list[list[int]]:
    """Returns [before, after] of each axis: for n, [n, m], [[a, b], [c, d]], and 4 of ZeroPad2d."""
    values = list(padding) if isinstance(padding, list | tuple) else [padding] * 2
    if len(values) == 4:  # Left, right, top, bottom.
        values = [values[2:], values[:2]]
    return [list(v) if isinstance(v, list | tuple) else [v, v] for v in values]


def _pair_of(value: Any) -> tuple[int, ...]:
    values = list(value if isinstance(value, list | tuple) else [value or 1])
    return tuple(values * 2 if len(values) == 1 else values)


def reordered_rows(
    name: str, first: Array, second: Array, layout: str, *, channels_first: bool
) -> str:
    """Explains a different gradient by the order of the flattened axes; "" if it does not.

    The rows of a dense kernel's gradient are of similar size in another order.

    Args:
        name: name of the weight.
        first, second: the gradients.
        layout: order of their axes; "" if unknown.
        channels_first: whether the first script flattens channels first.
    """
    a, b = dense(first), dense(second)
    if a.ndim != 2:
        return ""
    axis = 0 if layout == "OI" else 1
    sizes = np.linalg.norm(a, axis=axis), np.linalg.norm(b, axis=axis)
    num = len(sizes[0])
    alike = [(_correlation(sizes[0], sizes[1][order]), n) for n, order in _orders(num)]
    correlation, inner = max(alike, default=(0.0, 0))
    if correlation <= max(_ALIKE, _BY_CHANCE / num**0.5, _correlation(*sizes) + _MORE_ALIKE):
        return ""
    return (
        f"the inputs of {name} are in another order:"
        f" {num // inner if channels_first else inner} channels are flattened first in one script"
        " and last in the other"
    )


def _orders(count: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the order of rows with two flattened axes exchanged, for each length of the second."""
    for inner in range(2, min(count, _MOST_INNER)):
        if count % inner == 0:
            yield inner, np.arange(count).reshape(inner, -1).T.ravel()


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    a, b = first - first.mean(), second - second.mean()
    size = norm(a) * norm(b)
    return float(a @ b) / size if size else 0.0
