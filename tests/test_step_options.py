"""Which strategy gets which options, and what is refused as it is built."""

import pytest

from app.devices.device_setup import Devices
from app.options import Config
from app.runtime.errors import ConfigError
from app.training.strategy_builder import build_strategy
from conftest import CPUS
from strategies import STRATEGIES, STRATEGY_OPTIONS
from strategies.manual import ManualStrategy


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
