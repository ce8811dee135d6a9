"""What a script notes of its steps: the identities of the examples.

With `ids`, a comparison tells another order of examples from other examples, and both from another
augmentation of the same ones.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from lockstep.recorders.common import require

IDS = "ids"


class Notes:
    """Receives what `note` gets while a recorder records; a context manager.

    Args:
        is_ended: Returns whether the step is over, so that a note belongs to the next one.
    """

    def __init__(self, is_ended: Callable[[], bool] = lambda: False) -> None:
        self._is_ended = is_ended
        self._own, self._next = list[np.ndarray](), list[np.ndarray]()

    def __enter__(self) -> "Notes":
        _ACTIVE.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _ACTIVE.remove(self)

    def add(self, ids: np.ndarray) -> None:
        """Adds identities to those of the step."""
        (self._next if self._is_ended() else self._own).append(ids)

    def take(self) -> list[np.ndarray]:
        """Returns what was noted of the step, and begins the next one."""
        found, self._own, self._next = self._own, self._next, []
        return found


_ACTIVE: list[Notes] = []


def note(kind: str, values: Any) -> None:
    """Notes the identities of the examples that a step gets; without a recording it does nothing.

    Call it before the model, or the step of JAX or Keras, gets the examples; with micro-batches for
    each of them. Each process notes its own examples, in their order.

    Args:
        kind: "ids".
        values: a number, a text, or bytes for each example; or an array with a row for each, as the
            raw item, of which the hash is kept.
    """
    require(kind == IDS, f"note: unknown kind {kind!r}; use {IDS!r}")
    if _ACTIVE:
        ids = numbers_of(values)
        for each in _ACTIVE:
            each.add(ids)


def numbers_of(values: Any) -> np.ndarray:
    """Returns a whole number for each identity: itself, or a hash."""
    values = values.detach().cpu() if hasattr(values, "detach") else values
    is_array = hasattr(values, "__array__")
    rows = list(np.asarray(values)) if is_array else list(values)
    if all(isinstance(row, int | np.integer) for row in rows):
        return np.array(rows, np.int64)
    return np.array([_hashed(row) for row in rows], np.int64)


def _hashed(row: Any) -> int:
    row = row.detach().cpu() if hasattr(row, "detach") else row
    if not isinstance(row, bytes):
        row = row.encode() if isinstance(row, str) else np.asarray(row).tobytes()
    return int.from_bytes(hashlib.blake2b(row, digest_size=8).digest(), "little") >> 1
