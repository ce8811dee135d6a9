"""Compares start, examples and loss of the steps of a trace with those of another trace."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.arithmetic import norm, same_bits
from lockstep.context import Context
from lockstep.oracles.recording import StepPair
from lockstep.verdict import Finding

_LARGE = 100  # Minimum number of elements for a conclusion from the spread of initial values.
_OTHER_SPREAD = 0.2  # Larger than random deviations for that number.
_CLOSE = 1e-4  # For inputs that were scaled in float32.


def compare_starts(pair: StepPair, *, is_first: bool) -> Iterator[Finding]:
    """Compares weights and statistics before a step.

    Args:
        pair: the step.
        is_first: whether it is the first step; later states may differ by rounding.
    """
    if pair.starts_equally or not pair.states("before")[0]:
        return
    apart = pair.start_distances()
    if pair.second.trace.about.replayed is not None:
        text = "the step was to start from the state of the first recording, and does not"
        yield pair.found("start", "not_replayed", text, distance=max(apart.values()))
    elif is_first:
        cause, text = _why_start(*pair.states("before"), list(apart))
        yield pair.found("start", cause, text, tensors=apart, distance=max(apart.values()))


def _why_start(first: dict, second: dict, names: Sequence[str]) -> tuple[str, str]:
    """Returns cause and text of different initial values."""
    spread = [
        (name, float(np.std(first[name])), float(np.std(second[name])))
        for name in names
        if np.size(first[name]) >= _LARGE
    ]
    others = [each for each in spread if abs(each[2] - each[1]) > _OTHER_SPREAD * max(each[1:])]
    if others:
        name, a, b = max(others, key=lambda s: abs(np.log((s[2] + 1e-30) / (s[1] + 1e-30))))
        return "other_initialiser", (
            f"the initial values of {len(names)} of {len(first)} variables come from another"
            f" distribution: {name} has standard deviation {a:.4g} in the first recording and"
            f" {b:.4g} in the second"
        )
    text = f"{len(names)} of {len(first)} variables have other initial values"
    if all(not norm(first[name]) or not norm(second[name]) for name in names):
        return "other_initialiser", f"{text}: zero in one recording"
    return "other_initial_weights", text


class Inputs(NamedTuple):
    """The inputs of a step in two traces: `(N, features)`, channels last.

    Attributes:
        number: number of the step, from 0.
        first, second: the inputs in the reference and in the checked trace.
    """

    number: int
    first: np.ndarray
    second: np.ndarray

    @property
    def rows(self) -> tuple[Counter, Counter]:
        """The rows of both, counted."""
        first, second = (
            Counter(np.ascontiguousarray(row).tobytes() for row in each)
            for each in (self.first, self.second)
        )
        return first, second


def repeated_batches(contexts: Sequence[Context]) -> dict[int, int]:
    """Returns step → an earlier step with the same examples in the same order on every shard."""
    found: dict[int, int] = {}
    for earlier, later in itertools.combinations(contexts, 2):
        data = [(earlier.arrays("data")[s], later.arrays("data")[s]) for s in later.shards]
        if all(a and len(a) == len(b) and all(map(same_bits, a, b)) for a, b in data):
            found.setdefault(later.number, earlier.number)
    return found


def compare_examples(pairs: Sequence[StepPair]) -> dict[int, list[Finding]] | None:
    """Compares the inputs of all steps, ignoring the order within a step and the replica.

    Returns:
        Number of the step → findings; None if a trace has no inputs.
    """
    inputs = []
    for pair in pairs:
        a, b = _inputs_of(pair.first), _inputs_of(pair.second)
        if a is None or b is None:
            return None
        inputs.append(Inputs(pair.number, a, b))
    repeated = repeated_batches([pair.second for pair in pairs])
    rows = [each.rows for each in inputs]
    found: dict[int, list[Finding]] = {}
    dropped = ""
    for index, pair in enumerate(pairs):
        given, used = rows[index]
        found[pair.number] = []
        if given == used:
            continue
        # After a batch that was dropped, all batches are shifted.
        cause, text = "last_batch_dropped", dropped
        if not dropped:
            cause, text = _why_examples(index, rows, inputs, repeated)
        dropped = text if cause == "last_batch_dropped" else ""
        found[pair.number] = [pair.found("examples", cause, text)]
    return found


def _inputs_of(context: Context) -> np.ndarray | None:
    """Returns all inputs as rows, channels last; None if they are not recorded."""
    parts = []
    for shard in context.shards:
        own = context.inputs(shard)
        if not own:
            return None
        for array in own:
            if context.trace.about.data_layout == "NCHW" and array.ndim == 4:
                array = array.transpose(0, 2, 3, 1)
            parts.append(array.reshape(len(array), -1).astype(np.float32))
    if len({part.shape[1] for part in parts}) > 1:
        return None
    return np.concatenate(parts)


def _why_examples(
    index: int, rows: Sequence[tuple[Counter, Counter]], inputs: Sequence[Inputs],
    repeated: dict[int, int],
) -> tuple[str, str]:  # fmt: skip
    """Returns the cause of different examples in a step, and a sentence."""
    (first, second), (number, a, b) = rows[index], inputs[index]
    size, other_size = first.total(), second.total()
    usual, other_usual = (each.total() for each in rows[0])
    missing, extra = first - second, second - first
    if size < usual and other_size >= other_usual:
        return "last_batch_dropped", (
            f"the first recording has a last batch of {size} examples here, the second one a batch"
            f" of {other_size}"
        )
    if other_size < other_usual and size >= usual:
        return "last_batch_dropped", (
            f"the second recording has a last batch of {other_size} examples here, the first one a"
            f" batch of {size}"
        )
    if number in repeated:
        return "not_reshuffled", (
            f"step {number} has the examples of step {repeated[number]} again, in the same order"
        )
    if extra and not extra.keys() - first.keys():
        return "repeated_examples", (
            f"{extra.total()} examples come more often, and {missing.total()} are missing"
        )
    if missing and not extra:
        return "lost_examples", f"{missing.total()} of {size} examples are missing"
    if (scale := _scaling(a, b)) is not None:
        if abs(scale[0] - 1) < _CLOSE and abs(scale[1]) < _CLOSE:
            return "other_layout", "each example has the same values in another order"
        return "other_normalisation", (
            f"the inputs of the second recording are {scale[0]:.6g} · x + {scale[1]:.6g}, where x"
            " are those of the first"
        )
    for other, (earlier, _) in enumerate(rows):
        if other != index and earlier == second:
            return "other_order", (
                f"step {number} has the examples that step {inputs[other].number} has in the first"
                " recording"
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


def compare_losses(pair: StepPair, allowed: float) -> list[Finding] | None:
    """Compares the loss of the whole batch: the sum, mean or weighted mean of the shards' losses.

    Scripts report losses in different forms, which do not affect the training: any form of one
    recording may agree with any form of the other.

    Returns:
        The findings; None if a trace has no loss.
    """
    first, second = _losses(pair.first), _losses(pair.second)
    if not first or not second:
        return None
    if any(abs(a - b) <= allowed * abs(a) for a, b in itertools.product(first, second)):
        return []
    times = second[0] / first[0] if first[0] else float("nan")
    sizes = {size for step, _ in pair.both for size in step.sizes[:1]} - {0, 1}
    is_sum = any(min(abs(times - size) / size, abs(times * size - 1)) < 1e-3 for size in sizes)
    text = f"the loss is {second[0]:.6g}, and {first[0]:.6g} in the first recording"
    cause = "other_loss_reduction" if is_sum else "other_loss"
    if is_sum:
        text += f": {times:.6g} times, a sum over examples in place of a mean"
    return [pair.found("loss", cause, text, distance=abs(times - 1), allowed=allowed)]


def _losses(context: Context) -> list[float]:
    """Returns the loss of the whole batch in each form that a script may report."""
    if not context.has("loss") or not all(context.arrays("loss")):
        return []
    losses = [float(np.asarray(arrays[0], np.float64).sum()) for arrays in context.arrays("loss")]
    # Keras' second array is the regularisation, a part of the first.
    parts = [float(np.sum(arrays[1])) for arrays in context.arrays("loss") if len(arrays) > 1]
    found = _of_whole(context, losses)
    if len(parts) == len(losses) and any(parts):
        found += _of_whole(context, [a - b for a, b in zip(losses, parts, strict=True)])
    return found


def _of_whole(context: Context, losses: Sequence[float]) -> list[float]:
    found = [float(np.mean(losses)), float(np.sum(losses))]
    if all(sizes := context.sizes):
        found.append(float(np.average(losses, weights=sizes)))
    return found
