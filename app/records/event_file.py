"""Writes TensorBoard's event file: scalars over steps, for `tensorboard --logdir=runs`.

TensorFlow's `tf.summary` requires TensorBoard. The file is a series of `Event` messages, which
TensorFlow itself can write.
"""

import contextlib
import errno
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from app.records.files import fsync, remove, temporary_path, write_error
from app.runtime.errors import reason_of

# TensorBoard reads any file with "tfevents" in its name.
EVENTS_FILE = "events.out.tfevents.lockstep"
_FIRST = "brain.Event:2"  # Format version, named in the first event.


class EventFile:
    """Appends scalars to the event file of a run, which is created with the first of them.

    Args:
        run_dir: the run directory, locked.
    """

    def __init__(self, run_dir: pathlib.Path):
        self._path = run_dir / EVENTS_FILE
        self._writer: Any = None  # A `tf.io.TFRecordWriter`, from the first event on.

    def resume(self, step: int, epochs: Mapping[int, Mapping[str, float]]) -> None:
        """Keeps the earlier events of steps up to `step`, and drops later ones.

        Args:
            step: last step of the checkpoint.
            epochs: last step of an epoch → its scalars. Missing scalars of an epoch that was
                interrupted between its checkpoint and this file are added.

        Raises:
            DiskFullError, OutputError: the file cannot be written.
        """
        kept = list(_events(self._path, up_to_step=step))
        self._start(kept)
        told = {(event.step, value.tag) for event in kept for value in event.summary.value}
        for last_step, scalars in epochs.items():
            missing = {tag: v for tag, v in scalars.items() if (last_step, tag) not in told}
            if missing:
                self.add(last_step, missing)

    def sync(self) -> None:
        """Flushes what was added to disk, so that a power cut does not lose it.

        Raises:
            DiskFullError, OutputError: the file cannot be written.
        """
        if self._writer is not None:
            with self._failures_as_warnings():
                fsync(self._path)

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds scalars at a step and writes them to the file.

        Raises:
            DiskFullError, OutputError: the file cannot be written.
        """
        from tensorflow.compat.v1 import Event, Summary

        if self._writer is None:
            self._start([])
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        with self._failures_as_warnings():
            self._writer.write(event.SerializeToString())
            self._writer.flush()

    def _start(self, events: Sequence) -> None:
        """Creates a new file with these events, to which others are appended."""
        import tensorflow as tf

        temporary = temporary_path(self._path)
        first = tf.compat.v1.Event(wall_time=time.time(), file_version=_FIRST)
        with self._failures_as_warnings():
            try:
                self._writer = tf.io.TFRecordWriter(str(temporary))
                for event in events or [first]:
                    self._writer.write(event.SerializeToString())
                self._writer.flush()
                fsync(temporary)
                os.replace(temporary, self._path)
                fsync(self._path.parent)
            except BaseException:
                remove(temporary)
                raise

    @contextlib.contextmanager
    def _failures_as_warnings(self) -> Iterator[None]:
        import tensorflow as tf

        try:
            yield
        except tf.errors.OpError as error:
            full = isinstance(error, tf.errors.ResourceExhaustedError)
            number = errno.ENOSPC if full else errno.EIO
            raise write_error(self._path, OSError(number, reason_of(error))) from error
        except OSError as error:
            raise write_error(self._path, error) from error


def _events(path: pathlib.Path, *, up_to_step: int) -> Iterator[Any]:
    """Reads the complete events of a file up to a step."""
    import tensorflow as tf
    from google.protobuf.message import DecodeError

    if not up_to_step or path.is_symlink() or not path.is_file():
        return
    # The last event was truncated by a kill, or is from another program.
    with contextlib.suppress(tf.errors.OpError, DecodeError):
        for record in tf.compat.v1.io.tf_record_iterator(str(path)):
            event = tf.compat.v1.Event.FromString(record)
            if event.step > up_to_step:
                return
            yield event
