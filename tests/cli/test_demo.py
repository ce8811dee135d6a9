"""Tests the experiments of `demo`: exact numbers of d2l, on 2, 3 and 4 devices."""

import numpy as np
import pytest

from app.commands import demo
from app.data.fashion_mnist import load_data
from app.devices import setup
from app.devices.setup import Devices
from app.errors import DeviceError
from app.options import Config
from app.training.build import TrainingRun
from strategies import ALL_REDUCE_ALGORITHMS
from tests.conftest import CPUS


@pytest.fixture
def show(monkeypatch, capsys):
    """Runs an experiment on the devices of the tests; returns its output in one line."""

    def set_up(config):
        if config.distribution.device == "gpu":
            raise DeviceError("too few")
        return Devices(CPUS[: config.num_devices], simulated=True)

    monkeypatch.setattr(setup, "set_up", set_up)

    def run(experiment, **options):
        demo.run(Config.of("demo", experiment=experiment, **options))
        return " ".join(capsys.readouterr().out.split())

    return run


def test_allreduce_shows_before_and_after_on_each_device(show):
    output = show("allreduce")
    assert "/device:CPU:0 [[1. 1.]] [[3. 3.]] /device:CPU:1 [[2. 2.]] [[3. 3.]]" in output
    for name in ALL_REDUCE_ALGORITHMS["manual"]:
        assert f"{name} every device has [[3. 3.]]" in output
    assert "timing is not scaling" in output


def test_split_batch_shows_why_the_count_is_global(show):
    output = show("split_batch")
    assert "3 devices: shards of 2, 1, 1" in output
    assert "Their mean is 9.5. The mean of the devices' own means (4.5, 12, 17) is 11.17" in output
    assert "(2.25 + 3 + 4.25) adds up to 9.5" in output
    four = show("split_batch", num_devices=4)
    assert "correct only because these shards have equal sizes" in four


def test_a_step_is_gradients_their_sum_and_one_update(small_lenet, small_data):
    config = Config.of("demo", dataset="synthetic").for_training("manual")
    run = TrainingRun(config, Devices(CPUS[:3], simulated=True), load_data(config))
    before, gradients, sums, after = demo.observe_step(run.strategy, run.batches()).values()
    assert [len({a.tobytes() for a in copies}) for copies in (before, sums, after)] == [1, 1, 1]
    assert len({g.tobytes() for g in gradients}) == 3
    np.testing.assert_array_equal(gradients[0] + gradients[1] + gradients[2], sums[0])
    np.testing.assert_array_equal(before[0] - np.float32(run.learning_rate) * sums[0], after[0])


def test_replicate_shows_each_moment_on_each_device(show, small_lenet, small_data):
    output = show("replicate", dataset="synthetic")
    for moment in ("weight, before", "gradient after all-reduce", "weight after the update"):
        assert output.count(moment) == 2
    assert output.count("] yes") == 6 and output.count("] no") == 2
    assert "7,850 weights on each device are bitwise identical" in output


def test_without_a_name_the_experiments_are_listed(show):
    output = show(None)
    assert all(name in output for name in ("allreduce", "split_batch", "replicate"))
