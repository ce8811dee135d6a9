"""Compares the examples of the same steps in two recordings."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from app.verification.recordings.one_trace_checks import repeated_batches
from app.verification.recordings.recorded_step import RecordedStep
from app.verification.recordings.trace_finding import TraceFinding, fault

_CLOSE = 1e-4  # For inputs that were scaled in float32.

Rows = Counter[bytes]


def compare_examples(
    pairs: Sequence[tuple[RecordedStep, RecordedStep]],
) -> dict[int, list[TraceFinding]] | None:
    """Compares the inputs of each step, ignoring the order within a step and the replica.

    Args:
        pairs: the same step in the first and second recording.

    Returns:
        Number of the step → findings; None if a recording has no inputs.
    """
    inputs = [(inputs_of(first), inputs_of(second)) for first, second in pairs]
    if any(a is None or b is None for a, b in inputs):
        return None
    rows = [(_rows(a), _rows(b)) for a, b in inputs if a is not None and b is not None]
    repeated = {
        later: earlier for earlier, later in repeated_batches([second for _, second in pairs])
    }
    found: dict[int, list[TraceFinding]] = {}
    dropped = ""
    for index, (first, _) in enumerate(pairs):
        a, b = rows[index]
        if a == b:
            found[first.number] = []
            continue
        if dropped:  # All later batches are shifted.
            found[first.number] = [fault("examples", "last_batch_dropped", dropped, first.number)]
            continue
        explained = _why(index, rows, inputs, [pair[0].number for pair in pairs], repeated)
        dropped = explained[1] if explained[0] == "last_batch_dropped" else ""
        found[first.number] = [fault("examples", *explained, first.number)]
    return found


def inputs_of(step: RecordedStep) -> np.ndarray | None:
    """Returns all inputs as rows `(N, features)`, channels last; None if not recorded."""
    parts = []
    for replica in step.replicas:
        data, count = step.arrays("data", replica), step.micro_batches(replica)
        if not data:
            return None
        for array in data[:: max(1, len(data) // count)]:
            if array.ndim == 0:
                return None
            if step.trace.data_layout == "NCHW" and array.ndim == 4:
                array = array.transpose(0, 2, 3, 1)
            parts.append(array.reshape(len(array), -1).astype(np.float32))
    return np.concatenate(parts)


def _rows(inputs: np.ndarray) -> Rows:
    return Counter(np.ascontiguousarray(row).tobytes() for row in inputs)


def _why(
    index: int,
    rows: Sequence[tuple[Rows, Rows]],
    inputs: Sequence[tuple[np.ndarray | None, np.ndarray | None]],
    numbers: Sequence[int],
    repeated: dict[int, int],
) -> tuple[str, str]:
    """Returns the cause of different examples in a step, and a sentence."""
    (first, second), number = rows[index], numbers[index]
    size, other_size = first.total(), second.total()
    usual, other_usual = (each.total() for each in rows[0])
    missing, extra = first - second, second - first
    if size < usual and other_size >= other_usual:
        return (
            "last_batch_dropped",
            f"the first recording has a last batch of {size} examples here, the second one a batch"
            f" of {other_size}",
        )
    if other_size < other_usual and size >= usual:
        return (
            "last_batch_dropped",
            f"the second recording has a last batch of {other_size} examples here, the first one a"
            f" batch of {size}",
        )
    if number in repeated:
        return (
            "not_reshuffled",
            f"step {number} has the examples of step {repeated[number]} again, in the same order",
        )
    if extra and not extra.keys() - first.keys():
        return (
            "repeated_examples",
            f"{extra.total()} examples come more often, and {missing.total()} are missing",
        )
    if missing and not extra:
        return "lost_examples", f"{missing.total()} of {size} examples are missing"
    a, b = inputs[index]
    if a is not None and b is not None and (scale := _scaling(a, b)) is not None:
        if abs(scale[0] - 1) < _CLOSE and abs(scale[1]) < _CLOSE:
            return "other_layout", "each example has the same values in another order"
        return (
            "other_normalisation",
            f"the inputs of the second recording are {scale[0]:.6g} · x + {scale[1]:.6g}, where x"
            " are those of the first",
        )
    for other, (earlier, _) in enumerate(rows):
        if other != index and earlier == second:
            return (
                "other_order",
                f"step {number} has the examples that step {numbers[other]} has in the first"
                " recording",
            )
    return "other_examples", f"{extra.total()} of {other_size} examples are others"


def _scaling(first: np.ndarray, second: np.ndarray) -> tuple[float, float] | None:
    """Returns a and b if the second inputs are a · first + b in any order; else None."""
    if first.shape != second.shape:
        return None
    first, second = first.astype(np.float64), second.astype(np.float64)
    if not first.std() or not second.std():
        return None
    scale = second.std() / first.std()
    shift = second.mean() - scale * first.mean()
    a, b = (np.sort((x**2).sum(axis=1)) for x in (scale * first + shift, second))
    close = np.allclose(a, b, rtol=_CLOSE, atol=_CLOSE * np.abs(b).max())
    return (float(scale), float(shift)) if close else None
