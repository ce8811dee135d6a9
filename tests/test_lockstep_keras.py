"""Tests the comparison of recorded steps of Keras' `fit` with one device.

Each kind of model is recorded once. Faults are then made in copies of the arrays, as if a replica
had computed, sent or received something else; everything that follows from it is computed again.
That the same faults are found in real trainings is shown by the zoo.
"""

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
from recorders.keras_comparison import BY_DESIGN, FAULT, STAGES, compare, compare_evaluation
from recorders.keras_comparison.context import StepContext
from recorders.keras_comparison.distances import add, distance, relative_distance
from recorders.keras_comparison.expected_step import compute_expected, starts_of
from recorders.keras_comparison.reference_model import OneDevice
from recorders.lockstep_keras import Recorder
from small_models import mirrored

layers, losses, optimizers = keras.layers, keras.losses, keras.optimizers
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(48, 6)).astype(np.float32)
Y = (X @ RANDOM.normal(size=(6, 2))).astype(np.float32)
WEIGHTS = RANDOM.uniform(0.1, 2, 48).astype(np.float32)
IMAGES = RANDOM.normal(size=(48, 8, 8, 3)).astype(np.float32)
CLASSES = RANDOM.integers(0, 4, 48)
TOKENS = RANDOM.integers(0, 20, (48, 7))
TOKENS[:, 5:] = TOKENS[::3, 3:] = 0
OF_TOKENS = np.repeat(Y[:, None], 7, 1)
REPLICAS = (0, 1, 2)


# --- Models --------------------------------------------------------------------------------------


def compiled(model, loss="mse", optimizer=None, **options):
    model.compile(optimizer=optimizer or optimizers.SGD(0.1), loss=loss, **options)
    return model


def dense(*extra, kind=keras.Sequential, **first):
    hidden = layers.Dense(8, activation="relu", **first)
    return kind([hidden, *extra, layers.Dense(2)])


def convolution(*extra):
    pool = [layers.ReLU(), layers.GlobalAveragePooling2D(), layers.Dense(4)]
    model = keras.Sequential([layers.Conv2D(8, 3), *extra, *pool])
    return compiled(model, losses.SparseCategoricalCrossentropy(from_logits=True))


def sequences(loss, *between, mask_zero):
    parts = [layers.Embedding(20, 8, mask_zero=mask_zero), *between, layers.Dense(2)]
    return compiled(keras.Sequential(parts), loss)


def attention():
    tokens = keras.Input((7,), dtype="int32")
    embedded = layers.Embedding(20, 8)(tokens)
    mixed = layers.MultiHeadAttention(2, 4)(embedded, embedded)
    pooled = layers.GlobalAveragePooling1D()(mixed + embedded)
    return keras.Model(tokens, layers.Dense(2)(pooled))


def two_heads():
    """Inputs and outputs are dicts, some weights are unused, and the optimizer keeps averages."""
    a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
    hidden = layers.Dense(5, activation="relu", activity_regularizer="l2")
    joined = hidden(layers.Concatenate()([a, b]))
    heads = {name: layers.Dense(2, name=name)(joined) for name in ("u", "v")}
    model = keras.Model({"a": a, "b": b}, heads)
    model.spare = layers.Dense(3)
    model.spare.build((None, 6))
    kinds = {"u": losses.MeanSquaredError, "v": losses.MeanAbsoluteError}
    sums = {head: kind(reduction="sum") for head, kind in kinds.items()}
    return compiled(model, sums, optimizers.Adam(1e-3, use_ema=True))


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


class ClipsTheSum(keras.Sequential):
    """Sums gradients in its training step, and clips the sum."""

    divisor = property(lambda self: num_in_sync())

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            # Two factors: the data loss is divided by the batch, regularisation by the replicas.
            losses_of_x = tf.reduce_mean(tf.square(y - self(x, training=True)), axis=-1)
            loss = tf.reduce_sum(losses_of_x) / 12 + tf.add_n(self.losses) / num_in_sync()
        self.apply(tape.gradient(loss, self.trainable_weights))
        return {"loss": loss}

    def apply(self, gradients):
        summed = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
        clipped = [tf.clip_by_norm(g, 0.05) / self.divisor for g in summed]
        self.optimizer.apply(clipped, self.trainable_weights)


class ClipsTheSumOnly(ClipsTheSum):
    divisor = 1


class TwoFactors(ClipsTheSum):
    """As `ClipsTheSum`, without clipping: the optimizer sums."""

    def apply(self, gradients):
        self.optimizer.apply(gradients, self.trainable_weights)


class WithoutOptimizer(ClipsTheSum):
    """Changes its weights itself."""

    def apply(self, gradients):
        summed = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
        for gradient, variable in zip(summed, self.trainable_weights, strict=True):
            variable.assign_sub(0.1 * gradient)


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


class MixesALittle(layers.Layer):
    def call(self, x):
        return x + 1e-4 * tf.reduce_mean(x, axis=0, keepdims=True)


def num_in_sync():
    return tf.distribute.get_strategy().num_replicas_in_sync


def regularised(kind):
    model = dense(kind=kind, kernel_regularizer=keras.regularizers.L2(1e-3))
    model.layers[-1].kernel_regularizer = keras.regularizers.L1(0.01)
    return compiled(model)


def scalar_loss(y, y_pred):
    return tf.reduce_mean(tf.square(y - y_pred))


def contrastive_loss(y, y_pred):
    products = tf.matmul(y_pred, y, transpose_b=True)
    return losses.sparse_categorical_crossentropy(
        tf.range(tf.shape(y)[0]), products, from_logits=True
    )


def in_dtype(policy, build):
    """Builds a model in another dtype."""
    keras.config.set_dtype_policy(policy)
    try:
        return build()
    finally:
        keras.config.set_dtype_policy("float32")


def plain():
    return compiled(dense())


def momentum():
    return compiled(dense(), optimizer=optimizers.SGD(0.05, momentum=0.9))


def adamw():
    rate = optimizers.schedules.ExponentialDecay(0.01, 1, 0.9)
    return compiled(dense(), optimizer=optimizers.AdamW(rate, weight_decay=0.1))


def normalised():
    between = layers.BatchNormalization()
    return compiled(dense(between, kernel_regularizer=keras.regularizers.L2(0.1)))


def dropped():
    return compiled(dense(layers.Dropout(0.5, seed=3)))


SAME_NUMBERS = [("random numbers", FAULT, "same_random_numbers")]
LOCAL = [("forward", BY_DESIGN, "local_statistics")]
# Name: builder, data, expected findings as (stage, status, cause).
MODELS = {
    "plain": (plain, (X, Y), []),
    "momentum": (momentum, (X, Y, WEIGHTS), []),
    "adamw": (adamw, (X, Y), []),
    "two heads": (two_heads, ({"a": X, "b": X[::-1].copy()}, {"u": Y, "v": Y}), []),
    "own step": (lambda: compiled(OwnStep()), (X, Y), []),
    "sums in the step": (lambda: regularised(ClipsTheSum), (X, Y), []),
    "two factors": (lambda: regularised(TwoFactors), (X, Y), []),
    "synchronized": (
        lambda: convolution(layers.BatchNormalization(synchronized=True)), (IMAGES, CLASSES), [],
    ),
    "numbered dropout": (lambda: compiled(dense(NumberedDropout())), (X, Y), []),
    "embedding, scalar loss": (
        lambda: sequences(scalar_loss, mask_zero=False), (TOKENS, OF_TOKENS),
        [("loss", FAULT, "scalar_loss_not_divided")],
    ),
    "masked sequence": (
        lambda: sequences("mse", mask_zero=True), (TOKENS, OF_TOKENS),
        [("loss", FAULT, "weighted_mean_of_means")],
    ),
    "normalised": (normalised, (X, Y), LOCAL),
    "dropped": (dropped, (X, Y), SAME_NUMBERS),
    "both dropouts": (
        lambda: compiled(dense(NumberedDropout(), layers.Dropout(0.3, seed=2))), (X, Y),
        SAME_NUMBERS,
    ),
    "own step, scalar loss": (
        lambda: compiled(OwnStep(is_divided=False)), (X, Y),
        [("gradients", FAULT, "scalar_loss_not_divided")],
    ),
    "scaled in the step": (
        lambda: regularised(ClipsTheSumOnly), (X, Y), [("gradients", FAULT, "scaled_gradient")],
    ),
    "without an optimizer": (
        lambda: regularised(WithoutOptimizer), (X, Y), [("update", BY_DESIGN, "update_not_seen")],
    ),
    "contrastive loss": (
        lambda: compiled(dense(), contrastive_loss), (X, Y),
        [("loss", BY_DESIGN, "not_a_sum_over_examples")],
    ),
    "mixes a little": (
        lambda: compiled(dense(MixesALittle())), (X, Y),
        [
            ("forward", BY_DESIGN, "mixes_examples"),
            ("gradients", BY_DESIGN, "not_a_sum_over_examples"),
        ],
    ),
}  # fmt: skip
COPIED = ("plain", "momentum", "adamw", "own step", "normalised", "dropped")  # On 3 replicas.
SLOW_MODELS = {
    "bfloat16": (
        lambda: in_dtype("mixed_bfloat16", convolution), (IMAGES, CLASSES), [],
    ),
    "weights in bfloat16": (
        lambda: in_dtype("bfloat16", lambda: compiled(attention(), optimizer=optimizers.Muon(0.1))),
        (TOKENS, Y), [],
    ),
    "noise": (lambda: compiled(dense(layers.GaussianNoise(0.5))), (X, Y), SAME_NUMBERS),
    "masked recurrence": (
        lambda: sequences("mse", layers.LSTM(6, return_sequences=True), mask_zero=True),
        (TOKENS, OF_TOKENS), [("loss", FAULT, "weighted_mean_of_means")],
    ),
}  # fmt: skip


# --- Recording -----------------------------------------------------------------------------------


def batches_of(data):
    return tf.data.Dataset.from_tensor_slices(data).batch(12)


def record(build, data, *, steps=2, num=3, **options):
    """Trains under a strategy, and returns what was recorded."""
    keras.utils.set_random_seed(1)
    with mirrored(num).scope():
        model = build()
    with Recorder(model, steps=steps) as recorder:
        model.fit(batches_of(data), verbose=0, **options)
    return recorder.recording()


@functools.cache
def recorded(name):
    build, data, _ = (MODELS | SLOW_MODELS)[name]
    options = {"validation_data": batches_of(data).take(1)} if name == "two heads" else {}
    options |= {"class_weight": {0: 2.0, 3: 0.5}} if name == "synchronized" else {}
    steps, num = ((0, 2, 3), 3) if name in COPIED else (2, 2)
    return record(build, data, steps=steps, num=num, **options)


@functools.cache
def one_device(name):
    return MODELS[name][0]()


def found(report):
    return [(f.stage, f.status, f.cause) for f in report.findings]


def only(report, stage, cause):
    """Returns the one finding of a report besides those by design, and asserts what it is."""
    assert [(f.stage, f.cause) for f in report.faults] == [(stage, cause)], str(report)
    assert report.status(stage) == FAULT and report.faults[0].remedy in str(report)
    return report.faults[0]


@pytest.mark.parametrize(
    "name", [*MODELS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_MODELS)]
)
def test_models_of_all_kinds(name):
    build, _, expected = (MODELS | SLOW_MODELS)[name]
    report = compare(recorded(name), build)  # In float64, if possible.
    assert found(report) == expected, str(report)
    counts = "3 steps on 3 replicas: " if name in COPIED else "2 steps on 2 replicas: "
    assert str(report).startswith(counts) and "update" in report.checked
    assert all(stage in STAGES and stage in str(report) for stage in report.checked)
    assert (keras.config.floatx(), keras.config.dtype_policy().name) == ("float32", "float32")


def test_texts_have_the_numbers():
    report = compare(recorded("scaled in the step"), one_device("scaled in the step"))
    assert "adds up to 2 times" in report.findings[0].text
    report = compare(recorded("both dropouts"), one_device("both dropouts"))
    assert "1 of 2 seed generators (dropout" in report.findings[0].text
    report = compare(recorded("without an optimizer"), one_device("without an optimizer"))
    assert len(report.findings[0].tensors) == 4


# --- Copies with a fault -------------------------------------------------------------------------


class Copy:
    """A copy of a recording, to be changed as if replicas had done something else.

    Attributes:
        steps: the arrays of the copied steps.
        one: the model on one device, which computes what follows from a change.
    """

    def __init__(self, name="plain", positions=(0,), model=None):
        whole = recorded(name)
        self.recording = copy.copy(whole)
        self.recording.steps = [copy.deepcopy(whole.steps[p]) for p in positions]
        self.recording.numbers = [whole.numbers[p] for p in positions]
        self.recording.settings = [whole.settings[p] for p in positions]
        self.model = model or one_device(name)
        self.one = OneDevice(self.model, self.recording)
        self.steps = self.recording.steps

    @property
    def kinds(self):
        return [variable["kind"] for variable in self.recording.variables]

    def index(self, end):
        """Returns the index of the variable whose name ends so."""
        names = [variable["name"] for variable in self.recording.variables]
        (index,) = (i for i, name in enumerate(names) if name.endswith(end))
        return index

    def change(self, kind, change, replicas=REPLICAS):
        """Changes each array: `change(array, i, r, step)`; `sent` are those in the sum only."""
        for step in self.steps:
            for r in replicas if kind != "sent" else ():
                step[kind, r] = [change(a, i, r, step) for i, a in enumerate(step[kind, r])]
            if kind == "raw":
                self.clip(step)
            if kind in ("raw", "clipped", "sent"):
                changed = change if kind == "sent" else lambda array, *_: array
                self.all_reduce(step, changed)
            if kind != "after":
                self.update(step)
        return self

    def compute(self, replicas=REPLICAS, *, shares=(1 / 3, 1 / 3), **changed):
        """Replicas compute with other examples, states or factors; see `OneDevice.step`."""
        for step in self.steps:
            for r in replicas:
                state, data = (
                    changed[key](step, r) if key in changed else step[kind, r]
                    for key, kind in (("state", "before"), ("data", "data"))
                )
                result = self.one.step(state, data, scales=shares)
                step["y_pred", r], step["raw", r] = result.y_pred, result.raw
                data_loss, regular = (s * loss for s, loss in zip(shares, result.loss, strict=True))
                step["loss", r] = [np.float32(data_loss + regular), np.float32(regular)]
                own = zip(step["after", r], result.after, self.kinds, strict=True)
                step["after", r] = [b if k in ("statistic", "seed") else a for a, b, k in own]
            self.clip(step)
            self.all_reduce(step)
            self.update(step)
        return self

    def clip(self, step):
        for r in REPLICAS:
            step["clipped", r] = self.one.clip(step["raw", r])

    def all_reduce(self, step, changed=lambda array, *_: array):
        sent = [
            [changed(array, i, r, step) for i, array in enumerate(step["clipped", r])]
            for r in REPLICAS
        ]
        for r in REPLICAS:
            step["sums", r] = [add(parts) for parts in zip(*sent, strict=True)]

    def update(self, step, replicas=REPLICAS, **changes):
        """Replicas update their weights; see `OneDevice.update`."""
        for r in replicas:
            updated = self.one.update(step["before", r], step["sums", r], **changes)
            own = zip(step["after", r], updated, self.kinds, strict=True)
            step["after", r] = [a if k in ("statistic", "seed") else b for a, b, k in own]
        return self

    def report(self, model=None, **options):
        return compare(self.recording, model or self.model, **options)


def rounded(array, dtype=tf.bfloat16):
    return tf.cast(tf.cast(array, dtype), tf.float32).numpy()


def top_k(array):
    limit = np.sort(np.abs(array), axis=None)[-max(1, array.size // 4)]
    return np.where(np.abs(array) >= limit, array, np.float32(0))


def int8(array):
    scale = np.max(np.abs(array)) / np.float32(127)
    return np.round(array / scale) * scale


def signs(array):
    return np.sign(array) * np.mean(np.abs(array))


def noisy(array):
    noise = np.random.default_rng(1).normal(0, 0.1, array.shape)
    return (array * (1 + noise)).astype(array.dtype)


def of(tensor, change):
    """Returns a change of one tensor only."""
    return lambda array, i, r, step: change(array) if i == tensor else array


def every(change):
    return lambda array, i, r, step: change(array)


def on(replica, change):
    """Returns a change on one replica only."""
    return lambda array, i, r, step: change(array) if r == replica else array


STAGE_OF = {"raw": "gradients", "clipped": "clipping", "sent": "all-reduce", "sums": "all-reduce"}
# Name: what is changed, how, cause; tensors and replicas of the finding, None for all.
GRADIENT_FAULTS = {
    "not all-reduced": (
        "sums", lambda s, i, r, step: step["raw", r][2] if i == 2 else s,
        "not_all_reduced", (2,), None,
    ),
    "mean": ("sums", every(lambda s: s / 3), "mean_instead_of_sum", range(4), None),
    "mean of one tensor": ("sums", of(0, lambda s: s / 3), "mean_instead_of_sum", (0,), None),
    "sum on one replica only": (
        "sums", lambda s, i, r, step: s if r == 0 else s / 3, "mean_instead_of_sum", None, (1, 2),
    ),
    "lost": ("sent", on(1, np.zeros_like), "lost_replica", range(4), (1,)),
    "doubled": ("sent", on(2, lambda g: 2 * g), "scaled_gradient", range(4), (2,)),
    "bfloat16": ("sent", every(rounded), "reduced_precision", None, None),
    "bfloat16 sum": ("sums", every(rounded), "reduced_precision", None, None),
    "float16": ("sent", every(lambda g: rounded(g, tf.float16)), "reduced_precision", None, None),
    "top k": ("sent", every(top_k), "sparsified", None, None),
    "int8": ("sent", every(int8), "quantised", None, None),
    "int8 on one tensor": ("sent", of(0, int8), "quantised", (0,), None),
    "sign": ("sent", every(signs), "quantised", None, None),
    "noise in a sum": ("sums", of(2, noisy), "unexplained", (2,), None),
    "zero gradient": (
        "raw", lambda g, i, r, step: 0 * g if (i, r) == (0, 1) else g, "frozen", (0,), (1,),
    ),
    "gradient times 3": ("raw", of(2, lambda g: 3 * g), "scaled_gradient", (2,), None),
    "gradient in bfloat16": ("raw", on(2, rounded), "reduced_precision", None, (2,)),
    "gradient top k": ("raw", on(0, top_k), "sparsified", None, (0,)),
    "noise in a gradient": ("raw", of(2, noisy), "unexplained", (2,), None),
    "one replica clips": (
        "clipped", on(1, lambda g: g * np.float32(0.1 / np.linalg.norm(g))),
        "clipped_on_one_replica", None, (1,),
    ),
    "one replica clips values": (
        "clipped", on(1, lambda g: np.clip(g, -0.02, 0.02).astype(np.float32)),
        "clipped_on_one_replica", None, (1,),
    ),
    "noise after clipping": ("clipped", of(2, noisy), "unexplained", (2,), None),
}  # fmt: skip


@pytest.mark.parametrize("name", GRADIENT_FAULTS)
def test_faults_of_gradients(name):
    kind, change, cause, tensors, replicas = GRADIENT_FAULTS[name]
    faulty = Copy().change(kind, change)
    finding = only(faulty.report(), STAGE_OF[kind], cause)
    names = tuple(faulty.recording.gradients)
    assert finding.tensors and set(finding.tensors) <= set(names)
    assert tensors is None or finding.tensors == tuple(names[i] for i in tensors)
    assert finding.replicas == (replicas or REPLICAS)


def test_a_sum_of_the_step_before():
    faulty = Copy(positions=(0, 1))
    first, second = faulty.steps
    for r in REPLICAS:
        second["sums", r] = first["sums", r]
    faulty.update(second)
    assert only(faulty.report(), "all-reduce", "stale_gradient").steps == (2,)


def test_a_step_that_sums_in_every_second_step_only():
    faulty = Copy(positions=(0, 1))
    _, second = faulty.steps
    faulty.change("sums", lambda s, i, r, step: step["raw", r][i] if step is second else s)
    finding = only(faulty.report(), "all-reduce", "not_all_reduced")
    assert finding.steps == (2,) and finding.replicas == REPLICAS


@pytest.mark.parametrize(
    "limit", [{"clipnorm": 0.1}, {"global_clipnorm": 0.1}, {"clipvalue": 0.01}]
)
def test_clipping_before_the_sum(limit):
    model = compiled(dense(), optimizer=optimizers.SGD(0.1, **limit))
    faulty = Copy(model=model).change("raw", every(lambda g: g))
    text = only(faulty.report(), "clipping", "clipped_before_the_sum").text
    ((name, value),) = limit.items()
    assert f"{name}={value}" in text


def test_clipping_that_clips_nothing():
    model = compiled(dense(), optimizer=optimizers.SGD(0.1, global_clipnorm=1e9))
    report = compare(recorded("plain"), model)
    assert not report.findings and report.status("clipping") == "clean"


# --- Losses and predictions ----------------------------------------------------------------------


def with_rolled_targets(step, r):
    x, y, *weights = step["data", r]
    return [x, np.roll(y, 1, 0), *weights]


def test_labels_shifted_on_one_replica():
    faulty = Copy().compute((1,), data=with_rolled_targets)
    finding = only(faulty.report(), "loss", "labels_shifted")
    assert finding.replicas == (1,)
    # A step of its own shows no loss.
    faulty = Copy("own step")
    shifted = [faulty.one.step(s["before", 1], with_rolled_targets(s, 1)).raw for s in faulty.steps]
    for step, raw in zip(faulty.steps, shifted, strict=True):
        step["raw", 1] = [g / np.float32(3) for g in raw]
    finding = only(faulty.change("raw", every(lambda g: g)).report(), "gradients", "labels_shifted")
    assert finding.replicas == (1,)


@pytest.mark.parametrize("name", ["normalised", "dropped"])
def test_inference_mode_on_one_replica(name):
    faulty = Copy(name)
    modal = [*faulty.one.random_layers, *faulty.one.layers_with_statistics]
    faulty.one.without(modal, lambda: faulty.compute((1,)))
    faults = [f for f in faulty.report().faults if f.cause != "same_random_numbers"]
    assert [(f.stage, f.cause, f.replicas) for f in faults] == [("forward", "inference_mode", (1,))]


def test_predictions_with_the_random_numbers_of_another_replica():
    numbers = Copy("dropped")
    seed = numbers.kinds.index("seed")
    for step in numbers.steps:
        for r in REPLICAS:
            step["before", r][seed] = step["before", r][seed] + np.array([0, r], np.uint32)
    numbers.compute()
    assert not [f for f in numbers.report().faults if f.stage in ("random numbers", "forward")]

    def seeds_of_replica_0(step, r):
        return [*step["before", r][:seed], step["before", 0][seed], *step["before", r][seed + 1 :]]

    clean = copy.deepcopy(numbers.steps)
    numbers.compute((1,), state=seeds_of_replica_0)
    for step, own in zip(numbers.steps, clean, strict=True):
        step["after", 1][seed] = own["after", 1][seed]
    finding = only(numbers.report(), "forward", "same_random_numbers")
    assert finding.replicas == (1,)


def test_predictions_of_the_weights_one_step_before():
    faulty = Copy(positions=(1, 2))
    first, second = faulty.steps
    second["y_pred", 1] = faulty.one.step(first["before", 1], second["data", 1]).y_pred
    (fault,) = [f for f in faulty.report().faults if f.stage == "forward"]
    assert (fault.cause, fault.replicas, fault.steps) == ("stale_gradient", (1,), (3,))


def test_predictions_for_the_examples_of_another_replica_and_for_none():
    faulty = Copy()
    for step in faulty.steps:
        step["y_pred", 1] = step["y_pred", 0]
    faults = [f for f in faulty.report().faults if f.stage == "forward"]
    assert [(f.cause, f.replicas) for f in faults] == [("same_examples", (1,))]
    faulty = Copy().change("y_pred", on(2, noisy))
    faults = [f for f in faulty.report().faults if f.stage == "forward"]
    assert [(f.cause, f.replicas) for f in faults] == [("unexplained", (2,))]


@pytest.mark.parametrize("factor", [3, 0])
def test_a_regulariser_that_is_not_divided(factor):
    faulty = Copy("normalised").compute(shares=(1 / 3, factor / 3))
    cause = "regulariser_repeated" if factor else "regulariser_missing"
    assert f"{factor} times" in only(faulty.report(), "regularisation", cause).text


def test_a_regulariser_that_is_repeated_in_the_gradients():
    faulty = Copy("normalised")
    for step in faulty.steps:
        for r in REPLICAS:
            before, data = step["before", r], step["data", r]
            step["raw", r] = faulty.one.step(before, data, scales=(1 / 3, 1)).raw
    faulty.change("raw", every(lambda g: g))
    only(faulty.report(), "gradients", "regulariser_repeated")


def test_another_loss():
    finding = only(compare(recorded("plain"), compiled(dense(), "mae")), "loss", "other_loss")
    assert finding.replicas == REPLICAS


def test_a_loss_that_is_divided_twice():
    faulty = Copy().compute(shares=(1 / 9, 1 / 9))
    assert (
        "divided by the number of replicas twice"
        in only(faulty.report(), "loss", "scaled_gradient").text
    )


def test_a_weighted_mean_of_each_replica():
    mean = losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model = compiled(dense(), mean, optimizers.SGD(0.05, momentum=0.9))
    only(Copy("momentum", model=model).compute().report(), "loss", "weighted_mean_of_means")


def test_a_last_batch_that_does_not_divide():
    recording = record(plain, (X[:16], Y[:16]), steps=2)
    finding = only(compare(recording, one_device("plain")), "loss", "mean_of_means")
    assert finding.steps == (1,) and "2/2/0" in finding.text


def test_two_faults_at_once_are_both_named():
    faulty = Copy().compute(shares=(1.0, 1.0)).change("sent", on(1, np.zeros_like))
    assert found(faulty.report()) == [
        ("loss", FAULT, "scalar_loss_not_divided"), ("all-reduce", FAULT, "lost_replica"),
    ]  # fmt: skip


# --- A loss that is computed once, as by strategies of this program ------------------------------


def with_whole_loss(change):
    """Returns a copy whose loss is that of `change(y_pred)`, with the gradients of that loss."""
    faulty = Copy()
    faulty.recording.whole_loss = True
    for position, step in enumerate(faulty.steps):
        context = StepContext(faulty.recording, position, faulty.one)
        y_pred = [np.concatenate(change([step["y_pred", r][0] for r in REPLICAS]))]
        masks, state = [np.zeros(())], step["before", 0]
        loss = faulty.one.loss(state, context.whole, y_pred, masks)
        for r, start in enumerate(starts_of(context, context.whole, y_pred, masks)):
            step["loss", r] = [np.float32(loss / 3), np.float32(0)]
            step["raw", r] = faulty.one.step(state, step["data", r], starts=start).raw
    return faulty.change("raw", every(lambda g: g))


def test_predictions_that_are_joined_in_another_order():
    assert not with_whole_loss(lambda y_pred: y_pred).report().findings
    only(with_whole_loss(lambda y_pred: y_pred[::-1]).report(), "loss", "predictions_out_of_order")


# --- The update ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "momentum", "adamw"])
def test_another_learning_rate_on_one_replica(name):
    faulty = Copy(name)
    for step in faulty.steps:
        faulty.update(step, (1,), rate=2.0)
    finding = only(faulty.report(), "update", "other_learning_rate")
    assert finding.replicas == (1,) and finding.steps == (0,) and "2 times" in finding.text


@pytest.mark.parametrize(
    ("change", "cause", "number"),
    [
        (lambda weight, old: weight - np.float32(0.01) * old, "weight_decay_on_top", "0.01"),
        (lambda weight, old: old, "not_updated", "not change"),
        (lambda weight, old: noisy(weight), "unexplained", "different update"),
        (
            lambda weight, old: weight + np.eye(1, weight.size, 3, dtype=np.float32).reshape(
                weight.shape
            ),
            "changed_on_its_own", "1 elements",
        ),
    ],
)  # fmt: skip
def test_wrong_updates_of_one_weight(change, cause, number):
    faulty = Copy("momentum")
    for step in faulty.steps:
        for r in REPLICAS:
            step["after", r][0] = change(step["after", r][0], step["before", r][0])
    finding = only(faulty.report(), "update", cause)
    assert finding.tensors == tuple(faulty.recording.gradients[:1]) and number in finding.text


@pytest.mark.parametrize(
    ("applied", "cause"),
    [
        (lambda step, r: step["raw", r], "not_all_reduced"),
        (lambda step, r: [g / np.float32(3) for g in step["sums", r]], "mean_instead_of_sum"),
    ],
)
def test_updates_with_other_gradients_than_the_sum(applied, cause):
    faulty = Copy()
    for step in faulty.steps:
        sums = {r: step["sums", r] for r in REPLICAS}
        for r in REPLICAS:
            step["sums", r] = applied(step, r)
        faulty.update(step)
        step.update({("sums", r): sums[r] for r in REPLICAS})
    assert only(faulty.report(), "update", cause).replicas == REPLICAS


def test_a_schedule_that_is_stepped_twice():
    faulty = Copy("adamw")
    clock = faulty.index("iteration")
    for step in faulty.steps:
        for r in REPLICAS:
            step["after", r][clock] = step["after", r][clock] + 1
    finding = only(faulty.report(), "update", "schedule_stepped_too_often")
    assert "by 2" in finding.text and finding.tensors[0].endswith("iteration")


def next_up(array):
    changed = array.copy()
    changed.flat[1] = np.nextafter(changed.flat[1], np.float32(9))
    return changed


@pytest.mark.parametrize("slot", ["", "momentum"])
def test_one_bit_changed_between_steps(slot):
    faulty = Copy("momentum", positions=(1, 2))
    names = [v["name"] for v in faulty.recording.variables]
    index = next(i for i, v in enumerate(faulty.recording.variables) if v.get("slot", "") == slot)
    faulty.steps = faulty.steps[1:]

    def changed(step, r):
        state = list(step["before", r])
        state[index] = next_up(state[index])
        return state

    (step,) = faulty.steps
    step["before", 1] = changed(step, 1)
    faulty.compute((1,))
    finding = only(faulty.report(), "start", "changed_on_its_own")
    assert finding.replicas == (1,) and finding.steps == (3,)
    assert finding.tensors == (names[index],)


def test_replicas_that_start_apart_or_end_apart():
    faulty = Copy()
    (step,) = faulty.steps
    step["before", 2][0] = step["before", 2][0] + 1
    faulty.compute((2,))
    finding = only(faulty.report(), "start", "diverged_replicas")
    assert finding.replicas == (2,) and finding.tensors == tuple(faulty.recording.gradients[:1])
    faulty = Copy()
    (step,) = faulty.steps
    step["after", 2][0] = next_up(step["after", 2][0])  # Within the rounding of an update.
    finding = only(faulty.report(), "agreement", "diverged_replicas")
    assert finding.replicas == (2,) and finding.tensors == tuple(faulty.recording.gradients[:1])


# --- Numbers that are not finite -----------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_step_that_is_not_finite_on_one_device_either_has_no_fault(bad):
    faulty = Copy("adamw", positions=(1, 2))
    first, second = faulty.steps
    first["data", 1][1][1, 0] = bad
    faulty.steps = [first]
    faulty.compute((1,))
    for r in REPLICAS:
        second["before", r] = first["after", r]
    one, other = faulty.report().findings
    assert (one.stage, one.steps) == ("start", (3,))
    assert (other.stage, other.steps, other.replicas) == ("gradients", (2,), (1,))
    assert {(f.status, f.cause) for f in (one, other)} == {(BY_DESIGN, "not_finite")}


def test_gradients_that_are_not_finite_on_one_replica_only_are_a_fault():
    report = Copy().change("raw", on(1, lambda g: g + np.float32(np.inf))).report()
    assert report.status("gradients") == FAULT
    assert {f.replicas for f in report.faults if f.stage == "gradients"} == {(1,)}


def float16():
    return in_dtype("mixed_float16", momentum)


@functools.cache
def overflowing(*replicas):
    """A training in float16 whose gradients overflow on some replicas in the first step."""
    y = Y.copy()
    for r in replicas:
        y[4 * r : 4 * r + 4] *= 2000
    return record(float16, (X, y))


def test_a_step_that_overflows_is_skipped():
    recording = overflowing(0)
    assert [("raw", 0) in step for step in recording.steps] == [False, True]
    report = compare(recording, float16())
    assert not report.findings and report.num_steps == 2
    assert report.status("all-reduce") == "clean"


@pytest.mark.parametrize(
    ("kind", "cause", "replicas"),
    [("after", "changed_on_its_own", (2,)), ("data", "not_updated", ())],
)
def test_a_skipped_step_with_a_fault(kind, cause, replicas):
    recording = copy.copy(overflowing(0))
    recording.steps, recording.numbers = copy.deepcopy(recording.steps[:1]), [0]
    (step,) = recording.steps
    if kind == "after":  # A weight changes.
        step["after", 2][0] = step["after", 2][0] + 1
    else:  # Nothing overflows.
        step["data", 0][1] /= 2000
    fault = next(f for f in compare(recording, float16()).faults if f.stage == "update")
    assert (fault.cause, fault.replicas) == (cause, replicas)


def test_an_overflow_on_another_replica_than_the_first():
    """Keras looks at the gradients of replica 0 only, and applies the infinite ones of others."""
    report = compare(overflowing(1), float16())
    (fault,) = report.faults
    assert (fault.cause, fault.replicas, fault.steps) == ("overflow_not_skipped", (1,), (0,))
    others = [(f.cause, f.steps) for f in report.findings if f not in report.faults]
    assert others == [("not_finite", (1,))]


# --- Batches that the data set defines -----------------------------------------------------------


def test_examples_of_the_batch():
    faulty = Copy()
    x, y = X[:12], Y[:12]

    def report(*batch):
        return faulty.report(batches=[batch])

    assert not report(x, y).findings and "examples" in report(x, y).checked
    only(report(x, np.roll(y, 1, 0)), "examples", "labels_shifted")
    only(report(X[:16], Y[:16]), "examples", "lost_examples")
    only(report(x + 1, y), "examples", "other_examples")
    (step,) = faulty.steps
    step["data", 2] = step["data", 1]
    faulty.compute((2,))
    only(report(x, y), "examples", "repeated_examples")
    step["data", 0] = step["data", 1]
    faulty.compute((0,))
    assert only(report(x, y), "examples", "same_examples").replicas == REPLICAS


# --- Evaluations ---------------------------------------------------------------------------------


class AlwaysDrops(layers.Dropout):
    def call(self, x, training=False):
        return super().call(x, training=True)


def test_evaluations():
    metrics = [keras.metrics.MeanAbsoluteError(name="mae")]
    model = compiled(dense(), metrics=metrics)
    states = [recorded("plain").steps[0]["after", r] for r in REPLICAS]
    dataset = batches_of((X[:12], Y[:12]))
    model(X[:1])
    model.optimizer.build(model.trainable_variables)
    for variable, array in zip(
        [*model.variables, *model.optimizer.variables], states[0], strict=True
    ):
        variable.assign(array)
    logs = model.evaluate(dataset, verbose=0, return_dict=True)
    assert compare_evaluation(logs, model, states, dataset) == []
    (finding,) = compare_evaluation(logs | {"mae": 1.01 * logs["mae"]}, model, states, dataset)
    assert (finding.status, finding.cause, finding.tensors) == (FAULT, "other_metric", ("mae",))
    (finding,) = compare_evaluation(logs | {"loss": 1.01 * logs["loss"]}, model, states, dataset)
    assert (finding.stage, finding.status) == ("evaluation", FAULT)
    assert (finding.cause, finding.tensors) == ("other_evaluation", ("loss",))


def test_an_evaluation_with_random_numbers_or_local_statistics_is_by_design():
    model = compiled(dense(AlwaysDrops(0.5)))
    states = [recorded("dropped").steps[0]["after", r] for r in REPLICAS]
    dataset = batches_of((X[:12], Y[:12]))
    model(X[:1])
    model.optimizer.build(model.trainable_variables)
    (finding,) = compare_evaluation({"loss": 5.0}, model, states, dataset)
    assert (finding.status, finding.cause) == (BY_DESIGN, "random_evaluation")
    model, recording = one_device("normalised"), recorded("normalised")
    one, states = OneDevice(model, recording), [recording.steps[0]["after", r] for r in REPLICAS]
    shares = []
    for r, state in enumerate(states):
        one.load(state)
        part = batches_of((X[4 * r : 4 * r + 4], Y[4 * r : 4 * r + 4]))
        shares.append(model.evaluate(part, verbose=0, return_dict=True)["loss"])
    (finding,) = compare_evaluation({"loss": np.mean(shares)}, model, states, dataset)
    assert (finding.status, finding.cause) == (BY_DESIGN, "local_statistics")


# --- Small changes, and tolerances ---------------------------------------------------------------

# Kind → the stage that it belongs to, the replica, and the first of its arrays that is changed.
SMALL = {
    "y_pred": ("forward", 0, 0), "loss": ("loss", 1, 0), "raw": ("gradients", 2, 0),
    "clipped": ("clipping", 0, 0), "sums": ("all-reduce", 1, 0), "after": ("update", 2, 0),
    "statistic": ("statistics", 0, 4), "regularisation": ("regularisation", 1, 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", SMALL)
def test_a_change_of_one_in_ten_thousand_is_found_on_its_replica(kind):
    stage, replica, index = SMALL[kind]
    faulty = Copy("normalised")
    array = {"statistic": "after", "regularisation": "loss"}.get(kind, kind)
    changed = faulty.steps[0][array, replica]
    changed[index] = (changed[index] * 1.0001).astype(np.float32)
    report = faulty.report(normalised)
    assert report.tolerance.startswith("float64 on one device")
    faults = [f for f in report.faults if f.stage == stage]
    expected = () if stage == "regularisation" else (replica,)
    assert faults and {f.replicas for f in faults} == {expected}, str(report)
    if kind == "sums":
        assert faults[0].cause == "scaled_gradient" and "1.0001" in faults[0].text


class OnlyFloat32(keras.Model):
    """Adds a constant in float32, which fails in float64."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = layers.Dense(8, activation="relu"), layers.Dense(2)

    def call(self, x):
        return self.head(self.hidden(x)) + tf.constant([0.0, 0.0], tf.float32)


@pytest.mark.parametrize(
    ("name", "build", "why_not"),
    [
        ("dropped", dropped, "random layers"),
        ("plain", lambda: compiled(OnlyFloat32()), "in float64"),
        ("plain", lambda: in_dtype("mixed_bfloat16", plain), "does not compute in float32"),
        ("plain", lambda: compiled(dense(dtype="float32")), "sets its own dtype"),
    ],
)
def test_models_that_cannot_be_in_float64(name, build, why_not):
    report = Copy(name).report(build)
    assert "not float64" in report.tolerance and why_not in report.tolerance
    assert keras.config.floatx() == "float32"


def bfloat16():
    images = keras.Sequential([
        layers.Conv2D(6, 5, activation="sigmoid"), layers.Dropout(0.1), layers.Flatten(),
        layers.Dense(4),
    ])  # fmt: skip
    return compiled(images, losses.SparseCategoricalCrossentropy(from_logits=True))


@pytest.mark.slow
def test_rounding_in_bfloat16_is_measured_against_float32():
    """A gradient of a bias is a sum of many numbers, which may get stuck in bfloat16."""
    data = np.repeat(IMAGES, 3, axis=1).repeat(3, axis=2), CLASSES
    build = functools.partial(in_dtype, "mixed_bfloat16", bfloat16)
    recording, model = record(build, data, steps=1), build()
    one = OneDevice(model, recording)
    state, examples = recording.steps[0]["before", 0], recording.steps[0]["data", 0]
    step = functools.partial(one.step, state, examples, scales=(1 / 3, 1 / 3))
    own = step()
    fine = one.step_in_float32(state, examples, (1 / 3, 1 / 3))
    assert all(map(np.array_equal, step().raw, own.raw))
    apart = relative_distance(own.y_pred, fine.y_pred)
    assert 2.0**-12 < apart < 2.0**-4  # The same masks.
    assert np.any(fine.y_pred[0].view("uint32") & 0xFFFF)
    report = compare(recording, model)
    assert {f.cause for f in report.findings} == {"same_random_numbers"}
    context = StepContext(recording, 0, one)
    compute_expected(context)
    errors = [distance(a, b) for a, b in zip(own.raw, fine.raw, strict=True)]
    assert all(np.array(context.spread[0].gradients) >= np.array(errors))


# --- Errors and reports --------------------------------------------------------------------------


def test_one_device_is_as_itself():
    model = plain()
    with Recorder(model, steps=2) as recorder:
        model.fit(batches_of((X, Y)), verbose=0)
    report = compare(recorder, one_device("plain"))
    assert not report.findings and report.num_replicas == 1
    with pytest.raises(ValueError, match=r"the recording has .* variables"):
        compare(recorder, one_device("momentum"))
    with pytest.raises(ValueError, match="build the model that was recorded"):
        compare(recorder, compiled(dense(layers.Dense(3))))
    with mirrored(3).scope():
        other = plain()
    with pytest.raises(ValueError, match="outside of the strategy's scope"):
        compare(recorder, other)
    with Recorder(model) as recorder:
        pass
    with pytest.raises(ValueError, match="nothing was recorded"):
        compare(recorder, plain())


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


@pytest.mark.parametrize(
    ("statuses", "verdict"),
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
def test_a_report_begins_with_its_verdict(statuses, verdict):
    findings = [
        keras_comparison.Finding("examples", status, "same_examples", "why", (1,))
        for status in statuses
    ]
    several = keras_comparison.Report(2, 3, findings, ["examples"], "float64")
    assert str(several).splitlines()[0] == f"2 steps on 3 replicas: {verdict}"
    first, second, *_ = str(keras_comparison.Report(1, 1, findings, [], "float64")).splitlines()
    assert first == f"1 step on 1 replica: {verdict}"
    assert second.startswith("only one replica") and "only one replica" not in str(several)
