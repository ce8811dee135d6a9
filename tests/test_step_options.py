"""Options of the all-reduce and of precision change a training only within rounding."""

import functools

import keras
import numpy as np
import pytest

from app.data.input_pipeline import train_dataset
from app.devices.device_setup import Devices
from app.options import Config
from app.runtime.errors import ConfigError
from app.training.optimizers import ScaledSGD
from app.training.strategy_builder import build_strategy
from conftest import CPUS
from small_models import create, small_network, small_resnet
from strategies import STRATEGIES, STRATEGY_OPTIONS
from strategies.manual import ManualStrategy
from test_strategies import ROUNDING, assert_close, assert_same_bits, walk

BFLOAT16, FLOAT16 = 2.0**-8, 2.0**-11
ALL_REDUCES = [
    ("manual", "reduce_to_one", 0.001),
    ("manual", "ring", 0.001),
    ("manual", "tree", 0.0),
    ("manual", "direct", 0.0),
    ("mirrored", "reduce_to_one", 0.001),
    ("mirrored", "ring", 0.0),
]


def build(strategy="manual", **options):
    config = Config.of(strategy=strategy, num_devices=2, **options)
    return build_strategy(
        config,
        Devices(CPUS[:2], simulated=True),
        image_shape=(28, 28, 1),
        num_classes=10,
        learning_rate=0.1,
        num_steps=1,
    )


def test_statistics_of_the_whole_batch_need_batch_norm():
    with pytest.raises(ConfigError) as refusal:
        build(batch_norm="sync")
    assert str(refusal.value) == (
        "--batch_norm=sync needs a model with BatchNorm, got --model=lenet; leave the flag out"
    )


class Unable(ManualStrategy):
    """Knows only when it sees the model that it cannot split it."""

    def build(self, model_fn, optimizer_fn):
        raise ValueError("--num_devices=2 is more than 1 layer; use fewer devices")


def test_a_model_that_cannot_be_split_is_refused_in_one_line(monkeypatch):
    monkeypatch.setitem(STRATEGIES, "manual", f"{__name__}:Unable")
    with pytest.raises(ValueError, match="is more than 1 layer"):
        build()  # It splits no model: this is a bug.
    monkeypatch.setitem(STRATEGY_OPTIONS, "manual", ("model_parallel",))
    monkeypatch.setattr(Unable, "__init__", lambda self, devices, **options: None)
    with pytest.raises(ConfigError, match=r"^--num_devices=2 is more than 1 layer; use fewer devi"):
        build()


def test_a_strategy_is_given_its_own_options_and_no_others(monkeypatch):
    given = {}

    def record(self, devices, **options):
        given[self.name] = {**options}
        raise ValueError("that is all; continue")

    for name in STRATEGIES:
        own = type(name, (Unable,), {"name": name, "__init__": record})
        monkeypatch.setattr(f"{__name__}.Unable_{name}", own, raising=False)
        monkeypatch.setitem(STRATEGIES, name, f"{__name__}:Unable_{name}")
    for name in ("manual", "sharded", "pipeline", "tensor"):
        with pytest.raises(ConfigError, match=r"^that is all; continue$"):
            build(name)
    common = {"workers", "label_smoothing"}
    all_reduce = {"all_reduce", "communication_dtype"}
    assert all_reduce < set(given["manual"]) == {*common, *STRATEGY_OPTIONS["manual"]}
    assert set(given["sharded"]) == {*common, *STRATEGY_OPTIONS["sharded"]}
    assert set(given["pipeline"]) == {*common, *STRATEGY_OPTIONS["pipeline"]}
    assert set(given["tensor"]) == {*common, "model_parallel"}


@pytest.fixture(params=["mixed_bfloat16", "mixed_float16"])
def precision(request):
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy("float32")


def last_state(images, name, num_replicas, build=small_network, **options):
    strategy = create(name, num_replicas, build, **options)
    state = walk(strategy, images, global_batch_size=17)[1][-1]
    weights = [
        [copy[f"model/{w.path}"].numpy() for w in strategy.model.trainable_variables]
        for copy in strategy.copies()
    ]
    for other in weights[1:]:  # Whatever the exchange, all replicas got the same.
        for a, b in zip(weights[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
    return state


@pytest.mark.parametrize(("name", "all_reduce", "bucket_mib"), ALL_REDUCES)
def test_every_all_reduce_is_the_same_training(images, name, all_reduce, bucket_mib):
    expected = last_state(images, "manual", 3)
    state = last_state(images, name, 3, all_reduce=all_reduce, bucket_mib=bucket_mib)
    if all_reduce in ("reduce_to_one", "direct"):  # They add in the same order.
        assert_same_bits(state, expected)
    else:
        assert_close(state, expected)


@pytest.mark.parametrize("name", ["manual", "mirrored"])
def test_an_all_reduce_in_bfloat16_rounds_as_bfloat16_does(images, name):
    exact = last_state(images, name, 3)
    reduced = last_state(images, name, 3, communication_dtype="bfloat16", bucket_mib=1)
    with pytest.raises(AssertionError):
        assert_close(reduced, exact)
    assert_close(reduced, exact, tolerance=BFLOAT16)


def test_reduced_precision_is_the_same_training_on_every_strategy(images, precision):
    scaled = functools.partial(ScaledSGD, 0.1, initial_scale=1024.0)
    options = {"optimizer_fn": scaled} if precision == "mixed_float16" else {}
    keras.config.set_dtype_policy("float32")
    exact = last_state(images, "single", 1)
    keras.config.set_dtype_policy(precision)
    states = {n: last_state(images, n, 1 if n == "single" else 3, **options) for n in STRATEGIES}
    assert_same_bits(states["manual"], states["mirrored"])
    tolerance = 8 * (BFLOAT16 if precision == "mixed_bfloat16" else FLOAT16)  # Of a few steps.
    for state in ({name: s[name] for name in exact} for s in states.values()):
        with pytest.raises(AssertionError):
            assert_close(state, exact, tolerance=ROUNDING)
        assert_close(state, exact, tolerance=tolerance)
        assert {a.dtype for a in state.values()} == {np.dtype("float32"), np.dtype("int64")}


@pytest.mark.parametrize("name", sorted({*STRATEGIES} - {"pipeline", "tensor"}))
def test_what_xla_compiles_is_the_same_training(images, name):
    num_replicas = 1 if name == "single" else 2
    expected = last_state(images, name, num_replicas)
    assert_close(last_state(images, name, num_replicas, jit_compile=True), expected, 2 * ROUNDING)


def test_xla_keeps_the_statistics_of_each_replica_its_own(images):
    own = {}
    for name in ("manual", "mirrored"):
        strategy = create(name, 2, small_resnet, jit_compile=True)
        iterator = strategy.distribute(train_dataset(*images, seed=3, global_batch_size=17))
        strategy.train_steps(iterator, 2)
        first, second = own[name] = strategy.copy_states()
        moving = next(key for key in first if key.endswith("moving_mean"))
        assert not np.array_equal(first[moving], second[moving])
    for manual, mirrored in zip(*own.values(), strict=True):
        assert_close(manual, mirrored)
