"""Reads the scalars of an event file while a training appends to it, without TensorFlow.

Reference: the framing of TFRecord files (`tensorflow/core/lib/io/record_writer.h`) and the messages
`Event` (`tensorflow/core/util/event.proto`) and `Summary`
(`tensorflow/core/framework/summary.proto`). Checksums are not verified: the file is only displayed.
"""

import dataclasses
import itertools
import os
import pathlib
import struct
from collections.abc import Iterator, Sequence

from app.records.event_file import EVENTS_FILE
from app.records.files import open_regular

_STEPS = "steps/"  # Tags with this prefix are written after each compiled call.
_MOST_POINTS = 300
_FEWEST_POINTS = 3  # Of a curve.
_MOST_BYTES_PER_READ = 4 << 20
_LARGEST_RECORD_BYTES = 1 << 16
_HEAD_BYTES, _TAIL_BYTES = 12, 4  # Length with its checksum; checksum of the data.
_DAMAGED = (IndexError, KeyError, ValueError, struct.error)


@dataclasses.dataclass(frozen=True)
class StepScalars:
    """The scalars of one compiled call, or their means over several calls.

    Attributes:
        step: the last step of the call.
        time: when they were written, in seconds since 1970.
        values: tag → value.
    """

    step: int
    time: float
    values: dict[str, float]


def middle_steps(points: Sequence[StepScalars]) -> list[float]:
    """Returns the middle of the steps of each call: where its mean belongs on an axis of steps."""
    last_steps = [0, *(point.step for point in points)]
    return [(before + 1 + last) / 2 for before, last in itertools.pairwise(last_steps)]


class EventReader:
    """Reads the scalars of a run's compiled calls from its event file, as the file grows.

    Args:
        run_dir: the directory of the run.

    Attributes:
        points: the scalars so far, as means over equally many calls where there are many: fewer
            than 600 points, however long the run is.
        latest: the scalars of the newest call, None before the first call.
    """

    def __init__(self, run_dir: pathlib.Path) -> None:
        self._path = run_dir / EVENTS_FILE
        self._offset = 0
        self._clear(None)

    def update(self) -> None:
        """Reads what was appended since the last update; rereads a file that was replaced.

        The reading stops before a record that is incomplete or damaged.
        """
        try:
            with open_regular(self._path) as file:
                status = os.fstat(file.fileno())
                identity = status.st_dev, status.st_ino
                if identity != self._identity or status.st_size < self._offset:
                    self._clear(identity)
                file.seek(self._offset)
                data = file.read(_MOST_BYTES_PER_READ)
        except (OSError, ValueError):  # There is none yet, or --overwrite has removed it.
            self._clear(None)
            return
        start = self._offset
        try:
            for record, end in _records(data):
                self._add(_parse_event(record))
                self._offset = start + end
        except _DAMAGED:
            return

    def _clear(self, identity: tuple[int, int] | None) -> None:
        self._identity = identity
        self._offset = 0
        self._calls_per_point = 1
        self._pending: list[StepScalars] = []
        self.points: list[StepScalars] = []
        self.latest: StepScalars | None = None

    def _add(self, event: StepScalars) -> None:
        if not event.values:
            return
        self.latest = event
        self._pending.append(event)
        if len(self._pending) < self._calls_per_point:
            return
        self.points.append(_mean(self._pending))
        self._pending = []
        if len(self.points) == 2 * _MOST_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [_mean(pair) for pair in pairs]
            self._calls_per_point *= 2


def load_steps(run_dir: pathlib.Path) -> list[StepScalars]:
    """Returns the scalars of a run over its steps, in order; none where too few are recorded."""
    reader = EventReader(run_dir)
    reader.update()
    points = [point for point in reader.points if "steps/loss" in point.values]
    return points if len(points) >= _FEWEST_POINTS else []


def _mean(points: Sequence[StepScalars]) -> StepScalars:
    """Returns the means of scalars at the step and time of the last point."""
    last = points[-1]
    values = {}
    for tag in last.values:
        known = [point.values[tag] for point in points if tag in point.values]
        values[tag] = sum(known) / len(known)
    return StepScalars(last.step, last.time, values)


def _records(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Yields each complete record with the position after it.

    Raises:
        ValueError: a record is longer than any that a training writes.
    """
    position = 0
    while len(data) - position >= _HEAD_BYTES:
        (size,) = struct.unpack_from("<Q", data, position)
        if size > _LARGEST_RECORD_BYTES:
            raise ValueError(f"a record of {size} bytes")
        start = position + _HEAD_BYTES
        position = start + size + _TAIL_BYTES
        if position > len(data):
            return
        yield data[start : start + size], position


def _parse_event(record: bytes) -> StepScalars:
    """Returns step, time and the scalars of compiled calls in an `Event` message."""
    step, time, values = 0, 0.0, {}
    for number, integer, content in _fields(record):
        if number == 1:
            (time,) = struct.unpack("<d", content)
        elif number == 2:
            step = integer
        elif number == 5:
            for tag, value in map(_parse_scalar, [item for _, _, item in _fields(content)]):
                if tag.startswith(_STEPS):
                    values[tag] = value
    return StepScalars(step, time, values)


def _parse_scalar(message: bytes) -> tuple[str, float]:
    """Returns tag and value of a `Summary.Value` message."""
    tag, value = "", 0.0
    for number, _, content in _fields(message):
        if number == 1:
            tag = content.decode("utf-8", "replace")
        elif number == 2:
            (value,) = struct.unpack("<f", content)
    return tag, value


def _fields(message: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yields the fields of a protocol buffer: number, integer value, or else its bytes."""
    position = 0
    while position < len(message):
        key, position = _integer(message, position)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, position = _integer(message, position)
            yield number, value, b""
            continue
        if wire_type == 2:
            size, position = _integer(message, position)
        else:
            size = {1: 8, 5: 4}[wire_type]
        content = message[position : position + size]
        if len(content) != size:
            raise ValueError("a truncated field")
        position += size
        yield number, 0, content


def _integer(message: bytes, position: int) -> tuple[int, int]:
    """Returns a variable-length integer and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = message[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise ValueError("an integer of more than 64 bits")
