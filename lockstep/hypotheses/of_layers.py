"""Explains different gradients by the layers of two scripts: their settings, a flattened order."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lockstep.arithmetic import dense, norm
from lockstep.checks.other_statistics import moving_statistics
from lockstep.context import Context
from lockstep.oracles.recording import StepPair, Tolerance
from lockstep.trace import Named

_MOST_CHANNELS = 4096
# A different loss scales the examples of a batch, so that rows agree only in their size.
_ALIKE, _MORE_ALIKE = 0.5, 0.3
_BY_CHANCE = 6  # Times 1 / sqrt(n), the standard deviation of a correlation of n random values.
Cause = tuple[str, str]  # A key of `causes.CAUSES`, and a sentence.
Layer = dict[str, Any]

BOTH_SIDES, AT_THE_END = "on both sides", "more at the end"
KINDS = ("batchnorm", "layernorm", "conv", "dropout")


def local_statistics(pair: StepPair) -> Iterator[Cause]:
    """Yields a cause if BatchNorm normalises each replica's examples separately."""
    for step, which in pair.both:
        if step.trace.about.num_replicas > 1 and (count := num_local_norms(step)):
            yield (
                "local_statistics",
                f"{count} BatchNorm layers of the {which} recording normalise the examples of"
                " each replica apart",
            )


def num_local_norms(step: Context) -> int:
    """Returns how many BatchNorm layers of a trace are not synchronized."""
    return sum(
        kind_of(layer) == "batchnorm"
        and "Sync" not in str(layer.get("class"))
        and not layer.get("synchronized")
        for layer in step.trace.about.layers
    )


def other_settings(pair: StepPair) -> Iterator[Cause]:
    """Yields causes for settings of layers that differ, read from the traces.

    Omits a setting if the next BatchNorm receives the same batch in both traces.
    """
    layers = [_compared(step) for step in (pair.first, pair.second)]
    differences: dict[str, list[str]] = {}
    for a, b in _same_kind(*layers):
        for setting in ("epsilon", "padding", "strides", "dilation", "rate"):
            x, y = _canonical(a, setting), _canonical(b, setting)
            if None not in (x, y) and x != y and not _has_no_effect(pair, layers[0], a):
                differences.setdefault(setting, []).append(
                    f"{b.get('name')}: {_shown(a, setting)} in the first recording and"
                    f" {_shown(b, setting)} in the second"
                )
    causes = {"epsilon": "other_batch_norm_epsilon", "padding": "other_padding"}
    for setting, texts in differences.items():
        more = f"; and of {len(texts) - 1} more" if len(texts) > 1 else ""
        yield (
            causes.get(setting, "other_layer_settings"),
            f"the {setting} of layers differs: {texts[0]}{more}",
        )


def _compared(step: Context) -> list[Layer]:
    """Returns the layers with settings; a convolution gets the padding of the layer before it."""
    found: list[Layer] = []
    before: Any = None
    for layer in step.trace.about.layers:
        name = str(layer.get("class", "")).lower()
        if "zeropad" in name:
            before = _amounts(layer.get("padding"), is_torch="padding" not in name)
            continue
        kind = kind_of(layer)
        if kind == "conv" and before and _is_none(layer.get("padding")):
            layer = {**layer, "padding": before}
        before = None
        if kind:
            found.append(dict(layer))
    return found


def _same_kind(first: Sequence[Layer], second: Sequence[Layer]) -> Iterator[tuple[Layer, Layer]]:
    """Yields pairs of layers of one kind, in order, if both scripts have equally many."""
    for kind in KINDS:
        a, b = ([layer for layer in each if kind_of(layer) == kind] for each in (first, second))
        if len(a) == len(b):
            yield from zip(a, b, strict=True)


def _has_no_effect(pair: StepPair, layers: Sequence[Layer], layer: Layer) -> bool:
    """Returns whether the BatchNorm behind a layer receives the same batch in both traces."""
    later = layers[[each is layer for each in layers].index(True) + 1 :]
    norms = [each for each in later if kind_of(each) == "batchnorm"]
    if not norms:
        return False
    names = set(norms[0].get("weights", ()))
    means = [each for each in moving_statistics(pair) if each.name in names]
    return any(not each.is_variance and each.shares for each in means) and all(
        each.has_equal_batch() for each in means if not each.is_variance and each.shares
    )


def kind_of(layer: Any) -> str:
    """Returns "norm", "conv", … for layers of any framework; "" for other layers."""
    name = str(layer.get("class", "")).lower()
    return next((kind for kind in KINDS if kind in name), "")


def _canonical(layer: Any, setting: str) -> Any:
    """Returns a setting in a form common to all frameworks; None if the layer has none."""
    value = layer.get(setting)
    if value is None:
        return None
    if setting == "padding":
        if isinstance(value, str):
            strides = _pair_of(layer.get("strides"))
            if value.lower() == "valid":
                return "none"
            return BOTH_SIDES if all(s == 1 for s in strides) else AT_THE_END
        amounts = _amounts(value, is_torch=False)
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
        text = repr(value) if isinstance(value, str) else str(value).replace(" ", "")
        return f"{text} ({_canonical(layer, setting)})"
    return str(value)


def _is_none(padding: Any) -> bool:
    return padding in (None, "valid") or (
        not isinstance(padding, str) and not any(map(any, _amounts(padding, is_torch=False)))
    )


def _amounts(padding: Any, *, is_torch: bool) -> list[list[int]]:
    """Returns [before, after] for each axis, for n, [n, m], [[a, b], [c, d]] or nn.ZeroPad2d."""
    values = list(padding) if isinstance(padding, list | tuple) else [padding or 0] * 2
    if is_torch and len(values) == 4:  # Left, right, top, bottom.
        values = [values[2:], values[:2]]
    return [list(v) if isinstance(v, list | tuple) else [v, v] for v in values]


def _pair_of(value: Any) -> tuple[int, ...]:
    values = list(value if isinstance(value, list | tuple) else [value or 1])
    return tuple(values * 2 if len(values) == 1 else values)


def reordered_rows(
    pair: StepPair, first: Named, second: Named, wrong: Sequence[str], tolerance: Tolerance
) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Yields an explanation of different gradients by the order of the flattened axes.

    Rows of a dense kernel's gradient are equal in another order; or, if the kernel itself is not
    reordered and the loss differs, of similar size in that order.
    """
    layouts = {variable.name: variable.layout for variable in pair.first.trace.about.variables}
    for name in wrong:
        a, b = dense(first[name]), dense(second[name])
        if a.ndim != 2:
            continue
        if layouts.get(name) == "OI":
            a, b = a.T, b.T
        sizes = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
        direct = _correlation(*sizes)
        found = [
            (
                bool(tolerance.wrong({name: b[order]}, {name: a})),
                -_correlation(sizes[0], sizes[1][order]),
                n,
            )
            for n, order in _orders(len(a))
        ]
        if not found:
            continue
        is_far, unlike, channels = min(found)
        least = max(_ALIKE, _BY_CHANCE / len(a) ** 0.5, direct + _MORE_ALIKE)
        if not is_far or -unlike > least:
            yield (
                "flatten_order",
                f"the inputs of {name} are in another order: {channels} channels are flattened"
                " first in one script and last in the other",
                [name],
            )
            return


def _orders(count: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yields numbers of channels, and the row order with the channels on the other side."""
    rows = np.arange(count)
    for channels in range(2, min(count, _MOST_CHANNELS)):
        if count % channels == 0:
            yield channels, rows.reshape(channels, -1).T.ravel()
            yield channels, rows.reshape(-1, channels).T.ravel()


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    a, b = (array - array.mean() for array in (first.astype(np.float64), second))
    size = norm(a) * norm(b)
    return float(a @ b) / size if size else 0.0
