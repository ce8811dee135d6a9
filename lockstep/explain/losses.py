"""Reads off the gradient of a loss by its outputs how much each example counts: the loss as a rule.

Of softmax cross-entropy, sigmoid cross-entropy and squared error, the gradient of the outputs is
w · (softmax(y) − t), and so on, so that the weight w of an example is known for any outputs, also
behind layers that normalise other examples or draw other numbers.
"""

from collections.abc import Iterator

import numpy as np

from lockstep.context import Context
from lockstep.explain.factors import meanings
from lockstep.explain.pairing import Part, parts_of
from lockstep.explain.rows import Meaning
from lockstep.explain.targets import NO_TARGET, targets_of
from lockstep.numeric.arrays import norm, unit_of
from lockstep.reference import StepPair

_CLOSE = 1e-3  # Relative; of weights that are read off 32-bit outputs.


def weights_of_losses(pair: StepPair) -> list[tuple[str, str]]:
    """Returns cause and text if the examples of both recordings count differently in the loss.

    For outputs that differ by design: of equal ones, the gradients themselves tell.
    """
    first, second = parts_of(pair.first), parts_of(pair.second)
    smoothings = [{round(s, 3) for part in own for s in part.smoothings} for own in (first, second)]
    weights = [[_weight_of(part) for part in own] for own in (first, second)]
    if not all(weights) or any(w is None for own in weights for w in own):
        return []
    if smoothings[0] != smoothings[1]:
        shown = [", ".join(f"{s:.3g}" for s in sorted(own)) for own in smoothings]
        return [("label_smoothing", f"label smoothing of {shown[1]}, and of {shown[0]} in the first"
                 " recording")]  # fmt: skip
    usual = float(np.mean([w for w in weights[0] if w is not None]))
    share = pair.gradients.share
    factors = np.array([w / usual * share for w in weights[1] if w is not None])
    sizes, num = np.array(pair.second.sizes, float), len(factors)
    listed = ", ".join(f"{factor:.4g}" for factor in factors)
    is_each = num == len(sizes) and sizes.all() and np.ptp(sizes)
    if is_each and np.allclose(factors, sizes.sum() / (num * sizes), _CLOSE):
        listed_sizes = ", ".join(f"{size:g}" for size in sizes)
        text = f"the replicas have {listed_sizes} examples, and count equally"
        return [("mean_of_means", f"{text}: an example of each counts {listed} times")]
    if np.ptp(factors) <= _CLOSE * max(factors):
        times = float(factors[0])
        if abs(times - 1) <= _CLOSE:
            return []
        text = f"each example counts {times:.6g} times as much as in the first recording"
        found = meanings(pair, times, within=_CLOSE) or [Meaning("scaled_gradient", "")]
        return [(cause, f"{text}: {why}" if why else text) for cause, why in found[:1]]
    text = f"the examples of the replicas count {listed} times as much as in the first recording"
    return [("scaled_gradient", text)]


def _weight_of(part: Part) -> float | None:
    """Returns the mean weight of an example of a forward pass; None for a loss of another form."""
    outputs = [*zip(part.arrays["y_pred"], part.arrays["y_grad"], strict=False)]
    if len(outputs) != 1 or np.shape(outputs[0][0]) != np.shape(outputs[0][1]):
        return None
    unit = max(unit_of(np.asarray(each)) for each in outputs[0])
    output, gradient = (np.asarray(each, np.float64) for each in outputs[0])
    classes, smoothing = targets_of(output, gradient)
    if not classes.size or (smoothing and output.shape[-1] < 2):
        return None
    if classes.shape == (len(output), 1) and output.ndim == 2 and output.shape[1] > 1:
        p = np.exp(output - output.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        target = np.where(classes == NO_TARGET, 0, classes)[:, 0]
        right = np.eye(output.shape[1])[target] * (1 - smoothing) + smoothing / output.shape[1]
        form = (p - right) * (classes != NO_TARGET)
    elif classes.shape == output.reshape(len(output), -1).shape:
        form = ((1 / (1 + np.exp(-output))).reshape(classes.shape) - (classes == 1)) * (
            classes != NO_TARGET
        )
        gradient = gradient.reshape(classes.shape)
    else:
        return None
    squares = float(np.sum(form * form))
    weight = float(np.sum(form * gradient)) / squares if squares else 0.0
    # Examples with weights of their own, or of another loss, have no common one.
    is_form = norm(gradient - weight * form) <= max(_CLOSE, 4 * unit) * norm(gradient)
    return weight if weight and is_form else None


# --- The value of a loss -------------------------------------------------------------------------


def other_form(pair: StepPair) -> str:
    """Returns a sentence if the loss of each recording is another function of its outputs; else "".

    For outputs that differ by design. Only losses that are a known function of the recorded outputs
    and examples count, up to how a script adds them.
    """
    first, second = (_forms_of(step) for step in (pair.first, pair.second))
    if not (first and second) or first & second:
        return ""
    return (
        f"the loss is the {' or '.join(sorted(second))} of the outputs, and in the first recording"
        f" their {' or '.join(sorted(first))}"
    )


def _forms_of(step: Context) -> set[str]:
    """Returns the functions of outputs and examples that give the loss of each shard."""
    if not step.has("y_pred", "data", "loss"):
        return set()
    found: set[str] | None = None
    for shard in step.shards:
        outputs = [np.asarray(a, np.float64) for a in step.arrays("y_pred")[shard] if a.ndim]
        losses = [float(np.sum(np.float64(a))) for a in step.arrays("loss")[shard]]
        if len(outputs) != 1 or not losses or not losses[0]:
            return set()
        size, own = len(outputs[0]), set[str]()
        times = {1.0, float(size), 1 / len(step.shards), size / max(sum(step.sizes), 1)}
        for target in step.data[shard][1:]:
            for name, value in _values(outputs[0], target):
                if any(abs(losses[0] - by * value) <= _CLOSE * abs(losses[0]) for by in times):
                    own.add(name)
        found = own if found is None else found & own
    return found or set()


def _values(output: np.ndarray, target: np.ndarray) -> Iterator[tuple[str, float]]:
    """Yields names and means over a batch of common losses of outputs and targets."""
    if target.dtype.kind == "f" and target.size == output.size and output.size:
        apart = output.ravel() - np.asarray(target, np.float64).ravel()
        yield "squared error", float(np.mean(apart**2))
        yield "absolute error", float(np.mean(np.abs(apart)))
        yield "half squared error", float(np.mean(apart**2)) / 2
    classes = target.astype(np.int64) if target.dtype.kind in "iu" else np.zeros(0, np.int64)
    if output.ndim != 2 or classes.size != len(output) or output.shape[1] < 2:
        return
    if classes.size and classes.min() >= 0 and classes.max() < output.shape[1]:
        chosen, most = output[np.arange(len(output)), classes.ravel()], output.max(1)
        logs = most + np.log(np.sum(np.exp(output - most[:, None]), axis=1))
        yield "cross-entropy of logits", float(np.mean(logs - chosen))
        if np.all(chosen > 0):
            yield "cross-entropy of probabilities", float(np.mean(-np.log(chosen)))
