"""Rows of recordings with outputs and the gradient of the loss: they have the first difference."""

import dataclasses
import functools

import numpy as np

from lockstep.comparison import compare_traces
from lockstep.data.trace import About, Trace, Variable

from . import Row

NUM, FEATURES, CLASSES, LENGTH = 12, 6, 4, 3
AS_IS = {"x": lambda x: x, "y": lambda y: y, "output": lambda y: y, "of_loss": lambda g: g}


def softmax(outputs, targets, smoothing):
    """Returns the gradient of cross-entropy, summed over the examples."""
    p = np.exp(outputs - outputs.max(-1, keepdims=True))
    one_hot, num = np.eye(outputs.shape[-1])[targets], outputs.shape[-1]
    return p / p.sum(-1, keepdims=True) - (1 - smoothing) * one_hot - smoothing / num


def sigmoid(outputs, targets, smoothing):
    return 1 / (1 + np.exp(-outputs)) - (np.arange(CLASSES) < targets[..., None])


def squares(outputs, targets, smoothing):
    return outputs - np.sin(targets[..., None] + np.arange(CLASSES))


def trained(
    *, replicas=1, framework="torch", parts=1, loss=softmax, sequences=False, smoothing=(0.0, 0.0),
    seed=0, given=True, layers=(), on_all=False, values=(), classes=CLASSES, classes_second=False,
    **changes,
):  # fmt: skip
    """Returns a recording of one step of a linear model, some of whose arrays a replica changes.

    Args:
        parts: number of micro-batches.
        sequences: whether an example is a sequence.
        smoothing: label smoothing of replicas 0 and 1.
        given: whether targets are arguments of the step.
        changes: functions of inputs, targets, outputs and the gradient of the loss.
        on_all: whether all replicas have these changes, not only replica 1.
        values: the loss of each replica, if it is recorded.
        classes_second: whether outputs of sequences have their classes before the places.
    """
    random = np.random.default_rng(seed)
    shape = (NUM, LENGTH, FEATURES) if sequences else (NUM, FEATURES)
    x = random.normal(size=shape).astype(np.float32)
    y = random.integers(classes, size=shape[:-1])
    w = random.normal(size=(FEATURES, classes)).astype(np.float32)
    about = About(
        framework, replicas, steps=(0,), variables=(Variable("w", "weight"),), gradients=("w",),
        reduction="mean", micro_batches=(parts,), layers=tuple(layers), replayed="one.npz",
    )  # fmt: skip
    trace = Trace(about, name=f"{'one' if replicas == 1 else 'two'}.npz")
    raw = []
    for replica in range(replicas):
        change = AS_IS | (changes if replica == 1 or replicas == 1 or on_all else {})
        total, arrays = 0.0, {"data": [], "y_pred": [], "y_grad": []}
        own = [each[replica::replicas] for each in (x, y)]
        for inputs, targets in zip(*(np.split(each, parts) for each in own), strict=True):
            used = change["x"](inputs), change["y"](targets)
            outputs = change["output"](used[0] @ w)
            gradient = loss(outputs, used[1], smoothing[replica]) / (used[1].size * parts)
            gradient = change["of_loss"](gradient)
            arrays["data"] += [inputs, *[used[1]] * given]
            for kind, each in (("y_pred", outputs), ("y_grad", gradient.astype(np.float32))):
                arrays[kind].append(each.swapaxes(1, -1) if classes_second else each)
            total = total + np.tensordot(used[0], gradient, [[*range(used[1].ndim)]] * 2)
        raw.append(total)
        for kind, each in {**arrays, "raw": [total]}.items():
            trace.put(0, kind, replica, each)
        if values:
            trace.put(0, "loss", replica, [np.float32(values[replica])])
    for replica in range(replicas):
        mean = np.mean(raw, 0)
        for kind, array in {"before": w, "after": w - mean, "sums": mean}.items():
            trace.put(0, kind, replica, [array])
    return trace


def verdict_of(first, second, change=None):
    """Compares a recording with one of two replicas, whose arrays are changed."""
    one, two = trained(**first), trained(replicas=2, **second)
    if change in OF_BOTH:
        change(one, two)
    elif change:
        change(two)
    return compare_traces([one, two], {})["two.npz"]


def mask(gradient):
    gradient = gradient.copy()
    gradient[:2] = 0
    return gradient


def mean_of_unmasked(masked, certain, times):
    """A mean over the examples that are not masked; one of them is predicted with certainty."""

    def output(outputs):
        outputs = outputs.copy()
        outputs[certain] *= np.float32(1e4)
        return outputs

    def of_loss(gradient):
        gradient = np.float32(times) * gradient
        gradient[[*masked, certain]] = 0
        return gradient

    return {"output": output, "of_loss": of_loss}


def a_part(gradient):
    return gradient * np.float32([1, 0.5, 1, 0.2])


def by_replica(*factors):
    """The loss of each replica has a factor."""
    calls = []

    def scaled(gradient):
        calls.append(gradient)
        return gradient * factors[(len(calls) - 1) % len(factors)]

    return scaled


def second_of_two():
    """The loss of each second micro-batch is lost."""
    calls = []

    def lost(gradient):
        calls.append(gradient)
        return gradient * (len(calls) % 2)

    return {"parts": 2, "of_loss": lost}


def of_each(gradient):
    """Each example counts another number of times, as of a loss that is a function of its own."""
    return gradient * np.exp(np.sin(np.arange(len(gradient), dtype=np.float32)))[:, None]


def by_length(gradient):
    """Each example is divided by its length, which is not recorded."""
    return gradient / np.float32([2, 3, 1, 7, 5, 6] * 2)[: len(gradient), None]


def of_classes(gradient):
    """Each example counts as often as its class, the one with a negative gradient."""
    return gradient * np.float32([1, 2, 0.5, 3])[gradient.argmin(1)][:, None]


def slopes(first, second):
    """A second forward pass, whose outputs are differentiated by the inputs: by ones."""
    for trace in (first, second):
        for replica in range(trace.about.num_replicas):
            gradient, other = trace.arrays(0, "y_grad", replica)
            trace.put(0, "y_grad", replica, [gradient, np.ones_like(other)])
    other_gradient(second)


def drawn(of_first, of_second, of_inputs):
    """Numbers that are drawn for the examples, next to inputs that have others in them."""

    def change(first, second):
        for trace, numbers in ((first, of_first), (second, of_second)):
            for replica in range(trace.about.num_replicas):
                x, size = trace.arrays(0, "data", replica)[0], NUM // trace.about.num_replicas
                times = np.float32(numbers[replica * size :][:size])
                x = x * np.float32(of_inputs) if trace is second and replica else x
                trace.put(0, "data", replica, [x, times])

    return change


def overflowing(skipped):
    """Gradients of a replica overflow; both recordings say how many updates were skipped."""

    def change(first, second):
        for trace, number in zip((first, second), skipped, strict=True):
            trace.about = dataclasses.replace(trace.about, skipped=number)
        gradient = np.array(second.arrays(0, "raw", 1)[0])
        gradient[0, 0] = np.inf
        second.put(0, "raw", 1, [gradient])
        second.put(0, "data", 1, [x + 1 for x in second.arrays(0, "data", 1)])

    return change


def without(*kinds):
    def remove(trace):
        trace._index = {key: value for key, value in trace._index.items() if key[1] not in kinds}

    return remove


def two_outputs(*of_second):
    """The loss of a second output has a factor on each replica, and so has the gradient."""

    def change(first, second):
        for trace in (first, second):
            for replica in range(trace.about.num_replicas):
                factor = np.float32(of_second[replica] if trace is second else 1)
                y_pred, y_grad = (trace.arrays(0, k, replica)[0] for k in ("y_pred", "y_grad"))
                trace.put(0, "y_pred", replica, [y_pred, y_pred])
                trace.put(0, "y_grad", replica, [y_grad, factor * y_grad])
                raw = trace.arrays(0, "raw", replica)[0]
                trace.put(0, "raw", replica, [raw * (1 + factor)])
            copies = range(trace.about.num_replicas)
            mean = np.mean([trace.arrays(0, "raw", r)[0] for r in copies], 0)
            for replica in copies:
                before = trace.arrays(0, "before", replica)[0]
                trace.put(0, "sums", replica, [mean])
                trace.put(0, "after", replica, [before - mean])

    return change


def other_gradient(trace):
    """Outputs and losses agree, gradients do not."""
    trace.put(0, "raw", 1, [np.sin(trace.arrays(0, "raw", 1)[0])])
    mean = np.mean([trace.arrays(0, "raw", replica)[0] for replica in (0, 1)], axis=0)
    for replica in (0, 1):
        trace.put(0, "sums", replica, [mean])


def moved(outputs):
    """Returns outputs as of a layer that normalises other examples."""
    return outputs * np.float32(1.05) + np.float32(0.02)


def steep(*given):
    """A loss whose examples count differently by themselves."""
    gradient = softmax(*given)
    size = np.linalg.norm(gradient, axis=1, keepdims=True)
    return (gradient * np.sqrt(size / size.max())).astype(np.float32)


TWO_OUTPUTS = [two_outputs(*each) for each in ((1, 1), (2 / 3, 2), (3, 3), (0.5, 2))]
TIMES = np.linspace(0, 1, NUM)
EQUAL = np.tile(TIMES[: NUM // 2], 2)
DRAWN = [drawn(TIMES, TIMES, 2), drawn(TIMES, EQUAL, 2), drawn(EQUAL, EQUAL, 2)]
OVERFLOWING = [overflowing(each) for each in ((1, 0), (1, 1), (0, 1))]
OF_BOTH = [*TWO_OUTPUTS, *DRAWN, *OVERFLOWING, slopes]
DROPOUT = ({"name": "drop", "class": "Dropout", "rate": 0.5, "weights": []},)
NORM = ({"name": "norm", "class": "BatchNorm1d", "weights": []},)
SMALL = np.float32(1 + 1e-6)
NEXT = {"y": lambda y: np.roll(y, 1, axis=0)}
ZEROS = {"y": lambda y: 0 * y}
HALVED = {"of_loss": lambda g: g / 2, "on_all": True}
SECOND = {"place": ((0,), ("replica 1",), ())}
UNEXPLAINED, LOCAL = "gradients: unexplained", "gradients: local_statistics?"
ROWS_OF = {  # Name: both, the second one, what is found (a detail: of loss and gradients), more.
    "classes": ({"given": True}, {}, ""),
    "micro-batches": ({"given": True, "parts": 4}, {"parts": 2}, ""),
    "sequences": ({"given": True, "sequences": True}, {}, ""),
    "binary": ({"given": True, "loss": sigmoid}, {}, ""),
    "rounding": ({"given": True}, {"output": lambda y: y * SMALL}, ""),
    "a loss without effect on gradients": ({"given": True}, {"of_loss": lambda g: g * SMALL}, ""),
    "targets of other examples": ({}, NEXT, "labels_shifted"),
    "targets of other examples, two classes": ({"classes": 2}, NEXT, "labels_shifted"),
    "binary targets of other examples": ({"loss": sigmoid}, NEXT, "labels_shifted"),
    "targets of other examples of a squared error": ({"loss": squares}, NEXT, "other_loss"),
    "targets of other examples, with dropout": (
        {"layers": DROPOUT}, {**NEXT, "output": lambda y: y * np.float32(1.1)},
        "forward: random_layers?; loss: labels_shifted; gradients: random_layers?;"
        " gradients: labels_shifted"),
    "arguments of other examples": ({"given": True}, NEXT, "examples: labels_shifted"),
    "other arguments": ({"given": True}, ZEROS, "examples: other_examples"),
    "other targets": ({}, ZEROS, "other_targets"),
    "targets of the next place": (
        {"sequences": True}, {"y": lambda y: np.roll(y, 1, axis=1)}, "labels_shifted"),
    "targets of the next place, classes second": (
        {"sequences": True, "classes_second": True}, {"y": lambda y: np.roll(y, 1, axis=1)},
        "labels_shifted"),
    "label smoothing": ({}, {"smoothing": (0, 0.1)}, "label_smoothing"),
    "no label smoothing": ({"smoothing": (0.1, 0.1)}, {"smoothing": (0.1, 0)}, "label_smoothing"),
    "a lost loss": ({}, {"of_loss": lambda g: 0 * g}, "lost_replica"),
    "a gradient of a part of each output": (
        {"loss": squares, "values": (2, 2)}, {"of_loss": a_part}, "loss: other_backward;"
        " gradients: other_backward", {"text": "gathered from other replicas without a gradient"}),
    "a gradient of a part of each output, another loss": (
        {"loss": squares, "values": (2, 2)}, {"of_loss": a_part, "values": (2, 1)}, "other_loss"),
    "a loss of all outputs on each replica": ({"values": (2, 2)}, {**HALVED},
        "gradients: forgotten_backward_sum", {"text": "the loss of each replica is that of the"}),
    "a loss of all outputs, summed": ({"values": (2, 2)}, {}, ""),
    "a loss of all outputs, as many times as there are replicas": (
        {"values": (2, 2)}, {"values": (4, 4)}, ""),
    "a loss of all outputs, once more than there are replicas": (
        {"values": (2, 2)}, {"values": (6, 6)}, "loss: other_loss"),
    "a loss of all outputs, as many times, and other gradients": (
        {"values": (2, 2)}, {"values": (4, 4), "of_loss": lambda g: np.sin(40 * g)}, "other_loss"),
    "a share of the loss of each replica": ({"values": (2, 2)}, {**HALVED, "values": (0.5, 1.5)},
        "gradients: mean_instead_of_sum"),
    "a scaled loss": ({}, {"of_loss": lambda g: 3 * g}, "scaled_gradient"),
    "masked examples": ({}, {"of_loss": mask}, "other_targets"),
    # Of 12 examples, replica 1 masks 2 of its 6.
    "a mean of each replica, with a certain example": (
        mean_of_unmasked((1, 3), 5, 12 / 10), mean_of_unmasked((0, 1), 2, 6 / 4), "mean_of_means",
        {"place": ((0,), None, ())}),
    "a sum of means of each replica, over what is not recorded": (
        {}, {"of_loss": by_replica(4 / 3, 4), "on_all": True}, "mean_of_means",
        {"place": ((0,), None, ())}),
    "a mean of each replica, over what is not recorded": (
        {}, {"of_loss": by_replica(2 / 3, 2), "on_all": True}, "mean_of_means",
        {"place": ((0,), None, ()), "text": "their own sums of weights or masks"}),
    "factors that are no means": (
        {}, {"of_loss": by_replica(0.5, 2), "on_all": True}, "scaled_gradient",
        {"place": ((0,), None, ())}),
    **{
        f"two outputs, {name}": ({}, {"change": change}, found, {"place": ()})
        for change, (name, found) in zip(
            TWO_OUTPUTS,
            (("right", ""), ("a mean of each replica of the second", "mean_of_means"),
             ("three times the second", "scaled_gradient"),
             ("factors of the second that are no means", "scaled_gradient")),
            strict=True)
    },
    # A function of the loss of each example, as of a preference, is no other mean.
    "other losses of examples": ({}, {"of_loss": of_each}, "other_loss", {
        "text": "are no whole numbers, recorded weights or classes"}),
    "means over lengths": ({}, {"of_loss": by_length}, "other_loss_reduction"),
    "weights of classes": ({}, {"of_loss": of_classes, "on_all": True}, "other_loss_reduction", {
        "place": ((0,), None, ())}),
    "slopes beside a loss": ({"parts": 2}, {"change": slopes}, UNEXPLAINED, {
        "text": "in another part of the loss"}),
    **{
        f"noise, {name}": ({}, {"of_loss": lambda g: 3 * g, "change": change}, found)
        for change, (name, found) in zip(
            DRAWN,
            (("other times", "examples: other_examples"),
             ("equal times on both replicas",
              "random numbers: same_random_numbers; examples: other_examples"),
             ("equal times in the first recording, too", "examples: other_examples")),
            strict=True)
    },
    **{
        f"overflow, {name}": ({}, {"change": change}, f"examples: {found}; gradients: not_finite")
        for change, (name, found) in zip(
            OVERFLOWING,
            (("which the reference skips", "overflow_not_skipped"),
             ("skipped as often", "other_examples"), ("skipped more often", "other_examples")),
            strict=True)
    },
    "other outputs": ({}, {"output": lambda y: 2 * y},
        "forward: other_outputs; gradients: other_outputs"),
    "lost micro-batch": ({"parts": 4}, second_of_two(), "lost_micro_batch", {
        "text": "1 of 4 forward passes"}),
    **{
        f"without {' and '.join(kinds)}": ({}, {**NEXT, "change": without(*kinds)}, UNEXPLAINED)
        for kinds in (("y_pred", "y_grad"), ("y_grad",), ("data",))
    },
    "a port with probabilities": (
        {}, {"framework": "keras", "output": lambda y: 2 * y}, UNEXPLAINED),
    "backward": ({}, {"change": other_gradient}, UNEXPLAINED, {
        "text": "outputs, and the gradients of the loss by them, agree: it is in another part"}),
    # Behind BatchNorm, outputs differ by design: the loss tells how much each example counts.
    **{
        f"{name}, {loss.__name__} behind BatchNorm": (
            {"layers": NORM, "loss": loss}, {"on_all": True, "output": moved, **changes},
            f"forward: local_statistics?; {found}")
        for name, changes, found, *kinds in (
            ("right", {}, LOCAL, softmax, sigmoid, steep),
            ("doubled", {"of_loss": lambda g: 2 * g}, "gradients: sum_instead_of_mean", softmax,
             sigmoid),
            ("halved", {"of_loss": lambda g: g / 2}, "gradients: mean_instead_of_sum", softmax,
             sigmoid),
            ("times 1.3", {"of_loss": lambda g: 1.3 * g}, "gradients: scaled_gradient", softmax,
             sigmoid),
            ("smoothed", {"smoothing": (0.1, 0.1)},
             f"loss: label_smoothing; {LOCAL}; gradients: label_smoothing", softmax),
        )
        for loss in kinds
    },
}  # fmt: skip


def _rows():
    for name, (both, second, found, *more) in ROWS_OF.items():
        both = {"given": False, **both}
        second = {**both, **second}
        verdict = functools.partial(verdict_of, both, second, second.pop("change", None))
        is_detail = found and ":" not in found
        found = f"loss: {found}; gradients: {found}" if is_detail else found
        given = SECOND if is_detail else {} if found else {"checked": ("forward", "loss")}
        yield Row("outputs", name, found, verdict, **given | (more[0] if more else {}))


ROWS = [*_rows()]
