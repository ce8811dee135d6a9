"""The parts of the training loop: strategy, workers, writers, checkpoint schedule."""

import dataclasses
import types

import keras
import numpy as np
import pytest

from app.data.synthetic import generate_synthetic
from app.devices.device_setup import Devices
from app.options import Config
from app.records.run_metadata import Progress, summarize
from app.runtime.errors import ConfigError
from app.training.strategy_builder import build_strategy
from app.training.training_spec import TrainingSpec
from app.training.training_state import CheckpointSchedule, TrainingState
from strategies import STRATEGIES
from strategies.manual import ManualStrategy
from strategies.step_totals import StepTotals
from tests.conftest import CPUS
from tests.training.test_checkpoint import RUN_METADATA
from tests.training.test_records import make_history


def test_a_schedule_of_steps_stops_each_call_at_a_checkpoint_or_the_end_of_the_epoch():
    schedule = CheckpointSchedule(4, steps_per_epoch=10)
    before = [schedule.num_steps_before_next(Progress(step=n, epoch_step=n)) for n in range(10)]
    assert before == [4, 3, 2, 1, 4, 3, 2, 1, 2, 1]
    due = [n for n in range(1, 11) if schedule.is_due(Progress(step=n, epoch_step=n))]
    assert due == [4, 8]


def test_a_schedule_by_the_clock_knows_what_is_saved(monkeypatch):
    schedule, progress = CheckpointSchedule(None, 10), Progress(step=7, epoch_step=7)
    assert schedule.is_saved(Progress()) and not schedule.is_saved(progress)
    assert not schedule.is_due(progress) and schedule.num_steps_before_next(progress) == 3
    monkeypatch.setattr("app.training.training_state._CHECKPOINT_SEC", 0.0)
    assert schedule.is_due(progress)
    schedule.mark_saved(progress)
    assert schedule.saved_step == 7 and schedule.is_saved(progress)


def test_a_training_begins_with_nothing_counted():
    numbers = dataclasses.asdict(Progress())
    assert numbers.pop("totals") == (0, 0, 0)
    assert len(numbers) > 5 and not any(numbers.values())


def test_a_finished_epoch_tells_of_training_and_test_apart():
    strategy = types.SimpleNamespace(optimizer=keras.optimizers.SGD(0.25))
    training = TrainingState(Config.of("train"), strategy, RUN_METADATA)
    totals = StepTotals(30.0, 15, 60)
    training.progress = Progress(step=9, epoch_step=4, totals=totals, epoch_sec=2.0)
    training.finish_epoch(StepTotals(10.0, 4, 40), evaluation_sec=0.5)
    after = training.progress
    (record,) = after.history
    assert (after.step, after.epoch_step, record.epoch, record.step) == (9, 0, 1, 9)
    assert (record.train_loss, record.train_accuracy) == (0.5, 0.25)
    assert (record.test_loss, record.test_accuracy) == (0.25, 0.1)
    assert (record.images_per_sec, record.epoch_sec, record.evaluation_sec) == (30.0, 2.0, 0.5)
    assert (record.learning_rate, record.injected_fault) == (0.25, "")


def test_the_order_of_examples_follows_from_the_seed():
    dataset = generate_synthetic(num_train=300, num_test=70)

    def first_batch(own_seed, **options):
        config = Config.of("train", global_batch_size=64, recipe="d2l", seed=own_seed)
        return next(TrainingSpec(config, dataset).batches(**options).as_numpy_iterator())[0]

    np.testing.assert_array_equal(first_batch(1), first_batch(2, seed=1))
    assert not np.array_equal(first_batch(1), first_batch(2))


def test_the_best_epoch_need_not_be_the_last():
    first, last = make_history(2)
    history = [dataclasses.replace(first, test_accuracy=0.9), last]
    summary = summarize(RUN_METADATA, Progress(step=20, history=history))
    assert (summary.test_accuracy, summary.best_test_accuracy) == (0.5, 0.9)


class Unable(ManualStrategy):
    """Knows only when it sees the model that it cannot split it."""

    def build(self, model_fn, optimizer_fn):
        raise ValueError("--num_devices=2 is more than 1 layer; use fewer devices")


def test_a_model_that_cannot_be_split_is_refused_in_one_line(monkeypatch):
    monkeypatch.setitem(STRATEGIES, "manual", f"{__name__}:Unable")
    config = Config.of(strategy="manual", num_devices=2)
    with pytest.raises(ConfigError, match=r"^--num_devices=2 is more than 1 layer; use fewer devi"):
        build_strategy(config, Devices(CPUS[:2], simulated=True))
