"""The outer loop: records, resuming, and what ends it."""

import dataclasses
import json

import numpy as np
import pytest

from app.config import Config
from app.data.synthetic import generate_synthetic
from app.devices import Devices
from app.errors import CheckpointError, DivergedError
from app.records.checkpoint import load_newest_checkpoint
from app.records.history import load_history, load_summary
from app.training import Training, evaluate
from conftest import CPUS
from strategies import STRATEGIES


@pytest.fixture(scope="module")
def dataset():
    return generate_synthetic(num_train=300, num_test=70)


def make(dataset, run_dir, *, strategy="manual", **options):
    config = Config(
        **{"strategy": strategy, "global_batch_size": 64, "recipe": "fast", "epochs": 3, **options}
    )
    num_replicas = 1 if strategy == "single" else 2
    devices = Devices(CPUS[:num_replicas], simulated=num_replicas > 1)
    run_dir.mkdir(exist_ok=True)
    training = Training(config, devices, dataset, run_dir)
    training.resume()
    assert training.strategy.num_replicas == num_replicas
    return training


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_leaves_its_records(dataset, tmp_path, strategy):
    summary = make(dataset, tmp_path, strategy=strategy).run()
    assert {p.name for p in tmp_path.iterdir()} == {
        "history.jsonl", "summary.json", "accuracy.png", "accuracy.svg", "checkpoints",
    }  # fmt: skip
    assert load_summary(tmp_path) == summary
    assert summary.status == "finished" and summary.steps == 15 and summary.epochs == 3
    assert summary.num_test_examples == 70 and summary.num_parameters == 129_068
    history = load_history(tmp_path)
    assert [record.step for record in history] == [5, 10, 15]
    assert summary.best_test_accuracy == max(record.test_accuracy for record in history)
    assert summary.epoch_sec == np.median([record.epoch_sec for record in history])
    assert history[-1].train_loss < history[0].train_loss
    assert load_newest_checkpoint(tmp_path).step == 15


class Cut(Exception):
    pass


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_run_equals_an_uninterrupted_one(dataset, tmp_path, strategy, monkeypatch):
    whole = make(dataset, tmp_path / "whole", strategy=strategy).run()
    cut = make(dataset, tmp_path / "cut", strategy=strategy)
    train_epoch = Training._train_epoch

    def cut_in_third_epoch(self, *arguments):
        if len(load_history(tmp_path / "cut")) == 2:
            self.strategy.train_steps(arguments[0], 2)
            raise Cut
        return train_epoch(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "_train_epoch", cut_in_third_epoch)
        with pytest.raises(Cut):
            cut.run()
    assert load_summary(tmp_path / "cut").status == "running"
    resumed = make(dataset, tmp_path / "cut", strategy=strategy).run()
    assert resumed.weights_sha256 == whole.weights_sha256
    losses = [
        [(r.epoch, r.train_loss, r.test_loss) for r in load_history(tmp_path / name)]
        for name in ("whole", "cut")
    ]
    assert losses[0] == losses[1]
    assert resumed.total_sec > 0


def test_manual_and_mirrored_end_with_the_same_weights(dataset, tmp_path):
    manual, mirrored = (
        make(dataset, tmp_path / name, strategy=name).run() for name in ("manual", "mirrored")
    )
    assert manual.weights_sha256 == mirrored.weights_sha256
    assert manual.train_loss == pytest.approx(mirrored.train_loss, rel=1e-12)


def test_steps_per_call_do_not_change_the_result(dataset, tmp_path, monkeypatch):
    from app import training

    results = []
    for call_sec in (0.0, 1e9):  # One step a call; all that is left of the epoch after the first.
        monkeypatch.setattr(training, "_CALL_SEC", call_sec)
        results.append(make(dataset, tmp_path / str(call_sec), epochs=1).run())
    assert results[0].weights_sha256 == results[1].weights_sha256
    assert results[0].train_loss == results[1].train_loss


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_checkpoint(dataset, tmp_path):
    training = make(dataset, tmp_path, learning_rate=1e30)
    with pytest.raises(DivergedError, match=r"at step \d+ with learning rate 1e\+30"):
        training.run()
    assert load_newest_checkpoint(tmp_path) is None
    assert load_history(tmp_path) == []


@pytest.mark.parametrize(
    "place", ["histories.write_summary", "checkpoints.save_checkpoint", "plots.plot_accuracy"]
)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_run_cut_off_while_it_saves_can_be_finished(
    dataset, tmp_path, monkeypatch, place, when, call
):
    """Each point of the save of each epoch, the end of the run included."""
    from app import training

    module, name = place.split(".")
    function = getattr(getattr(training, module), name)
    calls = []

    def cut(*arguments):
        calls.append(name)
        if len(calls) == call and when == "before":
            raise Cut
        function(*arguments)
        if len(calls) == call:
            raise Cut

    with monkeypatch.context() as patch:
        patch.setattr(getattr(training, module), name, cut)
        if place == "checkpoints.save_checkpoint" and call == 3:
            make(dataset, tmp_path, epochs=2).run()  # It is called twice only: nothing is cut.
        else:
            with pytest.raises(Cut):
                make(dataset, tmp_path, epochs=2).run()
    resumed = make(dataset, tmp_path, epochs=2).run()
    assert resumed.status == "finished"
    assert load_summary(tmp_path) == resumed
    assert [record.epoch for record in load_history(tmp_path)] == [1, 2]
    assert (tmp_path / "accuracy.png").exists()


def test_a_checkpoint_without_its_history_is_refused(dataset, tmp_path):
    make(dataset, tmp_path, epochs=2).run()
    (tmp_path / "history.jsonl").unlink()
    with pytest.raises(CheckpointError, match="checkpoint of step 10, but a history of 0 epochs"):
        make(dataset, tmp_path, epochs=2)


def test_going_on_with_other_replicas_says_so(dataset, tmp_path, capsys):
    make(dataset, tmp_path, strategy="single").run()
    manual = make(dataset, tmp_path)
    assert "1 replica before, 2 now" in capsys.readouterr().out
    assert manual.run().status == "finished"


@pytest.mark.parametrize("change", ["data", "seed"])
def test_the_checkpoint_of_another_training_is_refused(dataset, tmp_path, change):
    make(dataset, tmp_path, epochs=1).run()
    other = dataclasses.replace(dataset, test_images=255 - dataset.test_images)
    with pytest.raises(CheckpointError, match="dataset_sha256" if change == "data" else "seed 0"):
        if change == "data":
            make(other, tmp_path, epochs=1)
        else:
            make(dataset, tmp_path, epochs=1, seed=5)


def test_evaluation_checks_how_many_images_it_saw(dataset, tmp_path, monkeypatch):
    strategy = make(dataset, tmp_path).strategy
    assert evaluate(strategy, dataset).examples == 70
    seen = strategy.evaluate
    monkeypatch.setattr(strategy, "evaluate", lambda data: seen(data)._replace(examples=69))
    with pytest.raises(RuntimeError, match="69 images instead of 70"):
        evaluate(strategy, dataset)


def test_the_recipe_s_learning_rate_follows_the_batch(dataset, tmp_path):
    assert make(dataset, tmp_path, recipe="d2l").learning_rate == 0.2 * 64 / 256
    given = make(dataset, tmp_path, recipe="d2l", learning_rate=0.125)
    assert given.learning_rate == 0.125
    summary = given.run()
    assert json.loads((tmp_path / "summary.json").read_text())["learning_rate"] == 0.125
    assert summary.precision == "float32" and summary.jit_compile is False
