"""TensorBoard's event file: scalars over steps, for `tensorboard --logdir=runs`.

TensorFlow's own `tf.summary` needs TensorBoard to be installed. The file is but a series of
`Event` messages, for which TensorFlow has all that is needed.
"""

import contextlib
import errno
import os
import pathlib
import time
from collections.abc import Iterator, Mapping

from app.errors import reason_of
from app.records.files import temporary_path, told_of, write_error

# TensorBoard reads any file with "tfevents" in its name.
EVENTS_FILE = "events.out.tfevents.lockstep"
_FIRST = "brain.Event:2"  # The version of the format, which the first event names.


class EventFile:
    """The event file of a run, to which scalars are added; it appears with the first of them.

    Args:
        run_dir: the directory of the run, locked.
    """

    def __init__(self, run_dir: pathlib.Path):
        self._path, self._writer, self._step = run_dir / EVENTS_FILE, None, 0

    def go_on(self, step: int) -> None:
        """Keeps what an earlier attempt has told of the steps up to `step`, and nothing later."""
        self._step = step

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds the values of some scalars at a step; they are on disk when this returns.

        Raises:
            DiskFullError, OutputError: they cannot be written.
        """
        import tensorflow as tf

        values = [
            tf.compat.v1.Summary.Value(tag=tag, simple_value=value)
            for tag, value in scalars.items()
        ]
        event = tf.compat.v1.Event(
            wall_time=time.time(), step=step, summary=tf.compat.v1.Summary(value=values)
        )
        with self._told_of_failures():
            self._writer = self._writer or self._open()
            self._writer.write(event.SerializeToString())
            self._writer.flush()

    def _open(self):
        """Makes the file anew, with what is to be kept; events that follow are appended to it."""
        import tensorflow as tf

        kept = list(_events(self._path, up_to_step=self._step))
        temporary = temporary_path(self._path)
        writer = tf.io.TFRecordWriter(str(temporary))
        first = tf.compat.v1.Event(wall_time=time.time(), file_version=_FIRST)
        for event in kept or [first.SerializeToString()]:
            writer.write(event)
        writer.flush()
        with told_of(self._path):
            os.replace(temporary, self._path)
        return writer

    @contextlib.contextmanager
    def _told_of_failures(self) -> Iterator[None]:
        import tensorflow as tf

        try:
            yield
        except tf.errors.OpError as error:
            full = isinstance(error, tf.errors.ResourceExhaustedError)
            number = errno.ENOSPC if full else errno.EIO
            raise write_error(self._path, OSError(number, reason_of(error))) from error


def _events(path: pathlib.Path, *, up_to_step: int) -> Iterator[bytes]:
    """Reads the events of a file up to a step, and no further than it is whole."""
    import tensorflow as tf

    if not up_to_step or path.is_symlink() or not path.is_file():
        return
    with contextlib.suppress(tf.errors.OpError):  # A kill has cut off the last event.
        for record in tf.compat.v1.io.tf_record_iterator(str(path)):
            if tf.compat.v1.Event.FromString(record).step > up_to_step:
                return
            yield record
