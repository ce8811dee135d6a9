"""Tests the experiments of `demo`: exact numbers of d2l, on 2, 3 and 4 devices."""

import numpy as np
import pytest

from app.commands import demo, wrong_all_reduce
from app.data.dataset_loader import load_data
from app.devices import device_setup
from app.devices.device_setup import Devices
from app.options import Config
from app.training.training_spec import TrainingSpec
from strategies import ALL_REDUCE_ALGORITHMS
from tests.conftest import CPUS


@pytest.fixture
def show(monkeypatch, capsys):
    """Runs an experiment on the devices of the tests; returns its output in one line."""
    asked = []

    def set_up(config):
        asked.append(config)
        return Devices(CPUS[: config.num_devices_asked], simulated=True)

    monkeypatch.setattr(device_setup, "set_up", set_up)
    monkeypatch.setattr(device_setup, "count_gpus", lambda config: 1)  # Too few.

    def run(experiment, **options):
        demo.run(Config.of("demo", experiment=experiment, **options))
        return " ".join(capsys.readouterr().out.split())

    run.asked = asked
    return run


def test_allreduce_shows_before_and_after_on_each_device(show):
    output = show("allreduce")
    assert "/device:CPU:0 [[1. 1.]] [[3. 3.]] /device:CPU:1 [[2. 2.]] [[3. 3.]]" in output
    for name in ALL_REDUCE_ALGORITHMS["manual"]:
        assert f"{name} every device has [[3. 3.]]" in output
    assert "simulated devices: timing is not scaling" in output
    asked = show.asked[0].distribution
    assert (asked.device, asked.num_devices) == ("cpu", 2)  # With one GPU here.


@pytest.mark.parametrize("num_devices", [2, 3, 4])
def test_a_wrong_all_reduce_has_the_right_list_and_the_wrong_gradients(num_devices):
    own = list(range(1, num_devices + 1))
    tensors = [tensor for (tensor,) in demo.tensors_to_add(CPUS[:num_devices])]
    for name, expected in ("wrong", [sum(own), *own[1:]]), ("right", [sum(own)] * num_devices):
        all_reduce = getattr(wrong_all_reduce, f"{name}_all_reduce")
        data, gradients, weights = wrong_all_reduce.train_step(all_reduce, tensors)
        assert [item.numpy().tolist() for item in data] == [[[sum(own)] * 2]] * num_devices
        assert [gradient.numpy().tolist() for gradient in gradients] == [
            [[n] * 2] for n in expected
        ]
        for number, *placed in zip(expected, weights, data, gradients, CPUS, strict=False):
            np.testing.assert_allclose(placed[0], [[1 - 0.1 * number] * 2], rtol=1e-6)
            assert all(each.device.endswith(placed[-1]) for each in placed[:-1])


def test_the_wrong_all_reduce_is_shown_with_its_code_and_a_step(show):
    output = show("allreduce", wrong=True)
    assert "data[i] = tf.identity(data[0])" in output
    assert "/device:CPU:0 [[1. 1.]] [[3. 3.]] /device:CPU:1 [[2. 2.]] [[3. 3.]]" in output
    assert "CPU:0 [[1. 1.]] [[3. 3.]] [[0.7 0.7]] [[0.7 0.7]]" in output
    assert "CPU:1 [[2. 2.]] [[2. 2.]] [[0.8 0.8]] [[0.7 0.7]]" in output


def test_the_d2l_batch_is_split_into_rows():
    for count, expected in {2: [[0, 1], [2, 3]], 3: [[0, 1], [2], [3]]}.items():
        shards = demo.split(CPUS[:count])
        batch = np.arange(20).reshape(4, 5)
        for name, shard, rows in zip(CPUS, shards, expected, strict=False):
            np.testing.assert_array_equal(shard.numpy(), batch[rows])
            assert shard.device.endswith(name)


def test_split_batch_shows_why_the_count_is_global(show):
    output = show("split_batch")
    assert "3 devices: shards of 2, 1, 1" in output
    assert "Their mean is 9.5. The mean of the devices' own means (4.5, 12, 17) is 11.17" in output
    assert "(2.25 + 3 + 4.25) adds up to 9.5" in output
    four = show("split_batch", num_devices=4)
    assert "correct only because these shards have equal sizes" in four


def test_a_step_is_gradients_their_sum_and_one_update(small_lenet, small_data):
    config = Config.of("demo", data_dir=str(small_data), allow_unverified_data=True).for_training(
        "manual"
    )
    spec = TrainingSpec(config, load_data(config))
    strategy = spec.build_strategy(Devices(CPUS[:3], simulated=True))
    before, gradients, sums, after = demo.observe_step(strategy, spec.batches()).values()
    assert [len({a.tobytes() for a in copies}) for copies in (before, sums, after)] == [1, 1, 1]
    assert len({g.tobytes() for g in gradients}) == 3
    np.testing.assert_array_equal(gradients[0] + gradients[1] + gradients[2], sums[0])
    np.testing.assert_array_equal(before[0] - np.float32(spec.learning_rate) * sums[0], after[0])


def test_replicate_shows_each_moment_on_each_device(show, small_lenet, small_data):
    output = show("replicate", data_dir=str(small_data), allow_unverified_data=True)
    for moment in ("weight, before", "gradient after all-reduce", "weight after the update"):
        assert output.count(moment) == 2
    assert output.count("] yes") == 6 and output.count("] no") == 2
    assert "7,850 weights on each device are bitwise identical" in output


def test_without_a_name_the_experiments_are_listed(show):
    output = show(None)
    assert all(name in output for name in ("allreduce", "split_batch", "replicate"))
