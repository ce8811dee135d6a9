"""Compares start, examples and loss of a step with those of another trace."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lockstep.arithmetic import norm, rows_of, same_bits
from lockstep.checks.examples import why_rows
from lockstep.context import Context
from lockstep.reference import StepPair, Tolerance, common_steps
from lockstep.trace import Named, Trace
from lockstep.verdict import Finding

_LARGE = 100  # Minimum number of elements for a conclusion from the spread of initial values.
_OTHER_SPREAD = 0.2  # Larger than random deviations for that number.
_CLOSE = 1e-4  # For inputs that were scaled in float32.
_NEAR = 0.1  # Gradients from inputs of another scale differ by more than this.

Why = tuple[str, str]  # Cause and text.


def compare_starts(pair: StepPair) -> Iterator[Finding]:
    """Compares weights and statistics before a step; later states may differ by rounding."""
    second = pair.second
    second.mark_checked()
    if not (apart := pair.start_distances):
        return
    far = max(apart.values())
    if second.trace.about.replayed is not None:
        text = "the step was to start from the state of the first recording, and does not"
        yield second.found("not_replayed", text, distance=far)
    elif pair.first.number == min({*pair.first.trace.steps} & {*second.trace.steps}):
        why = _why_start(*pair.states("before"), list(apart))
        yield second.found(*why, tensors=apart, distance=far)


def _why_start(first: Named, second: Named, names: Sequence[str]) -> Why:
    """Returns the cause of different initial values."""
    for name in names:
        a, b = float(np.std(first[name])), float(np.std(second[name]))
        if np.size(first[name]) >= _LARGE and abs(b - a) > _OTHER_SPREAD * max(a, b):
            return "other_initialiser", (
                f"the initial values of {len(names)} of {len(first)} variables come from another"
                f" distribution: {name} has standard deviation {a:.4g} in the first recording and"
                f" {b:.4g} in the second"
            )
    text = f"{len(names)} of {len(first)} variables have other initial values"
    if all(not norm(first[name]) or not norm(second[name]) for name in names):
        return "other_initialiser", f"{text}: zero in one recording"
    return "other_initial_weights", text


def repeated_batch(context: Context) -> str:
    """Returns a sentence if an earlier step has the same examples in order on every shard."""
    for position in range(context.position if context.has("data") else 0):
        earlier = [context.trace.arrays(position, "data", s) or [] for s in context.shards]
        data = list(zip(earlier, context.data, strict=True))
        if all(a and len(a) == len(b) and all(map(same_bits, a, b)) for a, b in data):
            number = context.trace.steps[position]
            return (
                f"step {context.number} has the examples of step {number} again, in the same order"
            )
    return ""


def other_examples(first: Trace, second: Trace) -> dict[int, Why] | None:
    """Compares the inputs of all steps, ignoring the order within a step and the replica.

    Returns:
        Number of a step → why its inputs differ; None if a trace has no inputs.
    """
    rows = [
        (rows_of([_inputs_of(own)]), rows_of([_inputs_of(other)]))
        for own, other in common_steps(first, second)
    ]
    if not all(map(all, rows)):
        return None
    of_first = set().union(*(given for given, _ in rows))
    usual = rows[0][0].total(), rows[0][1].total()
    found: dict[int, Why] = {}
    dropped: Why | None = None  # After a batch that was dropped, all batches are shifted.
    for (own, other), (given, used) in zip(common_steps(first, second), rows, strict=True):
        if given == used:
            continue
        dropped = dropped or _why_size((given.total(), used.total()), usual)
        if dropped:
            why = dropped
        elif repeated := repeated_batch(other):
            why = "not_reshuffled", repeated
        else:
            why = why_rows(given, used, other.sizes, of_first)
        if why[0] == "other_examples":
            why = _why_scaled(_inputs_of(own), _inputs_of(other)) or why
        found[own.number] = why
    return found


def compare_examples(others: Mapping[int, Why] | None, pair: StepPair) -> Iterator[Finding]:
    """Compares the inputs of a step.

    Args:
        others: the result of `other_examples`.
        pair: the step.
    """
    if others is None:
        return
    pair.second.mark_checked()
    why = others.get(pair.first.number)
    if why and not (pair.starts_equally and _is_converted_inside(pair, why[0])):
        yield pair.second.found(*why)


def _is_converted_inside(pair: StepPair, cause: str) -> bool:
    """Returns whether inputs of another scale or layout give approximately equal gradients.

    One of the models then scales or transposes its inputs, and a remaining difference has another
    cause.
    """
    first, second = pair.gradients
    near = Tolerance(max(pair.tolerance.allowed(list(first)), _NEAR))
    is_form = cause in ("other_normalisation", "other_layout")
    return is_form and bool(first) and not near.wrong(second, first)


def _inputs_of(context: Context) -> np.ndarray:
    """Returns all inputs as rows, channels last; empty if they are not recorded."""
    inputs = [context.inputs(shard) for shard in context.shards]
    rows = []
    for array in itertools.chain.from_iterable(inputs):
        if context.trace.about.data_layout == "NCHW" and array.ndim == 4:
            array = array.transpose(0, 2, 3, 1)
        if len(array):
            rows.append(array.reshape(len(array), -1).astype(np.float32))
    if not all(inputs) or len({part.shape[1] for part in rows}) != 1:
        return np.zeros((0, 0))
    return np.concatenate(rows)


def _why_size(sizes: tuple[int, int], usual: tuple[int, int]) -> Why | None:
    """Explains different examples by a smaller last batch that one recording has.

    Args:
        sizes: numbers of examples of a step in both recordings.
        usual: the same of the first step.
    """
    is_last = [size < whole for size, whole in zip(sizes, usual, strict=True)]
    if is_last[0] == is_last[1]:
        return None
    names = ("first", "second") if is_last[0] else ("second", "first")
    return "last_batch_dropped", (
        f"the {names[0]} recording has a last batch of {min(sizes)} examples here, the {names[1]}"
        f" one a batch of {max(sizes)}"
    )


def _why_scaled(first: np.ndarray, second: np.ndarray) -> Why | None:
    """Explains second inputs that are a · first + b in any order."""
    if first.shape != second.shape or not first.std() or not second.std():
        return None
    first, second = first.astype(np.float64), second.astype(np.float64)
    scale = second.std() / first.std()
    shift = second.mean() - scale * first.mean()
    a, b = (np.sort((x**2).sum(axis=1)) for x in (scale * first + shift, second))
    if not np.allclose(a, b, rtol=_CLOSE, atol=_CLOSE * np.abs(b).max()):
        return None
    if abs(scale - 1) < _CLOSE and abs(shift) < _CLOSE:
        return "other_layout", "each example has the same values in another order"
    return "other_normalisation", (
        f"the inputs of the second recording are {scale:.6g} · x + {shift:.6g}, where x are those"
        " of the first"
    )


def compare_losses(pair: StepPair) -> Iterator[Finding]:
    """Compares the loss of the whole batch: the sum, mean or weighted mean of the shards' losses.

    Scripts report losses in different forms, which do not affect the training: any form of one
    recording may agree with any form of the other.
    """
    first, second, allowed = _losses(pair.first), _losses(pair.second), pair.tolerance.of_batch
    if not (pair.computes_the_same and first and second):
        return
    pair.second.mark_checked()
    if any(abs(a - b) <= allowed * abs(a) for a, b in itertools.product(first, second)):
        return
    times = second[0] / first[0] if first[0] else float("nan")
    sizes = {size for step, _ in pair.both for size in step.sizes[:1]} - {0, 1}
    is_sum = any(min(abs(times - size) / size, abs(times * size - 1)) < 1e-3 for size in sizes)
    cause = "other_loss"
    text = f"the loss is {second[0]:.6g}, and {first[0]:.6g} in the first recording"
    if is_sum:
        cause = "other_loss_reduction"
        text += f": {times:.6g} times, a sum over examples in place of a mean"
    finding = pair.second.found(cause, text, distance=abs(times - 1), allowed=allowed)
    yield finding if is_sum else pair.explained(finding)


def _losses(context: Context) -> list[float]:
    """Returns the loss of the whole batch in each form that a script may report."""
    if not context.has("loss") or not all(context.arrays("loss")):
        return []
    losses = [[float(np.sum(np.float64(a))) for a in arrays] for arrays in context.arrays("loss")]
    forms = [[each[0] for each in losses]]
    # Keras' second array is the regularisation, a part of the first.
    if all(len(each) > 1 for each in losses):
        forms.append([each[0] - each[1] for each in losses])
    found = []
    for per_shard in forms:
        found += [float(np.mean(per_shard)), float(np.sum(per_shard))]
        if all(context.sizes):
            found.append(float(np.average(per_shard, weights=context.sizes)))
    return found
