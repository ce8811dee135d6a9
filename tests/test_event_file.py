"""The event file, read by TensorBoard's own reader."""

import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from app.records import event_file
from app.records.event_file import EVENTS_FILE, EventFile
from app.records.files import temporary_path
from app.runtime.errors import DiskFullError, OutputError


def read(run_dir):
    """Returns tag → list of (step, value), as TensorBoard sees the directory."""
    accumulator = EventAccumulator(str(run_dir))
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def write(run_dir, steps, resume_at=0):
    events = EventFile(run_dir)
    if resume_at:
        events.resume(resume_at, {})
    for step in steps:
        events.add(step, {"steps/loss": 1 / step, "steps/accuracy": 0.5})
    return events


def test_tensorboard_reads_what_was_added(tmp_path):
    write(tmp_path, [1, 2, 4])
    halves = [(1, 0.5), (2, 0.5), (4, 0.5)]
    assert read(tmp_path) == {
        "steps/loss": [(1, 1.0), (2, 0.5), (4, 0.25)],
        "steps/accuracy": halves,
    }
    assert [path.name for path in tmp_path.iterdir()] == [EVENTS_FILE]


def test_an_attempt_that_goes_on_keeps_the_steps_before_it_alone(tmp_path):
    write(tmp_path, [1, 2, 4])
    write(tmp_path, [4, 8], resume_at=2)
    assert [step for step, _ in read(tmp_path)["steps/loss"]] == [1, 2, 4, 8]
    write(tmp_path, [1])
    assert [step for step, _ in read(tmp_path)["steps/loss"]] == [1]


@pytest.mark.parametrize("num_bytes", [0, 3, 40, 100])
def test_a_file_that_was_cut_off_is_kept_as_far_as_it_is_whole(tmp_path, num_bytes):
    write(tmp_path, [1, 2])
    path = tmp_path / EVENTS_FILE
    path.write_bytes(path.read_bytes()[:num_bytes])
    write(tmp_path, [4], resume_at=2)
    steps = [step for step, _ in read(tmp_path)["steps/loss"]]
    assert steps[-1] == 4 and steps in ([4], [1, 4])


def test_an_epoch_that_was_cut_off_before_it_was_told_is_told_by_the_next_attempt(tmp_path):
    write(tmp_path, [1, 2]).add(2, {"epochs/test_loss": 0.2})
    events = EventFile(tmp_path)
    events.resume(4, {2: {"epochs/test_loss": 0.2}, 4: {"epochs/test_loss": 0.1}})
    assert read(tmp_path)["epochs/test_loss"] == [(2, pytest.approx(0.2)), (4, pytest.approx(0.1))]


def test_what_is_no_event_ends_what_is_kept(tmp_path):
    write(tmp_path, [1])
    kept = (tmp_path / EVENTS_FILE).read_bytes()
    with tf.io.TFRecordWriter(str(tmp_path / "other")) as writer:
        writer.write(b"\xff\xff\xff no event")
    (tmp_path / EVENTS_FILE).write_bytes(kept + (tmp_path / "other").read_bytes())
    (tmp_path / "other").unlink()
    write(tmp_path, [4], resume_at=2)
    assert [step for step, _ in read(tmp_path)["steps/loss"]] == [1, 4]


def test_a_directory_in_its_place_is_told_and_nothing_is_left(tmp_path):
    (tmp_path / EVENTS_FILE).mkdir()
    with pytest.raises(OutputError, match=EVENTS_FILE):
        write(tmp_path, [1])
    assert [path.name for path in tmp_path.iterdir()] == [EVENTS_FILE]


def test_it_is_visible_while_the_training_goes_on(tmp_path):
    events = write(tmp_path, [1])
    assert len(read(tmp_path)["steps/loss"]) == 1
    events.add(2, {"steps/loss": 0.1})
    assert len(read(tmp_path)["steps/loss"]) == 2


def test_nothing_is_written_through_a_link(tmp_path):
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / EVENTS_FILE).symlink_to(other)
    write(tmp_path / "run", [1], resume_at=1)
    assert other.read_text() == "mine"
    assert len(read(tmp_path / "run")["steps/loss"]) == 1


def test_what_was_added_is_synced_and_a_rewritten_file_before_its_name(tmp_path, monkeypatch):
    synced, path = [], tmp_path / EVENTS_FILE
    monkeypatch.setattr(event_file, "fsync", lambda at: synced.append((at, path.exists())))
    EventFile(tmp_path).sync()  # Nothing was added.
    events = write(tmp_path, [1])
    assert synced == [(temporary_path(path), False), (tmp_path, True)]
    events.sync()
    assert synced[2:] == [(path, True)]


def test_a_full_disk_is_told(tmp_path):
    events = EventFile(tmp_path)
    events._writer = tf.io.TFRecordWriter("/dev/full")
    with pytest.raises(DiskFullError, match=EVENTS_FILE):
        events.add(1, {"steps/loss": 1.0})
