"""Writes `log.jsonl`: the events of a run, one JSON object per line.

Each attempt has the events `run_start`, `config`, `data`, `resume` if it resumed, then `epoch` and
`checkpoint` in their order, and one `run_stop`. If an attempt was killed, the next one writes its
`run_stop`.
"""

import contextlib
import json
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

from app.records.check_value import with_check
from app.records.files import fsync, io_errors_as, read_bytes, write_error
from app.records.run_directory import RUN_LOG_FILE
from app.records.run_log_reader import Attempt, parse_events, split_attempts
from app.runtime.errors import (
    INTERRUPTED_EXIT_CODE,
    TERMINATED_EXIT_CODE,
    DeviceError,
    LockstepError,
    Terminated,
    is_from_lack_of_memory,
    reason_of,
)
from app.runtime.fault_points import fault_point

# Exit code → name in `run_stop`; an attempt without a code was killed.
STATUSES = {
    0: "finished",
    1: "failed",
    2: "refused",
    3: "bad_data",
    4: "bad_checkpoint",
    5: "bad_output",
    6: "bad_devices",
    7: "diverged",
    8: "disk_full",
    9: "mismatch",
    130: "interrupted",
    138: "stalled",
    143: "terminated",
    None: "killed",
}


class RunLog:
    """Appends events to the log of a run.

    Args:
        run_dir: the run directory, locked.
    """

    def __init__(self, run_dir: pathlib.Path) -> None:
        self._path = run_dir / RUN_LOG_FILE
        self._descriptor = -1  # Until the attempt starts.
        self._start, self._under_way = time.monotonic(), False

    def start(self, **fields: Any) -> None:
        """Starts an attempt; first ends the previous one, if it was killed.

        Raises:
            DiskFullError, OutputError: the log cannot be written.
        """
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._descriptor = os.open(self._path, flags, 0o644)
            fsync(self._path.parent)
            attempts = self._earlier_attempts()
            os.fsync(self._descriptor)  # Of a killed attempt; else a later line may outlive it.
        except OSError as error:
            raise write_error(self._path, error) from error
        if attempts and attempts[-1].stop is None:
            self._write("run_stop", {"status": STATUSES[None], "exit_code": None})
        self._write(
            "run_start",
            {
                "attempt": len(attempts) + 1,
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "pid": os.getpid(),
                **fields,
            },
        )
        self._under_way = True

    def event(self, name: str, /, **fields: Any) -> None:
        """Adds an event.

        Raises:
            DiskFullError, OutputError: the log cannot be written.
        """
        self._write(name, fields)

    def stop(self, exit_code: int, **fields: Any) -> None:
        """Ends the attempt, once, if it has started.

        Ignores a full disk, which the failed write of a record reports.
        """
        if not self._under_way:
            return
        self._under_way = False
        status = STATUSES.get(exit_code, STATUSES[1])
        with contextlib.suppress(LockstepError):
            self._write("run_stop", {"status": status, "exit_code": exit_code, **fields})

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def _earlier_attempts(self) -> list[Attempt]:
        """Reads the earlier attempts, and removes what a kill or a power cut left of a line.

        `run_log_check.check_log` reports other damage; nothing depends on it.
        """
        try:
            data = read_bytes(self._path)
        except (OSError, ValueError):
            return []
        lines = data.splitlines(keepends=True)
        while lines and not _is_complete(lines[-1]):
            lines.pop()
        whole = b"".join(lines)
        if whole != data:
            with io_errors_as(self._path):
                os.ftruncate(self._descriptor, len(whole))
        return split_attempts(parse_events(whole.decode(errors="replace"))[0])

    def _write(self, name: str, fields: dict) -> None:
        elapsed_sec = round(time.monotonic() - self._start, 3)
        event = {"event": name, "elapsed_sec": elapsed_sec, **fields}
        line = json.dumps(with_check(event)) + "\n"
        size_bytes = os.fstat(self._descriptor).st_size
        try:
            fault_point("log")
            written = os.write(self._descriptor, line.encode())
            if written < len(line.encode()):
                os.write(self._descriptor, line.encode()[written:])  # Raises the cause.
            os.fsync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, size_bytes)
            raise write_error(self._path, error, len(line)) from error


def _is_complete(line: bytes) -> bool:
    """Returns whether a line of the log is a JSON object with its end of line."""
    try:
        return line.endswith(b"\n") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


@contextlib.contextmanager
def open_run_log(run_dir: pathlib.Path) -> Iterator[RunLog]:
    """Opens the log of a run and writes `run_stop` when the attempt ends."""
    log = RunLog(run_dir)
    try:
        yield log
        log.stop(0)
    except LockstepError as error:
        log.stop(error.exit_code, error=str(error))
        raise
    except KeyboardInterrupt:
        log.stop(INTERRUPTED_EXIT_CODE)
        raise
    except Terminated:
        log.stop(TERMINATED_EXIT_CODE)
        raise
    except BaseException as error:
        exit_code = DeviceError.exit_code if is_from_lack_of_memory(error) else 1
        log.stop(exit_code, error=f"{type(error).__name__}: {reason_of(error)}")
        raise
    finally:
        log.close()
