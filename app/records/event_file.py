"""TensorBoard's event file: scalars over steps, for `tensorboard --logdir=runs`.

TensorFlow's own `tf.summary` needs TensorBoard to be installed. The file is but a series of
`Event` messages, for which TensorFlow has all that is needed.
"""

import contextlib
import errno
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from app.records.files import remove, temporary_path, write_error
from app.runtime.errors import reason_of

# TensorBoard reads any file with "tfevents" in its name.
EVENTS_FILE = "events.out.tfevents.lockstep"
_FIRST = "brain.Event:2"  # The version of the format, which the first event names.


class EventFile:
    """The event file of a run, to which scalars are added; it appears with the first of them.

    Args:
        run_dir: the directory of the run, locked.
    """

    def __init__(self, run_dir: pathlib.Path):
        self._path = run_dir / EVENTS_FILE
        self._writer: Any = None  # A `tf.io.TFRecordWriter`, from the first event on.

    def resume(self, step: int, epochs: Mapping[int, Mapping[str, float]]) -> None:
        """Keeps what an earlier attempt has told of the steps up to `step`, and nothing later.

        Args:
            step: the last one of the checkpoint.
            epochs: last step of an epoch → its scalars. Those of an epoch that was cut off between
                its checkpoint and this file are added.

        Raises:
            DiskFullError, OutputError: it cannot be written.
        """
        kept = list(_events(self._path, up_to_step=step))
        self._start(kept)
        told = {(event.step, value.tag) for event in kept for value in event.summary.value}
        for last_step, scalars in epochs.items():
            missing = {tag: v for tag, v in scalars.items() if (last_step, tag) not in told}
            if missing:
                self.add(last_step, missing)

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds the values of some scalars at a step; they are on disk when this returns.

        Raises:
            DiskFullError, OutputError: they cannot be written.
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
        """Makes the file anew, with these events in it; others are appended to it."""
        import tensorflow as tf

        temporary = temporary_path(self._path)
        first = tf.compat.v1.Event(wall_time=time.time(), file_version=_FIRST)
        with self._failures_as_warnings():
            try:
                self._writer = tf.io.TFRecordWriter(str(temporary))
                for event in events or [first]:
                    self._writer.write(event.SerializeToString())
                self._writer.flush()
                os.replace(temporary, self._path)
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
    """Reads the events of a file up to a step, and no further than it is whole."""
    import tensorflow as tf
    from google.protobuf.message import DecodeError

    if not up_to_step or path.is_symlink() or not path.is_file():
        return
    # A kill has cut off the last event, or it is none of ours.
    with contextlib.suppress(tf.errors.OpError, DecodeError):
        for record in tf.compat.v1.io.tf_record_iterator(str(path)):
            event = tf.compat.v1.Event.FromString(record)
            if event.step > up_to_step:
                return
            yield event
