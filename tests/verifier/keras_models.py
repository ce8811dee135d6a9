"""Small models of Keras, which `fit` trains under a strategy, and their recordings."""

import functools

import keras
import numpy as np
import tensorflow as tf

from lockstep.data.file import from_parts
from lockstep.record_keras import Recorder
from tests.small_models import mirrored
from tests.verifier.zoo.small import OwnStep, dense, num_replicas, regression_arrays, replica_id

layers, losses, optimizers = keras.layers, keras.losses, keras.optimizers
RANDOM = np.random.default_rng(0)
X, Y = regression_arrays(48)
WEIGHTS = RANDOM.uniform(0.1, 2, 48).astype(np.float32)
IMAGES = RANDOM.normal(size=(48, 8, 8, 3)).astype(np.float32)
CLASSES = RANDOM.integers(0, 2, 48)
SYMMETRIC = np.concatenate([IMAGES[:12], -IMAGES[:12], 0 * IMAGES[:24]])
SYMMETRIC = SYMMETRIC[np.arange(48).reshape(4, 12).T.ravel()]  # Each batch has a mean of 0.
TOKENS = RANDOM.integers(0, 20, (48, 7))
TOKENS[:, 5:] = TOKENS[::3, 3:] = 0
OF_TOKENS = np.repeat(Y[:, None], 7, 1)


def of_classes(model):
    model.compile(optimizers.SGD(0.1), losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def convolution(*between):
    pool = [layers.ReLU(), layers.GlobalAveragePooling2D(), layers.Dense(2)]
    return of_classes(keras.Sequential([layers.Conv2D(8, 3), *between, *pool]))


def pooled():
    """What the remedies of a verdict lead to, and inputs of a ReLU within rounding of 0."""
    norm = layers.BatchNormalization(synchronized=True)
    first = [keras.Input((8, 8, 3)), layers.Conv2D(4, 3, use_bias=False), norm, layers.ReLU()]
    rest = [layers.MaxPooling2D(), layers.Flatten(), NumberedDropout(), layers.Dense(2)]
    return of_classes(keras.Sequential([*first, *rest]))


def sequences(*, mask_zero):
    model = keras.Sequential([layers.Embedding(20, 8, mask_zero=mask_zero), layers.Dense(2)])
    model.compile(optimizers.SGD(0.1), "mse")
    return model


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
    model.compile(optimizers.Adam(1e-3, use_ema=True), sums)
    return model


class MeanOfEach(OwnStep):
    """Has a custom training step, which shows no loss."""

    def loss_of(self, x, y):
        return tf.reduce_mean(self.losses_of(x, y)) / num_replicas()


class TwoFactors(OwnStep):
    """Divides the data loss by the batch, and regularisation by the number of replicas."""

    def loss_of(self, x, y):
        return tf.reduce_sum(self.losses_of(x, y)) / 12 + tf.add_n(self.losses) / num_replicas()


class ClipsTheSum(TwoFactors):
    """Sums gradients in its training step, and clips the sum."""

    divisor = property(lambda self: num_replicas())

    def apply(self, gradients):
        super().apply([tf.clip_by_norm(g, 0.05) / self.divisor for g in summed(gradients)])


class ClipsTheSumOnly(ClipsTheSum):
    divisor = 1


class WithoutOptimizer(TwoFactors):
    """Changes its weights itself."""

    def apply(self, gradients):
        for gradient, variable in zip(summed(gradients), self.trainable_weights, strict=True):
            variable.assign_sub(0.1 * gradient)


class NumberedDropout(layers.Layer):
    """Dropout whose seed holds the number of the replica."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, x, training=False):
        if not training:
            return x
        seed = tf.cast(self.seed_generator.next(), "int32") + tf.stack([0, replica_id()])
        return tf.nn.experimental.stateless_dropout(x, 0.5, seed)


class MixesALittle(layers.Layer):
    def call(self, x):
        return x + 1e-4 * tf.reduce_mean(x, axis=0, keepdims=True)


class OnlyFloat32(keras.Sequential):
    """Adds a constant in float32, which fails in float64."""

    def call(self, x, training=None):
        return super().call(x, training=training) + tf.constant([0.0, 0.0], tf.float32)


def summed(gradients):
    return tf.distribute.get_replica_context().all_reduce("SUM", gradients)


def regularised(kind):
    model = dense(kind=kind, kernel_regularizer=keras.regularizers.L2(1e-3))
    model.layers[-1].kernel_regularizer = keras.regularizers.L1(0.01)
    return model


def in_dtype(policy, build):
    """Builds a model in another dtype."""
    keras.config.set_dtype_policy(policy)
    try:
        return build()
    finally:
        keras.config.set_dtype_policy("float32")


def plain(**limit):
    return dense(optimizer=optimizers.SGD(0.1, **limit))


def momentum():
    return dense(optimizer=optimizers.SGD(0.05, momentum=0.9))


def adamw():
    rate = optimizers.schedules.ExponentialDecay(0.01, 1, 0.9)
    return dense(optimizer=optimizers.AdamW(rate, weight_decay=0.1))


def normalised():
    return dense(layers.BatchNormalization(), kernel_regularizer=keras.regularizers.L2(0.1))


def dropped():
    return dense(layers.Dropout(0.5, seed=3))


LOCAL = ("forward: local_statistics*",)
# Name: builder, data, what is found.
MODELS = {
    "plain": (plain, (X, Y), ()),
    "momentum": (momentum, (X, Y, WEIGHTS), ()),
    "adamw": (adamw, (X, Y), ()),
    "classes": (lambda: of_classes(dense()), (X, CLASSES), ()),
    "two heads": (two_heads, ({"a": X, "b": X[::-1].copy()}, {"u": Y, "v": Y}), ()),
    "own step": (lambda: dense(kind=MeanOfEach), (X, Y), ()),
    "sums in the step": (lambda: regularised(ClipsTheSum), (X, Y), ()),
    "two factors": (lambda: regularised(TwoFactors), (X, Y), ()),
    "synchronized": (
        lambda: convolution(layers.BatchNormalization(synchronized=True)), (IMAGES, CLASSES), ()),
    "pooled": (pooled, (SYMMETRIC, CLASSES), ()),
    "numbered dropout": (lambda: dense(NumberedDropout()), (X, Y), ()),
    "embedding": (lambda: sequences(mask_zero=False), (TOKENS, OF_TOKENS), ()),
    "masked sequence": (lambda: sequences(mask_zero=True), (TOKENS, OF_TOKENS), (
        "loss: weighted_mean_of_means",)),
    "normalised": (normalised, (X, Y), LOCAL),
    "dropped": (dropped, (X, Y), ("random numbers: same_random_numbers",)),
    "scaled in the step": (
        lambda: regularised(ClipsTheSumOnly), (X, Y), ("gradients: scaled_gradient",)),
    "without an optimizer": (
        lambda: regularised(WithoutOptimizer), (X, Y), ("update: update_not_seen?",)),
    "mixes a little": (lambda: dense(MixesALittle()), (X, Y), (
        "forward: mixes_examples*", "gradients: not_a_sum_over_examples*")),
}  # fmt: skip
COPIED = (  # On 3 replicas.
    "plain", "momentum", "adamw", "classes", "two heads", "own step", "normalised", "dropped",
    "pooled",
)  # fmt: skip


def batches_of(data):
    return tf.data.Dataset.from_tensor_slices(data).batch(12)


def record(build, data, *, steps=2, num=3, **options):
    """Trains under a strategy, and returns what was recorded."""
    keras.utils.set_random_seed(1)
    with mirrored(num).scope():
        model = build()
    with Recorder(model, steps=steps) as recorder:
        model.fit(batches_of(data), verbose=0, **options)
    return from_parts(recorder.about, recorder.arrays)


@functools.cache
def recorded(name):
    build, data, _ = MODELS[name]
    options = {"validation_data": batches_of(data).take(1)} if name == "two heads" else {}
    options |= {"class_weight": {0: 2.0, 1: 0.5}} if name == "synchronized" else {}
    steps, num = (3, 3) if name in COPIED else (2, 2)
    return record(build, data, steps=steps, num=num, **options)


@functools.cache
def one_device(name):
    return MODELS[name][0]()


def float16():
    return in_dtype("mixed_float16", momentum)


@functools.cache
def overflowing(number):
    """A training in float16 whose gradients overflow on a replica in the first step."""
    y = Y.copy()
    y[4 * number : 4 * number + 4] *= 2000
    return record(float16, (X, y))


@functools.cache
def short_last_batch():
    """Batches of 12 and 4 on three replicas."""
    return record(plain, (X[:16], Y[:16]))
