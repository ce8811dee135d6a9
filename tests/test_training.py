"""The outer loop: records, resuming, and what ends it."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from app.config import Config
from app.config.split_numbers import num_shards
from app.data.synthetic import generate_synthetic
from app.devices.device_setup import Devices
from app.records.checkpoint import checkpoint_paths
from app.records.checkpoint_search import find_newest_checkpoint
from app.records.event_file import EVENTS_FILE
from app.records.files import write_file
from app.records.history import load_history, load_summary
from app.records.run_directory import open_run_directory
from app.records.run_log import open_run_log
from app.records.run_log_check import check_log
from app.records.run_log_reader import load_attempts
from app.runtime import fault_points
from app.runtime.errors import (
    CheckpointError,
    DeviceError,
    DiskFullError,
    DivergedError,
    MismatchError,
    ReplicaDivergenceError,
    Terminated,
)
from app.runtime.run_context import RunContext
from app.training.evaluation import evaluate
from app.training.loop import Training
from app.verification.run_comparison import compare_weights
from conftest import CPUS
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


def make(dataset, run_dir, *, strategy="manual", num_replicas=2, **options):
    config = Config.of(
        **{"strategy": strategy, "global_batch_size": 64, "recipe": "fast", "epochs": 3, **options}
    )
    num_replicas = 1 if strategy == "single" else num_replicas
    devices = Devices(CPUS[:num_replicas], simulated=num_replicas > 1)
    run_dir.mkdir(exist_ok=True)
    loop = Training(config, devices, dataset, run_dir)
    loop.start(from_scratch=False)
    assert loop.strategy.num_devices == num_replicas
    assert loop.strategy.num_shards == num_shards(strategy, config, num_replicas)
    return loop


def train(dataset, run_dir, **options):
    """Makes a training and runs it with its log, which must be right however it ends."""
    loop = make(dataset, run_dir, **options)
    try:
        with open_run_log(run_dir) as log:
            return loop.run(log)
    finally:
        assert check_log(run_dir) == []


def train_until(dataset, run_dir, fault, error=RuntimeError, **options):
    """Trains until a fault point ends it."""
    with RunContext(), pytest.raises(error):
        fault_points.arm({fault_points.VARIABLE: fault})
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
        "log.jsonl", EVENTS_FILE,
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
    (attempt,) = load_attempts(tmp_path)
    assert attempt.stop["status"] == "finished"
    assert [e["event"] for e in attempt.events] == [
        *("config", "data", "epoch", "checkpoint", "epoch", "checkpoint", "epoch", "checkpoint"),
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_cut_off_in_mid_epoch_equals_an_uninterrupted_one(dataset, tmp_path, strategy):
    """Cut off after step 13; the last checkpoint is that of step 12."""
    options = {"strategy": strategy, "steps_per_call": 1}
    whole = train(dataset, tmp_path / "whole", **options)
    options |= {"checkpoint_every": 4}
    train_until(dataset, tmp_path / "cut", "step:13:raise", **options)
    assert load_summary(tmp_path / "cut").status == "running"
    assert find_newest_checkpoint(tmp_path / "cut").checkpoint.progress.epoch_step == 2
    resumed = train(dataset, tmp_path / "cut", **options)
    assert resumed.weights_sha256 == whole.weights_sha256
    assert losses(tmp_path / "whole") == losses(tmp_path / "cut")
    assert resumed.total_sec > 0 and resumed.changes == []
    assert [a.stop["status"] for a in load_attempts(tmp_path / "cut")] == ["failed", "finished"]


def test_another_strategy_goes_on_from_mid_epoch(dataset, tmp_path, capsys):
    whole = train(dataset, tmp_path / "whole", strategy="manual")
    options = {"checkpoint_every": 4, "steps_per_call": 2}
    train_until(dataset, tmp_path / "cut", "step:6:raise", strategy="manual", **options)
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
    train_until(dataset, tmp_path / "cut", "step:4:raise", **options)
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
    from app.training import call_length

    results = []
    for call_sec in (0.0, 1e9):  # One step a call; all that is left of the epoch after the first.
        monkeypatch.setattr(call_length, "_CALL_SEC", call_sec)
        results.append(train(dataset, tmp_path / str(call_sec), epochs=1))
    assert results[0].weights_sha256 == results[1].weights_sha256
    assert results[0].train_loss == results[1].train_loss


@pytest.mark.parametrize("part", ["train_images", "train_labels", "test_images"])
def test_an_example_that_changes_in_memory_is_found(dataset, tmp_path, part):
    changed = getattr(dataset, part).copy()
    own = dataclasses.replace(dataset, **{part: changed})
    loop = make(own, tmp_path)
    with open_run_log(tmp_path) as log, pytest.raises(MismatchError) as caught:
        loop.begin(log)
        changed[7] ^= 1
        loop.step(loop.steps_per_epoch)
        loop.end_epoch()
    example = "a test example" if part == "test_images" else "training example 7"
    assert f"{example} has changed in memory since it was loaded" in str(caught.value)
    assert checkpoint_paths(tmp_path) == []


def test_a_changed_example_is_named_where_it_causes_another_error(dataset, tmp_path):
    loop = make(dataset, tmp_path)
    with open_run_log(tmp_path) as log, pytest.raises(MismatchError, match="training example 7 "):
        loop.begin(log)
        _, labels = loop._spec._examples
        labels._numpy()[7] = 34  # Not a copy, as `numpy()` is. The loss has no such class.
        loop._train()


def test_checkpoints_come_by_the_clock_where_no_steps_are_given(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr("app.training.checkpoint_schedule._CHECKPOINT_SEC", 0.0)
    train(dataset, tmp_path, epochs=1, steps_per_call=2)
    assert [p.name[-1] for p in checkpoint_paths(tmp_path)] == ["2", "4", "5"]


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_tensor(dataset, tmp_path):
    with pytest.raises(
        DivergedError,
        match=r"training loss nan, model/\S+ is not finite at step \d+ with learning rate 1e\+30",
    ):
        train(dataset, tmp_path, learning_rate=1e30)
    assert find_newest_checkpoint(tmp_path) is None
    assert load_history(tmp_path) == []
    assert load_attempts(tmp_path)[0].stop["status"] == "diverged"


def test_the_last_finite_checkpoint_is_kept(dataset, tmp_path):
    train(dataset, tmp_path, epochs=2)
    kept = []
    for _ in range(2):
        with pytest.raises(DivergedError, match=r"the checkpoint of step 1\d is kept"):
            train(dataset, tmp_path, learning_rate=1e30, force_resume=True, checkpoint_every=1)
        kept.append({path: path.stat().st_mtime_ns for path in checkpoint_paths(tmp_path)})
    assert kept[0] == kept[1]
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


# Of two epochs with a checkpoint in the middle of each; the last passing is the end of the run.
@pytest.mark.parametrize(
    "fault",
    [
        *("checkpoint.before_rename:2", "checkpoint.after_rename:2", "checkpoint.after_rename:4"),
        *("history.before_rename:2", "summary.before_rename:3", "accuracy.after_rename:1"),
        *("log:1", "log:10", "evaluate:2"),
    ],
)
def test_a_run_cut_off_while_it_saves_can_be_finished(dataset, tmp_path, whole_run, fault):
    options = {"epochs": 2, "checkpoint_every": 3}
    train_until(dataset, tmp_path, f"{fault}:raise", **options)
    resumed = train(dataset, tmp_path, **options)
    assert resumed.status == "finished" and load_summary(tmp_path) == resumed
    assert resumed.weights_sha256 == load_summary(whole_run).weights_sha256
    assert losses(tmp_path) == losses(whole_run)
    assert (tmp_path / "accuracy.png").read_text() == "of 2 epochs"


@pytest.mark.parametrize("point", ["history.made", "summary.before_rename", "accuracy.made"])
def test_a_full_disk_ends_the_run_and_what_is_saved_stays(dataset, tmp_path, point):
    fault = f"{point}:{3 if point == 'accuracy.made' else 2}:enospc"
    train_until(dataset, tmp_path, fault, error=DiskFullError)
    assert load_attempts(tmp_path)[0].stop["status"] == "disk_full"
    assert find_newest_checkpoint(tmp_path).checkpoint.progress.epoch == 2
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
    saved = [a.events[-1] for a in load_attempts(run_dir)]
    assert [(event["step"], event["epoch"]) for event in saved] == [(3, 0), (5, 0), (5, 1)]
    assert {a.stop["status"] for a in load_attempts(run_dir)} == {"terminated"}
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


def test_a_damaged_checkpoint_is_quarantined(dataset, tmp_path, capsys):
    whole = train(dataset, tmp_path)
    newest = checkpoint_paths(tmp_path)[-1]
    (newest / "state.safetensors").write_bytes((newest / "state.safetensors").read_bytes()[:-100])
    again = train(dataset, tmp_path)
    assert f"damaged checkpoint: {newest}" in capsys.readouterr().err
    assert again.weights_sha256 == whole.weights_sha256
    assert newest.with_name(f"damaged-{newest.name}").is_dir()
    assert load_attempts(tmp_path)[1].events[2]["damaged"] == [newest.name]
    assert [record.epoch for record in load_history(tmp_path)] == [1, 2, 3]


def test_going_on_with_other_replicas_says_so(dataset, tmp_path, capsys):
    train_until(dataset, tmp_path, "epoch:1:raise", strategy="single")
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
        make(dataset, tmp_path / "more", recipe="d2l", epochs=2, force_resume=True)


def test_fewer_epochs_than_are_begun_are_refused(dataset, tmp_path):
    options = {"checkpoint_every": 4, "steps_per_call": 1, "epochs": 2}
    train_until(dataset, tmp_path, "step:9:raise", **options)
    with pytest.raises(CheckpointError, match="epoch 2 has already started"):
        make(dataset, tmp_path, epochs=1, force_resume=True)


@pytest.mark.parametrize("lost", ["checkpoints", "checkpoints and history"])
def test_saved_work_that_is_lost_is_not_silently_trained_again(dataset, tmp_path, lost):
    train_until(dataset, tmp_path, "step:4:raise", checkpoint_every=3)
    for path in checkpoint_paths(tmp_path):
        shutil.rmtree(path)
    (tmp_path / "history.jsonl").unlink(missing_ok=True)
    told = r"has a log of the checkpoint of step \d+, but no checkpoint; restore"
    if lost == "checkpoints":
        (tmp_path / "history.jsonl").write_text("")
        told = "has a history, but no checkpoint; restore"
    with pytest.raises(CheckpointError, match=told):
        train(dataset, tmp_path, checkpoint_every=3)


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


FORCED = {
    "seed": {"seed": 5},
    "global_batch_size": {"global_batch_size": 30},
    "learning_rate": {"learning_rate": 0.03125},
    "recipe": {"recipe": "d2l"},
}


@pytest.mark.parametrize("name", FORCED)
def test_another_configuration_needs_to_be_forced(dataset, tmp_path, name, capsys):
    options = {"checkpoint_every": 4, "steps_per_call": 1, "epochs": 2}
    train_until(dataset, tmp_path, "step:9:raise", **options)
    with pytest.raises(CheckpointError, match=f"{name} .* → .*--force_resume"):
        make(dataset, tmp_path, **{**options, **FORCED[name]})
    options |= {**FORCED[name], "force_resume": True}
    loop = make(dataset, tmp_path, **options)
    told = capsys.readouterr().err
    assert f"--force_resume: from here on it is another training: {name}" in told
    # The schedule is where the data are: both begin the epoch anew where its order is another.
    begins_anew = name in ("seed", "global_batch_size")
    assert ("epoch 2 starts again" in told) == begins_anew
    steps_per_epoch = 10 if name == "global_batch_size" else 5
    position = steps_per_epoch + (0 if begins_anew else 3)
    assert loop.strategy.state()["optimizer/iteration"] == position
    learning_rate = loop.strategy.state().get("optimizer/learning_rate")
    assert learning_rate is None or learning_rate == np.float32(loop.learning_rate)
    saved = find_newest_checkpoint(tmp_path).checkpoint
    for key, array in loop.strategy.state().items():
        if key.startswith("model/"):
            np.testing.assert_array_equal(array, saved.state[key], err_msg=key)
    summary = train(dataset, tmp_path, **options)
    assert summary.status == "finished" and summary.changes[0].startswith(f"step 8: {name} ")
    assert summary.steps == 8 + 2 * steps_per_epoch - position
    assert train(dataset, tmp_path, **options).weights_sha256 == summary.weights_sha256


def test_other_data_are_another_training(dataset, tmp_path):
    train(dataset, tmp_path, epochs=1)
    other = dataclasses.replace(dataset, test_images=255 - dataset.test_images)
    with pytest.raises(CheckpointError, match=r"dataset_sha256 \w{12}… → \w{12}…"):
        make(other, tmp_path, epochs=1)


@pytest.mark.parametrize("force_resume", [False, True])
def test_another_model_is_refused_with_its_tensors(dataset, tmp_path, force_resume):
    train(dataset, tmp_path, epochs=1)
    with pytest.raises(CheckpointError, match=r"arrays do not fit: model/\S+: float32\[.*; .*; "):
        make(dataset, tmp_path, epochs=1, model="resnet18", force_resume=force_resume)


def test_another_model_that_fits_is_another_training(dataset, tmp_path, monkeypatch):
    train(dataset, tmp_path, epochs=1)
    monkeypatch.setitem(MODELS, "resnet18", "dense_network:build_three_dense_layers")
    with pytest.raises(CheckpointError, match="model lenet → resnet18"):
        make(dataset, tmp_path, epochs=1, model="resnet18")


def test_other_versions_are_told(dataset, tmp_path, monkeypatch, capsys):
    train_until(dataset, tmp_path, "epoch:1:raise")
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
    assert load_attempts(tmp_path)[0].stop["status"] == "bad_devices"


def test_a_batch_beyond_all_memory_is_refused_before_it_is_tried(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr("app.training.memory_guard.available_bytes", lambda: 1 << 10)
    with pytest.raises(DeviceError, match=r" GiB, 0\.0 are free; use --global_batch_size=32"):
        make(dataset, tmp_path)
