"""Recordings of a small training against each other: right ones are clean, faults are named."""

import dataclasses
import json
import re
import types

import numpy as np
import pytest

from in_process import run_here
from lockstep.answer.text import notes_of, sentence_of
from lockstep.answer.verdict import FAULT
from lockstep.comparison import compare_traces, not_trained, verify_against, verify_alone
from lockstep.data.trace import SEED, STATE, STATISTIC, WEIGHT, About, Trace, Variable
from lockstep.numeric.tolerance import Tolerance
from lockstep.reference import of_pair, tolerance_of
from lockstep.stages import start
from script_samples import WEIGHTS, Script, adam, batch_of, examples, mean_of, sgd, split_evenly

ADAM, ADAMW = {"optimizer": "Adam"}, {"class": "AdamW", "framework": "torch"}
LION = {"optimizer": {"class": "Lion", "framework": "torch"}}


@pytest.fixture(scope="module")
def one():
    return Script()


@pytest.fixture(scope="module")
def tolerance(one):
    """That of permuted examples."""
    permuted = Script(permute=1, replay=one, steps=(0, 1))
    return tolerance_of(one.trace(), permuted.trace("permuted.npz"), {}, None)


def of_replicas(trace, **per_replica):
    """Returns a trace each of whose files has its own value of some keys."""
    trace.of_replica = {
        replica: dataclasses.replace(
            trace.about, **{key: values[replica] for key, values in per_replica.items()}
        )
        for replica in range(trace.about.num_replicas)
    }
    return trace


def compared(first, second, tolerance=None):
    tolerance = tolerance or tolerance_of(first.trace(), None, {}, None)
    return verify_against(first.trace(), second.trace("two.npz"), {}, tolerance)


def shown(verdict):
    """Returns stages and causes of the findings; * marks what is by design, ? not compared."""
    marks = {"fault": "", "by design": "*", "not compared": "?"}
    return [f"{f.stage}: {f.detail}{marks[f.status]}" for f in verdict.findings]


# --- Changes of a training -----------------------------------------------------------------------


def three_quarters(rows, replica, count):
    size = 3 * len(rows) // 4
    return rows[:size] if replica == 0 else rows[size:]


def all_on_second(rows, replica, count):
    return rows if replica == 1 else rows[:0]


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
    return [[in_16_bits(array) for array in arrays] for arrays in mean_of(sent)]


def summed(sent):
    return [[np.float32(len(sent)) * array for array in arrays] for arrays in mean_of(sent)]


def clip(replica, gradients):
    norm = np.sqrt(sum(float((g**2).sum()) for g in gradients))
    return [g * np.float32(min(1, 0.1 / norm)) for g in gradients]


def without_bias(*replicas):
    def clip(replica, gradients):
        return [gradients[0], (replica not in replicas) * gradients[1]]

    return clip


def reduced_in_part(sent):
    """Of two micro-batches, the first is averaged over the replicas."""
    first = [[np.float32(0.3) * np.abs(array) for array in arrays] for arrays in sent]
    return [
        [common + own - part for common, own, part in zip(*arrays, strict=True)]
        for arrays in zip(mean_of(first), sent, first, strict=True)
    ]


def clip_on_first(replica, gradients):
    return [g * np.float32(0.5) for g in gradients] if replica == 0 else gradients


def times(factor):
    return {"gradient": lambda s, r, g: [np.float32(factor) * a for a in g]}


def padded(number, start=0, step=2):
    """Batches, the last of which has further examples of an earlier step of the epoch."""

    def batch(current):
        rows = batch_of(current)
        more = batch_of(current - current % 3 + start)[:number]
        return np.append(rows, more) if current % 3 == step else rows

    return {"batch": batch}


def twice_as_large(step):
    return np.append(batch_of(2 * step), batch_of(2 * step + 1))


def of_kernel(factor):
    return {"gradient": lambda s, r, g: [np.float32(factor) * g[0], g[1]]}


def apart(script, replica, gradients):
    return [gradients[0] + 0.01 * np.sin(1 + 9 * gradients[0]), gradients[1]]


NOISY = {"gradient": apart}


def little_noise(script, replica, gradients):
    kernel, bias = gradients
    other = np.random.default_rng(5).normal(size=kernel.shape)
    size = np.linalg.norm(kernel) / np.linalg.norm(other)
    return [kernel + np.float32(2e-2 * size) * other.astype(np.float32), bias]


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


def of_kernel_only(script, weights, gradients, state):
    sgd(script, weights[:1], gradients[:1], state)


def in_16_bits(array):
    return (array.view(np.uint32) & 0xFFFF0000).view(np.float32)


def clipped_inside(script, weights, gradients, state):
    sgd(script, weights, clip(0, gradients), state)


def first_moment_corrected(script, weights, gradients, state):
    before = [weight.copy() for weight in weights]
    adam(script, weights, gradients, state)
    for i, (weight, old) in enumerate(zip(weights, before, strict=True)):
        left = 1 - script.settings["beta_1"] ** float(state[3 * i + 2])
        root = np.sqrt(state[3 * i + 1]) + np.float32(script.settings["epsilon"])
        weight[:] = old - np.float32(script.settings["learning_rate"] / left) * state[3 * i] / root


def twice(script, weights, gradients, state):
    for _ in range(2):
        adam(script, weights, gradients, state)


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
KERNEL_ONLY = {"settings": [[{"learning_rate": 0.1, "momentum": 0.9, "weights": WEIGHTS[:1]}]] * 4}
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


def layers(*settings, off=()):
    """Layers of a script; those in evaluation mode in each of its steps."""
    listed = [{"weights": [], **each} for each in settings]
    return {"about": {"layers": listed, **({"in_evaluation": [list(off)] * 4} if off else {})}}


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
SYNCED = {**NORM, "synchronized": True}
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


def moments_in_16_bits(script):
    for index in (4, 7):
        edit(in_16_bits, "after", None, index)["edit"](script)


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


def with_average(changes_on_all):
    """A weight that the optimizer does not have, which the script changes between the steps."""

    def edited(script):
        for position in range(1, len(script.steps) + 1):
            for replica in range(script.replicas):
                value = position if changes_on_all or replica == 0 else 1
                for kind in ("before", "after"):
                    name = f"{position}/{kind}/{replica}/6"
                    script.arrays[name] = np.full(5, value, np.float32)

    return {"edit": edited, "more_variables": [Variable("average", WEIGHT)]}


def without_state(script):
    """Optimizer state is created in each step, and lost before the next one."""
    for name in [name for name in script.arrays if "/before/" in name]:
        if name.endswith(("/4", "/5")):
            del script.arrays[name]


def seeds(state_of):
    """A variable with the state of a layer's generator."""

    def edited(script):
        for position, step in enumerate(script.steps, start=1):
            for replica in range(script.replicas):
                for later, kind in enumerate(("before", "after")):
                    state = np.array(state_of(step, replica, later), np.uint32)
                    script.arrays[f"{position}/{kind}/{replica}/6"] = state

    return {"edit": edited, "more_variables": [Variable("drop/seed", SEED)]}


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


def without_gradient(of_sum, *replicas):
    """Some replicas send no gradient of the bias; others may send the sum in its place."""

    def edited(script):
        for position, _ in enumerate(script.steps, start=1):
            raw = [f"{position}/raw/{replica}/1" for replica in range(2)]
            if of_sum:
                script.arrays[raw[0]] = script.arrays[raw[0]] + script.arrays[raw[1]]
            for replica in replicas:
                del script.arrays[raw[replica]]
                if len(replicas) == 2:
                    for kind in ("sums", "clipped"):
                        del script.arrays[f"{position}/{kind}/{replica}/1"]

    return {"edit": edited}


def not_cleared(script, replica, gradients):
    """The gradients of this step are added to those of the previous one."""
    step = max(script.states)
    kept = [script.arrays.get(f"{step}/clipped/{replica}/{i}", np.float32(0)) for i in range(2)]
    return [old + gradient for old, gradient in zip(kept, gradients, strict=True)]


def two_losses(script):
    """A first loss whose gradients the script clears: only the second one counts."""
    for name in [name for name in script.arrays if "/loss/" in name]:
        own = script.arrays[name]
        script.arrays[name], script.arrays[f"{name[:-1]}1"] = own + np.float32(7), np.float32(7)


def sends_more(script, replica, gradients):
    return [gradient + np.float32(0.3) for gradient in gradients]


def clears_more(script):
    """The script clears gradients before those of the step itself."""
    for name in [name for name in script.arrays if "/raw/" in name]:
        more = np.full_like(script.arrays[name], 0.3)
        script.arrays[name.replace("/raw/", "/removed/")] = more


def sums_of_a_part(script):
    """The recorded sums are those of the first micro-batch, which was all that was reduced."""
    for name in [name for name in script.arrays if "/sums/" in name]:
        position, _, _, index = name.split("/")
        sent = [script.arrays[f"{position}/raw/{r}/{index}"] for r in range(script.replicas)]
        script.arrays[name] = np.float32(0.1) * (sent[0] + sent[1]) ** 2


def without(kind, *places):
    """Returns what removes the arrays of a kind: all, or those of `REPLICA/INDEX`."""

    def edited(script):
        for name in [name for name in script.arrays if f"/{kind}/" in name]:
            if not places or name.split(f"/{kind}/")[1] in places:
                del script.arrays[name]

    return edited


def without_first_state(script):
    """As PyTorch records it: the optimizer's state does not exist before the first update."""
    for name in [n for n in script.arrays if n.startswith("1/before/")]:
        if int(name.split("/")[-1]) >= 4:
            del script.arrays[name]


def put_together(script):
    """Each replica updates its rows; all record the whole weights."""
    for name, array in script.arrays.items():
        position, kind, _, index = name.split("/")
        if kind == "after" and int(index) < 2:
            size = -(-len(array) // 2)
            array[:size] = script.arrays[f"{position}/after/0/{index}"][:size]
            array[size:] = script.arrays[f"{position}/after/1/{index}"][size:]


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
    script.renamed = {"dense/kernel": "fc.weight", "dense/bias": "fc.bias", "IO": "OI"}


def scaled(by, *kinds):
    """Gradients are recorded before a script divides them."""

    def edited(script):
        for name in script.arrays:
            if name.split("/")[1] in kinds:
                script.arrays[name] = np.float32(by) * script.arrays[name]

    return {"edit": edited}


def clipped_alone(script):
    for kind in ("raw", "sums"):
        without(kind)(script)


def keys(of_step, own_of=None):
    """The keys of one program for all devices; in a replay, its own keys were replaced."""

    def edited(script):
        for position, step in enumerate(script.steps, start=1):
            key, own = (np.array([0, of(step)], np.uint32) for of in (of_step, own_of or of_step))
            script.arrays[f"{position}/random/0/0"] = key.view(np.uint8)
            for replica in range(script.replicas):
                script.arrays[f"{position}/before/{replica}/6"] = key
                where = f"{position}/before" if position == 1 else f"{position - 1}/after"
                for i in range(6) if script.replay else ():
                    array = script.arrays[f"{where}/{replica}/{i}"]
                    script.arrays[f"{position}/replaced/{replica}/{i}"] = array
                    script.arrays[f"{position}/replaced/{replica}/6"] = own

    return {"edit": edited}


# --- Pairs: what the reference has, what the other has, and what is found ------------------------

TWO = {"replicas": 2}
JAX = {"about": {"framework": "jax", "layers": ()}}
CLIPPED, KEYS = {**JAX, "clip": clip}, {**JAX, "more_variables": [Variable("key", SEED)]}
RIGHT = {
    **{f"{n} replicas": ({}, {"replicas": n}) for n in (1, 2, 3, 4)},
    "Adam": (ADAM, TWO),
    "Adam without a first state": (
        {**ADAM, "edit": without_first_state}, {**TWO, "edit": without_first_state}),
    "AdamW": ({**ADAM, "settings": {"weight_decay": 0.01}, "about": {"optimizer": ADAMW}}, TWO),
    "Adam of Keras": ({**ADAM, "framework": "keras"}, TWO),
    "Adam of Keras in float32": (
        {**ADAM, "framework": "keras"}, {"update": corrected_in_float32}
    ),
    "AMSGrad": ({**ADAM, "settings": {"amsgrad": True}}, TWO),
    "wrapped": ({"about": LION}, {**TWO, "about": {"optimizer": {"class": "ZeRO"}}}),
    "an optimizer without a rule": ({"about": LION}, {**TWO, "settings": {"foreach": True}}),
    "weights that no optimizer has": ({"about": KERNEL_ONLY, "update": of_kernel_only}, TWO),
    "state in 16 bits": ({**ADAM, "edit": moments_in_16_bits}, {
        **TWO, "edit": moments_in_16_bits}),
    "Nesterov": ({"settings": {"nesterov": True}}, TWO),
    "plain SGD": ({"settings": {"momentum": 0.0, "weight_decay": 0.01}}, TWO),
    "decay": ({"settings": {"weight_decay": 0.1}}, TWO),
    "weighted shards": ({}, {**TWO, "shard": three_quarters}),
    "a replica without examples": ({}, {**TWO, "shard": all_on_second}),
    "sum of shares": ({}, {
        **TWO, "shard": three_quarters, "about": {"reduction": "sum"}, **times(0.5),
        "reduce": lambda sent: summed(sent),
    }),
    "an unused setting of one replica": (
        {"settings": {"momentum": 0.0}}, {**TWO, "of_replica": {1: {"beta_1": 0.5}}}),
    "clipping after the sum": ({"clip": clip}, TWO),
    "no clipping before the sum": ({}, {**TWO, **clipped_first(1, 1)}),
    "zeros after the sum": ({"clip": without_bias(0, 1)}, TWO),
    "equal random states": ({}, {**TWO, **random_states(lambda step, replica: [0] * 4)}),
    "rows": ({}, {**TWO, "edit": as_rows}),
    "rows in both": ({"edit": as_rows}, {**TWO, "edit": as_rows}),
    "examples of a replica do not use a weight": ({}, {**TWO, **without_gradient(True, 1)}),
    "micro-batches": ({}, {**TWO, "about": {"micro_batches": [2] * 4}, "edit": micro_batches}),
    "layouts": (images("NHWC"), {**TWO, **images("NCHW")}),
    "scaled by the model": ({}, {**TWO, **edit(lambda array: 255 * array, "data")}),
    "other names": ({}, {**TWO, "edit": in_torch}),
    # In JAX, scripts say themselves what they keep.
    "divided after the sum": (JAX, {**TWO, **scaled(6, "raw")}),
    "divided later": (JAX, {**TWO, **scaled(2, "raw", "sums")}),
    "divided and clipped later": (CLIPPED, {**TWO, **scaled(6, "raw", "sums")}),
    "only clipped": (CLIPPED, {**TWO, "edit": clipped_alone}),
    "keys": ({**KEYS, **keys(int)}, {**TWO, **keys(int)}),
    "one key that steps fold": (
        {**KEYS, **keys(lambda step: 5)}, {**TWO, **keys(lambda step: 5)}),
}  # fmt: skip


def pair(first, second):
    """Returns a training, and one with further changes, from the states of the first."""
    reference = Script(**first)
    first = {name: value for name, value in first.items() if name != "edit"}
    return reference, Script(**{**first, "replay": reference, **second})


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_training_is_clean(tolerance, name):
    report = compared(*pair(*RIGHT[name]), tolerance)
    assert shown(report) == []
    assert {"gradients", "update"} <= set(report.checked) and not report.notes


def settings(**given):
    return {"settings": given}


KERAS_ADAM = {**ADAM, "framework": "keras"}
PLACED = {
    "decays_gradient": False,
    **settings(weight_decay=0.1, decay_placement="taken from the weights"),
}


def length_of(gradients):
    """Returns the norm of all gradients."""
    return np.sqrt(sum(np.sum(np.square(g)) for g in gradients))


FAULTS = {
    # Examples.
    "padded to equal shards": ({}, {"replicas": 3, **padded(1)}, "examples: sampler_padding*"),
    "padded in the second epoch": (
        {"steps": (4, 5)}, {"replicas": 3, **padded(1)}, "examples: sampler_padding*"),
    "filled": ({}, {**TWO, **padded(8)}, "examples: sampler_padding*"),
    "filled in part": ({}, {**TWO, **padded(6)}, "examples: other_order"),
    "filled with other examples": (
        {}, {**TWO, **padded(8, start=1)}, "examples: last_batch_dropped"),
    "padded unequally": ({}, {**TWO, **padded(1)}, "examples: other_order"),
    "padded in a full batch": ({}, {**TWO, **padded(2, step=1)}, "examples: other_order"),
    "twice as large": ({}, {**TWO, "batch": twice_as_large}, "examples: other_batch_size"),
    "again on one": (
        {}, {**TWO, "shard": lambda rows, r, count: (
            batch_of(0) if r and set(rows) == {*batch_of(3)} else rows)[r::count]},
        "examples: not_reshuffled"),
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
    "other batches": ({}, {**TWO, "batch": lambda step: np.sort(batch_of(step) * 7 % 40)},
        "examples: other_order"),
    "others": ({}, {**TWO, "inputs": lambda x: x**3}, "examples: other_examples"),
    "scaled inputs": ({}, {**TWO, "inputs": lambda x: 2 * x - 1}, "examples: other_normalisation"),
    "layout": (images("NHWC"), {**TWO, **images("NHWC", "NCHW"), **of_kernel(1.5)},
        "examples: other_layout"),
    # Start and random numbers.
    "weights": ({}, {"seed": 1, "replay": None}, "start: other_initial_weights"),
    "zeros": ({}, {"initial_scale": 0.0, "replay": None}, "start: other_initialiser"),
    "not replayed": ({}, {"seed": 1, "replay": None, "about": {"replayed": "one.npz"}},
        "start: not_replayed"),
    "broadcast": ({}, {**TWO, **edit(lambda a: a + np.float32(1e-3), "before", 1, 0, 1)},
        "start: diverged_replicas; update: unexplained"),
    "state of one replica": ({}, {
        **TWO, "edit": lambda s: [s.arrays.pop(f"1/before/1/{index}") for index in (4, 5)]},
        "start: diverged_replicas"),
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
    "random layers": (DROPOUT, {**TWO, "gradient": apart}, "gradients: random_layers?"),
    # All-reduce.
    "bypassed": ({}, {**TWO, "reduce": None},
        "all-reduce: not_all_reduced"),
    "bypassed and clipped": ({}, {**TWO, "reduce": None, "clip": clip},
        "all-reduce: not_all_reduced"),
    "no wrapper": ({}, {**TWO, "reduce": None, "about": {"reduction": ""}},
        "all-reduce: not_all_reduced"),
    "sums are raw": ({}, {**TWO, "reduce": lambda sent: sent},
        "all-reduce: not_all_reduced"),
    "sums are raw, and clipped": ({}, {**TWO, "reduce": lambda sent: sent, "clip": clip},
        "all-reduce: not_all_reduced"),
    "added after the sum": ({}, {**TWO, "reduce": lambda sent: sent, "edit": sums_of_a_part},
        "all-reduce: not_all_reduced"),
    "only a part is reduced": ({}, {**TWO, "reduce": reduced_in_part},
        "all-reduce: not_all_reduced"),
    "first only": ({}, {**TWO, "reduce": first_only}, "all-reduce: lost_replica"),
    "without the last": ({}, {"replicas": 3, "reduce": without_last}, "all-reduce: lost_replica"),
    "sum": ({}, {**TWO, "reduce": summed}, "all-reduce: sum_instead_of_mean"),
    "a mean that is said to be a sum": ({}, {**TWO, "about": {"reduction": "sum"}}, ""),
    "half": ({}, {**TWO, "reduce": half}, "all-reduce: scaled_gradient"),
    "half in torch": ({}, {**TWO, "reduce": half, "edit": in_torch}, "all-reduce: scaled_gradient"),
    "bfloat16": ({}, {**TWO, "reduce": in_bfloat16}, "all-reduce: reduced_precision"),
    # Clipping.
    "clipped on one": ({}, {**TWO, "clip": clip_on_first},
        "clipping: clipped_on_one_replica"),
    "clipped": ({}, {**TWO, "clip": lambda r, g: [a / 2 for a in g]}, "clipping: other_clipping"),
    "clipped first": ({}, {**TWO, **clipped_first(0.5, 0.25)},
        "clipping: clipped_before_the_sum; update: unexplained"),
    "zeros on one": ({}, {**TWO, "clip": without_bias(1)}, "clipping: frozen"),
    # Gradients and loss.
    "uneven": ({}, {**TWO, "shard": three_quarters, "weighted": False}, "gradients: mean_of_means"),
    "uneven sum": ({}, {
        **TWO, "shard": three_quarters, "weighted": False, "about": {"reduction": "sum"},
        **times(0.5), "reduce": summed,
    }, "gradients: mean_of_means"),
    "other weights": ({}, {
        **TWO, "gradient": lambda s, r, g: [np.float32((0.7, 1.75)[r]) * a for a in g]
    }, "gradients: mean_of_means"),
    "no weights": ({}, {
        **TWO, "gradient": lambda s, r, g: [np.float32((0.7, 1.3)[r]) * a for a in g]
    }, "gradients: scaled_gradient"),
    "clipped by hand": ({}, {
        **TWO, "gradient": lambda s, r, g: [a * np.float32(0.01 / length_of(g)) for a in g]
    }, "gradients: clipped_before_the_sum"),
    "one is larger": ({}, {**TWO, **of_kernel(1.01)}, "gradients: scaled_gradient"),
    "doubled": ({}, {**TWO, **times(2)}, "gradients: sum_instead_of_mean"),
    "halved": ({}, {**TWO, **times(0.5)}, "gradients: mean_instead_of_sum"),
    "tripled": ({}, {**TWO, **times(3)}, "gradients: scaled_gradient"),
    "tripled on one": ({}, {**TWO, "shard": all_on_second, **times(3)},
        "gradients: scaled_gradient"),
    "frozen": ({}, {**TWO, "gradient": lambda s, r, g: [g[0], 0 * g[1]]}, "gradients: frozen"),
    "frozen on one": ({}, {**TWO, "gradient": lambda s, r, g: [g[0], (1 - r) * g[1]]},
        "gradients: frozen"),
    "no gradient on one": ({}, {**TWO, **without_gradient(False, 1),
        "gradient": lambda s, replica, g: [g[0], (replica == 0) * g[1]]}, "gradients: frozen"),
    "no gradient": ({}, {**TWO, **without_gradient(False, 0, 1)}, "gradients: frozen"),
    "not cleared": ({}, {**TWO, "gradient": not_cleared}, "gradients: stale_gradient"),
    "not cleared, as in the first": ({"edit": clears_more}, {**TWO, "gradient": sends_more},
        "gradients: stale_gradient"),
    "a cleared loss": ({"edit": two_losses}, TWO, ""),
    "a cleared loss in both": ({"edit": two_losses}, {**TWO, "edit": two_losses}, ""),
    "noise": ({}, {**TWO, "gradient": apart}, "gradients: unexplained"),
    "noise of one": ({}, {**TWO, "shard": all_on_second, "gradient": apart},
        "gradients: unexplained"),
    "noise of a model that scales": ({}, {
        **TWO, "gradient": apart, **edit(lambda array: 255 * array, "data")
    }, "gradients: unexplained"),
    "loss": ({}, {**TWO, "sums_loss": True},
        "loss: other_loss_reduction; gradients: other_loss_reduction"),
    "other loss": ({}, edit(lambda array: 1.01 * array, "loss"), "loss: other_loss"),
    "not finite": ({}, edit(lambda array: np.float32(np.nan) * array, "loss", position=2),
        "loss: not_finite; loss: other_loss"),
    "weights of examples": ({}, {**times(1.5), "edit": weights_of_examples},
        "gradients: other_loss_reduction"),
    "decay in the loss": ({}, {**TWO, "gradient": decayed_in_loss},
        "gradients: regulariser_repeated"),
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
        "gradients: unexplained"),
    "none and 1": (layers({**CONV, "padding": [0, 0]}), {
        **NOISY, **layers({**CONV, "padding": 1})}, "gradients: other_padding"),
    "strides": (layers(CONV), {**NOISY, **layers({**CONV, "strides": [1, 1]})},
        "gradients: other_layer_settings"),
    "no padding": (layers(CONV), {**NOISY, **layers(KERAS_CONV)}, "gradients: other_padding"),
    "padding before": (layers(CONV), {**NOISY, **layers(PADDED, KERAS_CONV)},
        "gradients: unexplained"),
    "one-sided": (layers(TORCH_PADDED, {**CONV, "padding": [0, 0]}), {
        **NOISY, **layers(SAME_CONV)}, "gradients: unexplained"),
    "epsilon behind padding": (layers(CONV, NORM), {
        **NOISY, **layers(PADDED, KERAS_CONV, KERAS_NORM)}, "gradients: other_batch_norm_epsilon"),
    "both": (layers(CONV, NORM), {**NOISY, **layers(SAME_CONV, KERAS_NORM)},
        "gradients: other_batch_norm_epsilon; gradients: other_padding"),
    "without effect": (layers(CONV, OWN_NORM, {**NORM, "name": "last"}), {
        **NOISY, **layers(KERAS_CONV, OWN_NORM, {**NORM, "epsilon": 1e-3})},
        "gradients: other_batch_norm_epsilon"),
    "local norms": (layers(NORM), {**TWO, **NOISY}, "gradients: local_statistics?"),
    "other norms": (layers({**NORM, "class": "SyncBatchNorm"}), {
        **TWO, **NOISY, **layers(NORM)}, "gradients: local_statistics"),
    "synchronized norms": (layers(NORM), {**TWO, **NOISY, **layers(SYNCED)},
        "gradients: unexplained"),
    "norms in evaluation": (layers(NORM, off=["bn"]), {
        **TWO, **NOISY, **layers(NORM, off=["bn"])}, "gradients: unexplained"),
    # Update.
    "rate": ({}, {**TWO, **settings(learning_rate=0.2)}, "update: other_learning_rate"),
    "momentum": ({}, {**TWO, **settings(momentum=0.8)}, "update: other_momentum"),
    "no momentum": ({}, {**TWO, **settings(momentum=0.0)}, "update: other_momentum"),
    "dampening": ({}, {**TWO, "about": {"settings": [[{
        "learning_rate": 0.1, "momentum": 0.9, "dampening": 0.5}]] * 4}},
        "update: scaled_gradient; update: other_dampening"),
    "nesterov": ({}, {**TWO, **settings(nesterov=True)}, "update: other_nesterov"),
    "decay": ({}, {**TWO, **settings(weight_decay=0.1)}, "update: other_weight_decay"),
    "hidden rate": ({}, {**TWO, **with_settings(learning_rate=0.3)}, "update: other_learning_rate"),
    "hidden rate of Adam": (ADAM, {
        **TWO, **with_settings(learning_rate=0.03), "edit": without_first_state},
        "update: other_learning_rate"),
    **{
        f"{setting} of one replica": (given, {**TWO, "of_replica": {1: {setting: value}}},
            f"update: other_{setting}")
        for given, setting, value in (
            ({}, "learning_rate", 0.3), ({}, "momentum", 0.5), ({}, "nesterov", True),
            ({}, "weight_decay", 0.01), (ADAM, "beta_1", 0.5), (ADAM, "beta_2", 0.9),
            (ADAM, "epsilon", 1e-3),
        )
    },
    "learning rate of a replica's rows": ({}, {**TWO, "edit": put_together,
        "of_replica": {1: {"learning_rate": 0.3}}}, "update: other_learning_rate"),
    "hidden decay": (settings(weight_decay=0.1), {**TWO, **with_settings(weight_decay=0.0)},
        "update: other_weight_decay"),
    "hidden placement": (settings(weight_decay=0.1), {**TWO, "decays_gradient": False},
        "update: weight_decay_placement"),
    "hidden decay without one": ({}, {**TWO, **with_settings(weight_decay=0.05)},
        "update: other_weight_decay"),
    "hidden clipping": ({}, {**TWO, "update": clipped_inside}, "update: scaled_gradient"),
    "recorded clipping": ({}, {**TWO, "update": clipped_inside, **settings(max_grad_norm=0.1)},
        "update: other_clipping"),
    "no correction of one moment": (ADAM, {"update": first_moment_corrected},
        "update: bias_not_corrected"),
    "hidden nesterov": ({}, {**TWO, **with_settings(nesterov=True)}, "update: other_nesterov"),
    "no update": ({}, {**TWO, "update": no_update}, "update: not_updated"),
    "not corrected": (ADAM, {"update": not_corrected}, "update: bias_not_corrected"),
    "stale": (ADAM, {"update": stale}, "update: not_updated"),
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
    "AMSGrad": (ADAM, {**TWO, **settings(amsgrad=True)}, "update: other_optimizer"),
    "rate of an unknown optimizer": ({"about": LION}, {**TWO, **settings(learning_rate=0.2)},
        "update: other_learning_rate"),
    "hidden rate of an unknown optimizer": ({"about": LION}, {
        **TWO, **with_settings(learning_rate=0.2)}, "update: other_learning_rate"),
    "hidden momentum of an unknown optimizer": ({"about": LION}, {
        **TWO, **with_settings(momentum=0.5)}, "update: unexplained"),
    "rho": ({"about": LION, **settings(rho=0.99)}, {
        **TWO, "settings": {"rho": 0.9}, "update": with_settings(momentum=0.5)["update"]},
        "update: other_optimizer"),
    "no update by an unknown optimizer": ({"about": LION}, {**TWO, "update": no_update},
        "update: not_updated"),
    "twice": ({**ADAM, "about": {"optimizer": {"class": "Lamb", "framework": "torch"}}}, {
        **TWO, "update": twice}, "update: updated_twice"),
    "a weight that the optimizer does not have": ({}, {
        **TWO, "about": KERNEL_ONLY, "update": of_kernel_only}, "update: not_updated"),
    "moments in 16 bits": (ADAM, {**TWO, "edit": moments_in_16_bits},
        "update: reduced_precision"),
    "unknown": ({"about": LION}, {
        **TWO, **edit(lambda array: 1.01 * array, "after", 1, 0)}, "agreement: diverged_replicas"),
    # Statistics.
    "norm momentum": ({}, {**TWO, "norm_momentum": 0.01}, "statistics: other_batch_norm_momentum"),
    "unbiased": ({}, {**TWO, "unbiased": True}, "statistics: unbiased_variance"),
    "local norm": ({}, {**TWO, "local_norm": True}, "statistics: local_statistics?"),
    "unbiased of frameworks": ({"framework": "keras", **settings(momentum=0.0)}, {
        **TWO, "framework": "torch", "unbiased": True}, "statistics: unbiased_variance*"),
    "momentum and bias": (with_norm(0.1, unbiased=True), with_norm(0.01, unbiased=False),
        "statistics: other_batch_norm_momentum; statistics: unbiased_variance"),
    "other variance": (with_norm(0.1), {"edit": other_variance}, "statistics: other_statistics"),
    # In JAX, scripts say themselves what they keep.
    "sum hidden by clipping": (CLIPPED, {**TWO, "reduce": summed, **scaled(2, "raw")},
        "gradients: sum_instead_of_mean"),
    "sum in JAX": (JAX, {**TWO, "reduce": summed}, "all-reduce: sum_instead_of_mean"),
    "scaled and kept": (JAX, {**TWO, **times(3)}, "gradients: scaled_gradient"),
    "own statistics, gradients of all": (JAX, {**TWO, "local_norm": True},
        "statistics: local_statistics"),
    "key not split": ({**KEYS, **keys(int)}, {**TWO, **keys(int, lambda step: 0)},
        "random numbers: random_numbers_repeated"),
    "another key": ({**KEYS, **keys(int)}, {**TWO, **keys(int, lambda step: step + 9)}, ""),
    # Changes that no check was made for.
    "flipped raw that nothing uses": ({}, {**TWO, **flip("raw")}, ""),
    "flipped sums that nothing uses": ({}, {**TWO, **flip("sums")}, ""),
    "flipped clipped": ({}, {**TWO, **flip("clipped")},
        "clipping: unexplained; update: clipped_on_one_replica"),
    "flipped after": ({}, {**TWO, **flip("after")}, "update: changed_on_its_own"),
    "flipped before": ({}, {**TWO, **flip("before")},
        "start: diverged_replicas; update: changed_on_its_own"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(tolerance, name):
    first, second, expected = FAULTS[name]
    report = compared(*pair(first, second), tolerance)
    assert "; ".join(shown(report)) == expected


ALL, KERNEL, BIAS = (0, 1, 2, 3), ("dense/kernel",), ("dense/bias",)
FIRST, SECOND, BOTH = ("replica 0",), ("replica 1",), ("replica 0", "replica 1")
PLACES = {
    "same shard": (ALL, BOTH, ()),
    "broadcast": ((0,), SECOND, KERNEL),
    "seeds": (ALL, BOTH, ("drop/seed",)),
    "repeated": (ALL[1:], BOTH, ()),
    "bypassed": (ALL, BOTH, KERNEL + BIAS),
    "without the last": (ALL, ("replica 2",), KERNEL + BIAS),
    "clipped on one": (ALL, FIRST, ()),
    "clipped first": (ALL, BOTH, ()),
    "frozen": (ALL, (), BIAS),
    "no gradient on one": (ALL, SECOND, BIAS),
    "no gradient": (ALL, (), BIAS),
    "not cleared": (ALL[1:], (), KERNEL + BIAS),
    "not finite": ((1,), FIRST, ()),
    "reshuffled": ((3,), (), ()),
    "dropped": ((2, 3), (), ()),
    "nesterov": (ALL, (), ()),
    "flipped after": ((1,), SECOND, KERNEL),
    "local norm": (ALL, (), ("norm/moving_mean", "norm/moving_variance")),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_finding_names_steps_replicas_and_weights(tolerance, name):
    first, second, _ = FAULTS[name]
    found = compared(*pair(first, second), tolerance).findings[0]
    assert (found.steps, found.items, found.tensors) == PLACES[name]


def test_loaders_with_equal_seeds_are_named_where_examples_differ(one):
    """Augmentations that are drawn by the workers of a loader."""

    def drawn(seeds, shift):
        return Script(
            replicas=2, about={"loader_seeds": seeds}, inputs=lambda x: np.roll(x, shift, axis=1)
        )

    assert shown(compared(one, drawn((7,), 1)))[0] == "random numbers: same_random_numbers"
    assert shown(compared(one, drawn((), 1)))[0] == "examples: other_examples"
    assert not compared(one, drawn((7,), 0)).findings


def test_a_remedy_has_the_code_that_was_seen():
    passes = (("ddp", "no_sync"), ("module",), ("",), ("ddp",))
    words = ("is_last", "ddp.module(x)", "dist.all_reduce", "hooks of weights")
    for seen, told in zip(passes, words, strict=True):
        second = Script(replicas=2, steps=(0,), reduce=None, about={"passes": (seen,)})
        verdict = compared(Script(steps=(0,)), second)
        assert "not_all_reduced" in {finding.detail for finding in verdict.faults}
        text = str(verdict)
        assert told in text and not any(other in text for other in words if other != told)


def test_initial_values_of_another_spread_have_another_initialiser(one, monkeypatch):
    monkeypatch.setattr(start, "_LARGE", 36)  # The kernel has fewer than 100 values.
    for scale, cause in ((0.1, "other_initial_weights"), (0.2, "other_initialiser")):
        second = Script(seed=1, initial_scale=scale)
        assert shown(compared(one, second)) == [f"start: {cause}"]


def test_a_training_from_its_own_states_is_compared_in_its_first_step(one):
    verdict = compared(one, Script(replicas=2))
    assert not verdict.findings and "gradients" in verdict.checked
    assert verdict.idle.keys() == {1, 2} and not verdict.notes
    (note,) = notes_of(verdict)
    assert note.endswith("the step starts from another state: record it with replay=")
    assert " is the one.npz in step 0, step 3: every" in sentence_of(verdict)


def test_faulty_steps_from_their_own_states_are_said_to_be_not_compared(one):
    verdict = compared(one, Script(replicas=2, reduce=None))
    assert shown(verdict) == ["all-reduce: not_all_reduced"] and not verdict.idle
    assert verdict.notes[-1].endswith("are not compared: record them with replay=")


def test_other_initial_weights_that_replay_has_replaced_are_a_fault(one):
    def replaced(script):
        for name in [n for n in script.arrays if re.fullmatch(r"1/before/./[01]", n)]:
            script.arrays[name.replace("before", "replaced")] = script.arrays[name] + apart

    for apart in (0, 1):
        verdict = compared(one, Script(replicas=2, replay=one, edit=replaced))
        assert verdict.ok != bool(apart)
    assert shown(verdict)[0].startswith("start: other_initial")
    assert verdict.faults[0].text.endswith("before replay= replaced them")


def zero_in(*steps):
    """Gradients of 0 in some steps."""

    def gradient(script, replica, gradients):
        return [g * (len(script.states) - 1 not in steps) for g in gradients]

    return {"gradient": gradient}


def without_gradients(script):
    for name in [n for n in script.arrays if n.split("/")[1] in ("raw", "sums", "clipped")]:
        del script.arrays[name]


ZERO = "every gradient is 0"
VACUOUS = {  # What both trainings have → why nothing of them is verified, or a note.
    "every gradient is 0": (zero_in(*range(4)), ZERO, ()),
    "and weights decay": (zero_in(*range(4)) | settings(weight_decay=0.1), ZERO, ()),
    "in some steps": (zero_in(1, 3), "", (f"nothing to verify in step 1, step 3: {ZERO}",)),
    "of some weights": (
        {"clip": without_bias(0, 1), "gradient": lambda s, r, g: [g[0], g[1] * 0]}, "",
        ("nothing to verify in the gradients of 1 of 2 weights, which are 0 in every step:"
         " dense/bias",),
    ),
    "nothing is trained": (
        {"edit": without_gradients} | settings(learning_rate=0.0),
        "no gradient is recorded, and no weight changes", (),
    ),
    "no gradient is recorded": (
        {"edit": without_gradients},
        "gradients of no step could be compared: record them in both scripts, and the second one"
        " with replay=", (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VACUOUS)
def test_a_training_of_which_nothing_can_be_verified_is_not_clean(name):
    changes, why, notes = VACUOUS[name]
    first = Script(**changes)
    verdict = compared(first, Script(**changes, **TWO, replay=first))
    assert (verdict.status, verdict.ok) == ("nothing to verify" if why else "clean", not why)
    if why:
        assert sentence_of(verdict).endswith(f": nothing to verify: {why}")
    assert tuple(notes_of(verdict)) == notes
    alone = verify_alone(first.trace())
    assert alone.ok == (not why or name == "no gradient is recorded")
    assert tuple(notes_of(alone)) == notes


def test_a_gradient_of_0_in_one_recording_is_a_fault():
    zero = zero_in(*range(4))
    for changes, others in (({}, zero), (zero, {"gradient": lambda script, r, g: g})):
        assert compared(*pair(changes, {**TWO, **others})).status == "fault"


ALONE = {
    "right": ({}, ""),
    "few different examples": (  # As in the truth table of XOR: four rows, many times.
        {"inputs": lambda x: np.tile(examples()[0][:2], (len(x), 1))[: len(x)]},
        "examples: not_reshuffled*",
    ),
    "same shard": ({"shard": same_rows}, "examples: same_examples"),
    "again": ({"batch": lambda step: batch_of(step % 3)}, "examples: not_reshuffled*"),
    "summed": ({"reduce": summed}, "all-reduce: sum_instead_of_mean"),
    "average of weights": (with_average(True), ""),
    "average on the first": (with_average(False), "start: diverged_replicas"),
    "lost state": ({**settings(momentum=0.0), "edit": without_state}, "start: reset_state"),
    "state of 0": (
        edit(lambda array: array * np.float32(0), "before", index=4, position=2),
        "start: reset_state; update: unexplained",
    ),
    "overflow in the sum": (
        edit(lambda array: np.float32(np.nan) * array, "sums", position=2),
        "all-reduce: not_finite",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_a_recording_is_checked_alone(name):
    changes, expected = ALONE[name]
    verdict = verify_alone(Script(replicas=2, **changes).trace())
    assert "; ".join(shown(verdict)) == expected
    stages = {"start", "examples", "loss", "all-reduce", "clipping", "update", "agreement"}
    assert {*verdict.checked} == stages | {"statistics"}
    unknown = Script(about=LION, **changes)
    verdict = verify_alone(unknown.trace())
    assert "update" not in verdict.checked and "loss" in verdict.checked


def test_evaluation_mode_of_some_replicas_is_named(tolerance):
    """Only of layers for which it matters, or if gradients differ."""
    on, off = ([],) * 4, (["drop"],) * 4
    for rate, expected in ((0.5, ["forward: inference_mode"]), (0.0, [])):
        own = {**layers({"name": "drop", "class": "Dropout", "rate": rate}), **TWO}
        own["about"]["in_evaluation"] = on
        verdict = verify_alone(of_replicas(Script(**own).trace(), in_evaluation=(on, off)))
        assert shown(verdict) == expected
        items = [finding.items for finding in verdict.findings]
        assert items == [("replica 1",)] * len(expected)
        assert not shown(verify_alone(of_replicas(Script(**own).trace(), in_evaluation=(off, off))))
    about = {"layers": DROPOUT["about"]["layers"], "in_evaluation": on}
    first = Script(about=about)
    for modes, cause in ((on, "random_layers?"), (off, "inference_mode")):
        own = {**TWO, **NOISY, "about": {**about, "in_evaluation": modes}}
        second = Script(**own, replay=first)
        assert f"gradients: {cause}" in shown(compared(first, second, tolerance))


def test_statistics_of_synchronised_layers_are_equal_on_all_replicas():
    """At least on those of a group: SyncBatchNorm may have process groups."""
    norm = {"name": "norm", "class": "SyncBatchNorm", "weights": ["norm/moving_mean"]}
    for replicas, changed, mark in ((2, [1], ""), (3, [1], ""), (4, [1, 2], "*")):
        script = Script(replicas=replicas, about={"layers": [norm]}, steps=(0,))
        for replica in changed:
            script.arrays[f"1/after/{replica}/2"] = script.arrays["1/after/0/2"] + 1
        assert shown(verify_alone(script.trace())) == [f"statistics: local_statistics{mark}"]


def own_states(*changed):
    """Returns a function that adds the state which each replica had before one was loaded."""

    def edit(script):
        for key, array in list(script.arrays.items()):
            position, kind, replica, index = key.split("/")
            if kind == "after" and position in "12":
                own = array + 1 if (position, int(replica), index) in changed else array
                script.arrays[f"{int(position) + 1}/replaced/{replica}/{index}"] = own.copy()

    return edit


def test_the_own_states_of_a_replayed_training_are_compared(one):
    given = {"replicas": 2, "replay": one, "about": {"replayed": "one.npz"}}
    assert not compared(one, Script(**given, edit=own_states())).findings
    second = compared(one, Script(**given, edit=own_states(("1", 1, "0"))))
    both = compared(one, Script(**given, edit=own_states(("1", 0, "0"), ("1", 1, "0"))))
    for verdict, items in ((second, SECOND), (both, ("replica 0", "replica 1"))):
        assert shown(verdict) == ["start: changed_on_its_own"]
        assert (verdict.findings[0].items, verdict.findings[0].steps) == (items, (1,))
    first_step = own_states(("1", 1, "0"))

    def without_the_step_before(script):
        first_step(script)
        for key in [key for key in script.arrays if key.startswith("1/after")]:
            del script.arrays[key]

    verdict = compared(one, Script(**given, edit=without_the_step_before))
    assert shown(verdict) == ["start: diverged_replicas"]


def test_optimizer_state_that_is_lost_at_a_resume_is_named():
    one = Script(steps=(1, 2), settings={"momentum": 0.9})
    momenta = [i for i, v in enumerate(one.trace().about.variables) if v.kind == STATE]

    def without_state(script):
        for replica in range(2):
            for index in range(len(one.trace().about.variables)):
                before = script.arrays[f"1/before/{replica}/{index}"]
                script.arrays[f"1/replaced/{replica}/{index}"] = before * (index not in momenta)

    given = {"replicas": 2, "replay": one, "steps": (1, 2), "settings": {"momentum": 0.9}}
    given["about"] = {"replayed": "one.npz"}
    assert momenta and not compared(one, Script(**given)).findings
    lost = Script(**given, edit=without_state)
    assert shown(compared(one, lost)) == ["start: not_restored"]


def test_a_reference_that_computes_each_shard_hides_nothing(tolerance):
    """Not even with BatchNorm that normalises each replica's own examples."""
    one = Script(**layers(NORM))
    for key in [key for key in one.arrays if "/data/" in key and key.endswith("/0")]:
        count = len(one.arrays[key])
        numbers = [split_evenly(np.arange(count), replica, 2) for replica in (0, 1)]
        one.arrays[key.replace("data", "shards")] = np.isin(np.arange(count), numbers[1]) * 1
    for shard, mark in ((split_evenly, ""), (three_quarters, "*")):
        second = Script(**TWO, **NOISY, **layers(NORM), shard=shard)
        cause = "local_statistics?" if mark else "unexplained"
        assert f"gradients: {cause}" in shown(compared(one, second, tolerance))


def test_gradients_behind_local_statistics_are_not_compared(tolerance):
    one, local = Script(**layers(NORM)), layers(NORM)
    verdict = compared(one, Script(gradient=little_noise, **TWO, **local), tolerance)
    assert "gradients: local_statistics?" in shown(verdict)
    assert (verdict.status, verdict.ok) == ("not compared", False)
    text = " ".join(str(verdict).split())
    assert (
        'record the first script again, in one process, with replay="two.npz", shards="each"'
        in text
    )


def test_a_replica_that_does_not_use_a_weight_sends_nothing():
    """Its part of the sum is 0; where the sum is wrong, that is found."""
    unused = {
        "replicas": 2, "edit": without("raw", "1/1"),
        "gradient": lambda s, replica, g: [g[0], (replica == 0) * g[1]],
    }  # fmt: skip
    assert not verify_alone(Script(**unused).trace()).findings
    verdict = verify_alone(Script(**unused, reduce=summed).trace())
    assert shown(verdict) == ["all-reduce: sum_instead_of_mean"]
    assert set(verdict.findings[0].tensors) == {*KERNEL, *BIAS}


def test_a_sum_that_one_replica_does_not_receive():
    script = Script(replicas=2, edit=without("sums", "1/1"))
    found = verify_alone(script.trace()).findings[0]
    assert (found.detail, found.items, found.tensors) == ("frozen", SECOND, BIAS)


def test_sums_are_compared_where_it_is_unknown_what_was_sent():
    """As of PyTorch's `fully_shard`."""
    sharded = {"replicas": 2, "about": {"reduction": ""}, "edit": without("raw"), "clip": clip}
    assert not verify_alone(Script(**sharded).trace()).findings
    verdict = verify_alone(Script(**sharded, reduce=lambda sent: sent).trace())
    assert shown(verdict) == ["all-reduce: not_all_reduced"]


def for_two_classes(script, replica, gradients):
    """Makes the bias' gradient that of two classes, (a, -a)."""
    kernel, bias = gradients
    return [kernel, np.array([bias[0], -bias[0], 0], np.float32)]


def test_a_reduced_gradient_that_is_a_multiple_of_each_sent_one_is_right():
    one = Script(gradient=for_two_classes)
    two = {"replicas": 2, "gradient": for_two_classes, "edit": without("sums")}
    right = Script(replay=one, **two)
    assert shown(compared(one, right)) == []
    wrong = Script(replay=one, reduce=None, **two)
    assert shown(compared(one, wrong)) == ["all-reduce: not_all_reduced"]


@pytest.mark.parametrize("left_out", [0, 1])
def test_some_gradients_are_not_all_reduced(left_out):
    def reduce(sent):
        received = mean_of(sent)
        for own, got in zip(sent, received, strict=True):
            got[left_out] = own[left_out]
        return received

    one = Script()
    two = Script(replicas=2, replay=one, reduce=reduce, edit=without("sums"))
    verdict = compared(one, two)
    assert shown(verdict) == ["all-reduce: partly_all_reduced"]
    assert verdict.faults[0].tensors == (WEIGHTS[left_out],)
    assert verdict.faults[0].text.startswith("1 of 2 gradients are not all-reduced, and 1 are")
    assert verdict.status_of("agreement") == "not checked"


# --- Tolerance and causes of all steps ----------------------------------------------------------


def test_the_tolerance_is_computed_from_permuted_examples(one, tolerance):
    assert set(tolerance.spread) == {"dense/kernel", "dense/bias"}
    assert all(0 <= spread < 1e-5 for spread in tolerance.spread.values())
    assert "2 steps of" in tolerance.text and tolerance.times == 8
    given = tolerance_of(one.trace(), None, {}, 0.5)
    assert given.allowed(["dense/kernel"]) == 0.5 and "--tolerance" in given.text
    first, keras = one.trace(), Script(framework="keras").trace()
    assert of_pair(tolerance, first, first) is tolerance
    assert of_pair(given, first, keras) is given
    wider = of_pair(tolerance, first, keras)
    assert wider.times == 64 and "two frameworks" in wider.text
    with pytest.raises(ValueError, match="no step starts from the state of"):
        tolerance_of(first, Script(seed=1, permute=1).trace(), {}, None)


def test_the_tolerance_is_at_least_the_rounding_of_autocast(one):
    """Without an effect of permuting, too: a sum over fewer examples is rounded otherwise."""

    def in_float16(script, replica, gradients):
        return [g.astype(np.float16).astype(np.float32) for g in gradients]

    half = Script(about={"computed_in": "float16"}, gradient=in_float16)
    again = Script(permute=1, replay=half, steps=(0, 1), gradient=in_float16).trace("again.npz")
    two = Script(replicas=2, replay=half, gradient=in_float16).trace("two.npz")
    for permuted in ([], [again]):
        verdicts = compare_traces([half.trace("one.npz"), two, *permuted], {})
        assert [shown(v) for v in verdicts.values()] == [[], []]
        assert "of float16" in verdicts["two.npz"].tolerance
    wrong = Script(replicas=2, replay=half, **times(1.05)).trace("two.npz")
    assert shown(compare_traces([half.trace("one.npz"), wrong], {})["two.npz"])
    bfloat16 = Script(about={"computed_in": "bfloat16"}).trace()
    tolerance = tolerance_of(bfloat16, None, {}, None)
    assert (tolerance.times, tolerance.unit) == (2, 2**-7)  # Behind a BatchNorm.
    plain = Script(about={"computed_in": "bfloat16", "layers": []}).trace()
    assert tolerance_of(plain, None, {}, None).times == 1
    of_ranks = Script(about={"computed_in": "bfloat16", "mesh": {"tp": 1}}).trace()
    assert of_pair(tolerance, bfloat16, of_ranks).times == 4
    assert of_pair(tolerance, bfloat16, bfloat16) is tolerance


def test_a_fault_that_the_permuted_recording_shares_is_found(one):
    """A permuted recording of the wrong script must not make its fault a matter of rounding."""
    wrong = Script(permute=1, replay=one, steps=(0, 1), **times(0.5)).trace()
    tolerance = tolerance_of(one.trace(), wrong, {}, None)
    report = compared(*pair({}, {**TWO, **times(0.5)}), tolerance)
    assert shown(report) == ["gradients: mean_instead_of_sum"]


def test_a_factor_of_one_explains_nothing():
    """The difference is 2 to 4 times the tolerance, and no smaller with the factor."""
    first, second = pair({}, {"gradient": little_noise})
    verdict = compared(first, second, tolerance_of(first.trace(), None, {}, 1e-2))
    assert [each.detail for each in verdict.faults] == ["unexplained"]


def flattening(order, gradient_of, layout="", **changes):
    """Returns a script whose model has its features in an order, and records its outputs.

    The script has the gradients of its outputs only if `gradient_of`.
    """
    restore = np.argsort(order)

    def add_outputs(script):
        for number, step in enumerate(script.steps, start=1):
            for r in range(script.replicas):
                x = script.arrays[f"{number}/data/{r}/0"]
                kernel, bias = (script.arrays[f"{number}/before/{r}/{i}"] for i in range(2))
                script.arrays[f"{number}/y_pred/{r}/0"] = outputs = x @ kernel + bias
                rows = split_evenly(batch_of(step), r, script.replicas)
                wrong = outputs - examples()[1][rows]
                if gradient_of:
                    script.arrays[f"{number}/y_grad/{r}/0"] = 2 * wrong / np.float32(wrong.size)
                script.arrays[f"{number}/data/{r}/0"] = x[:, restore]

    given = {"about": {"data_layout": layout}, "edit": add_outputs, "inputs": lambda x: x[:, order]}
    return Script(**given | changes)


def named(first, second):
    found = [(f.detail, f.text) for f in compared(first, second).faults if f.stage == "gradients"]
    assert found
    return found


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("channels", [2, 3, 4, 6])
@pytest.mark.parametrize("of_first", [True, False])
def test_the_order_of_flattened_axes_is_named_where_it_gives_the_outputs(
    layout, channels, of_first
):
    """Under replay, the logits differ, and so do the losses: no row of the gradient is another."""
    usual = np.arange(12)
    shape = (channels, -1) if layout == "NCHW" else (-1, channels)
    order = usual.reshape(shape).T.ravel()
    first = flattening(usual, of_first, layout)
    second = flattening(order, not of_first, replay=first, framework="keras", replicas=2)
    ((detail, text),) = named(first, second) if of_first else named(
        first, flattening(order, True, replay=first, framework="keras")
    )  # fmt: skip
    assert detail == "flatten_order" and f" {channels} channels are flattened first" in text


def test_another_difference_is_no_order_of_flattened_axes():
    first = flattening(np.arange(12), True, "NCHW")
    mixed = np.random.default_rng(0).permutation(12)
    noise = np.random.default_rng(1).normal(size=(12, 3)).astype(np.float32)
    for order, changes in (
        (mixed, {}),  # Channels are exchanged, too.
        (np.arange(12).reshape(3, 4).T.ravel(), {  # An order, and another fault.
            "gradient": lambda script, r, own: [own[0] + 0.01 * noise, own[1]]}),
        (np.arange(12), {"gradient": lambda script, r, own: [own[0] + noise, own[1]]}),
    ):  # fmt: skip
        second = flattening(order, True, replay=first, **changes)
        assert {detail for detail, _ in named(first, second)} <= {"unexplained", "other_outputs"}
    same = flattening(np.arange(12), False, replay=first)
    assert not compared(first, same).faults


def test_a_cause_has_to_fit_all_steps(one):
    """The gradients of the step before are 0 in the first step: they are not frozen."""
    wrong = Script(replicas=2, replay=one).trace("two.npz")
    for position in range(4):
        old = [np.zeros_like(a) for a in one.trace().arrays(0, "raw", 0)]
        if position:
            old = one.trace().arrays(position - 1, "raw", 0)
        for replica in range(2):
            for kind in ("raw", "sums", "clipped"):
                wrong.put(position, kind, replica, old)
    found = [f for f in verify_against(one.trace(), wrong, {}, Tolerance()).faults
             if f.stage == "gradients"]  # fmt: skip
    assert [(each.detail, each.steps) for each in found] == [("stale_gradient", ALL)]


def test_several_recordings_have_verdicts_by_their_names(one):
    second = Script(replicas=2, replay=one, reduce=None).trace("runs/two.npz")
    permuted = Script(permute=1, replay=one, steps=(0,)).trace("permuted.npz")
    steps = []
    verdicts = compare_traces([one.trace(), permuted, second], {}, on_step=steps.append)
    assert list(verdicts) == ["one.npz", "two.npz"] and steps == list(range(1, 9))
    assert verdicts["one.npz"].ok and not verdicts["two.npz"].ok
    assert verdicts["two.npz"].reference == "training of one.npz"
    assert "permuting" in verdicts["two.npz"].tolerance
    other = {"dense/bias": "other"}
    verdict = compare_traces(
        [one.trace(), Script(replay=one, renamed=other).trace("x")], {"other": "dense/bias"}
    )
    assert all(each.ok and not each.notes for each in verdict.values())
    # The names are those of the second recording; the permuted one is of the first script.
    traces = [one.trace(), permuted, Script(replay=one, renamed=other).trace("x")]
    assert all(each.ok for each in compare_traces(traces, {"other": "dense/bias"}).values())


def first_data(array_of):
    """Changes the first array of examples."""

    def edited(script):
        for name in [name for name in script.arrays if "/data/" in name]:
            script.arrays[name.replace("/0/0", "/0/1").replace("/1/0", "/1/1")] = script.arrays[
                name
            ]
            script.arrays[name] = array_of(script.arrays[name])

    return {"edit": edited}


def as_texts(array):
    return np.array([b"text %d" % number for number in (array[:, 0] * 1e6).astype(int)])


@pytest.mark.parametrize("array_of", [lambda array: np.array(5), as_texts])
def test_examples_may_begin_with_a_number_or_a_text(array_of):
    first, second = first_data(array_of), {**TWO, **first_data(array_of)}
    assert shown(compared(*pair(first, second))) == []
    same = {**second, "shard": same_rows}
    assert "examples: same_examples" in shown(verify_alone(Script(**same).trace()))


@pytest.mark.parametrize("kind", ["data", "loss", "raw", "sums", "clipped", "before", "after"])
@pytest.mark.parametrize("number", [np.nan, np.inf, 3e38])
def test_numbers_that_overflow_cause_no_warning(kind, number, recwarn):
    wrong = edit(lambda array: np.full_like(array, number), kind, 1, 0, 1)
    traces = [script.trace() for script in pair({}, {**TWO, **wrong})]
    compare_traces(traces, {})
    assert not recwarn.list


@pytest.mark.parametrize(
    ("traces", "text"),
    [
        ([{"permute": 1}], "is recorded with permute="),
        ([{}, {"permute": 1}, {"permute": 2}], "is the second recording with permute="),
        ([{}, {"steps": (4,)}], "has no step in common"),
    ],
)
def test_recordings_with_nothing_in_common_are_refused(traces, text):
    with pytest.raises(ValueError, match=text):
        compare_traces([Script(**changes).trace() for changes in traces], {})


def test_recordings_without_a_common_weight_are_refused(one):
    other = Trace(About("torch", 1, (0,), (Variable("x", WEIGHT),)))
    other.put(0, "before", 0, [np.ones((7, 7), np.float32)])
    with pytest.raises(ValueError, match=r"no weight matches .*; pass --name_map"):
        compare_traces([one.trace(), other], {})


def test_the_command_reports_a_fault(tmp_path, one):
    first = one.write(tmp_path / "one.npz")
    second = Script(replicas=2, replay=one, reduce=None).write(tmp_path / "two.npz")
    out = tmp_path / "out"
    result = run_here("verify", f"--traces={first},{second}", f"--out={out}")
    assert result.returncode == 9
    assert "two.npz is not the training of one.npz: not all-reduced" in result.stdout
    record = json.loads((out / "verify.json").read_text())
    assert list(record["trainings"]) == ["one.npz", "two.npz"]
    assert record["trainings"]["two.npz"]["stages"]["all-reduce"] == "fault"
    page = (out / "report.html").read_text()
    assert "not all-reduced" in page and "call the wrapped model" in page


def test_the_command_ends_with_0_if_all_is_clean(tmp_path, one):
    first = one.write(tmp_path / "one.npz")
    second = Script(replicas=2, renamed={"dense/bias": "other"}).write(tmp_path / "two.npz")
    names, out = "--name_map=other=dense/bias", tmp_path / "out"
    result = run_here("verify", f"--traces={first},{second}", names, f"--out={out}")
    assert result.returncode == 0, result.stderr
    assert "one.npz in step 0, step 3: every checked stage is clean" in result.stdout
    record = json.loads((out / "verify.json").read_text())["trainings"]["two.npz"]
    assert [*record["not_checked"]["steps"]] == ["step 1", "step 2"]


def test_a_weight_that_one_script_does_not_train_is_a_fault():
    """Keras lists the weights of a frozen layer among the other variables of a model."""
    both, frozen = (
        Trace(About("keras", 1, (0,), (Variable("kernel", WEIGHT), Variable("bias", kind))))
        for kind in (WEIGHT, STATISTIC)
    )
    assert not [*not_trained(both, both)]
    for pair, which in (((both, frozen), "second"), ((frozen, both), "first")):
        (finding,) = not_trained(*pair)
        assert (finding.status, finding.detail, finding.tensors) == (FAULT, "frozen", ("bias",))
        assert finding.text == f"not trained in the {which} recording: bias"


def test_what_replay_did_not_load_is_said(one):
    options = {"replay": one, "about": {"replayed": "one.npz", "not_loaded": ("kernel/momentum",)}}
    verdict = compared(one, Script(**options))
    assert "not loaded by replay=, as it does not fit: kernel/momentum" in verdict.notes
