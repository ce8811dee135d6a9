"""The outer loop: records, resuming after every kind of interruption, and what ends a run."""

import contextlib
import dataclasses
import errno
import os
import pathlib
import shutil
import types

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from app.data.synthetic import generate_synthetic
from app.devices.device_setup import Devices
from app.options import Config
from app.records.checkpoint import checkpoint_paths, find_newest_checkpoint, save_checkpoint
from app.records.event_file import event_files
from app.records.files import write_file
from app.records.history import load_history, load_summary
from app.records.run_directory import open_run_directory
from app.records.run_metadata import Progress
from app.runtime import signals
from app.runtime.errors import (
    CheckpointError,
    DeviceError,
    DiskFullError,
    DivergedError,
    ReplicaDivergenceError,
    Terminated,
)
from app.training.evaluation import evaluate
from app.training.loop import Training
from app.training.resume import find_checkpoint, find_result
from app.training.training_spec import TrainingSpec
from models import MODELS
from strategies.step_totals import StepTotals
from tests.conftest import CPUS


@pytest.fixture(scope="module")
def dataset():
    return generate_synthetic(num_train=300, num_test=70)


@pytest.fixture(autouse=True, scope="module")
def _small_model():
    """Trains dense layers in place of LeNet and draws nothing: half the time goes into both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "lenet", "tests.dense_network:build_three_dense_layers")
        patch.setattr("app.report.accuracy_plot.plot_accuracy", plot_nothing)
        yield


def plot_nothing(runs, out_dir):
    ((_, history),) = runs.values()
    for name in ("accuracy.png", "accuracy.svg"):
        write_file(out_dir / name, f"of {len(history)} epochs")


def make(dataset, run_dir, *, strategy="single", steps_per_call=1, **options):
    """Makes a training of 5 steps an epoch; a compiled call has at most a number of steps.

    With `steps_per_call=None`, it has as many as in the program.
    """
    defaults = {"strategy": strategy, "global_batch_size": 64, "recipe": "d2l", "epochs": 2}
    config = Config.of(**{**defaults, **options})
    num_devices = 1 if strategy == "single" else 2
    devices = Devices(CPUS[:num_devices], simulated=num_devices > 1)
    run_dir.mkdir(exist_ok=True)
    loop = Training(config, devices, dataset, run_dir)
    if steps_per_call:
        loop._num_steps_in_time = lambda: steps_per_call
    loop.start(find_checkpoint(run_dir))
    assert loop.strategy.num_shards == num_devices
    return loop


def train(dataset, run_dir, **options):
    return make(dataset, run_dir, **options).run()


def losses(run_dir):
    """Returns the history without the times, which alone may differ."""
    return [
        dataclasses.replace(record, epoch_sec=0.0, images_per_sec=0.0, evaluation_sec=0.0)
        for record in load_history(run_dir)
    ]


@pytest.fixture(scope="module")
def finished(dataset, tmp_path_factory):
    """A finished run of two epochs, the result of its training, and how many steps a call had.

    In the first epoch, one step takes as long as a call should.
    """
    run_dir, lengths = tmp_path_factory.mktemp("finished") / "run", []
    step = Training.step
    with pytest.MonkeyPatch.context() as patch:

        def count(self, num_steps):
            lengths.append(num_steps)
            totals = step(self, num_steps)
            patch.setattr("app.training.loop._CALL_SEC", 1e9 * (sum(lengths) >= 5))
            return totals

        patch.setattr("app.training.loop._CALL_SEC", 0.0)
        patch.setattr(Training, "step", count)
        return run_dir, train(dataset, run_dir, steps_per_call=None), lengths


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of the finished run, which the test may change."""
    return pathlib.Path(shutil.copytree(finished[0], tmp_path / "copy"))


def test_calls_grow_until_they_take_long_enough(finished):
    assert finished[2] == [1, 1, 1, 1, 1, 5]


@pytest.mark.parity
def test_signals_save_and_each_other_strategy_goes_on(dataset, tmp_path, monkeypatch, capsys):
    """In mid-epoch, in the evaluation and after it, with statistics that each replica has."""
    monkeypatch.setitem(MODELS, "lenet", "tests.small_models:build_normalised_network")
    whole = train(dataset, tmp_path / "whole", strategy="manual", epochs=1)
    run_dir = tmp_path / "cut"
    # At step 3; in the evaluation, which has averaged the statistics by then; after it.
    for strategy, checks_before in (("manual", 2), ("mirrored", 2), ("manual", 1)):
        left = iter([None] * checks_before)

        def check(number, left=left):
            if next(left, "over") == "over":
                raise Terminated

        with monkeypatch.context() as patch, pytest.raises(Terminated):
            patch.setattr(signals, "check", check)
            train(dataset, run_dir, strategy=strategy, epochs=1)
        if strategy == "mirrored":
            own = find_newest_checkpoint(run_dir).per_shard_statistics
            assert len(own) == 2 and not np.array_equal(own[0][0], own[1][0])
    assert [path.stem for path in checkpoint_paths(run_dir)] == [
        f"step-{step:08d}-epoch-{epoch:04d}" for step, epoch in [(3, 0), (5, 0), (5, 1)]
    ]
    resumed = train(dataset, run_dir, strategy="manual", epochs=1)
    assert resumed.weights_sha256 == whole.weights_sha256
    (record,), (cut,) = losses(tmp_path / "whole"), losses(run_dir)
    assert cut.statistics_apart == record.statistics_apart > 0
    assert cut.train_loss == pytest.approx(record.train_loss, rel=1e-12)
    assert cut.test_loss == pytest.approx(record.test_loss, rel=1e-12)
    assert resumed.changes == [
        "step 3: strategy manual → mirrored",
        "step 5: strategy mirrored → manual",
    ]
    assert "strategy manual → mirrored: global batch 64 and" in capsys.readouterr().out


class Disk:
    """What a power cut leaves of a directory at each write, sync and renaming.

    A file system keeps what was synced. Of the rest it may keep all, nothing, removals alone, or
    names of files without their contents.

    Args:
        run_dir: the directory of a run.
        out_dir: where the states are written; `states` has their paths.
    """

    def __init__(self, run_dir, out_dir):
        self._run_dir, self._out_dir, self.states = run_dir, out_dir, []
        self._contents, self._entries, self._opened = {}, {}, contextlib.ExitStack()

    @contextlib.contextmanager
    def recorded(self):
        with pytest.MonkeyPatch.context() as patch, self._opened:
            for name in ("replace", "fsync", "rmdir"):
                patch.setattr(os, name, self._recording(getattr(os, name)))
            yield

    def _recording(self, call):
        """Returns a function of the system that notes what is on the disk before and after it."""

        def record_and_call(*arguments, **options):
            self._record()
            call(*arguments, **options)
            if call.__name__ == "fsync":
                self._keep(pathlib.Path(os.readlink(f"/proc/self/fd/{arguments[0]}")))
            self._record()

        return record_and_call

    def _keep(self, path):
        """Notes what is on the disk from now on; an open file keeps its number."""
        self._opened.callback(os.close, os.open(path, os.O_RDONLY))
        number = path.stat().st_ino
        if path.is_dir():
            self._entries[number] = self._now(path)
        else:
            self._contents[number] = path.read_bytes()

    def _now(self, path):
        return {each.name: (each.stat().st_ino, each.is_dir()) for each in path.iterdir()}

    def _record(self):
        there = {path.stat().st_ino for path in self._run_dir.rglob("*")}
        known = {child for names in self._entries.values() for child, _ in names.values()}
        for kept, names_are_kept in ((known, False), (there, False), (there, True)):
            self.states.append(self._out_dir / f"cut {len(self.states)}")
            number = self._run_dir.stat().st_ino
            self._write(number, self._run_dir, kept, names_are_kept, self.states[-1])
        self.states.append(
            shutil.copytree(self._run_dir, self._out_dir / f"cut {len(self.states)}")
        )

    def _write(self, number, path, kept, names_are_kept, target):
        target.mkdir(parents=True)
        entries = self._now(path) if names_are_kept else self._entries.get(number, {})
        for name, (child, is_directory) in entries.items():
            if is_directory and child in kept:
                self._write(child, path / name, kept, names_are_kept, target / name)
            elif child in kept:
                (target / name).write_bytes(self._contents.get(child, b""))


def test_a_run_cut_off_at_any_write_equals_an_uninterrupted_one(dataset, tmp_path, finished):
    """With one strategy: `test_strategies` loads a saved state into each of them."""
    whole = tmp_path / "run"
    disk = Disk(whole, tmp_path)
    whole.mkdir()
    with disk.recorded():
        summary = start_and_train(dataset, whole)
    before = len(disk.states)
    check_records(whole, summary)
    # Neither checkpoints nor the length of a call change the result.
    assert summary.weights_sha256 == finished[1].weights_sha256
    assert losses(whole) == losses(finished[0])
    with disk.recorded(), open_run_directory(whole, {"seed": 1}) as run_directory:
        run_directory.start(overwrite=True)
    assert before > 200 and len(disk.states) > before + 10
    newest_steps = []
    for number, cut in enumerate(disk.states):
        found, told, epochs = find_newest_checkpoint(cut), load_summary(cut), load_history(cut)
        progress = found.progress if found else Progress()
        newest_steps.append(progress.step)
        assert not found or found.damaged == []
        assert told is None or told.steps <= progress.step
        assert number >= before or len(epochs) <= progress.epoch
        figure = cut / "accuracy.png"
        assert not figure.exists() or figure.read_text().startswith("of ")
    # Each fourth state is what a killed process leaves: while the checkpoint of step 9 is written.
    killed = zip(newest_steps[3:before:4], disk.states[3:before:4], strict=True)
    mid_epoch = [cut for step, cut in killed if step == 6][-1]
    without_summary = next(c for c in disk.states if load_history(c) and not load_summary(c))
    assert load_summary(mid_epoch).status == "running" and [*mid_epoch.rglob(".lockstep-*")]
    with pytest.raises(CheckpointError, match="epoch 2 has already started"):
        make(dataset, mid_epoch, epochs=1)
    for cut in (mid_epoch, without_summary):
        resumed = start_and_train(dataset, cut, steps_per_call=2)
        assert load_summary(cut) == resumed and resumed.changes == []
        assert resumed.weights_sha256 == finished[1].weights_sha256
        assert losses(cut) == losses(finished[0])
        assert (cut / "accuracy.png").read_text() == "of 2 epochs"
        assert [*cut.rglob(".*")] == [cut / ".lock"]
    events = EventAccumulator(str(mid_epoch)).Reload()
    assert [event.step for event in events.Scalars("steps/loss")] == [1, 2, 3, 4, 5, 6, 8, 9, 10]
    told = [(event.step, event.value) for event in events.Scalars("epochs/test_accuracy")]
    history = load_history(mid_epoch)
    assert told == [(r.step, pytest.approx(r.test_accuracy)) for r in history]


def start_and_train(dataset, path, **options):
    """Trains as the command does, which removes what a killed run has left."""
    with open_run_directory(path, {}) as run_directory:
        run_directory.start(overwrite=False)
        return train(dataset, path, checkpoint_every=3, **options)


def check_records(run_dir, summary):
    """Checks what a run of 2 epochs of 5 steps leaves."""
    assert {path.name for path in run_dir.iterdir()} == {
        "history.jsonl", "summary.json", "accuracy.png", "accuracy.svg", "checkpoints", ".lock",
        "config.json", *(path.name for path in event_files(run_dir)),
    }  # fmt: skip
    assert load_summary(run_dir) == summary and summary.total_sec > 0
    assert (summary.status, summary.steps, summary.epochs) == ("finished", 10, 2)
    assert (summary.num_test_examples, summary.learning_rate) == (70, 0.2 * 64 / 256)
    history = load_history(run_dir)
    assert [record.step for record in history] == [5, 10]
    assert summary.epoch_sec == np.median([record.epoch_sec for record in history])
    assert history[1].train_loss < history[0].train_loss
    assert history[0].images_per_sec == pytest.approx(300 / history[0].epoch_sec)
    checkpoint = find_newest_checkpoint(run_dir)
    assert checkpoint.progress.step == 10 and checkpoint.progress.history == history
    assert checkpoint.metadata.steps_per_epoch == 5


def test_a_full_disk_ends_the_run_and_more_epochs_go_on_from_what_is_saved(
    dataset, tmp_path, finished, monkeypatch, capsys
):
    replace = os.replace

    def fail(source, target):
        if target.name == "history.jsonl":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(DiskFullError):
        patch.setattr(os, "replace", fail)
        train(dataset, tmp_path, epochs=1)
    assert find_newest_checkpoint(tmp_path).progress.epoch == 1
    assert not [*tmp_path.rglob(".*")] and not (tmp_path / "history.jsonl").exists()
    more = train(dataset, tmp_path)
    assert more.weights_sha256 == finished[1].weights_sha256
    assert more.changes == ["step 5: epochs 1 → 2"]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(TrainingSpec, "has_schedule", True)
    make(dataset, tmp_path, epochs=3)
    assert "WARNING: epochs 2 → 3: the learning rate follows" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_tensor(dataset, tmp_path):
    told = r"training loss nan, model/\S+ is not finite at step \d+ with learning rate 1e\+30"
    with pytest.raises(DivergedError, match=told):
        train(dataset, tmp_path, learning_rate=1e30)
    assert find_newest_checkpoint(tmp_path) is None
    assert load_history(tmp_path) == []


def test_the_last_finite_checkpoint_is_kept(dataset, copy):
    loop = make(dataset, copy, epochs=3)
    state = loop.strategy.state()
    state["model/first/bias"][3] = np.inf  # One number is enough.
    loop.strategy.load_state(state)
    before = loop._state.progress
    loop._state.progress = dataclasses.replace(before, step=11, epoch_step=1)
    with pytest.raises(DivergedError, match="model/first/bias is not finite at step 11"):
        loop.save()
    loop._state.progress = before
    with pytest.raises(DivergedError, match="the checkpoint of step 10 is kept"):
        loop.run()
    state = find_newest_checkpoint(copy).state
    assert all(np.isfinite(array).all() for array in state.values())


def test_replicas_that_part_are_not_saved(dataset, tmp_path):
    options = {"inject": "perturb_weight:step=2", "checkpoint_every": 3, "strategy": "manual"}
    with pytest.raises(ReplicaDivergenceError, match="replica 1 differs from replica 0"):
        train(dataset, tmp_path, **options)
    assert checkpoint_paths(tmp_path) == []


def test_records_are_written_again_from_the_checkpoint(dataset, copy, finished):
    """Whatever has happened to them, a training that resumes has the right ones."""
    history = (copy / "history.jsonl").read_text()
    (copy / "history.jsonl").write_text(history.replace('"epoch": 2', '"epoch": 7'))
    (copy / "summary.json").write_text("{")
    (copy / "accuracy.png").unlink()
    again = train(dataset, copy)
    assert (copy / "history.jsonl").read_text() == history
    assert (copy / "accuracy.png").read_text() == "of 2 epochs"
    assert dataclasses.replace(again, compile_sec=finished[1].compile_sec) == finished[1]


def test_a_history_without_checkpoints_is_no_new_start(copy):
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(CheckpointError, match="a history, but no checkpoint"):
        find_checkpoint(copy)


def test_a_damaged_checkpoint_is_replaced_by_the_training_that_resumes(
    dataset, copy, finished, capsys
):
    newest = checkpoint_paths(copy)[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    assert train(dataset, copy).weights_sha256 == finished[1].weights_sha256
    assert str(newest) in capsys.readouterr().err
    assert losses(copy) == losses(finished[0]) and not find_newest_checkpoint(copy).damaged


@contextlib.contextmanager
def opened(config, source, path):
    """Opens a copy of a run as the command does."""
    with open_run_directory(path, config.result_fields()) as run_directory:
        run_directory.start(overwrite=False)
        shutil.copytree(source, path, dirs_exist_ok=True)
        yield run_directory


def test_a_result_is_that_of_the_checkpoint_whatever_the_records_say(tmp_path, finished):
    """As a kill leaves them: at the end of an epoch, or just after a start with more epochs."""
    for epochs in (2, 3):
        config = Config.of(global_batch_size=64, recipe="d2l", strategy="single", epochs=epochs)
        path = tmp_path / str(epochs)
        with opened(config, finished[0], path) as run_directory:
            (path / "summary.json").write_text("{")
            (path / "history.jsonl").unlink()
            result = find_result(run_directory, find_checkpoint(path))
            assert result == (finished[1] if epochs == 2 else None)
        assert epochs == 3 or (load_summary(path), losses(path)) == (result, losses(finished[0]))


def test_another_training_is_refused(dataset, copy):
    other = dataclasses.replace(dataset, test_images=255 - dataset.test_images)
    for data, options, told in (
        (dataset, {"global_batch_size": 30, "seed": 5}, "global_batch_size 64 → 30; seed 0 → 5"),
        (dataset, {"learning_rate": 0.03125}, "learning_rate 0.05 → 0.03125"),
        (other, {}, r"dataset_sha256 \w{12}… → \w{12}…"),
    ):
        with pytest.raises(CheckpointError, match=rf"other settings \({told}\);.* --overwrite"):
            make(data, copy, **options)


def test_a_run_whose_default_is_spelled_out_is_the_same_run(dataset, copy, tmp_path):
    default = {"learning_rate": 0.05, "num_train_examples": 300}
    options = {"strategy": "single", "global_batch_size": 64, "recipe": "d2l", "epochs": 2}
    config = Config.of(**options, **default)
    with opened(config, copy, tmp_path / "run") as run_directory:
        found = find_checkpoint(run_directory.path)
        assert find_result(run_directory, found) is None  # The training compares values.
    loop = make(dataset, copy, **default)
    assert loop.is_finished and loop.run().changes == []


def test_why_the_rate_is_not_that_of_the_recipe_is_told(dataset):
    def text(size=256, **options):
        return TrainingSpec(Config.of(global_batch_size=size, **options), dataset).rate_text()

    why = "(0.2 is for a batch of 256; 0.05 needs at least 200 steps)"
    assert text(64, recipe="fast", epochs=10) == f"learning rate 0.0125 {why}"
    assert text(recipe="d2l") == "learning rate 0.2"


def test_another_way_of_computing_it_is_told(dataset, copy, monkeypatch, capsys):
    """Also if the checkpoint of an earlier version does not say which kernels computed it."""
    found = find_newest_checkpoint(copy)
    versions = {name: v for name, v in found.metadata.versions.items() if name != "cpu_kernels"}
    metadata = dataclasses.replace(found.metadata, versions=versions)
    save_checkpoint(copy, dataclasses.replace(found, metadata=metadata))
    now = {**versions, "tensorflow": "9.9", "cpu_kernels": "oneDNN on AVX-512"}
    monkeypatch.setattr("app.training.training_spec.versions", lambda: now)
    loop = make(dataset, copy, strategy="manual")
    told, warned = capsys.readouterr()
    assert "strategy single → manual;" in told and "shards of a batch 1 → 2: global" in told
    assert "tensorflow 2" in told and "→ 9.9" in told and "kernels" not in told
    change = "kernels of the CPU: not recorded → oneDNN on AVX-512"
    assert f"{change}; the weights may differ" in warned
    assert f"step 10: {change}" in loop.run().changes


def test_evaluation_checks_how_many_images_it_saw(dataset):
    counting = types.SimpleNamespace(evaluate=lambda *arguments: StepTotals(0.0, 0, 69))
    with pytest.raises(RuntimeError, match="69 examples instead of 70"):
        evaluate(counting, dataset)


def test_memory_that_runs_out_names_a_batch_that_fits(dataset, tmp_path, monkeypatch):
    def exhaust(self, iterator, num_steps):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")

    monkeypatch.setattr("strategies.base.Strategy.train_steps", exhaust)
    with pytest.raises(DeviceError, match=r"=64, which is 32 images .* use --global_batch_size=32"):
        train(dataset, tmp_path, strategy="manual")
