"""BatchNorm over the whole global batch: replicas of any sizes train as one device does."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from conftest import CPUS
from small_models import create, deep_norm_network, momentum_sgd, small_resnet
from strategies.sync_batch_norm import _combined
from test_strategies import assert_close, assert_same_bits, walk

OPTIONS = {"global_batch_size": 17, "num_steps": 2}
SYNC = {"batch_norm": "sync"}


@pytest.fixture(scope="module")
def one_device():
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (40, 28, 28, 1), dtype=np.uint8)
    images = pixels, (np.arange(40) % 10).astype(np.uint8)
    return images, *walk(create("single", 1, deep_norm_network, momentum_sgd), images, **OPTIONS)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("manual", {}),
        ("manual", {"shard_weights": (5, 2, 1)}),
        ("mirrored", {}),
        ("multi_worker", {}),
        ("sharded", {}),
        ("sharded", {"shard": "optimizer"}),
    ],
)
def test_replicas_are_one_device(one_device, name, options):
    """17 over 3 are 6, 6, 5, or 11, 4, 2: a mean of means would be another training."""
    images, losses, states = one_device
    strategy = create(name, 3, deep_norm_network, momentum_sgd, **SYNC, **options)
    own_losses, own_states = walk(strategy, images, **OPTIONS)
    np.testing.assert_allclose(own_losses, losses, rtol=1e-5)
    for state, expected in zip(own_states, states, strict=True):
        assert_close(state, expected, 2e-5)
    # The moving statistics too, which are bitwise identical on every replica.
    assert strategy.per_shard_statistics() == []


def test_without_it_the_training_is_another(one_device):
    images, _, states = one_device
    average = walk(create("manual", 3, deep_norm_network, momentum_sgd), images, **OPTIONS)[1][-1]
    kernel = next(name for name in average if name.endswith("conv/kernel"))
    assert not np.allclose(average[kernel], states[-1][kernel], rtol=1e-3, atol=1e-5)


def test_residual_blocks(images):
    single = walk(create("single", 1, small_resnet), images, **OPTIONS)
    sync = walk(create("manual", 2, small_resnet, **SYNC), images, **OPTIONS)
    np.testing.assert_allclose(sync[0], single[0], rtol=1e-5)
    assert_close(sync[1][-1], single[1][-1], 1e-4)


def test_manual_and_sharded_are_the_same_bits(images):
    first, second = (
        walk(create(name, 3, deep_norm_network, **SYNC), images, **OPTIONS)
        for name in ("manual", "sharded")
    )
    assert first[0] == second[0]
    assert_same_bits(first[1][-1], second[1][-1])


def test_one_replica_is_one_device(images):
    single = walk(create("single", 1, deep_norm_network), images, **OPTIONS)[1][-1]
    assert_close(
        walk(create("manual", 1, deep_norm_network, **SYNC), images, **OPTIONS)[1][-1], single
    )


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


def test_frozen_statistics_stay(images):
    def build():
        model = deep_norm_network()
        model.get_layer("norm").trainable = False
        return model

    single, sync = (
        walk(create(name, n, build, **options), images, **OPTIONS)[1][-1]
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
