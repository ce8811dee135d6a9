"""The training loop: records, resuming after every kind of interruption, and what ends a run."""

import contextlib
import dataclasses
import math
import os
import pathlib
import shutil
import time
import types
import unittest.mock

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from app import signals
from app.devices.setup import Devices
from app.errors import (
    CheckpointError,
    DivergedError,
    ReplicaDivergenceError,
    Terminated,
)
from app.options import Config
from app.records.checkpoint import checkpoint_paths, find_newest_checkpoint
from app.records.files import write_file
from app.records.history import finished, load_history, load_summary, summarize
from app.records.run_directory import open_run_directory
from app.training import loop as loops
from app.training.build import TrainingRun
from models import MODELS
from strategies.base import StepTotals
from tests.conftest import CPUS, generated


@pytest.fixture(scope="module")
def dataset():
    return generated(300, 70)


@pytest.fixture(autouse=True, scope="module")
def _small_model():
    """Trains a dense layer in place of LeNet and draws nothing: half the time goes into both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "lenet", "tests.dense_network:build_dense_network")
        patch.setattr(loops, "plot_accuracy", plot_nothing)
        yield


def plot_nothing(runs, out_dir):
    ((_, history),) = runs.values()
    for name in ("accuracy.png", "accuracy.svg"):
        write_file(out_dir / name, f"of {len(history)} epochs")


@pytest.fixture(autouse=True)
def _one_step_a_call(monkeypatch):
    monkeypatch.setattr(loops, "_CALL_SEC", 0.0)


def make(dataset, run_dir, *, strategy="single", on_progress=lambda: None, **options):
    """Makes a training of 5 steps an epoch, which resumes what is in the directory."""
    defaults = {"strategy": strategy, "global_batch_size": 64, "recipe": "d2l", "epochs": 2}
    config = Config.of(**{**defaults, **options})
    num_devices = 1 if strategy == "single" else 2
    run = TrainingRun(config, Devices(CPUS[:num_devices], simulated=num_devices > 1), dataset)
    assert run.strategy.num_shards == num_devices
    run_dir.mkdir(exist_ok=True)
    return loops.TrainingLoop(run, run_dir, find_newest_checkpoint(run_dir), on_progress)


def train(dataset, run_dir, **options):
    """Trains; returns the summary."""
    loop = make(dataset, run_dir, **options)
    return summarize(loop.metadata, loop.run())


def losses(run_dir):
    """Returns the history without the times, which alone may differ."""
    return [
        dataclasses.replace(record, epoch_sec=0.0, evaluation_sec=0.0)
        for record in load_history(run_dir)
    ]


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory):
    """The directory of a finished run of two epochs, and its summary; compiled calls are long."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "_CALL_SEC", 1e9)
        return run_dir, train(dataset, run_dir)


@pytest.fixture
def copy(whole, tmp_path):
    """A copy of the finished run, which the test may change."""
    return pathlib.Path(shutil.copytree(whole[0], tmp_path / "copy"))


@pytest.mark.parity
def test_a_signal_saves_and_the_same_command_resumes(dataset, tmp_path, monkeypatch):
    """In mid-epoch, in the evaluation and after it, with statistics that each replica has."""
    monkeypatch.setitem(MODELS, "lenet", "tests.dense_network:build_conv_norm_network")
    saves = unittest.mock.Mock(wraps=loops.save_checkpoint)
    monkeypatch.setattr(loops, "save_checkpoint", saves)
    options = {"strategy": "manual", "epochs": 1}
    expected = train(dataset, tmp_path / "whole", **options)
    run_dir = tmp_path / "cut"
    # At step 3; in the evaluation, which has averaged the statistics by then; after it.
    for checks_before in (2, 2, 1):
        left = iter([None] * checks_before)

        def check(number=None, left=left):
            if next(left, "over") == "over":
                raise Terminated

        with monkeypatch.context() as patch, pytest.raises(Terminated):
            patch.setattr(signals, "check", check)
            train(dataset, run_dir, **options)
    own = find_newest_checkpoint(run_dir).per_shard_statistics
    assert len(own) == 2 and not np.array_equal(own[0][0], own[1][0])
    assert [path.stem for path in checkpoint_paths(run_dir)] == [
        f"step-{step:08d}-epoch-{epoch:04d}" for step, epoch in [(3, 0), (5, 0), (5, 1)]
    ]
    assert saves.call_count == 1 + 3
    resumed = train(dataset, run_dir, **options)
    assert resumed["weights_sha256"] == expected["weights_sha256"]
    assert losses(run_dir) == losses(tmp_path / "whole")


class Disk:
    """What a power cut leaves of a directory at each write, sync and renaming.

    A file system keeps what was synced. Of the rest it may keep all, nothing, removals alone, or
    names of files without their contents. `states` has the directories with what is left.
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


def test_a_run_cut_off_at_any_write_equals_an_uninterrupted_one(dataset, tmp_path, whole):
    run_dir = tmp_path / "run"
    disk = Disk(run_dir, tmp_path)
    run_dir.mkdir()
    with disk.recorded():
        summary = start_and_train(dataset, run_dir)
    before = len(disk.states)
    assert load_summary(disk.states[-3]) == summary  # Of what is synced.
    check_records(run_dir, summary)
    # Neither checkpoints nor the length of a call change the result.
    assert summary["weights_sha256"] == whole[1]["weights_sha256"]
    assert losses(run_dir) == losses(whole[0])
    with disk.recorded(), open_run_directory(run_dir, {"seed": 1}) as run_directory:
        run_directory.start(overwrite=True)
    assert before > 200 and len(disk.states) > before + 10
    newest_steps = []
    for number, cut in enumerate(disk.states):
        told, history = load_summary(cut), load_history(cut)
        if number >= before and history and not checkpoint_paths(cut):
            assert told is None  # `--overwrite` removes the checkpoints before the history.
            continue
        found = find_newest_checkpoint(cut)
        step, epochs = (found.step, len(finished(found.epochs))) if found else (0, 0)
        newest_steps.append(step)
        assert not found or not found.damaged
        assert told is None or told["steps"] <= step
        assert number >= before or len(history) <= epochs
        figure = cut / "accuracy.png"
        assert not figure.exists() or figure.read_text().startswith("of ")
    # Each fourth state is what a killed process leaves: while the checkpoint of step 9 is written.
    killed = zip(newest_steps[3:before:4], disk.states[3:before:4], strict=True)
    mid_epoch = [cut for step, cut in killed if step == 6][-1]
    without_summary = next(c for c in disk.states if load_history(c) and not load_summary(c))
    assert load_summary(mid_epoch)["status"] == "running" and [*mid_epoch.rglob(".lockstep-*")]
    with pytest.raises(CheckpointError, match="epochs 2 → 1"):
        make(dataset, mid_epoch, epochs=1)
    for cut in (mid_epoch, without_summary):
        resumed = start_and_train(dataset, cut)
        assert load_summary(cut) == resumed
        assert resumed["weights_sha256"] == whole[1]["weights_sha256"]
        assert losses(cut) == losses(whole[0])
        assert (cut / "accuracy.png").read_text() == "of 2 epochs"
        assert [*cut.rglob(".*")] == [cut / ".lock"]
    events = EventAccumulator(str(mid_epoch)).Reload()
    assert [event.step for event in events.Scalars("steps/loss")] == [*range(1, 11)]
    told = [(event.step, event.value) for event in events.Scalars("epochs/test_accuracy")]
    history = load_history(mid_epoch)
    assert told == [(r.step, pytest.approx(r.test_accuracy)) for r in history]


def start_and_train(dataset, path, **options):
    with open_run_directory(path, {}) as run_directory:
        run_directory.start(overwrite=False)
        return train(dataset, path, checkpoint_every=3, **options)


def check_records(run_dir, summary):
    """Checks what a run of 2 epochs of 5 steps leaves."""
    assert load_summary(run_dir) == summary
    assert (summary["status"], summary["steps"], summary["epochs"]) == ("finished", 10, 2)
    assert (summary["num_test_examples"], summary["learning_rate"]) == (70, 0.2 * 64 / 256)
    history = load_history(run_dir)
    assert [(r.step, r.epoch_step, r.examples) for r in history] == [(5, 5, 300), (10, 5, 300)]
    assert summary["epoch_sec"] == np.median([record.epoch_sec for record in history])
    assert history[1].train_loss < history[0].train_loss
    assert history[0].learning_rate == pytest.approx(0.05)
    checkpoint = find_newest_checkpoint(run_dir)
    assert checkpoint.step == 10 and checkpoint.epochs == history
    assert checkpoint.metadata.steps_per_epoch == 5


def test_more_epochs_resume_from_what_is_saved(dataset, tmp_path, whole, monkeypatch):
    progress = unittest.mock.Mock()
    train(dataset, tmp_path, epochs=1, on_progress=progress)
    assert progress.call_count == 9  # Start, 5 steps, a batch of the evaluation, save, epoch.
    monkeypatch.setattr(loops, "_CALL_SEC", 1e9)  # Calls end where a checkpoint is due.
    summary = train(dataset, tmp_path, checkpoint_every=4)
    assert summary["weights_sha256"] == whole[1]["weights_sha256"]
    assert [path.stem[5:13] for path in checkpoint_paths(tmp_path)][-2:] == ["00000008", "00000010"]


def test_more_epochs_of_a_schedule_are_another_training(dataset, tmp_path, capsys, monkeypatch):
    clock, evaluate = types.SimpleNamespace(monotonic=time.monotonic), loops.evaluate

    def wait_and_evaluate(*arguments):
        clock.monotonic = lambda: time.monotonic() + 1000
        return evaluate(*arguments)

    monkeypatch.setattr(loops, "time", clock)
    monkeypatch.setattr(loops, "evaluate", wait_and_evaluate)
    train(dataset, tmp_path, epochs=1, recipe="fast")
    (record,) = load_history(tmp_path)
    assert record.epoch_sec < 1000 <= record.evaluation_sec
    assert capsys.readouterr().err == ""
    make(dataset, tmp_path, epochs=2, recipe="fast")
    assert "WARNING: epochs 1 → 2: the learning rate follows" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_tensor(
    dataset, tmp_path, monkeypatch
):
    told = r"training loss nan, model/\S+ is not finite at step \d+ with learning rate 3e\+38"
    with pytest.raises(DivergedError, match=told):
        train(dataset, tmp_path, learning_rate=3e38)
    assert find_newest_checkpoint(tmp_path) is None and load_history(tmp_path) == []
    options = {"inject": "scale_gradient:factor=1e6", "strategy": "manual", "checkpoint_every": 1}
    with pytest.raises(DivergedError, match=r"^model/\S+ is not finite at step 1 "):
        train(dataset, tmp_path, learning_rate=3e38, **options)
    assert find_newest_checkpoint(tmp_path) is None
    monkeypatch.setattr(loops, "evaluate", lambda *arguments: StepTotals(math.inf, 7, 70))
    with pytest.raises(DivergedError, match="test loss inf, all weights are finite at step 5"):
        train(dataset, tmp_path, epochs=1)


def test_the_last_finite_checkpoint_is_kept(dataset, copy):
    loop = make(dataset, copy, epochs=3)
    state = loop.training.strategy.state()
    name = next(name for name in state if name.endswith("logits/bias"))
    state[name][3] = np.inf  # One number is enough.
    loop.training.strategy.load_state(state)
    with pytest.raises(DivergedError, match="the checkpoint of step 10 is kept"):
        loop.run()
    state = find_newest_checkpoint(copy).state
    assert all(np.isfinite(array).all() for array in state.values())


def test_replicas_that_part_are_not_saved(dataset, tmp_path):
    options = {"inject": "perturb_weight:step=2", "checkpoint_every": 3, "strategy": "manual"}
    with pytest.raises(ReplicaDivergenceError, match="replica 1 differs from replica 0"):
        train(dataset, tmp_path, **options)
    assert checkpoint_paths(tmp_path) == []


def test_a_history_without_checkpoints_is_no_new_start(copy):
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(CheckpointError, match="a history, but no checkpoint"):
        find_newest_checkpoint(copy)


def test_a_damaged_checkpoint_is_replaced_by_the_training_that_resumes(
    dataset, copy, whole, capsys
):
    newest = checkpoint_paths(copy)[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    assert train(dataset, copy)["weights_sha256"] == whole[1]["weights_sha256"]
    assert str(newest) in capsys.readouterr().err
    assert losses(copy) == losses(whole[0]) and not find_newest_checkpoint(copy).damaged


def test_another_training_is_refused(dataset, copy, monkeypatch):
    other = dataclasses.replace(dataset, test_images=255 - dataset.test_images)
    for data, options, told in (
        (dataset, {"global_batch_size": 30, "seed": 5}, "global_batch_size 64 → 30; seed 0 → 5"),
        (dataset, {"learning_rate": 0.03125}, "learning_rate 0.05 → 0.03125"),
        (other, {}, r"dataset_sha256 \w{12}… → \w{12}…"),
    ):
        with pytest.raises(CheckpointError, match=rf"other settings \({told}\);.* --overwrite"):
            make(data, copy, **options)
    monkeypatch.setattr("app.training.build.versions", lambda: {"tensorflow": "9.9"})
    with pytest.raises(CheckpointError, match=r"tensorflow 2\S+ → 9.9"):
        make(dataset, copy)


def test_evaluation_checks_how_many_images_it_saw(dataset):
    counting = types.SimpleNamespace(evaluate=lambda *arguments: StepTotals(0.0, 0, 69))
    with pytest.raises(RuntimeError, match="69 examples instead of 70"):
        loops.evaluate(counting, dataset)
