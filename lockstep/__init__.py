"""Verifies that a distributed training is the same training as on one device."""

import importlib
import os
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.data.file import TraceError
    from lockstep.data.trace import Trace
    from lockstep.engine.verdict import Measured, Place, Verdict
    from lockstep.recorders.notes import note
    from lockstep.recording import record
    from lockstep.testing import assert_same_training

__all__ = [
    "Measured",
    "Place",
    "Trace",
    "TraceError",
    "Verdict",
    "assert_same_training",
    "compare",
    "note",
    "record",
]
__version__ = "2.0.0"

for _found in pathlib.Path(__file__).parents[1].glob("lockstep-*.dist-info"):
    warnings.warn(
        f"{_found.name.removesuffix('.dist-info')} is another distribution with modules of the same"
        " names; run: pip uninstall --yes lockstep && pip install --force-reinstall --no-deps"
        " lockstep-verifier",
        stacklevel=2,
    )


def compare(
    reference: Any,
    training: Any,
    *,
    permuted: Any = None,
    by_parts: Any = None,
    names: Mapping[str, str] | None = None,
    tolerance: float | None = None,
    on_step: Callable[[int], None] = lambda step: None,
) -> "Verdict":
    """Verifies a recorded training against a recording of the reference.

    A recording is its path, a `Trace`, or a recorder after its `with` block.

    Args:
        reference: the training on one device.
        training: the training to verify.
        permuted: a recording of the reference with permuted examples, which gives the bounds.
        by_parts: the reference, recorded with shards= and replay= of `training`: it computes layers
            that mix examples or draw for each rank as the ranks do.
        names: name of a weight in `training` → its name in `reference`, where they cannot be
            matched.
        tolerance: relative difference of gradients to allow; None to compute it.
        on_step: called with the number of compared steps after each step.

    Returns:
        The verdict: `ok`, `status`, `place`, `formula`, `name`, `str(verdict)` and `to_json()`.

    Raises:
        TraceError: a file is damaged, or not a recording.
        ValueError: nothing was recorded, or the recordings have nothing in common.
    """
    from lockstep.comparison import compare_recordings

    others = [each if each is None else _trace_of(each) for each in (permuted, by_parts)]
    return compare_recordings(
        _trace_of(reference), _trace_of(training), others[0], others[1], names or {}, tolerance,
        on_step,
    )  # fmt: skip


def _trace_of(training: Any) -> "Trace":
    """Returns the trace of a path, a recorder or a trace."""
    from lockstep.data import file as trace_file
    from lockstep.data.trace import Trace

    if isinstance(training, Trace):
        return training
    if isinstance(training, str | os.PathLike):
        return trace_file.load(training)
    if not (path := getattr(training, "path", None)):  # A recorder has that of what it wrote.
        raise ValueError(f"nothing was recorded by {training!r}; pass a file or a recorder")
    return trace_file.load(path)


_MODULES = {  # Name → its module, which imports NumPy and is imported when it is needed.
    **dict.fromkeys(("Measured", "Place", "Verdict"), "lockstep.engine.verdict"),
    "Trace": "lockstep.data.trace",
    "TraceError": "lockstep.data.file",
    "assert_same_training": "lockstep.testing",
    "note": "lockstep.recorders.notes",
    "record": "lockstep.recording",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
