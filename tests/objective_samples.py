"""Compiled Keras models of all kinds, and their trainings with the project's strategies."""

from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from app.verification.case_recorder import CaseRecorder
from conftest import CPUS
from recorders.keras_comparison import compare
from strategies import load_strategy_class
from strategies.base import Strategy
from strategies.keras_objective import KerasObjective
from strategies.tf_private import reset_layer_numbers

layers, losses, optimizers = keras.layers, keras.losses, keras.optimizers
NUM_REPLICAS = 2
RANDOM = np.random.default_rng(0)
# Batches of 12, 12 and 5 examples: the last one is short, and 2 replicas split it as 3 and 2.
X = RANDOM.normal(size=(29, 6)).astype(np.float32)
Y = (X @ RANDOM.normal(size=(6, 2))).astype(np.float32)
WEIGHTS = RANDOM.uniform(0.1, 2, 29).astype(np.float32)
TOKENS = RANDOM.integers(0, 20, (29, 7))
TOKENS[:, 5:] = TOKENS[::3, 3:] = 0
STEPS = np.repeat(Y[:, None], 7, axis=1)


# --- Models --------------------------------------------------------------------------------------


def compiled(model, loss="mse", optimizer=None, **options):
    model.compile(optimizer or optimizers.SGD(0.05, momentum=0.9), loss, **options)
    return model


def dense(*extra, **first):
    return keras.Sequential(
        [layers.Dense(8, activation="relu", **first), *extra, layers.Dense(2)], name="dense"
    )


def contrastive_loss(y, y_pred):
    """Compares each example with all others of the batch."""
    logits = tf.matmul(y_pred, y, transpose_b=True)
    numbers = tf.range(tf.shape(y)[0])
    return keras.losses.sparse_categorical_crossentropy(numbers, logits, from_logits=True)


def two_heads():
    a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
    hidden = layers.Dense(5, activation="relu", name="h")(layers.Concatenate()([a, b]))
    heads = {name: layers.Dense(2, name=name)(hidden) for name in ("u", "v")}
    model = keras.Model({"a": a, "b": b}, heads, name="two_heads")
    return compiled(model, {"u": "mse", "v": "mae"}, loss_weights={"u": 1.0, "v": 0.3})


def sequence(*hidden):
    parts = [layers.Embedding(20, 8, mask_zero=True), *hidden, layers.Dense(2)]
    return keras.Sequential(parts, name="sequence")


class AddsLoss(keras.Model):
    """Adds a loss of its predictions to the compiled one."""

    def __init__(self):
        super().__init__(name="adds_loss")
        self.hidden, self.head = layers.Dense(8, activation="tanh"), layers.Dense(2)

    def call(self, x):
        y_pred = self.head(self.hidden(x))
        self.add_loss(0.1 * tf.reduce_mean(tf.square(y_pred)))
        return y_pred


class OwnStep(AddsLoss):
    """Computes its loss in a custom training step that reports no loss."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(y - self(x, training=True)))
            loss /= tf.distribute.get_strategy().num_replicas_in_sync
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class StepOfCompiledLoss(AddsLoss):
    """Trains its compiled loss in a custom training step."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class TwoUpdates(OwnStep):
    """Gives its optimizer the gradients in two calls."""

    def train_step(self, data):
        for weights in (self.hidden.trainable_variables, self.head.trainable_variables):
            self.optimizer.apply([tf.ones(weight.shape) for weight in weights], weights)
        return {}


class PartlyUsed(keras.Model):
    """Has a frozen layer, and one that no prediction depends on."""

    def __init__(self):
        super().__init__(name="partly_used")
        self.frozen = layers.Dense(8, trainable=False)
        self.used, self.unused = layers.Dense(2), layers.Dense(3)

    def build(self, shape):
        self.frozen.build(shape)
        self.used.build((None, 8))
        self.unused.build((None, 8))
        self.built = True

    def call(self, x):
        return self.used(self.frozen(x))


def clips_and_averages(**clipping):
    rate = optimizers.schedules.ExponentialDecay(0.02, 1, 0.7)
    options = {"use_ema": True, "ema_momentum": 0.9, "weight_decay": 0.01}
    return compiled(dense(), optimizer=optimizers.AdamW(rate, epsilon=1e-3, **options, **clipping))


# Name: builder, data, whether several devices train as one does.
MODELS = {
    "plain": (lambda: compiled(dense()), (X, Y), True),
    "weighted mean": (
        lambda: compiled(dense(), losses.MeanSquaredError(reduction="mean_with_sample_weight")),
        (X, Y, WEIGHTS),
        True,
    ),
    "sum": (
        lambda: compiled(
            dense(), losses.MeanSquaredError(reduction="sum"), optimizers.SGD(0.002)
        ),
        (X, Y),
        True,
    ),
    "two heads": (two_heads, ({"a": X, "b": X[::-1].copy()}, {"u": Y, "v": Y}), True),
    "mask": (lambda: compiled(sequence(), metrics=["mae"]), (TOKENS, STEPS), True),
    "recurrent": (
        lambda: compiled(sequence(layers.LSTM(6, return_sequences=True))), (TOKENS, STEPS), True
    ),
    "embedding": (
        lambda: compiled(
            keras.Sequential(
                [layers.Embedding(20, 8), layers.GlobalAveragePooling1D(), layers.Dense(2)]
            ),
            optimizer=optimizers.Adam(0.01, epsilon=1e-3),
        ),
        (TOKENS, Y),
        True,
    ),
    "contrastive": (lambda: compiled(dense(), contrastive_loss), (X, Y), True),
    "regularisers": (
        lambda: compiled(dense(kernel_regularizer="l2", activity_regularizer="l2")), (X, Y), True
    ),
    "add_loss": (lambda: compiled(AddsLoss()), (X, Y), True),
    "add_loss alone": (lambda: compiled(AddsLoss(), None), (X, Y), True),
    "own step": (lambda: compiled(OwnStep()), (X, Y), True),
    "own step, compute_loss": (lambda: compiled(StepOfCompiledLoss()), (X, Y), True),
    "partly used": (lambda: compiled(PartlyUsed()), (X, Y), True),
    "clipnorm": (lambda: clips_and_averages(clipnorm=0.1), (X, Y), True),
    "global clipnorm": (lambda: clips_and_averages(global_clipnorm=0.1), (X, Y), True),
    "dropout": (lambda: compiled(dense(layers.Dropout(0.5))), (X, Y), False),
    "BatchNorm": (lambda: compiled(dense(layers.BatchNormalization())), (X, Y), False),
}  # fmt: skip


# --- Trainings -----------------------------------------------------------------------------------


class Training(NamedTuple):
    """A strategy with a built model, and its dataset of 3 batches."""

    strategy: Strategy
    objective: KerasObjective
    dataset: tf.data.Dataset
    model_fn: Callable[[], keras.Model]

    def record(self, steps=(0, 1, 2)):
        """Trains and returns a recording."""
        recorder = CaseRecorder(self.strategy, self.objective.element_spec)
        flat = self.objective.flatten(self.dataset.repeat())
        return recorder.record(self.strategy.distribute(flat), steps)

    def report(self, steps=(0, 1, 2)):
        """Trains, and compares each step with one device."""
        batches = list(self.dataset)
        wanted = [batches[step % len(batches)] for step in steps]
        return compare(self.record(steps), self.model_fn, batches=wanted)

    def train(self, num_steps=3, skip=0):
        flat = self.objective.flatten(self.dataset.repeat().skip(skip))
        return self.strategy.train_steps(self.strategy.distribute(flat), num_steps)

    def evaluate(self):
        return self.strategy.evaluate(self.objective.flatten(self.dataset))

    @property
    def seeds(self):
        names = [name for name in self.strategy.state() if "seed" in name]
        assert names
        return [self.strategy.state()[name] for name in names]


def start(name, build, data, **options):
    is_dataset = isinstance(data, tf.data.Dataset)
    dataset = data if is_dataset else tf.data.Dataset.from_tensor_slices(data).batch(12)
    objective, built = KerasObjective(dataset.element_spec), []

    def model():
        reset_layer_numbers()
        keras.utils.set_random_seed(1)
        built.append(build())
        return built[-1]

    num_replicas = 1 if name == "single" else NUM_REPLICAS
    strategy = load_strategy_class(name)(CPUS[:num_replicas], objective=objective, **options)
    assert strategy.num_replicas == num_replicas
    strategy.build(model, lambda: built[-1].optimizer)
    return Training(strategy, objective, dataset, model)


def differing(state, other):
    """Returns the names of variables that are not bitwise identical."""
    assert state.keys() == other.keys()
    return [name for name in state if state[name].tobytes() != other[name].tobytes()]
