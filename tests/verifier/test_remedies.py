"""The program after each remedy for Keras that is code, and after some together, is clean.

The code is that of examples/keras_remedies.py, as it stands there.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import lockstep
from examples import keras_remedies
from lockstep.record_keras import record
from tests.small_models import mirrored

REMEDIES = {  # Settings of `network`.
    "norm": {"norm": keras_remedies.synchronised_norm},
    "per_example": {"loss": keras_remedies.loss_of_each_example},
    "global_mean": {"loss": keras_remedies.MeanOverGlobalBatch()},
    "regularised": {"kind": keras_remedies.RegularisedOnce, "regularised": True},
    "clips": {"kind": keras_remedies.ClipsTheSum},
}


def network(*, norm=None, loss="mse", kind=keras.Sequential, regularised=False):
    """Returns a compiled model with what the remedies are about."""
    regulariser = keras.regularizers.L2(0.1) if regularised else None
    hidden = keras.layers.Dense(8, "tanh", kernel_regularizer=regulariser)
    norms = [norm()] if norm else []
    model = kind([keras.Input((6,)), hidden, *norms, keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    return model


@pytest.mark.parametrize(
    "remedies",
    [
        ("norm", "clips"),  # Together where they are about different things.
        *(pytest.param((remedy,), marks=pytest.mark.slow) for remedy in REMEDIES),
    ],
    ids="-".join,
)
def test_the_program_after_remedies_is_clean(remedies, tmp_path):
    settings = {key: value for name in remedies for key, value in REMEDIES[name].items()}
    num_examples = 21 if "global_mean" in remedies else 24  # The last of its batches is uneven.
    generator = np.random.default_rng(0)
    arrays = (generator.normal(size=(num_examples, n)).astype(np.float32) for n in (6, 2))
    data = tf.data.Dataset.from_tensor_slices(tuple(arrays)).batch(12)
    one, permuted, two = (tmp_path / f"{name}.npz" for name in ("one", "permuted", "two"))
    for path, scope, given in (
        (one, contextlib.nullcontext, {}),
        (permuted, contextlib.nullcontext, {"replay": one, "permute": 1}),
        (two, mirrored(2).scope, {"replay": one}),
    ):
        keras.utils.set_random_seed(1)
        with scope():
            model = network(**settings)
        with record(path, model, steps=2, **given):
            model.fit(data, verbose=0)
    verdict = lockstep.compare(one, two, permuted=permuted)
    assert verdict.status == "clean", str(verdict)
