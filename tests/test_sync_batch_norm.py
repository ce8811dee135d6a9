"""BatchNorm over the whole global batch; `test_strategies.py` shows that it is one device's."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from conftest import CPUS
from small_models import create, deep_norm_network
from strategies.sync_batch_norm import _combined
from walks import assert_close, training, walk

SYNC = {"batch_norm": "sync"}


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_moments_of_parts_are_those_of_the_whole(offset):
    """Uneven parts; far from 0 a mean of squares would lose all digits in float32."""
    x = np.random.default_rng(0).normal(offset, 0.1, (17, 3)).astype(np.float32)
    moments = [
        tf.constant(
            np.stack(
                [
                    np.full(3, len(part)),
                    part.mean(0),
                    np.square(part - part.mean(0)).sum(0),
                ]
            ).astype(np.float32)
        )
        for part in (x[:11], x[11:15], x[15:])
    ]
    mean, variance = _combined(moments)
    np.testing.assert_allclose(mean, x.astype(np.float64).mean(0), rtol=1e-6)
    np.testing.assert_allclose(variance, x.astype(np.float64).var(0), rtol=1e-3)


def network_with_frozen_statistics():
    model = deep_norm_network()
    model.get_layer("norm").trainable = False
    return model


def test_frozen_statistics_stay():
    single, sync = (
        walk(training(name, n, network_with_frozen_statistics, **options)).states[-1]
        for name, n, options in [("single", 1, {}), ("manual", 3, SYNC)]
    )
    assert_close(sync, single)
    np.testing.assert_array_equal(sync["model/deep_norm/norm/moving_mean"], np.zeros(5))


def test_channels_have_to_be_last():
    def build():
        images = keras.Input((28, 28, 1), dtype="uint8")
        x = keras.layers.BatchNormalization(axis=1, name="rows")(
            keras.layers.Rescaling(1 / 255)(images)
        )
        return keras.Model(images, keras.layers.Dense(10)(keras.layers.Flatten()(x)))

    with pytest.raises(ValueError, match="layer rows: --batch_norm=sync needs BatchNorm layers"):
        create("manual", 2, build, **SYNC)


def test_each_replica_normalises_on_its_device():
    strategy = create("manual", 3, deep_norm_network, **SYNC)
    for device, replica in zip(CPUS, strategy.replicas, strict=False):
        assert all(v.value.device.endswith(device) for v in replica.model.variables)
