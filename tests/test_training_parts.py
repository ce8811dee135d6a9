"""The parts of the training loop: workers without a directory, writers, checkpoint schedule."""

import inspect

import numpy as np
import pytest

from app.config import TrainConfig
from app.data.synthetic import generate_synthetic
from app.devices.device_setup import Devices
from app.records.run_log import RunLog
from app.records.run_metadata import Progress
from app.runtime.errors import DivergedError
from app.training.checkpoint_schedule import CheckpointSchedule
from app.training.finite_checks import check_finite_state
from app.training.loop import Training
from app.training.run_writer import NullRunWriter, RunWriter, TrainingWriter
from conftest import CPUS
from models import MODELS


def test_a_worker_without_a_run_directory_trains_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(MODELS, "lenet", "dense_network:build_dense_network")
    dataset = generate_synthetic(num_train=300, num_test=70)
    config = TrainConfig(strategy="manual", global_batch_size=64, recipe="fast", epochs=1)
    training = Training(config, Devices(CPUS[:2], simulated=True), dataset, None)
    training.start(from_scratch=False)
    training.assist()
    assert training.strategy.state()["optimizer/iteration"] == 5
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="a log needs a run directory"):
        training.run(RunLog(tmp_path))


def test_the_null_writer_has_every_method_that_the_loop_calls():
    methods = {name for name in vars(TrainingWriter) if not name.startswith("_")}
    assert methods == {"begin", "resume", "steps", "save"}
    assert methods <= set(vars(NullRunWriter)) and methods <= set(vars(RunWriter))
    for name in methods:
        expected = inspect.signature(getattr(TrainingWriter, name))
        assert inspect.signature(getattr(NullRunWriter, name)) == expected
        assert inspect.signature(getattr(RunWriter, name)) == expected


def test_a_schedule_of_steps_stops_each_call_at_a_checkpoint_or_the_end_of_the_epoch():
    schedule = CheckpointSchedule(4, steps_per_epoch=10)
    before = [schedule.num_steps_before_next(Progress(step=n, epoch_step=n)) for n in range(10)]
    assert before == [4, 3, 2, 1, 4, 3, 2, 1, 2, 1]
    due = [n for n in range(1, 11) if schedule.is_due(Progress(step=n, epoch_step=n))]
    assert due == [4, 8]


def test_a_schedule_knows_what_is_saved():
    schedule = CheckpointSchedule(None, steps_per_epoch=10)
    assert schedule.is_saved(Progress()) and schedule.saved_step == 0
    schedule.mark_saved(Progress(step=7, epoch_step=7))
    assert schedule.saved_step == 7 and schedule.is_saved(Progress(step=7, epoch_step=7))
    assert not schedule.is_saved(Progress(step=8, epoch_step=8))
    assert not schedule.is_due(Progress(step=8, epoch_step=8))
    assert schedule.num_steps_before_next(Progress(step=8, epoch_step=8)) == 2


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_one_number_that_is_not_finite_is_found(number):
    state = {"model/a": np.zeros(3, np.float32), "model/b": np.float32([1, number, 2])}
    with pytest.raises(
        DivergedError, match=r"^model/b is not finite at step 3 .* of step 2 is kept"
    ):
        check_finite_state(state, "step 3", saved_step=2)
    check_finite_state({"model/a": state["model/a"]}, "step 3", saved_step=2)
