"""Trains right models with every optimizer of Keras, and says where the comparison finds a fault.

A pair is a model, an optimizer and a dtype, `resnet/Adam/float32`. As nothing is wrong with any of
them, whatever is found as a fault is a false alarm.
"""

import contextlib
import gc
import inspect
import tempfile
import warnings

import keras
import numpy as np
import tensorflow as tf

import lockstep
from lockstep.engine.verdict import FAULT
from lockstep.record_keras import record
from tests.small_models import mirrored

from . import check

layers = keras.layers
NUM_REPLICAS, NUM_STEPS, GLOBAL_BATCH_SIZE = 3, 5, 15
NUM_CLASSES, NUM_TOKENS, LENGTH = 5, 20, 7


def resnet():
    images = keras.Input((28, 28, 1))
    x = layers.Conv2D(8, 3, strides=2, padding="same")(images)
    x = layers.MaxPooling2D(2)(layers.ReLU()(layers.BatchNormalization()(x)))
    y = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same")(x)))
    y = layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same")(y))
    pooled = layers.GlobalAveragePooling2D()(layers.ReLU()(x + y))
    return keras.Model(images, layers.Dense(NUM_CLASSES)(pooled))


def attention():
    tokens = keras.Input((LENGTH,), dtype="int32")
    embedded = layers.Embedding(NUM_TOKENS, 8, mask_zero=True)(tokens)
    mixed = layers.MultiHeadAttention(2, 4)(embedded, embedded)
    x = layers.LayerNormalization()(embedded + mixed)
    return keras.Model(tokens, layers.Dense(NUM_CLASSES)(layers.GlobalAveragePooling1D()(x)))


MODELS = {function.__name__: function for function in (resnet, attention)}
OPTIMIZERS = {
    name: kind
    for name, kind in inspect.getmembers(keras.optimizers, inspect.isclass)
    if name not in {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"}  # They have others.
}
LEARNING_RATE = 0.01
SETTINGS = {"SGD": {"momentum": 0.9, "nesterov": True}}  # Those of others are the default.
PAIRS = [f"{m}/{o}/{d}" for d in ("float32", "mixed_bfloat16") for m in MODELS for o in OPTIMIZERS]


def data(model, seed):
    """Returns images or tokens, and a class for each of them."""
    generator = np.random.default_rng(seed)
    num = NUM_STEPS * GLOBAL_BATCH_SIZE
    classes = generator.integers(0, NUM_CLASSES, num)
    if model == "resnet":
        return generator.normal(size=(num, 28, 28, 1)).astype("float32"), classes
    tokens = generator.integers(1, NUM_TOKENS, (num, LENGTH))
    lengths = generator.integers(1, LENGTH + 1, num)
    return np.where(np.arange(LENGTH) < lengths[:, np.newaxis], tokens, 0), classes


def compare_fits(build, data, strategy, seed=1):
    """Trains on one device and under a strategy; returns the verdict on the second recording."""
    num_steps = sum(1 for _ in data)
    with tempfile.TemporaryDirectory() as folder:
        one, permuted, two = (f"{folder}/{name}.npz" for name in ("one", "permuted", "two"))
        for path, scope, given in (
            (one, contextlib.nullcontext, {}),
            (permuted, contextlib.nullcontext, {"replay": one, "permute": 1}),
            (two, strategy.scope, {"replay": one}),
        ):
            keras.utils.set_random_seed(seed)
            with scope():
                model = build()
            with record(path, model, steps=num_steps, **given):
                model.fit(data, verbose=0)
        return lockstep.compare(one, two, permuted=permuted)


def search(pair, seed):
    """Trains a pair and compares it; returns the status, and the verdict if it is not right."""
    model, optimizer, dtype = pair.split("/")

    def build():
        built = MODELS[model]()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        settings = SETTINGS.get(optimizer, {})
        built.compile(OPTIMIZERS[optimizer](LEARNING_RATE, **settings), loss)
        return built

    keras.config.set_dtype_policy(dtype)
    try:
        batches = tf.data.Dataset.from_tensor_slices(data(model, seed)).batch(GLOBAL_BATCH_SIZE)
        verdict = compare_fits(build, batches, mirrored(NUM_REPLICAS), seed=seed)
        assert len(verdict.steps) == NUM_STEPS and "sum" in {m.node for m in verdict.measured}
        return verdict.status, "" if verdict.ok else str(verdict)
    finally:
        keras.config.set_dtype_policy("float32")
        keras.backend.clear_session()
        gc.collect()


def run(folder, options, counts):
    """Searches the pairs with a word of `only` in their names; yields a line for each."""
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * NUM_REPLICAS,
    )
    tf.get_logger().setLevel("ERROR")  # Of warnings of traced functions.
    warnings.filterwarnings("ignore", category=UserWarning, module="keras")
    for pair in [name for name in PAIRS if options.wants(name)]:
        try:
            status, found = search(pair, options.seed)
        except Exception as error:  # The other pairs are searched, too.
            status, found = "no verdict", f"{type(error).__name__}: {error}"
        counts["pairs"] += 1
        counts[status] += 1
        yield f"{pair}: {found or status}"
    check(not counts[FAULT] + counts["no verdict"], "a right program has a fault")
