"""The trace that `record_keras.record` writes, its replay, and another order of examples."""

import json
import random
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from lockstep.data import file as trace_file
from lockstep.record_keras import record
from tests.conftest import ROOT
from tests.small_models import mirrored

layers, optimizers = keras.layers, keras.optimizers
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(48, 8, 8, 1)).astype(np.float32)
CLASSES = RANDOM.integers(0, 3, 48)
WEIGHTS = RANDOM.uniform(0.5, 1.5, 48).astype(np.float32)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def convolution(dropout=0.2, is_built=False):
    model = keras.Sequential([
        layers.Conv2D(4, 3, strides=2, padding="same"), layers.BatchNormalization(),
        layers.ReLU(), layers.Flatten(), layers.Dropout(dropout), layers.Dense(3),
    ])  # fmt: skip
    schedule = optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    optimizer = optimizers.AdamW(schedule, weight_decay=0.01)
    optimizer.exclude_from_weight_decay(var_names=["bias", "beta"])
    model.compile(optimizer, LOSS)
    if is_built:
        model.build((None, 8, 8, 1))
    return model


def linear(*hidden, **options):
    model = keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), *hidden, layers.Dense(3)])
    model.compile("sgd", LOSS, **options)
    return model


def on_replicas(build=convolution, num=2, seed=1, **options):
    keras.utils.set_random_seed(seed)
    with mirrored(num).scope():
        return build(**options)


def batches():
    return tf.data.Dataset.from_tensor_slices((IMAGES, CLASSES, WEIGHTS)).batch(12)


def recorded(path, model, steps=(0, 2, 3), **options):
    """Records a training and returns what the file says, and its other members."""
    with record(path, model, steps=steps, **options):
        model.fit(batches(), verbose=0)
    return read(path)


def read(path):
    """Returns description and arrays, without what a file keeps beside those of the training."""
    with np.load(path, allow_pickle=False) as file:
        about = json.loads(str(file["about"]))
        names = {name: name for name in file.files if name != "about"} | about["aliases"]
        own = sorted(name for name in names if not re.search("/(kept|replaced)/", name))
        return about, {name: file[names[name]] for name in own}


def differing(a, b, part=""):
    """Returns the names of arrays that have other bits in a second file."""
    names = [name for name in a if part in name]
    assert names and names == [name for name in b if part in name]
    return [name for name in names if a[name].tobytes() != b[name].tobytes()]


def bits_of(*owners):
    return [v.numpy().tobytes() for owner in owners for v in owner.variables]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The path of a recording, and what `read` returns for it."""
    path = tmp_path_factory.mktemp("traces") / "one.npz"
    return path, *recorded(path, on_replicas())


def test_layouts_slots_and_settings_are_described(one):
    """Without them, a fault of the update is found, too, and explained less well."""
    _, about, _ = one
    kernels = [v for v in about["variables"] if v["name"].endswith("/kernel")]
    state = [v for v in about["variables"] if v.get("of") == kernels[0]["name"]]
    assert [v["layout"] for v in [*kernels, *state]] == ["HWIO", "IO", "HWIO", "HWIO"]
    assert [v["slot"] for v in state] == ["momentum", "velocity"]
    rates = [[group["learning_rate"] for group in groups] for groups in about["settings"]]
    assert rates == [pytest.approx([0.1 / 2**step] * 2) for step in (0, 2, 3)]
    groups = {group["weight_decay"]: group["weights"] for group in about["settings"][0]}
    names = {decay: [x.rpartition("/")[2] for x in own] for decay, own in groups.items()}
    assert names == {0.01: ["kernel", "gamma", "kernel"], 0.0: ["bias", "beta", "bias"]}


def test_an_error_ends_the_recording_and_removes_its_hooks(tmp_path):
    def begins(batch, logs):
        model.optimizer.learning_rate = 0.1 * (batch + 1)

    def ends(batch, logs):
        if batch == 1:
            raise RuntimeError("in between")

    def own_hook(data):
        return type(model).train_step(model, data)

    model = linear()
    object.__setattr__(model, "train_step", own_hook)
    callback = keras.callbacks.LambdaCallback(on_train_batch_begin=begins, on_train_batch_end=ends)
    with (
        pytest.raises(RuntimeError, match="in between"),
        record(tmp_path / "cut.npz", model, steps=4),
    ):
        assert vars(model)["train_step"] is not own_hook
        model.fit(batches(), verbose=0, callbacks=[callback])
    about, _ = read(tmp_path / "cut.npz")
    assert about["ended_with"] == "RuntimeError: in between" and about["asked"] == [0, 1, 2, 3]
    assert about["steps"] == [0, 1] and [p.name for p in tmp_path.iterdir()] == ["cut.npz"]
    assert [groups[0]["learning_rate"] for groups in about["settings"]] == pytest.approx([0.1, 0.2])
    assert vars(model)["train_step"] is own_hook and "compute_loss" not in vars(model)
    hooks = ("_backend_apply_gradients", "_clip_gradients", "_all_reduce_sum_gradients")
    assert not {*hooks} & {*vars(model.optimizer)} and model.train_function is None


def test_what_cannot_be_recorded_is_told_in_a_line(one, tmp_path):
    dense, x = keras.Sequential([layers.Dense(3)]), tmp_path / "x.npz"
    replay = {"path": x, "replay": one[0], "steps": 1}
    for model, options, told in (
        (dense, {"path": x}, r"is not compiled; call model\.compile first"),
        ({}, {"path": x}, r"^model: must be a keras\.Model, .* type dict$"),
        (linear(jit_compile=True), {"path": x}, "jit_compile=False"),
        (linear(), {"path": x, "optimizer": [0, 1]}, "optimizer: 0 is no optimizer of Keras"),
        (linear(), {"path": tmp_path / "none" / "x.npz"}, r"\.npz file in a folder that exists"),
        (linear(), {"path": x, "steps": [9]}, "no step was recorded"),
        (linear(), {**replay, "steps": 3}, r"lacks steps \[1\]; it has \[0, 2, 3\]"),
        (linear(layers.Dense(5)), replay, r"no weight fits \S+/kernel \(64, 5\)"),
        (linear(), {**replay, "names": {"no": "p"}}, "names has no, which the model does not"),
    ):
        options = {"model": model, **options}
        with pytest.raises(ValueError, match=told), record(**options):
            model.fit(batches(), verbose=0)
    with (
        pytest.raises(ValueError, match=r"call strategy\.run\(recorder\.wrap\(step\), …\)"),
        record(x, dense, optimizer := optimizers.SGD()),
        tf.GradientTape() as tape,
    ):
        loss = tf.reduce_sum(dense(tf.ones((2, 3))))
        optimizer.apply(tape.gradient(loss, dense.trainable_variables), dense.trainable_variables)


# --- Replay and permutation ----------------------------------------------------------------------


def test_a_replay_from_another_start_is_bitwise_identical(one, tmp_path):
    path, _, first = one
    trace_file.save(trace_file.load(path), tmp_path / "one.npz")  # Equal arrays once.
    model = on_replicas(seed=5, is_built=True)
    own = model.trainable_variables[0].numpy()
    about, second = recorded(tmp_path / "two.npz", model, replay=tmp_path / "one.npz")
    assert about["replayed"] == path.name and not differing(first, second)
    replaced = trace_file.load(tmp_path / "two.npz").arrays(0, "replaced", 0)
    assert np.array_equal(replaced[0], own) and not np.array_equal(own, first["1/before/0/0"])


@pytest.mark.slow
def test_examples_are_permuted_together(tmp_path):
    _, first = recorded(path := tmp_path / "one.npz", on_replicas(dropout=0), steps=2)
    eager = on_replicas(seed=5, dropout=0)
    eager.run_eagerly = True
    options = {"steps": 2, "replay": path, "permute": 7}
    about, second = recorded(tmp_path / "two.npz", eager, **options)
    assert about["permuted"] == 7 and not differing(first, second, "/before/")
    for replica in (0, 1):
        before, after = (
            [trace[f"1/data/{replica}/{i}"] for i in range(3)] for trace in (first, second)
        )
        order = [int(np.flatnonzero(before[2] == weight)[0]) for weight in after[2]]
        assert sorted(order) == list(range(6)) != order
        assert all(np.array_equal(b[order], a) for b, a in zip(before, after, strict=True))
    for name in differing(first, second, "/sums/"):  # Only the order of summation differs.
        np.testing.assert_allclose(first[name], second[name], atol=1e-5)


# --- Eager steps, and the lines of the page ------------------------------------------------------


class Noisy(keras.Model):
    """Counts its steps, and draws noise for them, in Python; a step that runs eagerly does so."""

    def __init__(self):
        super().__init__()
        self.hidden, self.dropout = layers.Dense(4, "tanh"), layers.Dropout(0.5)
        self.last, self.num_steps = layers.Dense(1), 0

    def call(self, x, training=False):
        return self.last(self.dropout(self.hidden(x)))

    def train_step(self, data):
        x, y = data
        self.num_steps += 1
        noise = np.random.normal(size=(1, 3)).astype(np.float32) * random.random()
        return super().train_step((x + noise, y))


@pytest.mark.parametrize("is_marked", [False, True])
def test_a_model_that_an_eager_step_builds_draws_the_same_numbers(tmp_path, is_marked):
    x = RANDOM.normal(size=(24, 3)).astype(np.float32)
    found = []
    for path in (None, tmp_path / "one.npz"):
        keras.utils.set_random_seed(1)
        model = Noisy()
        model.compile(optimizers.SGD(0.1), "mse", run_eagerly=True)
        model.built = is_marked  # Its layers are not built.
        with record(path, model):
            model.fit(x, x[:, :1], batch_size=8, verbose=0, shuffle=False)
        found.append((bits_of(model), np.random.random(), model.num_steps))
    assert found[0] == found[1] and found[0][2] == 3


def test_the_lines_of_the_page_record_fit_and_a_custom_loop(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "verify_scripts.md").read_text(encoding="utf-8")
    of_keras = page.split("\n### Keras")[1].split("\n### ")[0]
    fit, loop = re.findall(r"```python\n(.*?)```", of_keras, re.DOTALL)
    model = on_replicas(linear)
    strategy, optimizer = model.distribute_strategy, optimizers.SGD(0.1)

    def replica_step(batch):
        x, y, _ = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model.loss(y, model(x, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    space = {"tf": tf, "model": model, "dataset": batches(), "strategy": strategy}
    space |= {"optimizer": optimizer, "replica_step": replica_step}
    space["distributed_dataset"] = strategy.experimental_distribute_dataset(batches())
    monkeypatch.chdir(tmp_path)
    for lines in (fit, loop):
        exec(lines, space)
        about, _ = read("one.npz")
        assert (about["steps"], about["num_replicas"]) == ([0, 1, 2], 2)
