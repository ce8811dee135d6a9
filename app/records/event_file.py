"""Writes TensorBoard's event files: scalars over steps, for `tensorboard --logdir=runs`.

TensorFlow's `tf.summary` requires TensorBoard. A file is a series of `Event` messages, which
TensorFlow itself can write. Each attempt of a training writes its own file, named by the step at
which it starts; its first event makes TensorBoard drop the steps of earlier attempts after it.
"""

import contextlib
import errno
import pathlib
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from app.records.files import fsync, write_error
from app.runtime.errors import reason_of

# TensorBoard reads all files with "tfevents" in their names, in the order of the names.
_NAME = "events.out.tfevents.{:012d}.lockstep"
_PATTERN = re.compile(r"events\.out\.tfevents\.(\d{12})\.lockstep")


def event_files(run_dir: pathlib.Path) -> dict[pathlib.Path, int]:
    """Returns the event files of a run, each with the step at which its attempt started."""
    matches = {path: _PATTERN.fullmatch(path.name) for path in run_dir.iterdir()}
    return {path: int(match[1]) for path, match in matches.items() if match}


class EventFile:
    """Creates the file of one attempt, and writes its scalars.

    Args:
        run_dir: the run directory, locked.
        step: step from which the training resumes; 0 from scratch.
        first_dropped_step: from this step on, events of earlier attempts are dropped.

    Raises:
        DiskFullError, OutputError: the file cannot be written.
    """

    def __init__(self, run_dir: pathlib.Path, step: int, *, first_dropped_step: int):
        import tensorflow as tf
        from tensorflow.compat.v1 import Event, SessionLog

        self._run_dir, self._path = run_dir, run_dir / _NAME.format(step)
        with self._failures_as_errors():
            for path, earlier_step in event_files(run_dir).items():
                if earlier_step >= step:  # Nothing in it has become part of the training.
                    path.unlink()
            self._writer = tf.io.TFRecordWriter(str(self._path))
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if step:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=first_dropped_step, session_log=start))

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds scalars at a step and writes them to the file.

        Raises:
            DiskFullError, OutputError: the file cannot be written.
        """
        from tensorflow.compat.v1 import Event, Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def sync(self) -> None:
        """Flushes the file and its name to disk, so that a power cut does not lose them.

        Raises:
            DiskFullError, OutputError: the file cannot be written.
        """
        with self._failures_as_errors():
            fsync(self._path)
            fsync(self._run_dir)

    def _write(self, event: Any) -> None:
        with self._failures_as_errors():
            self._writer.write(event.SerializeToString())
            self._writer.flush()

    @contextlib.contextmanager
    def _failures_as_errors(self) -> Iterator[None]:
        import tensorflow as tf

        try:
            yield
        except tf.errors.OpError as error:
            full = isinstance(error, tf.errors.ResourceExhaustedError)
            number = errno.ENOSPC if full else errno.EIO
            raise write_error(self._path, OSError(number, reason_of(error))) from error
        except OSError as error:
            raise write_error(self._path, error) from error
