"""Tests the recorder of Keras' `fit`: no findings on correct trainings, and named faults."""

import ast
import collections
import copy
import functools
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from recorders import keras_comparison
from recorders.keras_comparison import BY_DESIGN, FAULT, compare
from recorders.keras_comparison.context import StepContext
from recorders.keras_comparison.distances import distance, relative_distance
from recorders.keras_comparison.expected_step import compute_expected
from recorders.keras_comparison.reference_model import OneDevice
from recorders.lockstep_keras import Recorder, Recording
from small_models import mirrored

layers, losses, optimizers = keras.layers, keras.losses, keras.optimizers
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(40, 6)).astype(np.float32)
Y = (X @ RANDOM.normal(size=(6, 2))).astype(np.float32)
WEIGHTS = RANDOM.uniform(0.1, 2, 40).astype(np.float32)
IMAGES = RANDOM.normal(size=(40, 8, 8, 3)).astype(np.float32)
CLASSES = RANDOM.integers(0, 4, 40)
TOKENS = RANDOM.integers(0, 20, (40, 7))
TOKENS[:, 5:] = TOKENS[::3, 3:] = 0


# --- Models --------------------------------------------------------------------------------------


def compiled(model, loss="mse", optimizer=None, **options):
    model.compile(optimizer=optimizer or optimizers.SGD(0.1), loss=loss, **options)
    return model


def dense(*extra, **first):
    hidden = layers.Dense(8, activation="relu", **first)
    return keras.Sequential([hidden, *extra, layers.Dense(2)])


def convolution(*extra):
    pool = [layers.ReLU(), layers.GlobalAveragePooling2D(), layers.Dense(4)]
    return keras.Sequential([layers.Conv2D(8, 3), *extra, *pool])


def lstm(mask_zero=False, return_sequences=False):
    hidden = layers.LSTM(6, return_sequences=return_sequences)
    return keras.Sequential([layers.Embedding(20, 8, mask_zero=mask_zero), hidden, layers.Dense(2)])


def attention():
    tokens = keras.Input((7,), dtype="int32")
    embedded = layers.Embedding(20, 8)(tokens)
    mixed = layers.MultiHeadAttention(2, 4)(embedded, embedded)
    pooled = layers.GlobalAveragePooling1D()(mixed + embedded)
    return keras.Model(tokens, layers.Dense(2)(pooled))


def two_heads():
    a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
    hidden = layers.Dense(5, activation="relu")(layers.Concatenate()([a, b]))
    heads = {name: layers.Dense(2, name=name)(hidden) for name in ("u", "v")}
    return keras.Model({"a": a, "b": b}, heads)


class OwnStep(keras.Model):
    """Has a custom training step, which shows no loss."""

    def __init__(self, is_divided=True):
        super().__init__()
        self.hidden, self.head = layers.Dense(8, activation="tanh"), layers.Dense(2)
        self.is_divided = is_divided

    def call(self, x):
        return self.head(self.hidden(x))

    def train_step(self, data):
        x, y = data
        num = tf.distribute.get_strategy().num_replicas_in_sync if self.is_divided else 1
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True))) / num
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def scalar_loss(y, y_pred):
    return tf.reduce_mean(tf.square(y - y_pred))


def contrastive_loss(y, y_pred):
    products = tf.matmul(y_pred, y, transpose_b=True)
    return keras.losses.sparse_categorical_crossentropy(
        tf.range(tf.shape(y)[0]), products, from_logits=True
    )


def cross_entropy():
    return losses.SparseCategoricalCrossentropy(from_logits=True)


def in_dtype(policy, build):
    """Builds a model in another dtype."""
    keras.config.set_dtype_policy(policy)
    try:
        return build()
    finally:
        keras.config.set_dtype_policy("float32")


def plain():
    return compiled(dense())


# Name: builder, data, expected findings as (stage, status, cause).
MODELS = {
    "plain": (plain, (X, Y), []), "sample weights": (plain, (X, Y, WEIGHTS), []),
    "l2": (lambda: compiled(dense(kernel_regularizer="l2")), (X, Y), []),
    "activity": (lambda: compiled(dense(activity_regularizer="l2")), (X, Y), []),
    "sum": (
        lambda: compiled(dense(), losses.MeanSquaredError(reduction="sum"), optimizers.SGD(1e-3)),
        (X, Y), [],
    ),
    "ema": (lambda: compiled(dense(), optimizer=optimizers.Adam(0.01, use_ema=True)), (X, Y), []),
    "two heads": (
        lambda: compiled(two_heads(), {"u": "mse", "v": "mae"}),
        ({"a": X, "b": X[::-1].copy()}, {"u": Y, "v": Y}), [],
    ),
    "embedding": (lambda: compiled(lstm()), (TOKENS, Y), []),
    "attention": (lambda: compiled(attention(), optimizer=optimizers.AdamW(0.01)), (TOKENS, Y), []),
    "convolution": (lambda: compiled(convolution(), cross_entropy()), (IMAGES, CLASSES), []),
    "own step": (lambda: compiled(OwnStep()), (X, Y), []),
    "unused weights": (lambda: compiled(unused()), (X, Y), []),
    "float16": (lambda: in_dtype("mixed_float16", plain), (X, Y), []),
    "bfloat16": (
        lambda: in_dtype("mixed_bfloat16", lambda: compiled(convolution(), cross_entropy())),
        (IMAGES, CLASSES), [],
    ),
    "weights in bfloat16": (
        lambda: in_dtype("bfloat16", lambda: compiled(attention(), optimizer=optimizers.Muon(0.1))),
        (TOKENS, Y), [],
    ),
    "synchronized BatchNorm": (
        lambda: compiled(
            convolution(layers.BatchNormalization(synchronized=True)), cross_entropy(),
        ),
        (IMAGES, CLASSES), [],
    ),
    "BatchNorm": (
        lambda: compiled(convolution(layers.BatchNormalization()), cross_entropy()),
        (IMAGES, CLASSES), [("forward", BY_DESIGN, "local_statistics")],
    ),
    "dropout": (
        lambda: compiled(dense(layers.Dropout(0.5))), (X, Y),
        [("random numbers", FAULT, "same_random_numbers")],
    ),
    "noise": (
        lambda: compiled(dense(layers.GaussianNoise(0.5))), (X, Y),
        [("random numbers", FAULT, "same_random_numbers")],
    ),
    "clipnorm": (
        lambda: compiled(dense(), optimizer=optimizers.SGD(0.1, clipnorm=0.1)), (X, Y),
        [("clipping", FAULT, "clipped_before_the_sum")],
    ),
    "global_clipnorm": (
        lambda: compiled(dense(), optimizer=optimizers.Adam(0.1, global_clipnorm=0.1)), (X, Y),
        [("clipping", FAULT, "clipped_before_the_sum")],
    ),
    "clipvalue": (
        lambda: compiled(dense(), optimizer=optimizers.SGD(0.1, clipvalue=0.01)), (X, Y),
        [("clipping", FAULT, "clipped_before_the_sum")],
    ),
    "clipping that clips nothing": (
        lambda: compiled(dense(), optimizer=optimizers.SGD(0.1, global_clipnorm=1e9)), (X, Y), [],
    ),
    "scalar loss": (
        lambda: compiled(dense(), scalar_loss), (X, Y),
        [("loss", FAULT, "scalar_loss_not_divided")],
    ),
    "weighted mean": (
        lambda: compiled(dense(), losses.MeanSquaredError(reduction="mean_with_sample_weight")),
        (X, Y, WEIGHTS), [("loss", FAULT, "weighted_mean_of_means")],
    ),
    "masked sequence": (
        lambda: compiled(lstm(mask_zero=True, return_sequences=True)),
        (TOKENS, np.repeat(Y[:, None], 7, 1)), [("loss", FAULT, "weighted_mean_of_means")],
    ),
    "own step, scalar loss": (
        lambda: compiled(OwnStep(is_divided=False)), (X, Y),
        [("gradients", FAULT, "scalar_loss_not_divided")],
    ),
    "contrastive loss": (
        lambda: compiled(dense(), contrastive_loss), (X, Y),
        [("loss", BY_DESIGN, "not_a_sum_over_examples")],
    ),
}  # fmt: skip
QUICK = {"plain", "BatchNorm", "dropout", "clipnorm", "scalar loss", "own step", "float16"}


def unused():
    model = dense()
    model.build((None, 6))
    model.spare = layers.Dense(3)
    model.spare.build((None, 6))
    return model


# --- Running them --------------------------------------------------------------------------------


def batches_of(data, size=12, steps=3):
    return tf.data.Dataset.from_tensor_slices(data).batch(size).take(steps)


def record(build, data, *, inject=None, steps=3, size=12, num=3, callbacks=(), epochs=1):
    """Trains under a strategy, with a fault or without, and returns model and recording."""
    keras.utils.set_random_seed(1)
    with mirrored(num).scope():
        model = build()
    if inject:
        inject(model)
    dataset = batches_of(data, size, steps) if not isinstance(data, tf.data.Dataset) else data
    with Recorder(model, steps=steps) as recorder:
        model.fit(dataset, verbose=0, callbacks=list(callbacks), epochs=epochs)
    return model, recorder


def found(report):
    return [(f.stage, f.status, f.cause) for f in report.findings]


def only(report, stage, cause):
    """Returns the one fault of a report, and asserts what it is."""
    assert found(report) == [(stage, FAULT, cause)], str(report)
    assert report.status(stage) == FAULT
    return report.findings[0]


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
@pytest.mark.parametrize("num", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_models_of_all_kinds(name, num):
    build, data, expected = MODELS[name]
    _, recorder = record(build, data, num=num)
    report = compare(recorder, build if num == 3 else build())
    assert found(report) == expected, str(report)
    assert report.num_steps == 3 and report.num_replicas == num
    assert len(report.checked) >= 6 and "update" in report.checked


# --- Faults --------------------------------------------------------------------------------------


def replica_id():
    context = tf.distribute.get_replica_context()
    if context is None:  # Where a model is built.
        return 0
    return int(tf.get_static_value(context.replica_id_in_sync_group))


def hook(owner, name, function):
    """Replaces a method of an instance by `function(inner, ...)`."""
    inner = getattr(owner, name)
    object.__setattr__(owner, name, lambda *args, **kwargs: function(inner, *args, **kwargs))


def in_sum(change):
    """Injects a fault into the all-reduce: `change(pairs, sums)` returns the sums that are used."""

    def inject(model):
        def all_reduce(inner, pairs):
            pairs = list(pairs)
            sums = [g for g, _ in inner(pairs)]
            changed = change([g for g, _ in pairs], sums)
            return list(zip(changed, [v for _, v in pairs], strict=True))

        hook(model.optimizer, "_all_reduce_sum_gradients", all_reduce)

    return inject


def before_sum(change):
    """Injects a fault into what is sent: `change(i, gradient)` of each tensor, on each replica."""

    def inject(model):
        def all_reduce(inner, pairs):
            return inner([(change(i, g), v) for i, (g, v) in enumerate(pairs)])

        hook(model.optimizer, "_all_reduce_sum_gradients", all_reduce)

    return inject


def before_clipping(change):
    """Injects a fault into what a replica computes."""

    def inject(model):
        def apply(inner, gradients, variables):
            changed = [change(i, g) for i, g in enumerate(gradients)]
            return inner(changed, variables)

        hook(model.optimizer, "apply", apply)

    return inject


def paths(model, *indices):
    return tuple(model.trainable_variables[i].path for i in indices)


def not_summed(gradients, sums):
    return [*sums[:2], gradients[2], sums[3]]


def top_k(i, gradient):
    flat = tf.reshape(gradient, [-1])
    limit = tf.sort(tf.abs(flat))[-max(1, flat.shape[0] // 4)]
    return tf.where(tf.abs(gradient) >= limit, gradient, 0.0)


def int8(i, gradient):
    scale = tf.reduce_max(tf.abs(gradient)) / 127
    return tf.round(gradient / scale) * scale


def to_bfloat16(i, gradient):
    return tf.cast(tf.cast(gradient, tf.bfloat16), tf.float32)


def every_second_step(model):
    def all_reduce(inner, pairs):
        pairs = list(pairs)
        sums = inner(pairs)
        odd = tf.equal(model.optimizer.iterations.value % 2, 1)
        return [(tf.where(odd, g / 3, s), v) for (g, v), (s, _) in zip(pairs, sums, strict=True)]

    hook(model.optimizer, "_all_reduce_sum_gradients", all_reduce)


def stale_sums(model):
    shapes = [v.shape for v in model.trainable_variables] or [(6, 8), (8,), (8, 2), (2,)]
    kept = [[tf.Variable(tf.zeros(shape)) for shape in shapes] for _ in range(3)]

    def all_reduce(inner, pairs):
        pairs = list(pairs)
        old = [tf.identity(v) for v in kept[replica_id()]]
        with tf.control_dependencies(old):
            for store, (value, _) in zip(kept[replica_id()], inner(pairs), strict=True):
                store.assign(value)
        return [(value, variable) for value, (_, variable) in zip(old, pairs, strict=True)]

    hook(model.optimizer, "_all_reduce_sum_gradients", all_reduce)


def on_replica(number, change):
    """Returns a change that is made on one replica only."""
    return lambda i, g: change(i, g) if replica_id() == number else g


# Name: injection, stage, cause, tensors, replicas, steps; None for all.
GRADIENT_FAULTS = {
    "not all-reduced": (in_sum(not_summed), "all-reduce", "not_all_reduced", (2,), None, None),
    "every second step": (every_second_step, "all-reduce", "not_all_reduced", None, None, (1,)),
    "mean": (
        in_sum(lambda g, s: [x / 3 for x in s]),
        "all-reduce", "mean_instead_of_sum", None, None, None,
    ),
    "mean of one tensor": (
        in_sum(lambda g, s: [s[0] / 3, *s[1:]]),
        "all-reduce", "mean_instead_of_sum", (0,), None, None,
    ),
    "lost": (
        before_sum(on_replica(1, lambda i, g: tf.zeros_like(g))),
        "all-reduce", "lost_replica", None, (1,), None,
    ),
    "doubled": (
        before_sum(on_replica(2, lambda i, g: 2 * g)),
        "all-reduce", "scaled_gradient", None, (2,), None,
    ),
    "sum on one replica only": (
        in_sum(lambda g, s: s if replica_id() == 0 else [x / 3 for x in s]),
        "all-reduce", "mean_instead_of_sum", None, (1, 2), None,
    ),
    "bfloat16": (before_sum(to_bfloat16), "all-reduce", "reduced_precision", None, None, None),
    "bfloat16 sum": (
        in_sum(lambda g, s: [to_bfloat16(0, x) for x in s]),
        "all-reduce", "reduced_precision", None, None, None,
    ),
    "float16": (
        before_sum(lambda i, g: tf.cast(tf.cast(g, tf.float16), tf.float32)),
        "all-reduce", "reduced_precision", None, None, None,
    ),
    "top k": (before_sum(top_k), "all-reduce", "sparsified", None, None, None),
    "int8": (before_sum(int8), "all-reduce", "quantised", None, None, None),
    "int8 on one tensor": (
        before_sum(lambda i, g: int8(i, g) if i == 0 else g),
        "all-reduce", "quantised", (0,), None, None,
    ),
    "sign": (
        before_sum(lambda i, g: tf.sign(g) * tf.reduce_mean(tf.abs(g))),
        "all-reduce", "quantised", None, None, None,
    ),
    "zero gradient": (
        before_clipping(on_replica(1, lambda i, g: tf.zeros_like(g) if i == 0 else g)),
        "gradients", "frozen", (0,), (1,), None,
    ),
    "gradient times 3": (
        before_clipping(lambda i, g: 3 * g if i == 2 else g),
        "gradients", "scaled_gradient", (2,), None, None,
    ),
    "gradient in bfloat16": (
        before_clipping(on_replica(2, to_bfloat16)),
        "gradients", "reduced_precision", None, (2,), None,
    ),
    "gradient top k": (
        before_clipping(on_replica(0, top_k)), "gradients", "sparsified", None, (0,), None,
    ),
    "one replica clips": (
        lambda m: hook(
            m.optimizer, "_clip_gradients",
            lambda inner, g: tf.clip_by_global_norm(g, 0.05)[0] if replica_id() == 1 else inner(g),
        ),
        "clipping", "clipped_on_one_replica", None, (1,), None,
    ),
    "one replica clips values": (
        lambda m: hook(
            m.optimizer, "_clip_gradients",
            lambda inner, g: (
                [tf.clip_by_value(x, -0.02, 0.02) for x in g] if replica_id() == 1 else inner(g)
            ),
        ),
        "clipping", "clipped_on_one_replica", None, (1,), None,
    ),
}  # fmt: skip


QUICK_FAULTS = {
    "not all-reduced", "mean", "lost", "bfloat16", "top k", "int8", "zero gradient",
    "one replica clips",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK_FAULTS else pytest.param(n, marks=pytest.mark.slow) for n in GRADIENT_FAULTS],
)
def test_faults_of_gradients(name):
    inject, stage, cause, tensors, replicas, steps = GRADIENT_FAULTS[name]
    model, recorder = record(plain, (X, Y), inject=inject, steps=2)
    finding = only(compare(recorder, plain()), stage, cause)
    everything = range(len(model.trainable_variables))
    names = paths(model, *(tensors or everything))
    if tensors or name in ("mean", "lost", "doubled"):
        assert finding.tensors == names
    assert set(finding.tensors) <= set(names) and finding.tensors
    assert finding.replicas == (replicas or (0, 1, 2))
    assert finding.steps == (steps or (0, 1))
    assert finding.remedy in str(finding)


def test_a_sum_of_the_step_before():
    _, recorder = record(plain, (X, Y), inject=stale_sums)
    report = compare(recorder, plain())
    assert [(f.stage, f.cause, f.steps) for f in report.findings] == [
        ("all-reduce", "lost_replica", (0,)), ("all-reduce", "stale_gradient", (1, 2)),
    ]  # fmt: skip


def test_labels_shifted_on_one_replica():
    def inject(model):
        def train_step(inner, data):
            x, y = data
            return inner((x, tf.roll(y, 1, 0) if replica_id() == 1 else y))

        hook(model, "train_step", train_step)

    _, recorder = record(plain, (X, Y), inject=inject)
    finding = only(compare(recorder, plain()), "loss", "labels_shifted")
    assert finding.replicas == (1,) and finding.steps == (0, 1, 2)
    _, recorder = record(lambda: compiled(OwnStep()), (X, Y), inject=inject)
    finding = only(compare(recorder, compiled(OwnStep())), "gradients", "labels_shifted")
    assert finding.replicas == (1,)


@pytest.mark.parametrize("extra", [layers.BatchNormalization, lambda: layers.Dropout(0.5)])
def test_inference_mode_on_one_replica(extra):
    def build():
        return compiled(dense(extra()))

    def inject(model):
        def call(inner, *args, **kwargs):
            return inner(*args, **{**kwargs, "training": replica_id() != 1})

        hook(model, "call", call)

    _, recorder = record(build, (X, Y), inject=inject)
    report = compare(recorder, build())
    faults = [f for f in report.faults if f.cause != "same_random_numbers"]
    assert [(f.stage, f.cause, f.replicas) for f in faults] == [
        ("forward", "inference_mode", (1,))
    ], str(report)


def test_a_regulariser_that_is_not_divided():
    def build():
        return compiled(dense(kernel_regularizer="l2"))

    def inject(model):
        object.__setattr__(model, "_aggregate_additional_loss", tf.reduce_sum)

    _, recorder = record(build, (X, Y), inject=inject)
    finding = only(compare(recorder, build()), "regularisation", "regulariser_repeated")
    assert "3 times" in finding.text

    def without(model):
        object.__setattr__(model, "_aggregate_additional_loss", lambda loss: tf.zeros(()))

    _, recorder = record(build, (X, Y), inject=without)
    only(compare(recorder, build()), "regularisation", "regulariser_missing")


def momentum():
    return compiled(dense(), optimizer=optimizers.SGD(0.05, momentum=0.9))


def adam():
    return compiled(dense(), optimizer=optimizers.Adam(0.01))


def adamw():
    return compiled(dense(), optimizer=optimizers.AdamW(0.01, weight_decay=0.1))


@pytest.mark.parametrize(
    "build", [plain, pytest.param(momentum, marks=pytest.mark.slow), adam, adamw]
)
def test_another_learning_rate_on_one_replica(build):
    def inject(model):
        def update(inner, gradients, variables, rate):
            return inner(gradients, variables, rate * (2 if replica_id() == 1 else 1))

        hook(model.optimizer, "_backend_update_step", update)

    _, recorder = record(build, (X, Y), inject=inject)
    finding = only(compare(recorder, build()), "update", "other_learning_rate")
    assert finding.replicas == (1,) and finding.steps == (0, 1, 2)
    assert "2 times" in finding.text


@pytest.mark.parametrize("build", [pytest.param(plain, marks=pytest.mark.slow), momentum])
def test_weight_decay_on_top(build):
    def inject(model):
        def update(inner, distribution, pairs, rate):
            pairs = list(pairs)
            inner(distribution, pairs, rate)
            for _, variable in pairs[:1]:
                distribution.extended.update(variable, lambda v: v.assign(0.99 * v), group=False)

        hook(model.optimizer, "_distributed_tf_update_step", update)

    model, recorder = record(build, (X, Y), inject=inject)
    finding = only(compare(recorder, build()), "update", "weight_decay_on_top")
    assert finding.tensors == paths(model, 0) and "0.01" in finding.text


def test_a_schedule_that_is_stepped_twice():
    def build():
        rate = optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
        return compiled(dense(), optimizer=optimizers.SGD(rate))

    def inject(model):
        def apply(inner, gradients, variables):
            inner(gradients, variables)
            model.optimizer.iterations.assign_add(1)

        hook(model.optimizer, "_backend_apply_gradients", apply)

    model, recorder = record(build, (X, Y), inject=inject)
    finding = only(compare(recorder, build()), "update", "schedule_stepped_too_often")
    assert "by 2" in finding.text and finding.tensors == (model.optimizer.iterations.path,)


class Changes(keras.callbacks.Callback):
    """Changes one element on one replica after a step."""

    def __init__(self, variable, replica, after_batch):
        super().__init__()
        self.change = variable, replica, after_batch

    def on_train_batch_end(self, batch, logs=None):
        variable, replica, after_batch = self.change
        if batch == after_batch:
            part = variable(self.model).value.values[replica]
            array = part.numpy()
            array.flat[1] = np.nextafter(array.flat[1], np.float32(9))
            part.assign(array)


@pytest.mark.parametrize(
    "variable", [lambda m: m.trainable_variables[0], lambda m: m.optimizer.variables[2]],
    ids=["weight", "state"],
)  # fmt: skip
def test_one_bit_changed_between_steps(variable):
    model, recorder = record(momentum, (X, Y), callbacks=[Changes(variable, 1, 0)])
    finding = only(compare(recorder, momentum()), "start", "changed_on_its_own")
    assert finding.replicas == (1,) and finding.steps == (1,)
    assert finding.tensors == (variable(model).path,)


def test_one_element_changed_in_the_update():
    def inject(model):
        def update(inner, distribution, pairs, rate):
            pairs = list(pairs)
            inner(distribution, pairs, rate)
            kernel = pairs[2][1]
            kernel = getattr(kernel, "value", kernel) if callable(kernel) else kernel
            distribution.extended.update(
                kernel, lambda v: v.scatter_nd_add([[1, 1]], [0.01]), group=False
            )

        hook(model.optimizer, "_distributed_tf_update_step", update)

    model, recorder = record(plain, (X, Y), inject=inject)
    finding = only(compare(recorder, plain()), "update", "changed_on_its_own")
    assert finding.tensors == paths(model, 2) and "1 elements" in finding.text


def test_replicas_that_start_apart():
    def inject(model):
        with mirrored(3).scope():
            model.build((None, 6))
        part = model.trainable_variables[0].value.values[2]
        part.assign(part.numpy() + 1)

    model, recorder = record(plain, (X, Y), inject=inject)
    finding = only(compare(recorder, plain()), "start", "diverged_replicas")
    assert finding.replicas == (2,) and finding.tensors == paths(model, 0)


def test_a_last_batch_that_does_not_divide():
    _, recorder = record(plain, (X, Y), steps=4)
    finding = only(compare(recorder, plain()), "loss", "mean_of_means")
    assert finding.steps == (3,) and "2/2/0" in finding.text


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_step_that_is_not_finite_on_one_device_either_has_no_fault(bad):
    y = Y.copy()
    y[12 + 5, 0] = bad
    _, recorder = record(adam, (X, y))
    first, second = compare(recorder, adam).findings
    assert (first.stage, first.steps) == ("start", (2,))
    assert (second.stage, second.steps, second.replicas) == ("gradients", (1,), (1,))
    assert {(f.status, f.cause) for f in (first, second)} == {(BY_DESIGN, "not_finite")}


def test_gradients_that_are_not_finite_on_one_replica_only_are_a_fault():
    def divided(i, gradient):
        return gradient / 0 if replica_id() == 1 else gradient

    _, recorder = record(plain, (X, Y), inject=before_clipping(divided), steps=1)
    report = compare(recorder, plain)
    assert report.status("gradients") == FAULT
    assert {f.replicas for f in report.faults if f.stage == "gradients"} == {(1,)}


def test_predictions_of_the_weights_one_step_before():
    recording = record(plain, (X, Y), steps=2)[1].recording()
    one = OneDevice(plain(), recording)
    first, second = recording.steps
    second["y_pred", 1] = one.step(first["before", 1], second["data", 1]).y_pred
    (fault,) = [f for f in compare(recording, plain).faults if f.stage == "forward"]
    assert (fault.cause, fault.replicas, fault.steps) == ("stale_gradient", (1,), (1,))


def test_another_loss():
    _, recorder = record(lambda: compiled(dense(), "mae"), (X, Y))
    only(compare(recorder, plain()), "loss", "other_loss")


def test_two_faults_at_once_are_both_named():
    def inject(model):
        GRADIENT_FAULTS["lost"][0](model)

    def build():
        return compiled(dense(), scalar_loss)

    _, recorder = record(build, (X, Y), inject=inject)
    assert found(compare(recorder, build())) == [
        ("loss", FAULT, "scalar_loss_not_divided"), ("all-reduce", FAULT, "lost_replica"),
    ]  # fmt: skip


def test_a_fault_behind_a_difference_by_design():
    build, data, expected = MODELS["BatchNorm"]
    _, recorder = record(build, data, inject=in_sum(lambda g, s: [s[0] / 3, *s[1:]]))
    report = compare(recorder, build())
    assert found(report) == [*expected, ("all-reduce", FAULT, "mean_instead_of_sum")]


# --- Batches that the data set defines -----------------------------------------------------------


def given(change):
    """Returns what is found if the replicas are given something else than the data set's batch."""
    batches = [tuple(part.numpy() for part in batch) for batch in batches_of((X, Y))]
    changed = [np.concatenate(parts) for parts in zip(*(change(*b) for b in batches), strict=True)]
    dataset = batches_of(tuple(changed), len(changed[0]) // 3)
    _, recorder = record(plain, dataset)
    return compare(recorder, plain(), batches=batches)


def test_examples():
    assert not given(lambda x, y: (x, y)).findings
    only(given(lambda x, y: (x, np.roll(y, 1, 0))), "examples", "labels_shifted")
    only(given(lambda x, y: (x[:9], y[:9])), "examples", "lost_examples")
    same = given(lambda x, y: (np.tile(x[:4], (3, 1)), np.tile(y[:4], (3, 1))))
    assert only(same, "examples", "same_examples").replicas == (0, 1, 2)
    twice = np.r_[0:9, 6:9]
    only(given(lambda x, y: (x[twice], y[twice])), "examples", "repeated_examples")
    only(given(lambda x, y: (x + 1, y)), "examples", "other_examples")


# --- float16 -------------------------------------------------------------------------------------


def float16():
    return in_dtype("mixed_float16", momentum)


@pytest.mark.parametrize("examples", [slice(0, 12), slice(0, 4)], ids=["all", "replica 0"])
def test_a_step_that_overflows_is_skipped(examples):
    y = Y.copy()
    y[examples] *= 2000
    _, recorder = record(float16, (X, y))
    assert [("raw", 0) in step for step in recorder.steps] == [False, True, True]
    report = compare(recorder, float16())
    assert not report.findings and report.num_steps == 3
    assert report.status("all-reduce") == "clean"


def test_a_weight_that_changes_in_a_skipped_step():
    y = Y.copy()
    y[:12] *= 2000
    _, recorder = record(float16, (X, y), steps=1)
    recording = recorder.recording()
    recording.steps[0]["after", 2][0] = recording.steps[0]["after", 2][0] + 1
    fault, *_ = compare(recording, float16()).faults
    assert (fault.stage, fault.cause, fault.replicas) == ("update", "changed_on_its_own", (2,))


@pytest.mark.parametrize("replica", [1, 2])
def test_an_overflow_on_another_replica_than_the_first(replica):
    """Keras looks at the gradients of replica 0 only, and applies the infinite ones of others."""
    y = Y.copy()
    y[4 * replica : 4 * replica + 4] *= 2000
    _, recorder = record(float16, (X, y))
    report = compare(recorder, float16())
    (fault,) = report.faults
    assert (fault.cause, fault.replicas, fault.steps) == ("overflow_not_skipped", (replica,), (0,))
    assert [(f.cause, f.steps) for f in report.findings if f not in report.faults] == [
        ("not_finite", (1, 2))
    ]


# --- Small changes of what was recorded ----------------------------------------------------------


def normalised():
    between = layers.BatchNormalization()
    return compiled(dense(between, kernel_regularizer=keras.regularizers.L2(0.1)))


@functools.cache
def recorded_once():
    return record(normalised, (X, Y), steps=1)[1].recording()


# Kind → the stage that it belongs to, and the first of its arrays that is changed.
SMALL = {
    "y_pred": ("forward", 0), "loss": ("loss", 0), "raw": ("gradients", 0),
    "clipped": ("clipping", 0), "sums": ("all-reduce", 0), "after": ("update", 0),
    "statistic": ("statistics", 4), "regularisation": ("regularisation", 1),
}  # fmt: skip


@pytest.mark.parametrize("replica", [0, pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("kind", SMALL)
def test_a_change_of_one_in_ten_thousand_is_found_on_its_replica(kind, replica):
    stage, index = SMALL[kind]
    recording = copy.deepcopy(recorded_once())
    array = {"statistic": "after", "regularisation": "loss"}.get(kind, kind)
    changed = recording.steps[0][array, replica]
    changed[index] = (changed[index] * 1.0001).astype(np.float32)
    report = compare(recording, normalised)
    faults = [f for f in report.faults if f.stage == stage]
    assert faults, str(report)
    expected = () if stage == "regularisation" else (replica,)
    assert {f.replicas for f in faults} == {expected}, str(report)
    if kind == "sums":
        assert faults[0].cause == "scaled_gradient" and "1.0001" in faults[0].text


class MixesALittle(layers.Layer):
    def call(self, x):
        return x + 1e-4 * tf.reduce_mean(x, axis=0, keepdims=True)


def test_layers_that_mix_examples_a_little_are_by_design():
    def build():
        return compiled(dense(MixesALittle()))

    report = compare(record(build, (X, Y), steps=1)[1], build)
    assert found(report) == [
        ("forward", BY_DESIGN, "mixes_examples"),
        ("gradients", BY_DESIGN, "not_a_sum_over_examples"),
    ], str(report)


def test_what_was_recorded_once_is_clean_but_for_the_design():
    report = compare(recorded_once(), normalised)
    assert found(report) == [("forward", BY_DESIGN, "local_statistics")], str(report)


# --- bfloat16 ------------------------------------------------------------------------------------


def bfloat16():
    images = keras.Sequential([
        layers.Conv2D(6, 5, activation="sigmoid"), layers.Dropout(0.1), layers.Flatten(),
        layers.Dense(4),
    ])  # fmt: skip
    return compiled(images, cross_entropy())


def test_rounding_in_bfloat16_is_measured_against_float32():
    """A gradient of a bias is a sum of many numbers, which may get stuck in bfloat16."""
    data = np.repeat(IMAGES, 3, axis=1).repeat(3, axis=2), CLASSES
    build = functools.partial(in_dtype, "mixed_bfloat16", bfloat16)
    _, recorder = record(build, data, steps=1)
    one = OneDevice(build(), recorder)
    state, examples = recorder.steps[0]["before", 0], recorder.steps[0]["data", 0]
    step = functools.partial(one.step, state, examples, scales=(1 / 3, 1 / 3))
    own = step()
    fine = one.step_in_float32(state, examples, (1 / 3, 1 / 3))
    again = step()
    assert all(map(np.array_equal, again.raw, own.raw))
    apart = relative_distance(own.y_pred, fine.y_pred)
    assert 2.0**-12 < apart < 2.0**-4  # The same masks.
    assert np.any(fine.y_pred[0].view("uint32") & 0xFFFF)
    report = compare(recorder, build())
    assert {f.cause for f in report.findings} == {"same_random_numbers"}
    context = StepContext(recorder, 0, one)
    compute_expected(context)
    errors = [distance(a, b) for a, b in zip(own.raw, fine.raw, strict=True)]
    assert all(np.array(context.spread[0].gradients) >= np.array(errors))


# --- float64 -------------------------------------------------------------------------------------


def test_expected_values_in_float64():
    build, data, expected = MODELS["BatchNorm"]
    _, recorder = record(build, data, inject=in_sum(lambda g, s: [s[0] / 3, *s[1:]]))
    report = compare(recorder, build)
    assert report.tolerance.startswith("float64 on one device")
    assert found(report) == [*expected, ("all-reduce", FAULT, "mean_instead_of_sum")]
    assert keras.config.floatx() == "float32"
    assert keras.config.dtype_policy().name == "float32"


def test_a_wrong_gradient_is_found_in_float64():
    """A relative error of 1e-4 is beyond float32's rounding."""
    inject = before_clipping(on_replica(1, lambda i, g: g * (1 + 1e-4) if i == 2 else g))
    model, recorder = record(plain, (X, Y), inject=inject, steps=1)
    finding = only(compare(recorder, plain), "gradients", "scaled_gradient")
    assert finding.tensors == paths(model, 2) and finding.replicas == (1,)


class OnlyFloat32(keras.Model):
    """Adds a constant in float32, which fails in float64."""

    def __init__(self):
        super().__init__()
        self.head = layers.Dense(2)

    def call(self, x):
        return self.head(x) + tf.constant([1.0, 2.0], tf.float32)


@pytest.mark.parametrize(
    ("build", "why_not"),
    [
        (lambda: compiled(dense(layers.Dropout(0.5))), "random layers"),
        (lambda: compiled(OnlyFloat32()), "in float64"),
        (lambda: in_dtype("mixed_bfloat16", plain), "does not compute in float32"),
        (lambda: compiled(dense(dtype="float32")), "sets its own dtype"),
    ],
)
def test_models_that_cannot_be_in_float64(build, why_not):
    _, recorder = record(build, (X, Y), steps=1)
    report = compare(recorder, build)
    assert "not float64" in report.tolerance and why_not in report.tolerance
    assert [f.cause for f in report.findings] in ([], ["same_random_numbers"])
    assert keras.config.floatx() == "float32"


# --- The recorder --------------------------------------------------------------------------------


def test_a_recording_that_is_saved_and_loaded(tmp_path):
    def build():
        return compiled(lstm(), scalar_loss)

    _, recorder = record(build, (TOKENS, Y), steps=2)
    recorder.save(str(tmp_path / "trace.npz"))
    loaded = Recording.load(str(tmp_path / "trace.npz"))
    assert str(compare(loaded, build())) == str(compare(recorder, build()))
    assert "scalar loss not divided" in str(compare(loaded, build()))


def test_recording_changes_nothing():
    def train(recorded):
        keras.utils.set_random_seed(1)
        with mirrored(3).scope():
            model = compiled(dense(layers.Dropout(0.5)), optimizer=optimizers.Adam(0.01))
        if recorded:
            with Recorder(model, steps=2):
                model.fit(batches_of((X, Y)), verbose=0, epochs=2)
        else:
            model.fit(batches_of((X, Y)), verbose=0, epochs=2)
        return [v.numpy().tobytes() for v in [*model.variables, *model.optimizer.variables]]

    assert train(True) == train(False)


def test_hooks_are_removed():
    model, recorder = record(plain, (X, Y))
    hooked = {
        "train_step", "compute_loss", "_backend_apply_gradients", "_clip_gradients",
        "_all_reduce_sum_gradients",
    }  # fmt: skip
    assert not hooked & {*vars(model), *vars(model.optimizer)}
    model.fit(batches_of((X, Y)), verbose=0)
    assert len(recorder.steps) == 3
    with pytest.raises(RuntimeError, match="in between"), Recorder(model):
        raise RuntimeError("in between")
    assert not hooked & {*vars(model), *vars(model.optimizer)}


def test_hooks_of_others_stay():
    model = plain()
    hook(model, "train_step", lambda inner, data: inner(data))
    own = vars(model)["train_step"]
    with Recorder(model):
        assert vars(model)["train_step"] is not own
    assert vars(model)["train_step"] is own


def test_one_device_is_as_itself():
    model = plain()
    with Recorder(model, steps=2) as recorder:
        model.fit(batches_of((X, Y)), verbose=0)
    report = compare(recorder, plain())
    assert not report.findings and report.num_replicas == 1


def test_errors():
    with pytest.raises(ValueError, match=r"is not compiled; call model\.compile first"):
        Recorder(dense())
    with pytest.raises(ValueError, match="jit_compile=False"):
        Recorder(compiled(dense(), jit_compile=True))
    several = optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.SGD(clipnorm=0.1)))
    with pytest.raises(ValueError, match="compiled with a MultiOptimizer"):
        Recorder(compiled(dense(), optimizer=several))
    model = plain()
    with Recorder(model) as recorder:
        pass
    with pytest.raises(ValueError, match="nothing was recorded"):
        compare(recorder, plain())
    _, recorder = record(plain, (X, Y), steps=1)
    with pytest.raises(ValueError, match="build the model that was recorded"):
        compare(recorder, compiled(dense(layers.Dense(3))))
    with pytest.raises(ValueError, match=r"the recording has .* variables"):
        compare(recorder, adam())
    with mirrored(3).scope():
        other = plain()
    with pytest.raises(ValueError, match="outside of the strategy's scope"):
        compare(recorder, other)


def test_the_file_must_be_a_recording(tmp_path):
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    with pytest.raises(ValueError, match="is not a recording"):
        Recording.load(str(tmp_path / "other.npz"))


def test_each_cause_has_a_remedy_and_each_report_all_stages():
    _, recorder = record(plain, (X, Y), steps=1)
    report = compare(recorder, plain())
    text = str(report)
    for stage in report.checked:
        assert stage in keras_comparison.STAGES and stage in text
    assert text.splitlines()[0].endswith("on one device: no fault found")


def test_causes_and_remedies_belong_together():
    """No cause without a remedy, and no remedy for a cause that nothing names."""
    folder = pathlib.Path(keras_comparison.__file__).parent
    sources = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))]
    tree = ast.parse("\n".join(sources))
    named = collections.Counter(
        node.value for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )  # fmt: skip
    named_elsewhere = {"not_restored"}  # By `verify --case`, which restores a training.
    unnamed = {cause for cause in keras_comparison.REMEDIES if named[cause] < 2}
    assert unnamed == named_elsewhere
    # What `_found` is called with, and first elements of tuples: (cause, text), (cause, text, …).
    used = {
        first.value for node in ast.walk(tree)
        for first in (
            node.args[:1] if isinstance(node, ast.Call) and is_named(node.func, "found")
            else node.elts[:1] if isinstance(node, ast.Tuple) and len(node.elts) > 1 else []
        )
        if isinstance(first, ast.Constant) and "_" in str(first.value)
    }  # fmt: skip
    assert {"clipped_before_the_sum", "stale_gradient", "not_all_reduced"} <= used
    assert used - set(keras_comparison.REMEDIES) == {"y_pred"}  # The name of an argument.


def is_named(function, name):
    return isinstance(function, ast.Attribute) and function.attr == name


@pytest.mark.parametrize(
    ("findings", "verdict"),
    [
        ([], "the training that the model defines on one device: no fault found"),
        (
            [BY_DESIGN],
            "different by design from the training on one device: same examples; no fault found",
        ),
        (
            [BY_DESIGN, FAULT, FAULT],
            "not the training that the model defines on one device: same examples",
        ),
    ],
)
def test_a_report_begins_with_its_verdict(findings, verdict):
    found = [
        keras_comparison.Finding("examples", status, "same_examples", "why", (1,))
        for status in findings
    ]
    several = keras_comparison.Report(2, 3, found, ["examples"], "float64")
    assert str(several).splitlines()[0] == f"2 steps on 3 replicas: {verdict}"
    one = keras_comparison.Report(1, 1, found, ["examples"], "float64")
    first, second, *_ = str(one).splitlines()
    assert first == f"1 step on 1 replica: {verdict}"
    assert second.startswith("only one replica") and "only one replica" not in str(several)


# --- Steps that use the context of their replica -------------------------------------------------


class ClipsTheSum(keras.Sequential):
    """Sums gradients in its training step, and clips the sum."""

    is_divided = True

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            # Two factors: the data loss is divided by the batch, regularisation by the replicas.
            losses_of_x = tf.reduce_mean(tf.square(y - self(x, training=True)), axis=-1)
            context = tf.distribute.get_replica_context()
            num = context.num_replicas_in_sync
            loss = tf.reduce_sum(losses_of_x) / 12 + tf.add_n(self.losses) / num
        gradients = tape.gradient(loss, self.trainable_weights)
        summed = context.all_reduce("SUM", gradients)
        divisor = 1 + (num - 1) * self.is_divided
        clipped = [tf.clip_by_norm(g, 0.05) / divisor for g in summed]
        self.optimizer.apply(clipped, self.trainable_weights)
        return {"loss": loss}


class ClipsTheSumOnly(ClipsTheSum):
    is_divided = False


class ClipsAndScales(ClipsTheSum):
    is_divided = 1.0005


class TwoFactors(ClipsTheSum):
    """As `ClipsTheSum`, without clipping: the optimizer sums."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses_of_x = tf.reduce_mean(tf.square(y - self(x, training=True)), axis=-1)
            num = tf.distribute.get_strategy().num_replicas_in_sync
            loss = tf.reduce_sum(losses_of_x) / 12 + tf.add_n(self.losses) / num
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


class WithoutOptimizer(keras.Sequential):
    """Changes its weights itself."""

    def train_step(self, data):
        x, y = data
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
        for gradient, variable in zip(
            context.all_reduce("MEAN", tape.gradient(loss, self.trainable_weights)),
            self.trainable_weights,
            strict=True,
        ):
            variable.assign_sub(0.1 * gradient)
        return {"loss": loss}


class NumberedDropout(layers.Layer):
    """Dropout whose seed holds the number of the replica."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, x, training=False):
        if not training:
            return x
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        seed = tf.cast(self.seed_generator.next(), "int32") + tf.stack([0, number])
        return tf.nn.experimental.stateless_dropout(x, 0.5, seed)


def regularised(kind, l2=1e-5):
    hidden = layers.Dense(8, activation="tanh", kernel_regularizer=keras.regularizers.L2(l2))
    return compiled(kind([hidden, layers.Dense(2, kernel_regularizer="l1")]))


@pytest.mark.parametrize(("kind", "num"), [(ClipsTheSum, 2), (ClipsTheSum, 3), (TwoFactors, 3)])
def test_right_steps_of_ones_own_are_clean(kind, num):
    build = functools.partial(regularised, kind)
    _, recorder = record(build, (X, Y), num=num, steps=2)
    report = compare(recorder, build())
    assert found(report) == [] and report.status("gradients") == "clean", str(report)


def test_an_update_that_the_optimizer_does_not_see_is_not_called_clean():
    build = functools.partial(regularised, WithoutOptimizer)
    _, recorder = record(build, (X, Y), num=3, steps=2)
    (finding,) = compare(recorder, build()).findings
    assert (finding.stage, finding.status) == ("update", BY_DESIGN)
    assert finding.cause == "update_not_seen" and len(finding.tensors) == 4


@pytest.mark.parametrize(("kind", "times"), [(ClipsTheSumOnly, "3"), (ClipsAndScales, "0.9997")])
def test_a_sum_in_the_step_that_is_scaled_is_named(kind, times):
    build = functools.partial(regularised, kind)
    _, recorder = record(build, (X, Y), num=3, steps=2)
    finding = only(compare(recorder, build()), "gradients", "scaled_gradient")
    assert f"adds up to {times} times" in finding.text


def test_numbers_of_a_layer_that_adds_the_replicas_number_are_not_the_same():
    def one():
        return compiled(dense(NumberedDropout()))

    def both():
        return compiled(dense(NumberedDropout(), layers.Dropout(0.3, seed=2)))

    _, recorder = record(one, (X, Y), num=3, steps=2)
    assert found(compare(recorder, one())) == []
    _, recorder = record(both, (X, Y), num=3, steps=2)
    finding = only(compare(recorder, both()), "random numbers", "same_random_numbers")
    assert len(finding.tensors) == 1 and "1 of 2 seed generators (dropout" in finding.text
