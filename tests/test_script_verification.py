"""`verify --traces`: what it finds in recordings of a small training, right ones and wrong ones."""

import json
import types

import numpy as np
import pytest

from app.records.script_trace import load_trace
from app.runtime.errors import DataError
from app.verification.recordings import pair_start
from app.verification.recordings.flatten_order import reordered_rows
from app.verification.recordings.recorded_step import RecordedStep
from app.verification.recordings.trace_finding import REMEDIES, STAGES
from app.verification.recordings.trace_verification import (
    between_frameworks,
    computed_tolerance,
    given_tolerance,
    pairs_of,
    verify_against,
    verify_alone,
)
from app.verification.script_match import Matching
from in_process import run_here
from script_samples import Script, adam, batch_of, examples, mean_of, sgd

ADAM, ADAMW = {"optimizer": "Adam"}, {"class": "AdamW", "framework": "torch"}


@pytest.fixture(scope="module")
def one():
    return Script()


@pytest.fixture(scope="module")
def tolerance(one, tmp_path_factory):
    """That of permuted examples."""
    folder = tmp_path_factory.mktemp("tolerance")
    permuted = Script(permute=1, replay=one, steps=(0, 1))
    return computed_tolerance(loaded(one, folder), loaded(permuted, folder, "permuted"), {})


def loaded(script, folder, name="one"):
    script.write(folder / f"{name}.npz")
    return load_trace(folder / f"{name}.npz")


def compared(first, second, folder, tolerance=None):
    first, second = loaded(first, folder), loaded(second, folder, "two")
    return verify_against(first, second, {}, tolerance or given_tolerance(None))


def shown(report):
    """Returns stages and causes of the findings; * marks what is by design."""
    assert set(report.stages) <= set(STAGES)
    marks = {"fault": "", "by design": "*"}
    return [f"{f.stage}: {f.cause}{marks[f.status]}" for f in report.findings]


# --- Changes of a training -----------------------------------------------------------------------


def three_quarters(rows, replica, count):
    size = 3 * len(rows) // 4
    return rows[:size] if replica == 0 else rows[size:]


def same_rows(rows, replica, count):
    return rows[: len(rows) // count]


def first_only(sent):
    return [[array.copy() for array in sent[0]] for _ in sent]


def without_last(sent):
    count = np.float32(len(sent) - 1)
    return [[sum(parts[:-1]) / count for parts in zip(*sent, strict=True)] for _ in sent]


def half(sent):
    return [[array / 2 for array in arrays] for arrays in mean_of(sent)]


def in_bfloat16(sent):
    def cut(array):
        return (array.view(np.uint32) & 0xFFFF0000).view(np.float32)

    return [[cut(array) for array in arrays] for arrays in mean_of(sent)]


def summed(sent):
    return [[np.float32(len(sent)) * array for array in arrays] for arrays in mean_of(sent)]


def clip(replica, gradients):
    norm = np.sqrt(sum(float((g**2).sum()) for g in gradients))
    return [g * np.float32(min(1, 0.1 / norm)) for g in gradients]


def clip_on_first(replica, gradients):
    return [g * np.float32(0.5) for g in gradients] if replica == 0 else gradients


def times(factor):
    return {"gradient": lambda s, r, g: [np.float32(factor) * a for a in g]}


def of_kernel(factor):
    return {"gradient": lambda s, r, g: [np.float32(factor) * g[0], g[1]]}


NOISY = of_kernel(1.01)


def apart(script, replica, gradients):
    return [gradients[0] + 0.01 * np.sin(1 + 9 * gradients[0]), gradients[1]]


def little_noise(script, replica, gradients):
    kernel, bias = gradients
    other = np.random.default_rng(0).normal(size=kernel.shape)
    size = np.linalg.norm(kernel) / np.linalg.norm(other)
    return [kernel + np.float32(2e-2 * size) * other.astype(np.float32), bias]


def channels_last(script, replica, gradients):
    """3 channels of 4 pixels: one script has the channels first, the other last."""
    return [gradients[0][np.arange(12).reshape(3, 4).T.ravel()], gradients[1]]


def decayed_in_loss(script, replica, gradients):
    weights = script.states[max(script.states)][replica][:2]
    return [g + np.float32(0.05) * w for g, w in zip(gradients, weights, strict=True)]


def with_settings(**settings):
    """An update with other settings than those that are recorded."""

    def update(script, weights, gradients, state):
        changed = types.SimpleNamespace(
            settings=script.settings | settings, decays_gradient=script.decays_gradient,
            framework=script.framework,
        )  # fmt: skip
        (adam if script.optimizer == "Adam" else sgd)(changed, weights, gradients, state)

    return {"update": update}


def no_update(script, weights, gradients, state):
    """Changes nothing."""


def not_corrected(script, weights, gradients, state):
    before = [weight.copy() for weight in weights]
    adam(script, weights, gradients, state)
    for i, (weight, old) in enumerate(zip(weights, before, strict=True)):
        root = np.sqrt(state[3 * i + 1]) + np.float32(script.settings["epsilon"])
        weight[:] = old - np.float32(script.settings["learning_rate"]) * state[3 * i] / root


def stale(script, weights, gradients, state):
    kept = state[1].copy()
    adam(script, weights, gradients, state)
    state[1][:] = kept


def corrected_in_float32(script, weights, gradients, state):
    """Keras computes 1 - 0.999 in float32: 1e-5 away from 0.001."""
    adam(script, weights, gradients, state)
    number = float(state[2])
    left = 1 - np.float32(0.999) ** np.float32(number)
    for weight, before in zip(weights, script.states[number - 1][0][:2], strict=True):
        weight[:] = before + (weight - before) * np.float32((left / (1 - 0.999**number)) ** 0.5)


RATES = [0.1, 0.1, 0.05, 0.05]
SCHEDULE = {"settings": [[{"learning_rate": r, "momentum": 0.9}] for r in RATES]}


def with_schedule(script, weights, gradients, state):
    """SGD of PyTorch or of Keras, whose velocity has the learning rate within."""
    rate = np.float32(RATES[max(script.states)])
    for i, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
        if script.framework == "torch":
            state[i][:] = np.float32(0.9) * state[i] + gradient
            weight -= rate * state[i]
        else:
            state[i][:] = np.float32(0.9) * state[i] - rate * gradient
            weight += state[i]


def in_order(size):
    return {"batch": lambda step: np.arange(40)[step % size * 16 :][:16]}


def layers(*settings):
    return {"about": {"layers": [{"weights": [], **each} for each in settings]}}


def with_norm(momentum, **changes):
    """A training whose BatchNorm is recorded with its statistics."""
    layer = {"name": "norm", "class": "BatchNorm2d", "momentum": momentum}
    layer |= {"weights": ["norm/moving_mean", "norm/moving_variance"]}
    return {"norm_momentum": momentum, "about": {"layers": [layer]}, **changes}


CONV = {"name": "0", "class": "Conv2d", "strides": [2, 2], "padding": [1, 1]}
KERAS_CONV = {"name": "conv", "class": "Conv2D", "strides": [2, 2], "padding": "valid"}
SAME_CONV = {**KERAS_CONV, "padding": "same"}
PADDED = {"name": "pad", "class": "ZeroPadding2D", "padding": [[1, 1], [1, 1]]}
TORCH_PADDED = {"name": "pad", "class": "ZeroPad2d", "padding": [0, 1, 0, 1]}
NORM = {"name": "bn", "class": "BatchNorm2d", "epsilon": 1e-5}
KERAS_NORM = {"name": "bn", "class": "BatchNormalization", "epsilon": 1e-3}
OWN_NORM = {**NORM, "momentum": 0.1, "weights": ["norm/moving_mean"]}
DROPOUT = layers({"name": "drop", "class": "Dropout", "rate": 0.5})

# --- Changes of the arrays of a recording --------------------------------------------------------


def edit(of_array, kind, replica=None, index=None, position=None):
    """Returns what changes the arrays of a kind: all, or those of one place."""

    def edited(script):
        for name, array in list(script.arrays.items()):
            place = name.split("/")
            wanted = (position, kind, replica, index)
            if all(w is None or str(w) == p for w, p in zip(wanted, place, strict=True)):
                script.arrays[name] = of_array(array)

    return {"edit": edited}


def flip(kind):
    """One bit of the exponent, in one array of one step."""

    def flipped(array):
        bits = array.copy().reshape(-1).view(np.uint32)
        bits[5] ^= 1 << 25
        return bits.view(np.float32).reshape(array.shape)

    return edit(flipped, kind, 1, 0, 2)


def random_states(state_of, change=None):
    def edited(script):
        for position, step in enumerate(script.steps, start=1):
            for replica in range(script.replicas):
                state = np.array(state_of(step, replica), np.uint8)
                script.arrays[f"{position}/random/{replica}/0"] = state
                if change is not None:
                    script.arrays[f"{position}/random_after/{replica}/0"] = state + np.uint8(change)

    return {"edit": edited}


def seeds(state_of):
    """A variable with the state of a layer's generator."""

    def edited(script):
        for position, step in enumerate(script.steps, start=1):
            for replica in range(script.replicas):
                for later, kind in enumerate(("before", "after")):
                    state = np.array(state_of(step, replica, later), np.uint32)
                    script.arrays[f"{position}/{kind}/{replica}/6"] = state

    entry = '{"name": "drop/seed", "kind": "seed", "layout": ""}'
    return {"edit": edited, "renamed": {'], "gradients"': f', {entry}], "gradients"'}}


def as_rows(script):
    """The gradient of a table of which some rows are used, each twice."""
    for name in [n for n in script.arrays if n.split("/")[1] in ("raw", "sums", "clipped")]:
        if name.endswith("/0"):
            array = script.arrays.pop(name)
            script.arrays[f"{name}/values"] = np.concatenate([array / 2, array / 2])
            script.arrays[f"{name}/indices"] = np.tile(np.arange(len(array)), 2)
            script.arrays[f"{name}/rows"] = np.array(len(array))


def clipped_first(*factors):
    """As Keras' fit records it: raw, clipped, then the sum of these."""

    def edited(script):
        for position, _ in enumerate(script.steps, start=1):
            clipped = [
                [scale * script.arrays[f"{position}/raw/{replica}/{i}"] for i in range(2)]
                for replica, scale in enumerate(np.float32(factors))
            ]
            for replica, sums in enumerate(mean_of(clipped)):
                for i in range(2):
                    script.arrays[f"{position}/clipped/{replica}/{i}"] = clipped[replica][i]
                    script.arrays[f"{position}/sums/{replica}/{i}"] = sums[i]

    return {"edit": edited, "about": {"order": "clip, reduce"}}


def micro_batches(script):
    for name in [name for name in script.arrays if "/data/" in name]:
        array = script.arrays[name]
        script.arrays[name], script.arrays[f"{name[:-1]}1"] = array[:3], array[3:]


def weights_of_examples(script):
    """Half of the examples count twice."""
    for position in range(1, 5):
        count = len(script.arrays[f"{position}/data/0/0"])
        weights = np.where(np.arange(count) % 2, 1, 2).astype(np.float32)
        script.arrays[f"{position}/data/0/1"] = weights


def other_variance(script):
    """A variance 1.5 times as large: n / (n - 1) is at most 16 / 15."""
    for position, step in enumerate(script.steps, start=1):
        name, share = f"{position}/after/0/3", np.float32(0.1)
        rest = (1 - share) * script.states[step][0][3]
        script.arrays[name] = rest + np.float32(1.5) * (script.arrays[name] - rest)


def images(layout, stored=None):
    """Channels last or first; a wrong layout is another order."""

    def as_images(array):
        x = array.reshape(-1, 2, 2, 3)
        return x.transpose(0, 3, 1, 2) if (stored or layout) == "NCHW" else x

    return {"about": {"data_layout": layout}, **edit(as_images, "data")}


def in_torch(script):
    """As PyTorch records it: kernels (out, in), other names."""
    for name, array in script.arrays.items():
        if array.shape == (12, 3):
            script.arrays[name] = np.ascontiguousarray(array.T)
    script.renamed = {"dense/kernel": "fc.weight", "dense/bias": "fc.bias", '"IO"': '"OI"'}


# --- Pairs: what the reference has, what the other has, and what is found ------------------------

TWO = {"replicas": 2}
RIGHT = {
    **{f"{n} replicas": ({}, {"replicas": n}) for n in (1, 2, 3, 4)},
    "Adam": (ADAM, TWO),
    "AdamW": ({**ADAM, "settings": {"weight_decay": 0.01}, "about": {"optimizer": ADAMW}}, TWO),
    "Adam of Keras": ({**ADAM, "framework": "keras"}, TWO),
    "Adam of Keras in float32": (
        {**ADAM, "framework": "keras"}, {"update": corrected_in_float32}
    ),
    "Nesterov": ({"settings": {"nesterov": True}}, TWO),
    "plain SGD": ({"settings": {"momentum": 0.0, "weight_decay": 0.01}}, TWO),
    "decay": ({"settings": {"weight_decay": 0.1}}, TWO),
    "weighted shards": ({}, {**TWO, "shard": three_quarters}),
    "sum of shares": ({}, {
        **TWO, "shard": three_quarters, "about": {"reduction": "sum"}, **times(0.5),
        "reduce": lambda sent: summed(sent),
    }),
    "clipping after the sum": ({"clip": clip}, TWO),
    "no clipping before the sum": ({}, {**TWO, **clipped_first(1, 1)}),
    "equal random states": ({}, {**TWO, **random_states(lambda step, replica: [0] * 4)}),
    "rows": ({}, {**TWO, "edit": as_rows}),
    "micro-batches": ({}, {**TWO, "about": {"micro_batches": [2] * 4}, "edit": micro_batches}),
    "layouts": (images("NHWC"), {**TWO, **images("NCHW")}),
    "scaled by the model": ({}, {**TWO, **edit(lambda array: 255 * array, "data")}),
    "other names": ({}, {**TWO, "edit": in_torch}),
}  # fmt: skip


def pair(first, second):
    """Returns a training, and one with further changes, from the states of the first."""
    reference = Script(**first)
    first = {name: value for name, value in first.items() if name != "edit"}
    return reference, Script(**{**first, "replay": reference, **second})


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_training_is_clean(tmp_path, tolerance, name):
    report = compared(*pair(*RIGHT[name]), tmp_path, tolerance)
    assert shown(report) == []
    assert report.stages["gradients"] == report.stages["update"] == "clean"
    assert not report.unmatched and not report.skipped


def settings(**given):
    return {"settings": given}


KERAS_ADAM = {**ADAM, "framework": "keras"}
PLACED = {
    "decays_gradient": False,
    **settings(weight_decay=0.1, decay_placement="taken from the weights"),
}
FAULTS = {
    # Examples.
    "same shard": ({}, {**TWO, "shard": same_rows},
        "examples: same_examples; examples: repeated_examples"),
    "padded": ({}, {**TWO, "batch": lambda s: np.append(batch_of(s), batch_of(s)[:2])},
        "examples: repeated_examples"),
    "cut": ({}, {**TWO, "batch": lambda step: batch_of(step)[:-2]}, "examples: lost_examples"),
    "lost": ({}, {**TWO, "batch": lambda step: batch_of(step)[:-2], "steps": (0,)},
        "examples: lost_examples"),
    "reshuffled": ({}, {**TWO, "batch": lambda step: batch_of(step % 3)},
        "examples: not_reshuffled"),
    "dropped": ({}, {**TWO, "batch": lambda s: batch_of(3 * (s // 2) + s % 2)},
        "examples: last_batch_dropped"),
    "dropped in order": (in_order(3), in_order(2), "examples: last_batch_dropped"),
    "kept": (in_order(2), in_order(3), "examples: last_batch_dropped"),
    "order": ({}, {**TWO, "batch": lambda step: batch_of((1, 0, 2, 3)[step])},
        "examples: other_order"),
    "others": ({}, {**TWO, "batch": lambda step: np.sort(batch_of(step) * 7 % 40)},
        "examples: other_examples"),
    "scaled inputs": ({}, {**TWO, "inputs": lambda x: 2 * x - 1}, "examples: other_normalisation"),
    "layout": (images("NHWC"), {**TWO, **images("NHWC", "NCHW"), **of_kernel(1.5)},
        "examples: other_layout"),
    # Start and random numbers.
    "weights": ({}, {"seed": 1, "replay": None}, "start: other_initial_weights"),
    "zeros": ({}, {"initial_scale": 0.0, "replay": None}, "start: other_initialiser"),
    "not replayed": ({}, {"seed": 1, "replay": None, "about": {"replayed": "one.npz"}},
        "start: not_replayed"),
    "broadcast": ({}, {**TWO, **edit(lambda a: a + np.float32(1e-3), "before", 1, 0, 1)},
        "start: diverged_replicas; update: unexplained_update"),
    "random numbers": (DROPOUT, {**TWO, **random_states(lambda step, r: [step] * 4)},
        "random numbers: same_random_numbers"),
    "without layers": ({}, {**TWO, "about": {"layers": []}, **random_states(lambda s, r: [s])},
        "random numbers: same_random_numbers"),
    "drawn": (DROPOUT, {**TWO, **random_states(lambda step, r: [step] * 4, 1)},
        "random numbers: same_random_numbers"),
    "not drawn": (DROPOUT, {**TWO, **random_states(lambda step, r: [step] * 4, 0)}, ""),
    "other states": (DROPOUT, {**TWO, **random_states(lambda step, r: [step, r])}, ""),
    "repeated": (DROPOUT, {**TWO, **random_states(lambda step, r: [r])},
        "random numbers: random_numbers_repeated"),
    "seeds": ({}, {**TWO, **seeds(lambda step, r, later: [step + later, 0])},
        "random numbers: same_random_numbers"),
    "other seeds": ({}, {**TWO, **seeds(lambda step, r, later: [step + later, r])}, ""),
    "unused seeds": ({}, {**TWO, **seeds(lambda step, r, later: [step, 0])}, ""),
    "random layers": (DROPOUT, {**TWO, "gradient": apart}, "gradients: random_layers*"),
    # All-reduce.
    "bypassed": ({}, {**TWO, "reduce": None},
        "all-reduce: not_all_reduced; agreement: not_all_reduced"),
    "bypassed and clipped": ({}, {**TWO, "reduce": None, "clip": clip},
        "all-reduce: not_all_reduced; agreement: not_all_reduced"),
    "sums are raw": ({}, {**TWO, "reduce": lambda sent: sent},
        "all-reduce: not_all_reduced; agreement: not_all_reduced"),
    "first only": ({}, {**TWO, "reduce": first_only}, "all-reduce: lost_replica"),
    "without the last": ({}, {"replicas": 3, "reduce": without_last}, "all-reduce: lost_replica"),
    "sum": ({}, {**TWO, "reduce": summed}, "all-reduce: sum_instead_of_mean"),
    "mean": ({}, {**TWO, "about": {"reduction": "sum"}},
        "all-reduce: mean_instead_of_sum; gradients: sum_instead_of_mean"),
    "half": ({}, {**TWO, "reduce": half}, "all-reduce: other_sum"),
    "half in torch": ({}, {**TWO, "reduce": half, "edit": in_torch}, "all-reduce: other_sum"),
    "bfloat16": ({}, {**TWO, "reduce": in_bfloat16}, "all-reduce: reduced_precision"),
    # Clipping.
    "clipped on one": ({}, {**TWO, "clip": clip_on_first},
        "clipping: clipped_on_one_replica; agreement: clipped_on_one_replica"),
    "clipped": ({}, {**TWO, "clip": lambda r, g: [a / 2 for a in g]}, "clipping: other_clipping"),
    "clipped first": ({}, {**TWO, **clipped_first(0.5, 0.25)},
        "clipping: clipped_before_the_sum; update: unexplained_update"),
    # Gradients and loss.
    "uneven": ({}, {**TWO, "shard": three_quarters, "weighted": False}, "gradients: mean_of_means"),
    "uneven sum": ({}, {
        **TWO, "shard": three_quarters, "weighted": False, "about": {"reduction": "sum"},
        **times(0.5), "reduce": summed,
    }, "gradients: mean_of_means"),
    "other weights": ({}, {
        **TWO, "gradient": lambda s, r, g: [np.float32((0.7, 1.3)[r]) * a for a in g]
    }, "gradients: mean_of_means"),
    "one is larger": ({}, {**TWO, **NOISY}, "gradients: unexplained_gradient"),
    "doubled": ({}, {**TWO, **times(2)}, "gradients: sum_instead_of_mean"),
    "halved": ({}, {**TWO, **times(0.5)}, "gradients: mean_instead_of_sum"),
    "tripled": ({}, {**TWO, **times(3)}, "gradients: scaled_gradient"),
    "frozen": ({}, {**TWO, "gradient": lambda s, r, g: [g[0], 0 * g[1]]}, "gradients: frozen"),
    "noise": ({}, {**TWO, "gradient": apart}, "gradients: unexplained_gradient"),
    "noise of a model that scales": ({}, {
        **TWO, "gradient": apart, **edit(lambda array: 255 * array, "data")
    }, "gradients: unexplained_gradient"),
    "loss": ({}, {**TWO, "sums_loss": True},
        "loss: other_loss_reduction; gradients: other_loss_reduction"),
    "other loss": ({}, edit(lambda array: 1.01 * array, "loss"), "loss: other_loss"),
    "not finite": ({}, edit(lambda array: np.float32(np.nan) * array, "loss", position=2),
        "loss: not_finite; loss: other_loss"),
    "weights of examples": ({}, {**times(1.5), "edit": weights_of_examples},
        "gradients: other_loss_reduction"),
    "flattened": ({}, {**TWO, "gradient": channels_last}, "gradients: flatten_order"),
    "decay in the loss": ({}, {**TWO, "gradient": decayed_in_loss},
        "gradients: regularisation_in_the_loss"),
    "as much decay": (settings(weight_decay=0.05), {
        "gradient": decayed_in_loss, **settings(weight_decay=0.0)},
        "gradients: regularisation_in_the_loss*"),
    "less decay": (settings(weight_decay=0.02), {
        "gradient": decayed_in_loss, **settings(weight_decay=0.0)},
        "gradients: regularisation_in_the_loss; update: other_weight_decay"),
    # Settings of layers.
    "epsilon": (layers(NORM), {**NOISY, **layers({**NORM, "epsilon": 1e-3})},
        "gradients: other_batch_norm_epsilon"),
    "padding": (layers(CONV), {**NOISY, **layers({**CONV, "padding": "same"})},
        "gradients: other_padding"),
    "same and valid": (layers(KERAS_CONV), {**NOISY, **layers(SAME_CONV)},
        "gradients: other_padding"),
    "one side": (layers(SAME_CONV), {**NOISY, **layers({**CONV, "padding": 1})},
        "gradients: other_padding"),
    "none": (layers(KERAS_CONV), {**NOISY, **layers({**CONV, "padding": 0})},
        "gradients: unexplained_gradient"),
    "none and 1": (layers({**CONV, "padding": [0, 0]}), {
        **NOISY, **layers({**CONV, "padding": 1})}, "gradients: other_padding"),
    "strides": (layers(CONV), {**NOISY, **layers({**CONV, "strides": [1, 1]})},
        "gradients: other_layer_settings"),
    "no padding": (layers(CONV), {**NOISY, **layers(KERAS_CONV)}, "gradients: other_padding"),
    "padding before": (layers(CONV), {**NOISY, **layers(PADDED, KERAS_CONV)},
        "gradients: unexplained_gradient"),
    "one-sided": (layers(TORCH_PADDED, {**CONV, "padding": [0, 0]}), {
        **NOISY, **layers(SAME_CONV)}, "gradients: unexplained_gradient"),
    "epsilon behind padding": (layers(CONV, NORM), {
        **NOISY, **layers(PADDED, KERAS_CONV, KERAS_NORM)}, "gradients: other_batch_norm_epsilon"),
    "both": (layers(CONV, NORM), {**NOISY, **layers(SAME_CONV, KERAS_NORM)},
        "gradients: other_batch_norm_epsilon; gradients: other_padding"),
    "without effect": (layers(CONV, OWN_NORM, {**NORM, "name": "last"}), {
        **NOISY, **layers(KERAS_CONV, OWN_NORM, {**NORM, "epsilon": 1e-3})},
        "gradients: other_batch_norm_epsilon"),
    "local norms": (layers(NORM), {**TWO, **NOISY}, "gradients: local_statistics*"),
    "other norms": (layers({**NORM, "class": "SyncBatchNorm"}), {
        **TWO, **NOISY, **layers(NORM)}, "gradients: local_statistics"),
    # Update.
    "rate": ({}, {**TWO, **settings(learning_rate=0.2)}, "update: other_learning_rate"),
    "momentum": ({}, {**TWO, **settings(momentum=0.8)}, "update: other_momentum"),
    "no momentum": ({}, {**TWO, **settings(momentum=0.0)}, "update: other_momentum"),
    "dampening": ({}, {**TWO, "about": {"settings": [[{
        "learning_rate": 0.1, "momentum": 0.9, "dampening": 0.5}]] * 4}},
        "update: unexplained_update; update: other_dampening"),
    "nesterov": ({}, {**TWO, **settings(nesterov=True)}, "update: other_nesterov"),
    "decay": ({}, {**TWO, **settings(weight_decay=0.1)}, "update: other_weight_decay"),
    "hidden rate": ({}, {**TWO, **with_settings(learning_rate=0.3)}, "update: other_learning_rate"),
    "hidden decay": (settings(weight_decay=0.1), {**TWO, **with_settings(weight_decay=0.0)},
        "update: other_weight_decay"),
    "hidden placement": (settings(weight_decay=0.1), {**TWO, "decays_gradient": False},
        "update: weight_decay_placement"),
    "hidden nesterov": ({}, {**TWO, **with_settings(nesterov=True)}, "update: other_nesterov"),
    "no update": ({}, {**TWO, "update": no_update}, "update: not_updated"),
    "not corrected": (ADAM, {"update": not_corrected}, "update: bias_not_corrected"),
    "stale": (ADAM, {"update": stale}, "update: unexplained_update"),
    "hidden epsilon": ({**ADAM, **settings(epsilon=1e-4)}, {
        "framework": "keras", "about": {"optimizer": {"class": "Adam", "framework": "torch"}}},
        "update: epsilon_placement"),
    "epsilon of frameworks": ({**KERAS_ADAM, **settings(epsilon=1e-4)}, {"framework": "torch"},
        "update: epsilon_placement*"),
    "other epsilon": ({**KERAS_ADAM, **settings(epsilon=1e-4)}, {
        "framework": "torch", **settings(epsilon=1e-8)},
        "update: other_epsilon; update: epsilon_placement*"),
    "placement": (settings(weight_decay=0.1), {**PLACED, "about": {"optimizer": {
        "class": "SGD", "framework": "torch", "decay_placement": "weights"}}},
        "update: weight_decay_placement"),
    "velocity": ({"about": SCHEDULE, "update": with_schedule}, {"framework": "keras"},
        "update: learning_rate_in_velocity*"),
    "optimizer": (ADAM, {"optimizer": "SGD", "replay": None, "steps": (0, 1)},
        "update: other_optimizer"),
    **{
        f"{name} of Adam": (
            {**ADAM, "about": {"optimizer": ADAMW}, **settings(**{name: first})},
            {**TWO, **settings(**{name: second})},
            f"update: other_{name}",
        )
        for name, first, second in (
            ("beta_1", 0.9, 0.8), ("beta_2", 0.999, 0.99), ("epsilon", 1e-7, 1e-4),
            ("learning_rate", 0.01, 0.02), ("weight_decay", 0.0, 0.1),
        )
    },
    "unknown": ({"about": {"optimizer": {"class": "Lion", "framework": "torch"}}}, {
        **TWO, **edit(lambda array: 1.01 * array, "after", 1, 0)}, "agreement: diverged_replicas"),
    # Statistics.
    "norm momentum": ({}, {**TWO, "norm_momentum": 0.01}, "statistics: other_batch_norm_momentum"),
    "unbiased": ({}, {**TWO, "unbiased": True}, "statistics: unbiased_variance*"),
    "local norm": ({}, {**TWO, "local_norm": True}, "statistics: local_statistics*"),
    "momentum and bias": (with_norm(0.1, unbiased=True), with_norm(0.01, unbiased=False),
        "statistics: other_batch_norm_momentum; statistics: unbiased_variance*"),
    "other variance": (with_norm(0.1), {"edit": other_variance}, "statistics: other_statistics"),
    # Changes that no check was made for.
    "flipped raw": ({}, {**TWO, **flip("raw")},
        "all-reduce: other_sum; gradients: unexplained_gradient"),
    "flipped sums": ({}, {**TWO, **flip("sums")},
        "all-reduce: other_sum; clipping: clipped_on_one_replica"),
    "flipped after": ({}, {**TWO, **flip("after")},
        "update: unexplained_update; agreement: unexplained_update"),
    "flipped before": ({}, {**TWO, **flip("before")},
        "start: diverged_replicas; update: unexplained_update"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(tmp_path, tolerance, name):
    first, second, expected = FAULTS[name]
    report = compared(*pair(first, second), tmp_path, tolerance)
    assert "; ".join(shown(report)) == expected


ALL, KERNEL, BIAS = (0, 1, 2, 3), ("dense/kernel",), ("dense/bias",)
PLACES = {
    "same shard": (ALL, (0, 1), ()),
    "broadcast": ((0,), (1,), KERNEL),
    "seeds": (ALL, (0, 1), ("drop/seed",)),
    "repeated": (ALL[1:], (0, 1), ()),
    "bypassed": (ALL, (), KERNEL + BIAS),
    "without the last": (ALL, (0, 1, 2), KERNEL + BIAS),
    "clipped on one": (ALL, (0,), ()),
    "clipped first": (ALL, (0, 1), ()),
    "frozen": (ALL, (), BIAS),
    "not finite": ((1,), (0,), ()),
    "reshuffled": ((3,), (), ()),
    "dropped": ((2, 3), (), ()),
    "nesterov": (ALL, (), ()),
    "flipped after": ((1,), (1,), KERNEL),
    "local norm": (ALL, (1,), ("norm/moving_mean", "norm/moving_variance")),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_finding_names_steps_replicas_and_weights(tmp_path, tolerance, name):
    first, second, _ = FAULTS[name]
    found = compared(*pair(first, second), tmp_path, tolerance).findings[0]
    assert (found.steps, found.replicas, found.tensors) == PLACES[name]


def test_every_cause_has_a_remedy_and_is_found_above(one, tmp_path, monkeypatch):
    expected = {each.split(": ")[1].strip("*") for *_, text in FAULTS.values() if text
                for each in text.split("; ")}  # fmt: skip
    # Of at least 100 values, the spread tells another initialiser.
    monkeypatch.setattr(pair_start, "_LARGE", 36)
    for scale, cause in ((0.1, "other_initial_weights"), (0.2, "other_initialiser")):
        second = Script(seed=1, initial_scale=scale)
        assert shown(compared(one, second, tmp_path)) == [f"start: {cause}"]
    assert expected == set(REMEDIES)
    assert all(REMEDIES.values())


def test_a_training_from_its_own_states_is_compared_in_its_first_step(tmp_path, one):
    report = compared(one, Script(replicas=2), tmp_path)
    assert not report.findings and report.stages["gradients"] == "clean"
    assert report.skipped and 0 not in report.skipped


ALONE = {
    "right": ({}, ""),
    "few different examples": (  # As in the truth table of XOR: four rows, many times.
        {"inputs": lambda x: np.tile(examples()[0][:2], (len(x), 1))[: len(x)]},
        "examples: not_reshuffled*",
    ),
    "same shard": ({"shard": same_rows}, "examples: same_examples"),
    "again": ({"batch": lambda step: batch_of(step % 3)}, "examples: not_reshuffled*"),
    "summed": ({"reduce": summed}, "all-reduce: sum_instead_of_mean"),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_recording_is_checked_alone(tmp_path, name):
    changes, expected = ALONE[name]
    report = verify_alone(loaded(Script(replicas=2, **changes), tmp_path))
    assert "; ".join(shown(report)) == expected
    stages = {"start", "examples", "loss", "all-reduce", "clipping", "update", "agreement"}
    assert report.stages.keys() == stages | {"statistics"}
    unknown = Script(about={"optimizer": {"class": "Lion", "framework": "torch"}}, **changes)
    report = verify_alone(loaded(unknown, tmp_path))
    assert report.stages.keys() - {"examples"} == {"loss", "clipping"}


# --- Tolerance -----------------------------------------------------------------------------------


def test_the_tolerance_is_computed_from_permuted_examples(tmp_path, one, tolerance):
    assert set(tolerance.of_weight) == {"dense/kernel", "dense/bias"}
    assert all(8 * 2**-23 <= value < 1e-4 for value in tolerance.of_weight.values())
    assert "2 steps of" in tolerance.text
    given = given_tolerance(0.5)
    assert given("dense/kernel") == 0.5 and "--tolerance" in given.text
    first = loaded(one, tmp_path)
    assert between_frameworks(tolerance, first, first) is tolerance
    other = loaded(Script(framework="keras"), tmp_path, "two")
    wider = between_frameworks(tolerance, first, other)
    assert min(wider.of_weight.values()) >= 64 * 2**-23 and "two frameworks" in wider.text
    with pytest.raises(DataError, match="no step starts from the state of"):
        computed_tolerance(first, loaded(Script(seed=1, permute=1), tmp_path, "p"), {})


def test_a_fault_that_the_permuted_recording_shares_is_found(tmp_path, one):
    """A permuted recording of the wrong script must not make its fault a matter of rounding."""
    wrong = loaded(Script(permute=1, replay=one, steps=(0, 1), **times(0.5)), tmp_path, "p")
    tolerance = computed_tolerance(loaded(one, tmp_path), wrong, {})
    assert "limited to 0.01" in tolerance.text
    report = compared(*pair({}, {**TWO, **times(0.5)}), tmp_path, tolerance)
    assert shown(report) == ["gradients: mean_instead_of_sum"]


def test_a_factor_of_one_explains_nothing(tmp_path):
    """The difference is 2 to 4 times the tolerance, and no smaller with the factor."""
    report = compared(*pair({}, {"gradient": little_noise}), tmp_path, given_tolerance(1e-2))
    assert [each.cause for each in report.faults] == ["unexplained_gradient"]


@pytest.mark.parametrize("is_reordered", [True, False])
def test_the_order_of_flattened_axes_is_named_by_the_sizes_of_rows(is_reordered):
    """Under replay, the logits differ: the rows of the gradient are only of similar size."""
    generator = np.random.default_rng(0)
    activity = generator.random((16 * 9, 1)) ** 2
    order = np.arange(16 * 9).reshape(16, 9).T.ravel()
    gradients = [activity * generator.normal(size=(16 * 9, 10)) for _ in range(2)]
    if is_reordered:
        gradients[1] = gradients[1][order]
    variable = types.SimpleNamespace(name="dense", layout="IO")
    trace = types.SimpleNamespace(variables=[variable])
    steps = types.SimpleNamespace(first=types.SimpleNamespace(trace=trace))
    first, second = ({"dense": array} for array in gradients)
    causes = [c for c, *_ in reordered_rows(steps, first, second, ["dense"], lambda name: 1e-4)]
    assert causes == ["flatten_order"] * is_reordered


def test_arrays_of_a_step_are_freed_after_it(tmp_path, one, monkeypatch):
    held = []
    monkeypatch.setattr(RecordedStep, "release", lambda step: held.append(len(step._read)))
    compared(one, Script(replicas=2, replay=one), tmp_path)
    assert len(held) == 3 * len(one.steps) and all(held)


# --- The command ---------------------------------------------------------------------------------


def test_the_command_reports_a_fault(tmp_path, one):
    first = one.write(tmp_path / "one.npz")
    second = Script(replicas=2, replay=one, reduce=None).write(tmp_path / "two.npz")
    permuted = Script(permute=1, replay=one, steps=(0,)).write(tmp_path / "permuted.npz")
    out = tmp_path / "out"
    result = run_here("verify", f"--traces={first},{second},{permuted}", f"--out={out}")
    assert result.returncode == 9
    assert "two.npz is not the training of one.npz: not all reduced" in result.stdout
    record = json.loads((out / "verify.json").read_text())
    assert list(record["trainings"]) == ["one.npz", "two.npz"]
    assert record["trainings"]["two.npz"]["stages"]["all-reduce"] == "fault"
    page = (out / "report.html").read_text()
    assert "not all reduced" in page and "call the wrapped model" in page


def test_the_command_ends_with_0_if_all_is_clean(tmp_path, one):
    """Also of a file for each rank, with other states and a weight that only one has."""
    first = one.write(tmp_path / "one.npz")
    second = Script(replicas=2, renamed={"dense/bias": "other"}).write(tmp_path / "two.npz")
    names = "--name_map=other=dense/bias"
    out = tmp_path / "out"
    result = run_here("verify", f"--traces={first},{second}", names, f"--out={out}")
    assert result.returncode == 0, result.stderr
    assert "two.npz is the training of one.npz: every stage is clean" in result.stdout
    assert "0.0001, the default" in result.stdout
    model = json.loads((out / "verify.json").read_text())["trainings"]["two.npz"]["about"]
    assert model.startswith("torch 1.0, 2 replicas, gradients of steps ")
    assert "not matched" not in model


@pytest.mark.parametrize(
    ("flags", "code", "text"),
    [
        (["--traces={missing}"], 3, "does not exist"),
        (["--traces={damaged}"], 3, "damaged.npz"),
        (["--traces={permuted}"], 3, "is recorded with permute="),
        (["--traces={one},{permuted},{later}"], 3, "is the second recording with permute="),
        (["--traces={one}", "--recipe=fast"], 2, "--recipe has no part in --traces"),
        (["--traces={one}", "--name_map=a"], 2, "--name_map=a must be OTHER=FIRST"),
        (["--tolerance=0.1"], 2, "--tolerance needs --traces"),
        (["--traces={one},{fourth}"], 3, "has no step in common"),
    ],
)
def test_what_cannot_be_verified_is_refused_in_one_line(tmp_path, one, flags, code, text):
    names = ("missing", "damaged", "permuted", "later", "one", "fourth")
    paths = {name: tmp_path / f"{name}.npz" for name in names}
    one.write(paths["one"])
    for name in ("permuted", "later"):
        Script(permute=1, steps=(0,)).write(paths[name])
    Script(steps=(4,)).write(paths["fourth"])
    paths["damaged"].write_bytes(paths["one"].read_bytes()[:-100])
    result = run_here("verify", *(f.format(**paths) for f in flags), f"--out={tmp_path / 'out'}")
    assert result.returncode == code and text in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_recordings_without_a_common_weight_are_refused(tmp_path, one):
    first = loaded(one, tmp_path)
    with pytest.raises(DataError, match=r"no weight matches .*; pass --name_map"):
        pairs_of(first, first, Matching((), (), (), ()))
