"""Explains different gradients by the layers of two scripts: their settings, a flattened order."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.context import Context
from lockstep.data.trace import STATISTIC
from lockstep.numeric.arrays import MARGIN, dense, distance, factor_of, norm, same_bits
from lockstep.reference import StepPair

_MOST_INNER = 4096
_CLEAR = 0.1  # Rounding may be this part of a difference that is to show an order.
_SAME_BATCH = 1e-4
Layer = Mapping[str, Any]

BOTH_SIDES, AT_THE_END = "on both sides", "more at the end"
KINDS = ("batchnorm", "layernorm", "conv", "dropout", "embedding")
SETTINGS = {  # Setting → its cause.
    "epsilon": "other_batch_norm_epsilon",
    "padding": "other_padding",
    "strides": "other_layer_settings",
    "dilation": "other_layer_settings",
    "rate": "other_layer_settings",
    "scale_grad_by_freq": "other_layer_settings",
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


def inference_by_statistics(pair: StepPair) -> str:
    """Returns a sentence if no moving statistic changes, and all do in the reference; else "".

    Of traces without layers, whose outputs differ.
    """
    if any(step.trace.about.layers for step, _ in pair.both):
        return ""
    before, first = pair.first.named("before")[0], pair.first.ends[0]
    names = [n for n in pair.first.of_kind(STATISTIC) if n in before and n in first]
    names = [n for n in names if before[n].dtype.kind == "f"]
    own = [n for n in map(pair.in_second, names) if n]
    starts, ends = pair.second.named("before"), pair.second.ends
    is_kept = all(
        name in old and name in new and same_bits(old[name], new[name])
        for old, new in zip(starts, ends, strict=True)
        for name in own
    )
    if not (own and is_kept) or any(same_bits(before[n], first[n]) for n in names):
        return ""
    terms = pair.gradients  # A layer that is not called leaves them, too, and has no gradient.
    if not all(norm(terms.given[0][n]) for n, own in terms.reference.items() if norm(own)):
        return ""
    return (
        f"none of {len(own)} moving statistics changes, as in inference mode, and in the first"
        " recording all do"
    )


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
    yield from _other_numbers(pair)
    for setting, texts in differences.items():
        more = f"; and of {len(texts) - 1} more" if len(texts) > 1 else ""
        yield SETTINGS[setting], f"the {setting} of layers differs: {texts[0]}{more}"


def _other_numbers(pair: StepPair) -> Iterator[tuple[str, str]]:
    """Yields cause and text of further settings, where both scripts have the same layers."""
    first, second = (step.trace.about.layers for step in (pair.first, pair.second))
    if [x.get("class") for x in first] != [x.get("class") for x in second]:
        return
    for a, b in zip(first, second, strict=True):
        settings = a.get("settings", {}), b.get("settings", {})
        for key in settings[0].keys() & settings[1].keys():
            values = [own[key] for own in settings]
            if values[0] != values[1] and not _has_no_effect(pair, first, a):
                text = f"{values[0]} in the first recording and {values[1]} in the second"
                yield "other_layer_settings", f"the {key} of {b.get('name')} is {text}"


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


def reordered_rows(pair: StepPair, name: str) -> str:
    """Explains a different gradient by the order of the flattened axes; "" if it does not.

    Both scripts multiply their inputs, in an own order of the features, with the kernel of the last
    layer, W. The gradient of W is G = Xᵀ · D, with the gradient D of the outputs. In an order p of
    the features, the outputs of one script differ from those of the other by (X[:, p] - X) · W, so
    that (G[p] - G)ᵀ · W = Dᵀ · (their difference), whatever the inputs are.

    Args:
        pair: the step in both traces.
        name: name of the kernel.
    """
    layout = pair.first.trace.variables[name].layout
    weights = pair.states("before")[0].get(name)
    if weights is None or np.ndim(weights) != 2:
        return ""
    steps, orders = (pair.first, pair.second), _orders_of_examples(pair)
    outputs = [_rows_of(steps[i], orders[i], "y_pred") for i in (0, 1)]
    found, num = set[int](), 0
    gradients = pair.gradients.reference, pair.gradients.given[0]
    for own, step in enumerate(steps):
        of_outputs = _rows_of(step, orders[own], "y_grad")
        by_outputs = _by_outputs(of_outputs, outputs[1 - own], outputs[own])
        if by_outputs is None:
            continue
        gradient, kernel = gradients[own][name], dense(weights)
        if layout == "OI":
            gradient, kernel = gradient.T, kernel.T
        num = len(gradient)
        inner = _order_that_fits(gradient, kernel, by_outputs, pair.tolerance.allowed([name]))
        found.add(num // inner if own and inner else inner)
    if len(found) != 1 or not any(found):  # Each gradient of outputs has to give the same order.
        return ""
    inner = found.pop()
    channels = inner if pair.first.trace.about.data_layout == "NCHW" else num // inner
    return (
        f"the inputs of {name} are in another order: {channels} channels are flattened first in one"
        " script and last in the other; so ordered, the gradient gives the outputs"
    )


def _orders_of_examples(pair: StepPair) -> list[np.ndarray | slice]:
    """Returns the order that sorts the examples of each trace by their bytes.

    They stay as they are if both have them in other forms, as of axes.
    """
    orders, sets = list[np.ndarray | slice](), []
    for step in (pair.first, pair.second):
        rows = [row.tobytes() for batch in step.data for row in (batch[0] if batch else ())]
        orders.append(np.array(sorted(range(len(rows)), key=rows.__getitem__), int))
        sets.append(sorted(rows))
    return orders if sets[0] == sets[1] else [slice(None), slice(None)]


def _rows_of(step: Context, order: np.ndarray | slice, kind: str) -> np.ndarray | None:
    """Returns the first array of outputs of all examples, `(n, m)`; None if it is not known."""
    found = [shard[0] for shard in step.arrays(kind) if shard] if step.has(kind) else []
    if len(found) != len(step.shards) or any(array.ndim != 2 for array in found):
        return None
    if any(step.trace.micro_batches(step.position, shard) != 1 for shard in step.shards):
        return None
    return np.asarray(np.concatenate([dense(array) for array in found])[order])


def _by_outputs(
    gradient: np.ndarray | None, other: np.ndarray | None, own: np.ndarray | None
) -> np.ndarray | None:
    """Returns what the difference of the outputs adds to the product of gradient and outputs."""
    if gradient is None or other is None or own is None:
        return None
    if not gradient.shape == other.shape == own.shape:
        return None
    return np.asarray(gradient.T @ (other - own))


def _order_that_fits(
    gradient: np.ndarray, weights: np.ndarray, by_outputs: np.ndarray, allowed: float
) -> int:
    """Returns the length of the inner axis of the only order that fits; 0 if none or several do.

    The loss of a replica may be a mean or a sum: a common factor is solved.
    """
    if by_outputs.shape[0] != gradient.shape[1]:
        return 0
    size, found = norm(gradient) * norm(weights), []
    for inner, order in _orders(len(gradient)):
        predicted = (gradient[order] - gradient).T @ weights
        factor = factor_of([by_outputs], [predicted])
        limit = MARGIN * allowed * abs(factor) * size
        is_clear = factor > 0 and limit < _CLEAR * norm(by_outputs)
        if is_clear and distance(by_outputs, factor * predicted) <= limit:
            found.append(inner)
    return found[0] if len(found) == 1 else 0


def _orders(count: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the order of rows with two flattened axes exchanged, for each length of the second."""
    for inner in range(2, min(count, _MOST_INNER)):
        if count % inner == 0:
            yield inner, np.arange(count).reshape(inner, -1).T.ravel()
