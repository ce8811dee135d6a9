"""The event files, read by TensorBoard's own reader."""

import os

import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from app.records.event_file import EventFile, event_files
from app.runtime.errors import DiskFullError, OutputError


def steps(run_dir, tag="steps/loss"):
    """Returns the steps of a scalar, as TensorBoard sees the directory."""
    return [event.step for event in EventAccumulator(str(run_dir)).Reload().Scalars(tag)]


def write(run_dir, added, resume_at=0, **start):
    events = EventFile(run_dir, resume_at, **{"first_dropped_step": resume_at + 1, **start})
    for step in added:
        events.add(step, {"steps/loss": 1 / step, "steps/accuracy": 0.5})
    return events


def test_an_attempt_that_resumes_keeps_the_steps_before_it_alone(tmp_path):
    first = write(tmp_path, [1, 2, 4])
    first.add(6, {"steps/loss": 0.25})
    read = EventAccumulator(str(tmp_path)).Reload().Scalars("steps/loss")
    values = [(event.step, event.value) for event in read]  # While the training runs.
    assert values == [(1, 1.0), (2, 0.5), (4, 0.25), (6, 0.25)]
    write(tmp_path, [4, 8], resume_at=2)
    assert steps(tmp_path) == [1, 2, 4, 8]
    write(tmp_path, [5], resume_at=2)  # The last attempt has saved nothing.
    assert steps(tmp_path) == [1, 2, 5]
    write(tmp_path, [7], resume_at=5)
    write(tmp_path, [3], resume_at=2)  # The newest checkpoint was damaged.
    assert steps(tmp_path) == [1, 2, 3]
    write(tmp_path, [1])
    assert steps(tmp_path) == [1] and len(event_files(tmp_path)) == 1


def test_an_epoch_that_is_evaluated_again_has_one_result(tmp_path):
    write(tmp_path, [1, 2]).add(2, {"epochs/test_loss": 0.2})
    write(tmp_path, [], resume_at=2, first_dropped_step=2).add(2, {"epochs/test_loss": 0.2})
    assert steps(tmp_path, "epochs/test_loss") == [2]


@pytest.mark.parametrize("num_bytes", [3, 100])  # Within its first event, and within the second.
def test_a_file_that_was_cut_off_does_not_hide_the_next(tmp_path, num_bytes):
    write(tmp_path, [1, 2])
    (path,) = event_files(tmp_path)
    os.truncate(path, num_bytes)
    write(tmp_path, [4], resume_at=2)
    assert steps(tmp_path) in ([4], [1, 4])


def test_nothing_is_written_through_a_link(tmp_path):
    (tmp_path / "other").write_text("mine")
    (tmp_path / "run").mkdir()
    write(tmp_path / "run", [1])
    (path,) = event_files(tmp_path / "run")
    path.unlink()
    path.symlink_to(tmp_path / "other")
    write(tmp_path / "run", [1])
    assert (tmp_path / "other").read_text() == "mine" and steps(tmp_path / "run") == [1]


def test_a_full_disk_and_a_directory_in_its_place_are_told(tmp_path):
    events = write(tmp_path, [])
    events._writer = tf.io.TFRecordWriter("/dev/full")
    with pytest.raises(DiskFullError, match="tfevents"):
        events.add(1, {"steps/loss": 1.0})
    (path,) = event_files(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(OutputError, match=path.name):
        write(tmp_path, [1])
