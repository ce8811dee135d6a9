"""Verifies that a distributed training is the same training as on one device."""

import dataclasses
import importlib
import os
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.answer.verdict import Finding, Measurement, Verdict
    from lockstep.data.file import TraceError
    from lockstep.data.trace import Trace
    from lockstep.recorders.notes import note
    from lockstep.recording import record
    from lockstep.testing import assert_same_training

__all__ = [
    "Finding",
    "Measurement",
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
    one: Any,
    two: Any = None,
    *,
    permuted: Any = None,
    model: Any = None,
    batches: Sequence[Any] = (),
    names: Mapping[str, str] | None = None,
    tolerance: float | None = None,
    on_step: Callable[[int], None] = lambda step: None,
) -> "Verdict":
    """Checks a recorded training: on its own, against another recording, or against one device.

    A training is the path of its recording, a `Trace`, or a recorder after its `with` block.

    Args:
        one: the training; with `two`, the reference.
        two: the training to check against `one`; None to check `one`.
        permuted: a recording of `one` with permuted examples, which gives the tolerance.
        model: for a Keras training, the model compiled by the same code outside of the strategy's
            scope; or a function that builds it, with which the expected values are computed in
            float64, if the model supports it. The training is then checked against one device.
        batches: with `model`, the global batch of each step as the data set defines it.
        names: name of a weight in `two` → its name in `one`, where they cannot be matched.
        tolerance: relative difference of gradients to allow between `one` and `two`.
        on_step: called with the number of checked steps after each step.

    Returns:
        The verdict: `ok`, `findings`, `str(verdict)` and `to_json()`.

    Raises:
        TraceError: a file is damaged, or not a recording.
        ValueError: nothing was recorded, the recordings have nothing in common, or the model is
            another one.
    """
    if model is None:
        from lockstep.comparison import compare_traces

        traces = [_trace_of(each) for each in (one, two, permuted) if each is not None]
        verdicts = compare_traces(traces, names or {}, tolerance, on_step)
        return list(verdicts.values())[-1]
    if two is not None:
        raise ValueError("compare takes either a second training or model=, not both")
    return _compared_with_model(one, model, batches, on_step)


def _compared_with_model(
    one: Any, model: Any, batches: Sequence[Any], on_step: Callable[[int], None]
) -> "Verdict":
    """Checks a recorded training of Keras against one device; see `compare`."""
    from lockstep.oracles.keras import KerasOracle
    from lockstep.recorders.keras.values import leaves
    from lockstep.run import check, require_steps

    trace = _trace_of(one)
    require_steps(trace)
    if any(variable.shape for variable in trace.about.variables):
        raise ValueError(
            f"{trace.name or 'the recording'}: is recorded with sample=, and a model computes whole"
            " arrays; record it with sample=0"
        )
    verdict = check(
        trace,
        KerasOracle(model, trace),
        batches=[leaves(batch) for batch in batches],
        name=trace.name or "the recorded training",
        reference="training that the model defines on one device",
        on_step=on_step,
    )
    if trace.about.num_replicas > 1:
        return verdict
    note = (
        "only one replica: faults between replicas cannot appear; create two devices first, with"
        " tf.config.set_logical_device_configuration"
    )
    return dataclasses.replace(verdict, notes=(*verdict.notes, note))


def _trace_of(training: Any) -> "Trace":
    """Returns the trace of a path, a recorder or a trace."""
    from lockstep.data import file as trace_file
    from lockstep.data.trace import Trace

    if isinstance(training, Trace):
        return training
    if isinstance(training, str | os.PathLike):
        return trace_file.load(training)
    if getattr(training, "path", ""):  # A recorder that has written a file.
        return trace_file.load(training.path)
    return trace_file.from_parts(training.about, training.arrays)


_MODULES = {  # Name → its module, which imports NumPy and is imported when it is needed.
    **dict.fromkeys(("Finding", "Measurement", "Verdict"), "lockstep.answer.verdict"),
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
