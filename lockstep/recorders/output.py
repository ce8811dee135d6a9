"""The file of a recording, which is written while the training runs.

An error of the file, as of a full disk, does not end the training: one line says that there is no
recording, and the file says that it was not finished.
"""

import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lockstep.data.archive import Member, Writer


class Output:
    """Writes arrays to the file of a process as they come.

    Any method may raise a `ValueError`: another process writes this file, or an array has a dtype
    that no reader takes.

    Args:
        path: File to write; one that has this name is replaced when the first array is written.

    Attributes:
        error: The error that ended the file; None without one.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._writer: Writer | None = None
        self.error: OSError | None = None
        self._lock = threading.Lock()  # Autograd has a thread for each GPU.

    @property
    def has_failed(self) -> bool:
        """Whether nothing more is written."""
        return self.error is not None

    def add(self, place: str, array: np.ndarray) -> Member | None:
        """Writes an array of `KIND/ITEM/INDEX`, which may get a name; returns what `put` takes."""
        found: Member | None = self._call(Writer.add, place, array)
        return found

    def put(self, name: str, array: np.ndarray | Member | None) -> None:
        """Writes an array, or names one that was added."""
        if array is not None:
            self._call(Writer.__setitem__, name, array)

    def forget(self) -> None:
        """Frees memory between steps that are recorded; see `Writer.forget`."""
        with self._lock:
            if self._writer is not None:
                self._writer.forget()

    def close(self, about: Mapping[str, Any], renamed: Callable[[str], str] = str) -> None:
        """Finishes the file; see `Writer.close`."""
        self._call(Writer.close, about, renamed)

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Calls a method of the writer, unless one has failed."""
        with self._lock:
            if self.error is not None:
                return None
            try:
                if self._writer is None:
                    self._writer = self._opened()
                return method(self._writer, *args)
            except OSError as error:
                self._fail(error)

    def _opened(self) -> Writer:
        try:
            return Writer(self._path)
        except BlockingIOError:
            raise ValueError(
                f"{self._path}: another process writes this file; give each its own path, or record"
                " after init_process_group, which gives each rank its file, and with mesh= where"
                " DDP reduces over some of the processes"
            ) from None

    def _fail(self, error: OSError) -> None:
        self.error = error
        if self._writer is not None:
            self._writer.abandon()
        self._writer = None
        text = f"{self._path}: cannot be written ({error.strerror or error})"
        print(f"lockstep: {text}; the training is not recorded", file=sys.stderr, flush=True)
