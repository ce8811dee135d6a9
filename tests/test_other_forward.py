"""Recordings with outputs and the gradient of the loss: the first difference is found in them."""

import numpy as np
import pytest

from lockstep.comparison import compare_traces
from lockstep.data.trace import About, Trace, Variable

NUM, FEATURES, CLASSES, LENGTH = 12, 6, 4, 3
AS_IS = {"x": lambda x: x, "y": lambda y: y, "output": lambda y: y, "of_loss": lambda g: g}


def softmax(outputs, targets, smoothing):
    """Returns the gradient of cross-entropy, summed over the examples."""
    p = np.exp(outputs - outputs.max(-1, keepdims=True))
    one_hot = np.eye(CLASSES)[targets]
    return p / p.sum(-1, keepdims=True) - (1 - smoothing) * one_hot - smoothing / CLASSES


def sigmoid(outputs, targets, smoothing):
    return 1 / (1 + np.exp(-outputs)) - (np.arange(CLASSES) < targets[..., None])


def squares(outputs, targets, smoothing):
    return outputs - np.sin(targets[..., None] + np.arange(CLASSES))


def trained(
    *, replicas=1, framework="torch", parts=1, loss=softmax, sequences=False, smoothing=(0.0, 0.0),
    seed=0, given=True, layers=(), on_all=False, **changes,
):  # fmt: skip
    """Returns a recording of one step of a linear model, some of whose arrays a replica changes.

    Args:
        parts: number of micro-batches.
        sequences: whether an example is a sequence.
        smoothing: label smoothing of replicas 0 and 1.
        given: whether targets are arguments of the step.
        changes: functions of inputs, targets, outputs and the gradient of the loss.
        on_all: whether all replicas have these changes, not only replica 1.
    """
    random = np.random.default_rng(seed)
    shape = (NUM, LENGTH, FEATURES) if sequences else (NUM, FEATURES)
    x = random.normal(size=shape).astype(np.float32)
    y = random.integers(CLASSES, size=shape[:-1])
    w = random.normal(size=(FEATURES, CLASSES)).astype(np.float32)
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
            arrays["y_pred"].append(outputs)
            arrays["y_grad"].append(gradient.astype(np.float32))
            total = total + np.tensordot(used[0], gradient, [[*range(used[1].ndim)]] * 2)
        raw.append(total)
        for kind, each in {**arrays, "raw": [total]}.items():
            trace.put(0, kind, replica, each)
    for replica in range(replicas):
        for kind, array in {"before": w, "after": w - sum(raw), "sums": np.mean(raw, 0)}.items():
            trace.put(0, kind, replica, [array])
    return trace


def found(first, second):
    two = trained(replicas=2, **second)
    verdict = compare_traces([trained(**first), two], {})["two.npz"]
    return [(f.stage, f.detail, *f.items) for f in verdict.faults if f.stage != "update"], verdict


def mask(gradient):
    gradient = gradient.copy()
    gradient[:2] = 0
    return gradient


DROPOUT = ({"name": "drop", "class": "Dropout", "rate": 0.5, "weights": []},)
HIDDEN = {"given": False}
SHIFTED = {**HIDDEN, "y": lambda y: np.roll(y, 1, axis=0)}
RIGHT = {
    "classes": ({}, {}),
    "micro-batches": ({"parts": 4}, {"parts": 2}),
    "sequences": ({"sequences": True}, {"sequences": True}),
    "binary": ({"loss": sigmoid}, {"loss": sigmoid}),
    "rounding": ({}, {"output": lambda y: y * np.float32(1 + 1e-6)}),
    "a loss without effect on the gradients": ({}, {"of_loss": lambda g: g * np.float32(1 + 1e-6)}),
}  # fmt: skip
WRONG = {
    "targets of other examples": (HIDDEN, SHIFTED, ("loss", "labels_shifted")),
    "binary targets of other examples": (
        {**HIDDEN, "loss": sigmoid}, {**SHIFTED, "loss": sigmoid}, ("loss", "labels_shifted")),
    "targets of other examples of a squared error": (
        {**HIDDEN, "loss": squares}, {**SHIFTED, "loss": squares}, ("loss", "other_loss")),
    "targets of other examples, with dropout": (
        {**HIDDEN, "layers": DROPOUT},
        {**SHIFTED, "layers": DROPOUT, "output": lambda y: y * np.float32(1.1)},
        ("loss", "labels_shifted")),
    "arguments of other examples": (
        {}, {"y": lambda y: np.roll(y, 1, axis=0)}, ("examples", "labels_shifted")),
    "other arguments": ({}, {"y": lambda y: 0 * y}, ("examples", "other_examples")),
    "other targets": (HIDDEN, {**HIDDEN, "y": lambda y: 0 * y}, ("loss", "other_targets")),
    "targets of the next place": (
        {**HIDDEN, "sequences": True},
        {**HIDDEN, "sequences": True, "y": lambda y: np.roll(y, 1, axis=1)},
        ("loss", "labels_shifted")),
    "label smoothing": (HIDDEN, {**HIDDEN, "smoothing": (0, 0.1)}, ("loss", "label_smoothing")),
    "no label smoothing": (
        {**HIDDEN, "smoothing": (0.1, 0.1)}, {**HIDDEN, "smoothing": (0.1, 0)},
        ("loss", "label_smoothing")),
    "a lost loss": (HIDDEN, {**HIDDEN, "of_loss": lambda g: 0 * g}, ("loss", "lost_replica")),
    "a scaled loss": (HIDDEN, {**HIDDEN, "of_loss": lambda g: 3 * g}, ("loss", "scaled_gradient")),
    "masked examples": (HIDDEN, {**HIDDEN, "of_loss": mask}, ("loss", "other_targets")),
    "other outputs": (HIDDEN, {**HIDDEN, "output": lambda y: 2 * y}, ("forward", "other_outputs")),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right_outputs_and_losses(name):
    faults, verdict = found(*RIGHT[name])
    assert not faults
    assert {"forward", "loss"} <= {*verdict.checked}


@pytest.mark.parametrize("name", WRONG)
def test_first_difference(name):
    first, second, expected = WRONG[name]
    faults, _ = found(first, second)
    assert faults[0] == (*expected, "replica 1")
    assert {cause for _, cause, *_ in faults} == {expected[1]}


def test_lost_micro_batch():
    calls = []

    def lost(gradient):
        calls.append(gradient)
        return gradient * (len(calls) % 2)

    faults, verdict = found({**HIDDEN, "parts": 4}, {**HIDDEN, "parts": 2, "of_loss": lost})
    assert faults[0] == ("loss", "lost_micro_batch", "replica 1")
    assert "1 of 4 forward passes" in verdict.faults[0].text


def test_recordings_without_outputs():
    """Recorders of other frameworks and old ones do not record them."""
    for kinds in (["y_pred", "y_grad"], ["y_grad"], ["data"]):
        one, two = trained(**HIDDEN), trained(replicas=2, **SHIFTED)
        for kind in kinds:
            two._index = {key: value for key, value in two._index.items() if key[1] != kind}
        verdict = compare_traces([one, two], {})["two.npz"]
        assert [(f.stage, f.detail) for f in verdict.faults] == [("gradients", "unexplained")]
        assert "backward" not in verdict.faults[0].text


def test_outputs_of_a_port():
    """A model of another framework may return logits, and this one probabilities."""
    keras = {"framework": "keras", "output": lambda y: 2 * y}
    faults, _ = found(HIDDEN, {**HIDDEN, **keras})
    assert {stage for stage, *_ in faults} == {"gradients"}


def moved(outputs):
    """Returns outputs as of a layer that normalises other examples."""
    return outputs * np.float32(1.05) + np.float32(0.02)


NORM = ({"name": "norm", "class": "BatchNorm1d", "weights": []},)
BEHIND = {
    "right": ({}, []),
    "doubled": ({"of_loss": lambda g: 2 * g}, ["sum_instead_of_mean"]),
    "halved": ({"of_loss": lambda g: g / 2}, ["mean_instead_of_sum"]),
    "times 1.3": ({"of_loss": lambda g: 1.3 * g}, ["scaled_gradient"]),
    "label smoothing": ({"smoothing": (0.1, 0.1)}, ["label_smoothing"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BEHIND)
@pytest.mark.parametrize("loss", [softmax, sigmoid])
def test_the_weight_of_an_example_is_known_behind_batch_norm(name, loss):
    """Outputs differ by design: the form of the loss tells how much each example counts."""
    changes, causes = BEHIND[name]
    if loss is sigmoid and name == "label smoothing":
        return
    given = {"layers": NORM, "loss": loss, **HIDDEN}
    one = trained(**given)
    two = trained(replicas=2, on_all=True, output=moved, **given, **changes)
    verdict = compare_traces([one, two], {})["two.npz"]
    assert [f.detail for f in verdict.faults if f.stage == "gradients"] == causes


def test_a_loss_of_another_form_has_no_weights_behind_batch_norm():
    """Its examples count differently by themselves: nothing says how much a replica counts."""

    def steep(*given):
        gradient = softmax(*given)
        size = np.linalg.norm(gradient, axis=1, keepdims=True)
        return (gradient * np.sqrt(size / size.max())).astype(np.float32)

    given = {"layers": NORM, "loss": steep, **HIDDEN}
    two = trained(replicas=2, on_all=True, output=moved, **given)
    verdict = compare_traces([trained(**given), two], {})["two.npz"]
    assert verdict.status == "not compared", str(verdict)


def test_backward_pass():
    """Outputs and losses agree, gradients do not."""
    one, two = trained(**HIDDEN), trained(replicas=2, **HIDDEN)
    two.put(0, "raw", 1, [np.sin(two.arrays(0, "raw", 1)[0])])
    mean = np.mean([two.arrays(0, "raw", replica)[0] for replica in (0, 1)], axis=0)
    for replica in (0, 1):
        two.put(0, "sums", replica, [mean])
    verdict = compare_traces([one, two], {})["two.npz"]
    text = next(f.text for f in verdict.faults if f.stage == "gradients")
    assert "outputs, and the gradients of the loss by them, agree: it is in another part" in text
