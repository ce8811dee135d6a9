"""The outer loop: records, resuming, and what ends it."""

import dataclasses
import errno
import itertools
import json
import os

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from app.data.synthetic import generate_synthetic
from app.devices.device_setup import Devices
from app.options import Config
from app.options.split_numbers import num_shards
from app.records.checkpoint import checkpoint_paths, find_newest_checkpoint
from app.records.event_file import event_files
from app.records.files import write_file
from app.records.history import load_history, load_summary
from app.records.run_directory import open_run_directory
from app.runtime.errors import (
    CheckpointError,
    DeviceError,
    DiskFullError,
    DivergedError,
    MismatchError,
    ReplicaDivergenceError,
    Terminated,
)
from app.runtime.progress_bar import TrainingProgress
from app.training import loop as training_loop
from app.training.evaluation import evaluate
from app.training.loop import Training
from app.verification.run_comparison import compare_weights
from conftest import CPUS
from failing_steps import InjectedError, after_call, after_step
from models import MODELS
from strategies import STRATEGIES


@pytest.fixture(scope="module")
def dataset():
    return generate_synthetic(num_train=300, num_test=70)


@pytest.fixture(autouse=True)
def _small_model(request, monkeypatch):
    """Trains dense layers in place of LeNet and draws nothing: half the time goes into both."""
    if "whole_lenet" not in request.fixturenames:
        monkeypatch.setitem(MODELS, "lenet", "dense_network:build_three_dense_layers")
        monkeypatch.setattr("app.report.accuracy_plot.plot_accuracy", plot_nothing)


def plot_nothing(run_dirs, out_dir):
    for name in ("accuracy.png", "accuracy.svg"):
        write_file(out_dir / name, f"of {len(load_history(run_dirs[0]))} epochs")


@pytest.fixture
def whole_lenet():
    """For tests that need the real network and figure."""


class CallLength:
    """Fixes the number of steps of a compiled call, which otherwise depends on their duration."""

    steps = None


@pytest.fixture(autouse=True)
def _call_length(monkeypatch):
    in_time = Training._num_steps_in_time
    monkeypatch.setattr(CallLength, "steps", None)
    monkeypatch.setattr(
        Training, "_num_steps_in_time", lambda self: CallLength.steps or in_time(self)
    )


def make(dataset, run_dir, *, strategy="manual", num_replicas=2, steps_per_call=None, **options):
    CallLength.steps = steps_per_call
    config = Config.of(
        **{"strategy": strategy, "global_batch_size": 64, "recipe": "fast", "epochs": 3, **options}
    )
    num_replicas = 1 if strategy == "single" else num_replicas
    devices = Devices(CPUS[:num_replicas], simulated=num_replicas > 1)
    run_dir.mkdir(exist_ok=True)
    loop = Training(config, devices, dataset, run_dir)
    loop.start(from_scratch=False)
    assert loop.strategy.num_devices == num_replicas
    assert loop.strategy.num_shards == num_shards(strategy, config.distribution, num_replicas)
    return loop


def train(dataset, run_dir, **options):
    return make(dataset, run_dir, **options).run()


def train_until(dataset, run_dir, failing, **options):
    """Trains until it fails."""
    with failing, pytest.raises(InjectedError):
        train(dataset, run_dir, **options)


def losses(run_dir):
    """Returns the history without the times, which alone may differ."""
    return [
        dataclasses.replace(record, epoch_sec=0.0, images_per_sec=0.0, evaluation_sec=0.0)
        for record in load_history(run_dir)
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_leaves_its_records(dataset, tmp_path, strategy, whole_lenet):
    summary = train(dataset, tmp_path, strategy=strategy)
    assert {p.name for p in tmp_path.iterdir()} == {
        "history.jsonl", "summary.json", "accuracy.png", "accuracy.svg", "checkpoints",
        *(path.name for path in event_files(tmp_path)),
    }  # fmt: skip
    events = EventAccumulator(str(tmp_path)).Reload()
    told = [(event.step, event.value) for event in events.Scalars("epochs/test_accuracy")]
    assert load_summary(tmp_path) == summary
    assert summary.status == "finished" and summary.steps == 15 and summary.epochs == 3
    assert summary.num_test_examples == 70 and summary.num_parameters == 129_068
    history = load_history(tmp_path)
    assert [record.step for record in history] == [5, 10, 15]
    assert told == [(r.step, pytest.approx(r.test_accuracy)) for r in history]
    assert events.Scalars("steps/loss")[-1].step == 15
    assert summary.best_test_accuracy == max(record.test_accuracy for record in history)
    assert summary.epoch_sec == np.median([record.epoch_sec for record in history])
    assert history[-1].train_loss < history[0].train_loss
    checkpoint = find_newest_checkpoint(tmp_path).checkpoint
    assert checkpoint.progress.step == 15 and checkpoint.progress.history == history
    assert (
        checkpoint.metadata.config["model"] == "lenet" and checkpoint.metadata.steps_per_epoch == 5
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_cut_off_in_mid_epoch_equals_an_uninterrupted_one(dataset, tmp_path, strategy):
    """Cut off after step 13; the last checkpoint is that of step 12."""
    options = {"strategy": strategy, "steps_per_call": 1}
    whole = train(dataset, tmp_path / "whole", **options)
    options |= {"checkpoint_every": 4}
    train_until(dataset, tmp_path / "cut", after_step(13), **options)
    assert load_summary(tmp_path / "cut").status == "running"
    assert find_newest_checkpoint(tmp_path / "cut").checkpoint.progress.epoch_step == 2
    resumed = train(dataset, tmp_path / "cut", **options)
    assert resumed.weights_sha256 == whole.weights_sha256
    assert losses(tmp_path / "whole") == losses(tmp_path / "cut")
    assert resumed.total_sec > 0 and resumed.changes == []
    events = EventAccumulator(str(tmp_path / "cut")).Reload()
    assert [event.step for event in events.Scalars("steps/loss")] == list(range(1, 16))
    assert [event.step for event in events.Scalars("epochs/test_loss")] == [5, 10, 15]


def test_another_strategy_goes_on_from_mid_epoch(dataset, tmp_path, capsys):
    whole = train(dataset, tmp_path / "whole", strategy="manual")
    options = {"checkpoint_every": 4, "steps_per_call": 2}
    train_until(dataset, tmp_path / "cut", after_step(6), strategy="manual", **options)
    resumed = train(dataset, tmp_path / "cut", strategy="mirrored", **options)
    assert "strategy manual → mirrored: global batch 64 and" in capsys.readouterr().out
    assert resumed.weights_sha256 == whole.weights_sha256
    assert resumed.changes == ["step 8: strategy manual → mirrored"]


@pytest.mark.parametrize("strategy", ["manual", "mirrored"])
def test_batch_norm_statistics_go_on_bit_for_bit(dataset, tmp_path, strategy, monkeypatch):
    """Replicas keep statistics of their own, which a checkpoint in mid-epoch must not average."""
    monkeypatch.setitem(MODELS, "lenet", "small_models:build_normalised_network")
    options = {"strategy": strategy, "epochs": 1, "steps_per_call": 1}
    whole = train(dataset, tmp_path / "whole", **options)
    options |= {"checkpoint_every": 3}
    train_until(dataset, tmp_path / "cut", after_step(4), **options)
    own = find_newest_checkpoint(tmp_path / "cut").checkpoint.per_shard_statistics
    assert len(own) == 2 and not np.array_equal(own[0][0], own[1][0])
    assert train(dataset, tmp_path / "cut", **options).weights_sha256 == whole.weights_sha256


def test_manual_and_mirrored_end_with_the_same_weights(dataset, tmp_path, whole_lenet):
    manual, mirrored = (
        train(dataset, tmp_path / name, strategy=name) for name in ("manual", "mirrored")
    )
    assert manual.weights_sha256 == mirrored.weights_sha256
    assert manual.train_loss == pytest.approx(mirrored.train_loss, rel=1e-12)


def test_steps_per_call_do_not_change_the_result(dataset, tmp_path, monkeypatch):
    results = []
    for call_sec in (0.0, 1e9):  # One step a call; all that is left of the epoch after the first.
        monkeypatch.setattr(training_loop, "_CALL_SEC", call_sec)
        results.append(train(dataset, tmp_path / str(call_sec), epochs=1))
    assert results[0].weights_sha256 == results[1].weights_sha256
    assert results[0].train_loss == results[1].train_loss


@pytest.mark.parametrize("part", ["train_images", "train_labels", "test_images"])
def test_an_example_that_changes_in_memory_is_found(dataset, tmp_path, part):
    changed = getattr(dataset, part).copy()
    own = dataclasses.replace(dataset, **{part: changed})
    loop = make(own, tmp_path)
    with pytest.raises(MismatchError) as caught:
        loop.begin()
        changed[7] ^= 1
        loop.step(loop.steps_per_epoch)
        loop.end_epoch()
    example = "a test example" if part == "test_images" else "training example 7"
    assert f"{example} has changed in memory since it was loaded" in str(caught.value)
    assert checkpoint_paths(tmp_path) == []


def test_a_changed_example_is_named_where_it_causes_another_error(dataset, tmp_path):
    loop = make(dataset, tmp_path)
    with pytest.raises(MismatchError, match="training example 7 "):
        loop.begin()
        _, labels = loop._spec._examples
        labels._numpy()[7] = 34  # Not a copy, as `numpy()` is. The loss has no such class.
        loop._train()


def test_checkpoints_come_by_the_clock_where_no_steps_are_given(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr("app.training.checkpoint_schedule._CHECKPOINT_SEC", 0.0)
    train(dataset, tmp_path, epochs=1, steps_per_call=2)
    assert [p.name[:13] for p in checkpoint_paths(tmp_path)] == [
        f"step-{step:08d}" for step in (2, 4, 5)
    ]


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_tensor(dataset, tmp_path):
    with pytest.raises(
        DivergedError,
        match=r"training loss nan, model/\S+ is not finite at step \d+ with learning rate 1e\+30",
    ):
        train(dataset, tmp_path, learning_rate=1e30)
    assert find_newest_checkpoint(tmp_path) is None
    assert load_history(tmp_path) == []


def test_the_last_finite_checkpoint_is_kept(dataset, tmp_path):
    train(dataset, tmp_path, epochs=2)
    loop = make(dataset, tmp_path)
    for name, array in (state := loop.strategy.state()).items():
        state[name] = array * np.array(1e30, array.dtype) if "kernel" in name else array
    loop.strategy.load_state(state)
    with pytest.raises(DivergedError, match="the checkpoint of step 10 is kept"):
        loop.run()
    state = find_newest_checkpoint(tmp_path).checkpoint.state
    assert all(np.isfinite(array).all() for array in state.values())


def test_replicas_that_part_are_not_saved(dataset, tmp_path):
    with pytest.raises(ReplicaDivergenceError, match="replica 1 differs from replica 0"):
        train(
            dataset, tmp_path, inject="perturb_weight:step=2", checkpoint_every=3, steps_per_call=1
        )
    assert checkpoint_paths(tmp_path) == []


@pytest.fixture(scope="module")
def whole_run(dataset, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "lenet", "dense_network:build_three_dense_layers")
        patch.setattr("app.report.accuracy_plot.plot_accuracy", plot_nothing)
        train(dataset, run_dir, epochs=2)
    return run_dir


def fail_at_rename(number, error, *, after=False):
    """Returns an `os.replace` whose call of this number fails, before or after it has renamed."""
    calls, replace = itertools.count(1), os.replace

    def fail(source, target):
        is_it = next(calls) == number
        if not is_it or after:
            replace(source, target)
        if is_it:
            raise error

    return fail


# Of two epochs, with a checkpoint in the middle of each: a checkpoint, and at the end of an epoch
# another one, history, summary and two figures; then the summary of the finished run.
@pytest.mark.parametrize(
    ("number", "after"), [(1, True), (2, True), (3, False), (8, False), (9, True), (13, False)]
)
def test_a_run_cut_off_while_it_saves_can_be_finished(
    dataset, tmp_path, whole_run, number, after, monkeypatch
):
    options = {"epochs": 2, "checkpoint_every": 3}
    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(os, "replace", fail_at_rename(number, KeyError(), after=after))
        train(dataset, tmp_path, **options)
    resumed = train(dataset, tmp_path, **options)
    assert resumed.status == "finished" and load_summary(tmp_path) == resumed
    assert resumed.weights_sha256 == load_summary(whole_run).weights_sha256
    assert losses(tmp_path) == losses(whole_run)
    assert (tmp_path / "accuracy.png").read_text() == "of 2 epochs"


@pytest.mark.parametrize("number", [2, 3, 5])  # History, summary and figure of the first epoch.
def test_a_full_disk_ends_the_run_and_what_is_saved_stays(dataset, tmp_path, number, monkeypatch):
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch, pytest.raises(DiskFullError):
        patch.setattr(os, "replace", fail_at_rename(number, error))
        train(dataset, tmp_path)
    assert find_newest_checkpoint(tmp_path).checkpoint.progress.epoch == 1
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]
    assert train(dataset, tmp_path).status == "finished"


def test_a_signal_saves_the_state_and_ends_the_run(dataset, tmp_path, monkeypatch):
    """In the middle of an epoch, and of its evaluation."""
    from app.runtime import signals

    whole = train(dataset, tmp_path / "whole", steps_per_call=1)
    run_dir = tmp_path / "cut"
    for checks_before in (2, 2, 1):  # At step 3; in the evaluation after step 5; after it.
        left = iter([None] * checks_before)

        def check(number, left=left):
            if next(left, "over") == "over":
                raise Terminated

        with monkeypatch.context() as patch:
            patch.setattr(signals, "check", check)
            with pytest.raises(Terminated):
                train(dataset, run_dir, steps_per_call=1)
    assert [path.name for path in checkpoint_paths(run_dir)] == [
        f"step-{step:08d}-epoch-{epoch:04d}" for step, epoch in [(3, 0), (5, 0), (5, 1)]
    ]
    resumed = train(dataset, run_dir, steps_per_call=1)
    assert resumed.weights_sha256 == whole.weights_sha256
    assert losses(run_dir) == losses(tmp_path / "whole")


def test_a_signal_in_the_evaluation_does_not_change_the_record(dataset, tmp_path, monkeypatch):
    """The evaluation has averaged the statistics by then; how far apart they were is kept."""
    from app.runtime import signals

    monkeypatch.setitem(MODELS, "lenet", "small_models:build_normalised_network")
    options = {"epochs": 1, "steps_per_call": 5}
    train(dataset, tmp_path / "whole", **options)
    checks = iter([None])

    def check(number):
        if next(checks, "over") == "over":
            raise Terminated

    with monkeypatch.context() as patch:
        patch.setattr(signals, "check", check)
        with pytest.raises(Terminated):
            train(dataset, tmp_path / "cut", **options)
    assert find_newest_checkpoint(tmp_path / "cut").checkpoint.progress.epoch_step == 5
    train(dataset, tmp_path / "cut", **options)
    assert losses(tmp_path / "whole") == losses(tmp_path / "cut")
    assert losses(tmp_path / "cut")[0].statistics_apart > 0


def test_a_checkpoint_without_its_history_makes_it_again(dataset, tmp_path):
    train(dataset, tmp_path, epochs=2)
    before = losses(tmp_path)
    (tmp_path / "history.jsonl").unlink()
    (tmp_path / "summary.json").write_text("{")
    assert train(dataset, tmp_path, epochs=2).status == "finished"
    assert losses(tmp_path) == before


def test_a_history_without_checkpoints_is_no_new_start(dataset, tmp_path):
    train(dataset, tmp_path, epochs=1)
    for path in checkpoint_paths(tmp_path):
        path.rename(tmp_path / path.name)
    with pytest.raises(CheckpointError, match="a history, but no checkpoint"):
        make(dataset, tmp_path, epochs=1)


def test_going_on_with_other_replicas_says_so(dataset, tmp_path, capsys):
    train_until(dataset, tmp_path, after_call(TrainingProgress, "epoch"), strategy="single")
    assert train(dataset, tmp_path).status == "finished"
    assert (
        "strategy single → manual; shards of a batch 1 → 2: global batch 64"
        in capsys.readouterr().out
    )


def test_more_epochs_go_on(dataset, tmp_path, capsys):
    whole = train(dataset, tmp_path / "whole", recipe="d2l", epochs=3)
    train(dataset, tmp_path / "more", recipe="d2l", epochs=1)
    more = train(dataset, tmp_path / "more", recipe="d2l", epochs=3)
    assert more.weights_sha256 == whole.weights_sha256
    assert more.changes == ["step 5: epochs 1 → 3"]
    capsys.readouterr()
    with pytest.raises(CheckpointError, match="epoch 3 has already started"):
        make(dataset, tmp_path / "more", recipe="d2l", epochs=2)


def test_a_finished_run_of_fewer_epochs_is_not_the_result(dataset, tmp_path):
    """As a kill leaves it, just after the run was started with more of them."""
    from app.commands.train import _find_result

    for epochs in (1, 2):
        config = Config.of(global_batch_size=64, recipe="fast", epochs=epochs)
        with open_run_directory(tmp_path, config.result_fields()) as run_directory:
            run_directory.start(overwrite=False)
            if epochs == 1:
                train(dataset, tmp_path, epochs=1)
            assert (_find_result(config, run_directory) is None) == (epochs == 2)


def test_weights_of_another_step_are_not_compared(dataset, tmp_path):
    run_dirs = [tmp_path / "a", tmp_path / "b"]
    for run_dir in run_dirs:
        train(dataset, run_dir, epochs=2)
    assert compare_weights(run_dirs)[0].difference.identical
    (checkpoint_paths(run_dirs[0])[-1] / "state.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"damaged .* not the weights of step 10"):
        compare_weights(run_dirs)


def test_more_epochs_of_a_schedule_are_not_what_they_would_have_been(dataset, tmp_path, capsys):
    train(dataset, tmp_path, epochs=1)
    make(dataset, tmp_path, epochs=2)
    assert "WARNING: epochs 1 → 2: the learning rate follows" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_replaced_by_the_training_that_resumes(dataset, tmp_path, capsys):
    whole = train(dataset, tmp_path)
    damaged = checkpoint_paths(tmp_path)[1:]
    for path in damaged:
        (path / "state.safetensors").write_bytes((path / "state.safetensors").read_bytes()[:-100])
    again = train(dataset, tmp_path)
    told = capsys.readouterr().err
    assert all(str(path) in told for path in damaged)
    assert again.weights_sha256 == whole.weights_sha256
    assert [record.epoch for record in load_history(tmp_path)] == [1, 2, 3]
    for path in checkpoint_paths(tmp_path):
        (path / "MANIFEST.json").unlink()
    with pytest.raises(CheckpointError, match="as all 3 here do not"):
        make(dataset, tmp_path)


def test_records_are_written_from_the_checkpoint(dataset, tmp_path):
    """Whatever has happened to them, a training that resumes has the right ones."""
    whole = train(dataset, tmp_path, epochs=2)
    history = (tmp_path / "history.jsonl").read_text()
    (tmp_path / "history.jsonl").write_text(history.replace('"epoch": 2', '"epoch": 7'))
    (tmp_path / "summary.json").unlink()
    again = train(dataset, tmp_path, epochs=2)
    assert (tmp_path / "history.jsonl").read_text() == history
    assert dataclasses.replace(again, compile_sec=whole.compile_sec) == whole


CHANGED = {
    "seed": {"seed": 5},
    "global_batch_size": {"global_batch_size": 30},
    "learning_rate": {"learning_rate": 0.03125},
    "recipe": {"recipe": "d2l"},
}


@pytest.mark.parametrize("name", CHANGED)
def test_another_configuration_is_refused(dataset, tmp_path, name):
    train(dataset, tmp_path, epochs=1)
    with pytest.raises(CheckpointError, match=f"{name} .* → .*--overwrite"):
        make(dataset, tmp_path, epochs=1, **CHANGED[name])


def test_other_data_are_another_training(dataset, tmp_path):
    train(dataset, tmp_path, epochs=1)
    other = dataclasses.replace(dataset, test_images=255 - dataset.test_images)
    with pytest.raises(CheckpointError, match=r"dataset_sha256 \w{12}… → \w{12}…"):
        make(other, tmp_path, epochs=1)


def test_another_model_is_refused_with_its_tensors(dataset, tmp_path):
    train(dataset, tmp_path, epochs=1)
    with pytest.raises(CheckpointError, match=r"arrays do not fit: model/\S+: float32\[.*; .*; "):
        make(dataset, tmp_path, epochs=1, model="resnet18")


def test_another_model_that_fits_is_another_training(dataset, tmp_path, monkeypatch):
    train(dataset, tmp_path, epochs=1)
    monkeypatch.setitem(MODELS, "resnet18", "dense_network:build_three_dense_layers")
    with pytest.raises(CheckpointError, match="model lenet → resnet18"):
        make(dataset, tmp_path, epochs=1, model="resnet18")


def test_other_versions_are_told(dataset, tmp_path, monkeypatch, capsys):
    train_until(dataset, tmp_path, after_call(TrainingProgress, "epoch"))
    monkeypatch.setattr("app.training.training_spec.versions", lambda: {"tensorflow": "9.9"})
    make(dataset, tmp_path)
    assert "tensorflow 2" in (told := capsys.readouterr().out) and "→ 9.9" in told


def test_evaluation_checks_how_many_images_it_saw(dataset, tmp_path, monkeypatch):
    strategy = make(dataset, tmp_path).strategy
    assert evaluate(strategy, dataset).examples == 70
    seen = strategy.evaluate
    monkeypatch.setattr(strategy, "evaluate", lambda *args: seen(*args)._replace(examples=69))
    with pytest.raises(RuntimeError, match="69 examples instead of 70"):
        evaluate(strategy, dataset)


def test_the_recipe_s_learning_rate_follows_the_batch(dataset, tmp_path):
    assert make(dataset, tmp_path, recipe="d2l").learning_rate == 0.2 * 64 / 256
    summary = train(dataset, tmp_path, recipe="d2l", learning_rate=0.125)
    assert json.loads((tmp_path / "summary.json").read_text())["learning_rate"] == 0.125
    assert summary.precision == "float32" and summary.jit_compile is False


def test_memory_that_runs_out_names_a_batch_that_fits(dataset, tmp_path, monkeypatch):
    import tensorflow as tf

    def exhaust(self, iterator, num_steps):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")

    monkeypatch.setattr("strategies.base.Strategy.train_steps", exhaust)
    with pytest.raises(DeviceError, match=r"=64, which is 32 images .* use --global_batch_size=32"):
        train(dataset, tmp_path)


def test_a_batch_beyond_all_memory_is_refused_before_it_is_tried(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr("app.training.memory_guard.available_bytes", lambda: 1 << 10)
    with pytest.raises(DeviceError, match=r" GiB, 0\.0 are free; use --global_batch_size=6 or"):
        make(dataset, tmp_path)
