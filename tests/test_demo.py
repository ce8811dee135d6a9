"""Tests the experiments of `demo`: exact numbers of d2l, and every experiment end to end."""

import dataclasses
import importlib

import numpy as np
import pytest

from app.commands import demo
from app.config import Config, DemoConfig
from app.config.option import options_of
from app.demos import (
    allreduce,
    demo_setup,
    many_devices,
    order,
    replicate,
    slow_replica,
    split_batch,
    textbook_table,
)
from app.demos.registry import EXPERIMENTS, check_options, find_experiment
from app.devices import device_setup
from app.devices.device_setup import Devices
from app.records.history import load_summary
from app.runtime.errors import ConfigError
from app.training.training_spec import load_data
from conftest import CPUS
from in_process import run_here, train_here
from performance_samples import make_sample
from strategies import ALL_REDUCE_ALGORITHMS
from strategies.collectives import ALL_REDUCE_FUNCTIONS
from strategies.manual import all_reduce

DEMO_OPTIONS = {o.name for o in options_of(DemoConfig) if not o.metadata.positional}
MANUAL_ALGORITHMS = ALL_REDUCE_ALGORITHMS["manual"]


@pytest.fixture
def prepared(monkeypatch):
    """The devices of the tests in place of those that a command would set up."""

    def set_up(config):
        return Devices(CPUS[: config.num_devices_asked], simulated=True)

    monkeypatch.setattr(device_setup, "set_up", set_up)
    monkeypatch.setattr(device_setup, "count_gpus", lambda config: 0)
    return Devices(CPUS, simulated=True)


@pytest.fixture
def data(small_data):
    return {"data_dir": str(small_data), "allow_unverified_data": True}


def config_of(experiment, **options):
    return Config.of("demo", experiment=experiment, **options)


def run(config, capsys):
    demo.run(config)
    return capsys.readouterr().out


def cells(output, first):
    """Returns the rows of the tables whose first cell is this."""
    return [line.split() for line in output.splitlines() if line.split()[:1] == [first]]


# What d2l prints.


@pytest.mark.parametrize("algorithm", MANUAL_ALGORITHMS)
@pytest.mark.parametrize("num_devices", [2, 3, 4])
def test_the_d2l_tensors_add_up_on_each_device(algorithm, num_devices):
    names = CPUS[:num_devices]
    before = allreduce.tensors_to_add(names)
    assert [b.numpy().tolist() for (b,) in before] == [
        [[i + 1.0, i + 1.0]] for i in range(num_devices)
    ]
    functions = {"reduce_to_one": all_reduce, **ALL_REDUCE_FUNCTIONS}
    after = functions[algorithm](before, names)
    total = num_devices * (num_devices + 1) / 2
    for name, (tensor,) in zip(names, after, strict=True):
        assert tensor.numpy().tolist() == [[total, total]]
        assert tensor.device.endswith(name)


def test_allreduce_shows_before_and_after_on_each_device(prepared, capsys):
    output = run(config_of("allreduce"), capsys)
    assert cells(output, "/device:CPU:0") == [["/device:CPU:0", "[[1.", "1.]]", "[[3.", "3.]]"]]
    assert cells(output, "/device:CPU:1") == [["/device:CPU:1", "[[2.", "2.]]", "[[3.", "3.]]"]]
    # Steps and bytes, for two devices and for eight, of LeNet's 129,068 numbers of 4 bytes.
    row = ["[[3.", "3.]]", "2", "516,272", "14", "903,476"]
    assert ["ring", *row] in cells(output, "ring")
    assert "simulated devices: timing is not scaling" in output


def test_the_d2l_batch_is_cut_into_rows():
    for count, expected in {2: [[0, 1], [2, 3]], 3: [[0, 1], [2], [3]]}.items():
        shards = split_batch.split(Devices(CPUS[:count], simulated=True))
        batch = np.arange(20).reshape(4, 5)
        for name, shard, rows in zip(CPUS, shards, expected, strict=False):
            np.testing.assert_array_equal(shard.numpy(), batch[rows])
            assert shard.device.endswith(name)


def test_split_batch_shows_why_the_count_is_global(prepared, capsys):
    output = " ".join(run(config_of("split_batch"), capsys).split())
    assert "2 devices: shards of 2, 2" in output and "3 devices: shards of 2, 1, 1" in output
    assert "Their mean is 9.5. The mean of the devices' own means (4.5, 12, 17) is 11.17" in output
    assert "(2.25 + 3 + 4.25) adds up to 9.5" in output
    four = " ".join(run(config_of("split_batch", num_devices=4), capsys).split())
    assert "is 9.5: correct only because these shards have equal sizes" in four


def test_weights_are_equal_after_the_update_and_gradients_before_are_not(
    prepared, small_lenet, data
):
    training = demo_setup.training(config_of("replicate", **data))
    dataset = load_data(training)
    spec, strategy, iterator = demo_setup.create(training, demo_setup.first(prepared, 3), dataset)
    moments, whole = replicate.watch_step(strategy, iterator)
    before, none, gradients, sums, after = (per_replica for _, per_replica in moments)
    assert whole.identical
    assert none == [None] * 3
    assert [len({a.tobytes() for a in copies}) for copies in (before, sums, after)] == [1, 1, 1]
    assert len({g.tobytes() for g in gradients}) == 3
    np.testing.assert_array_equal(gradients[0] + gradients[1] + gradients[2], sums[0])
    np.testing.assert_array_equal(before[0] - np.float32(spec.learning_rate) * sums[0], after[0])


def test_replicate_reads_the_gradient(prepared, data, capsys):
    output = run(config_of("replicate", **data), capsys)
    read = [line for line in output.splitlines() if "among 128 images" in line]
    assert len(read) == 2
    for line in read:
        computed, held = line.rpartition("= ")[2].split(", and holds ")
        assert float(computed) == pytest.approx(float(held), abs=1e-4)


# The exercises.


def test_variants_of_scale(prepared, small_lenet, data, capsys):
    options = {**data, "num_train_examples": 600, "epochs": 1}
    output = run(config_of("scale", **options), capsys)
    rows = [row for first in "12" for row in cells(output, first) if row[1].isdigit()]
    assert [(row[0], row[1], row[2]) for row in rows] == [
        ("1", "256", "0.01"), ("2", "512", "0.02"), ("2", "512", "0.01"),
    ]  # fmt: skip
    assert [row[-2] for row in rows] == ["3", "2", "2"]  # Steps of an epoch.


def test_numbers_of_devices():
    assert many_devices.counts_up_to(16) == [1, 2, 4, 8, 16]
    assert many_devices.counts_up_to(6) == [1, 2, 4, 6]


def test_many_devices(prepared, small_lenet, data, capsys, monkeypatch):
    """Each number of devices trains; what is timed in processes of its own is made up here."""
    found = {}

    def measure(cases, **options):
        found["counts"] = [case.config.num_devices for case in cases]
        secs = (0.1, 0.11, 0.12, 0.11, 0.1)
        many = [make_sample("manual", n, secs, simulated=True) for n in found["counts"]]
        return dataclasses.make_dataclass("Measured", ["samples"])(many)

    monkeypatch.setattr(many_devices, "measure", measure)
    output = run(config_of("many_devices", num_devices=4, **data), capsys)
    assert found["counts"] == [1, 2, 4]
    assert ["4", "64", "yes"] in [row[:3] for row in cells(output, "4")]
    # In all and on the busiest link, of the 7,850 numbers of a dense layer: 6, 1.5, 4, 1.5 times.
    assert ["4", "188,400", "47,100", "125,600", "47,100"] in cells(output, "4")
    assert "(simulated devices: timing is not scaling)" in output


def test_a_batch_is_divided_by_rate():
    assert slow_replica.divide_by_rate([128, 128], [0.1, 0.2]) == (
        [171, 85],
        pytest.approx(171 * 0.1 / 128),
    )
    sizes, sec = slow_replica.divide_by_rate([3, 3, 4], [1.0, 1.0, 1.0])
    assert sum(sizes) == 10 and sizes == [3, 3, 4] and sec == 1.0


def test_slow_replica_names_the_slow_one(prepared, small_lenet, data, capsys, monkeypatch):
    monkeypatch.setattr(slow_replica, "_ROUNDS", 2)
    monkeypatch.setattr(slow_replica, "_STEPS_PER_BLOCK", 2)
    output = run(config_of("slow_replica", num_devices=3, **data), capsys)
    rows = [cells(output, name)[0] for name in CPUS[:3]]
    assert [row[1] for row in rows] == ["86", "85", "85"]
    assert int(rows[2][2]) > max(int(row[2]) for row in rows[:2])  # It sends last,
    assert rows[2][3] == "0" and min(int(row[3]) for row in rows[:2]) > 0  # and all others wait.
    assert sum(int(row[5]) for row in rows) == 256
    assert int(rows[2][5]) < 85


def test_predict_on_several_devices_is_predict_on_one(prepared, small_lenet, data, capsys):
    output = run(config_of("predict", num_devices=3, num_train_examples=300, **data), capsys)
    owners = [row[1] for i in range(5) for row in cells(output, str(i)) if row[1] in CPUS]
    assert owners == [CPUS[0], CPUS[0], CPUS[1], CPUS[1], CPUS[2]]
    assert "OTHERS" not in output
    (one,) = [row for row in cells(output, "1") if row[1:4] == ["1", "0", "0"]]
    assert one[4] == "1"  # A prediction for the one image, none for the blanks.


# The three ways to split a training.


def test_pipeline_shows_the_schedule_and_is_manual_bit_for_bit(prepared, data, capsys):
    output = run(config_of("pipeline", num_devices=3, **data), capsys)
    first, second = (
        [line.strip() for line in output.splitlines() if line.startswith(f"  stage {k}")]
        for k in (0, 2)
    )
    assert first == [
        "stage 0  F0 F1 F2 ·  ·  ·  ·  B0 B1 B2",
        "stage 0  F0 F1 F2 ·  ·  B0 ·  B1 ·  B2",
    ]
    assert second == [
        "stage 2  ·  ·  F0 F1 F2 B0 B1 B2 ·  ·",
        "stage 2  ·  ·  F0 B0 F1 B1 F2 B2 ·  ·",
    ]
    assert "= 2/5 = 40% of the time" in output
    assert sum(row[-1].endswith("%") for name in CPUS for row in cells(output, name)) == 3
    assert_counted(output)
    assert "are bitwise identical" in " ".join(output.split())


def assert_counted(output):
    """Asserts that each table of traffic has the same bytes by formula and in the graph."""
    rows = cells(output, "in")
    assert rows
    for row in rows:
        assert row[:2] == ["in", "all"] and len(row) == 4 and row[2] == row[3] != "0"


@pytest.mark.slow
def test_tensor_shows_what_a_forgotten_sum_does(prepared, data, capsys):
    output = run(config_of("tensor", num_devices=3, **data), capsys)
    assert ["conv2", "17/17/16"] in [row[:2] for row in cells(output, "conv2")]
    assert_counted(output)
    (loss,) = cells(output, "loss")
    assert loss[-1] == loss[-2]  # Right without the sum; the gradients are not.
    assert int(cells(output, "conv1/kernel")[0][-1].rstrip("%")) > 50
    assert cells(output, "logits/kernel")[0][-1] == "0%"
    apart = float(" ".join(output.split()).partition("weights differ by at most ")[2].split(":")[0])
    assert 0 <= apart < 1e-7


@pytest.mark.slow
def test_sharded_keeps_a_part_and_is_manual_bit_for_bit(prepared, data, capsys):
    output = run(config_of("sharded", num_devices=3, **data), capsys)
    rows = [cells(output, name)[0] for name in CPUS[:3]]
    assert [row[3] for row in rows] == ["0.333"] * 3
    for column in (1, 2):
        assert sum(int(row[column].replace(",", "")) for row in rows) == 4 * 129_068
    assert_counted(output)
    assert {row[2] for row in cells(output, "in")} == {f"{2 * 2 * 4 * 129_068:,}"}
    assert "optimizer state are bitwise identical" in " ".join(output.split())


def test_order_finds_a_number_with_two_sums():
    generator = np.random.default_rng(0)
    gradients = [[generator.normal(size=100).astype(np.float32)] for _ in range(3)]
    a, b, c = order.find_order_dependent_element(gradients)
    assert (a + b) + c != a + (b + c)
    assert order.find_order_dependent_element([[np.ones(3, np.float32)]] * 3) is None


@pytest.mark.e2e
def test_order_distinguishes_equal_orders_from_others(data, small_program, monkeypatch, capfd):
    """In a process of its own, as ever: collectives of four devices would break those of others."""
    monkeypatch.syspath_prepend(small_program)
    demo.run(config_of("order", device="cpu", **data))
    output = capfd.readouterr().out
    rows = {" ".join(line.split()[:2]): line for line in output.splitlines() if " of 7,850" in line}
    same = {name for name, row in rows.items() if row.count("bit-identical") == 2}
    assert same == {"manual reduce_to_one", "manual direct", "mirrored reduce_to_one"}
    assert {"manual tree", "manual ring", "mirrored ring"} == set(rows) - same


@pytest.mark.e2e
def test_train_has_the_d2l_table_beside_ours(data, small_lenet, capsys, monkeypatch, tmp_path):
    """Real trainings, but in this process; the speed of both models is made up here."""
    monkeypatch.setattr(textbook_table, "train_in_child_process", train_here)
    monkeypatch.chdir(tmp_path)

    def measure(cases, **options):
        many = [
            make_sample("manual", p.config.num_devices, (1.0,) * 5, simulated=True,
                    model=p.config.model, global_batch_size=p.config.global_batch_size)
            for p in cases
        ]  # fmt: skip
        return dataclasses.make_dataclass("Measured", ["samples"])(many)

    monkeypatch.setattr(textbook_table, "measure", measure)
    config = config_of("train", device="cpu", epochs=1, num_train_examples=100, **data)
    output = run(config, capsys)
    summaries = [load_summary(path) for path in sorted((tmp_path / "runs").iterdir())]
    assert [s.num_replicas for s in summaries] == [1, 2]
    assert all(s.status == "finished" and s.epochs == 1 for s in summaries)
    assert "1 epoch of a subset of 100 images" in output
    # 64 images a second on one device and 128 on two, which have a batch twice as large.
    assert "938 projected" in output and "469 projected" in output
    assert "d2l, TensorFlow, by hand, 10 epochs" in output and "5.1" in output
    assert output.count("(simulated devices: timing is not scaling)") == 3


# The command line.


def test_every_experiment_is_registered_with_options_of_the_command():
    for name, experiment in EXPERIMENTS.items():
        assert callable(importlib.import_module(f"app.demos.{experiment.module or name}").run)
        assert experiment.options <= DEMO_OPTIONS
        assert experiment.least_devices <= experiment.num_devices
    assert set().union(*(e.options for e in EXPERIMENTS.values())) == DEMO_OPTIONS


def test_every_experiment_names_commands_that_there_are(capsys):
    demo.run(Config.of("demo"))
    output = capsys.readouterr().out
    for name, experiment in EXPERIMENTS.items():
        (line,) = [line for line in output.splitlines() if line.split()[:1] == [name]]
        assert experiment.duration in line and line.endswith(experiment.text)


@pytest.mark.parametrize(
    ("experiment", "options", "told"),
    [
        ("alreduce", {}, "did you mean allreduce?"),
        ("xyz", {}, "is not an experiment; choose one of"),
        ("order", {"num_devices": 2}, "needs at least 3 devices"),
        ("allreduce", {"num_gpus": 1}, "got --num_gpus=1"),
    ],
)
def test_what_an_experiment_does_not_take_is_refused(experiment, options, told):
    with pytest.raises(ConfigError, match=told.replace("?", r"\?")):
        find_experiment(config_of(experiment, **options))


@pytest.mark.parametrize(
    ("experiment", "option", "told"),
    [
        ("allreduce", "epochs", "only of demo train, demo scale"),
        ("split_batch", "all_reduce", "--all_reduce is not an option of demo split_batch"),
    ],
)
def test_what_an_option_means_nothing_to_refuses_it(experiment, option, told):
    with pytest.raises(ConfigError, match=told):
        check_options(experiment, ["num_devices", option])


def test_an_experiment_that_is_not_one_is_refused():
    result = run_here("demo", "allreduse", "--num_devices=2")
    assert result.returncode == 2 and "did you mean allreduce?" in result.stderr


def test_a_machine_with_one_gpu_gets_logical_cpus(monkeypatch):
    asked = []
    monkeypatch.setattr(device_setup, "count_gpus", lambda config: 1)
    monkeypatch.setattr(device_setup, "set_up", asked.append)
    demo_setup.set_up(config_of("order"))
    demo_setup.set_up(config_of("order", device="gpu"))
    assert (asked[0].device, asked[0].num_devices) == ("cpu", 4)
    assert (asked[1].device, asked[1].num_devices) == ("gpu", None)
