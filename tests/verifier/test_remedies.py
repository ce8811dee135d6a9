"""The program after each remedy for Keras, and after some together, is clean.

The code is that of examples/keras_remedies.py, as it stands there.
"""

import importlib.util

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.campaigns import optimizers
from tests.conftest import ROOT

spec = importlib.util.spec_from_file_location("remedies", ROOT / "examples" / "keras_remedies.py")
remedies_of = importlib.util.module_from_spec(spec)
spec.loader.exec_module(remedies_of)

REMEDIES = {  # Settings of `program`.
    "norm": {"norm": remedies_of.synchronised_norm},
    "per_example": {"loss": remedies_of.loss_of_each_example},
    "global_mean": {"loss": remedies_of.MeanOverGlobalBatch(), "num_examples": 21},
    "regularised": {"kind": remedies_of.RegularisedOnce, "regularised": True},
    "clips": {"kind": remedies_of.ClipsTheSum},
    "drop_remainder": {"drop_remainder": True, "num_examples": 21},
    "weights": {"weighted": True},
    "masks": {"masked": True},
    "bfloat16": {"policy": "mixed_bfloat16"},
    "frozen": {"frozen": True},
}
# Remedies change one program together where they are about different things.
TOGETHER = [("norm", "clips"), ("global_mean", "weights")]


def network(
    *, norm=None, loss="mse", kind=keras.Sequential, regularised=False, masked=False, frozen=False
):  # fmt: skip
    """Returns a compiled model with what the remedies are about."""
    layers = keras.layers
    first = [keras.Input((4,)), layers.Embedding(9, 6, mask_zero=True)]
    first = first if masked else [keras.Input((6,))]
    regulariser = keras.regularizers.L2(0.1) if regularised else None
    hidden = layers.Dense(8, "tanh", kernel_regularizer=regulariser, trainable=not frozen)
    model = kind([*first, hidden, *([norm()] if norm else []), layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    return model


def examples(*, num_examples=24, weighted=False, masked=False, drop_remainder=False):
    """Returns batches of 12 examples, with equally many unmasked steps on two replicas."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(num_examples, 6)).astype(np.float32)
    y = generator.normal(size=(num_examples, 2)).astype(np.float32)
    if masked:
        x = generator.integers(1, 9, (num_examples, 4))
        x[:, 3] = 0
        y = np.repeat(y[:, None], 4, axis=1)
    arrays = [x, y]
    if weighted:
        weights = generator.uniform(0.5, 1.5, num_examples).astype(np.float32)
        arrays.append(weights[:, None] if masked else weights)
    dataset = tf.data.Dataset.from_tensor_slices(tuple(arrays))
    return dataset.batch(12, drop_remainder=drop_remainder)


def verdict_after(*remedies):
    """Trains the program after some remedies on one device and on two; returns the verdict."""
    settings = {key: value for name in remedies for key, value in REMEDIES[name].items()}
    keras.config.set_dtype_policy(settings.pop("policy", "float32"))
    names = "num_examples", "weighted", "masked", "drop_remainder"
    of_data = {name: settings[name] for name in names if name in settings}
    of_model = {k: v for k, v in settings.items() if k not in of_data or k == "masked"}
    try:
        return optimizers.compare_fits(
            lambda: network(**of_model), examples(**of_data), optimizers.mirrored(2)
        )
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize(
    "remedies",
    [*TOGETHER, *(pytest.param((remedy,), marks=pytest.mark.slow) for remedy in REMEDIES)],
    ids="-".join,
)
def test_the_program_after_remedies_is_clean(remedies):
    verdict = verdict_after(*remedies)
    assert verdict.status == "clean", str(verdict)
