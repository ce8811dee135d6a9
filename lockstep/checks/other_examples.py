"""Compares start, examples and loss of the steps of a trace with those of another trace."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from lockstep.arithmetic import norm, rows_of, same_bits
from lockstep.checks.examples import why_rows
from lockstep.context import Context
from lockstep.oracles.recording import StepPair, Why
from lockstep.trace import Named
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
    apart = pair.start_distances()
    if not apart:
        return
    if pair.second.trace.about.replayed is not None:
        text = "the step was to start from the state of the first recording, and does not"
        yield pair.found("start", Why("not_replayed", text), max(apart.values()))
    elif is_first:
        why = _why_start(*pair.states("before"), list(apart))
        yield pair.found("start", why, max(apart.values()))


def _why_start(first: Named, second: Named, names: Sequence[str]) -> Why:
    """Returns the cause of different initial values."""
    for name in names:
        a, b = float(np.std(first[name])), float(np.std(second[name]))
        if np.size(first[name]) >= _LARGE and abs(b - a) > _OTHER_SPREAD * max(a, b):
            text = (
                f"the initial values of {len(names)} of {len(first)} variables come from another"
                f" distribution: {name} has standard deviation {a:.4g} in the first recording and"
                f" {b:.4g} in the second"
            )
            return Why("other_initialiser", text, names)
    text = f"{len(names)} of {len(first)} variables have other initial values"
    if all(not norm(first[name]) or not norm(second[name]) for name in names):
        return Why("other_initialiser", f"{text}: zero in one recording", names)
    return Why("other_initial_weights", text, names)


def repeated_batches(contexts: Sequence[Context]) -> dict[int, str]:
    """Returns step → text, if an earlier step has the same examples in order on every shard."""
    found: dict[int, str] = {}
    recorded = [context for context in contexts if context.has("data")]
    for earlier, later in itertools.combinations(recorded, 2):
        data = [(earlier.arrays("data")[s], later.arrays("data")[s]) for s in later.shards]
        if all(a and len(a) == len(b) and all(map(same_bits, a, b)) for a, b in data):
            text = (
                f"step {later.number} has the examples of step {earlier.number} again, in the same"
                " order"
            )
            found.setdefault(later.number, text)
    return found


def compare_examples(pairs: Sequence[StepPair]) -> dict[int, list[Finding]] | None:
    """Compares the inputs of all steps, ignoring the order within a step and the replica.

    Returns:
        Number of the step → findings; None if a trace has no inputs.
    """
    inputs = [(_inputs_of(pair.first), _inputs_of(pair.second)) for pair in pairs]
    if not all(len(a) and len(b) for a, b in inputs):
        return None
    rows = [(rows_of([a]), rows_of([b])) for a, b in inputs]
    of_first = set().union(*(given for given, _ in rows))
    repeated = repeated_batches([pair.second for pair in pairs])
    found: dict[int, list[Finding]] = {}
    dropped: Why | None = None  # After a batch that was dropped, all batches are shifted.
    for pair, own, (given, used) in zip(pairs, inputs, rows, strict=True):
        found[pair.number] = []
        if given == used:
            continue
        dropped = dropped or _why_size(given.total(), used.total(), *rows[0])
        why = dropped
        if why is None and pair.number in repeated:
            why = Why("not_reshuffled", repeated[pair.number])
        if why is None:
            why = Why(*why_rows(given, used, pair.second.sizes, of_first))
        if why.cause == "other_examples":
            why = _why_scaled(*own) or why
        found[pair.number].append(pair.found("examples", why))
    return found


def _inputs_of(context: Context) -> np.ndarray:
    """Returns all inputs as rows, channels last; empty if they are not recorded."""
    parts = []
    for shard in context.shards:
        for array in context.inputs(shard):
            if context.trace.about.data_layout == "NCHW" and array.ndim == 4:
                array = array.transpose(0, 2, 3, 1)
            parts.append(array.reshape(len(array), -1).astype(np.float32))
    if not all(context.sizes) or len({part.shape[1] for part in parts}) != 1:
        return np.zeros((0, 0))
    return np.concatenate(parts)


def _why_size(first: int, second: int, given: Counter, used: Counter) -> Why | None:
    """Explains different examples by a smaller last batch that one recording has.

    Args:
        first, second: numbers of examples of a step.
        given, used: the examples of the first step.
    """
    if (first < given.total()) == (second < used.total()):
        return None
    names = ("first", "second") if first < given.total() else ("second", "first")
    sizes = min(first, second), max(first, second)
    text = (
        f"the {names[0]} recording has a last batch of {sizes[0]} examples here, the {names[1]} one"
        f" a batch of {sizes[1]}"
    )
    return Why("last_batch_dropped", text)


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
        return Why("other_layout", "each example has the same values in another order")
    text = (
        f"the inputs of the second recording are {scale:.6g} · x + {shift:.6g}, where x are those"
        " of the first"
    )
    return Why("other_normalisation", text)


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
    why = Why(
        "other_loss", f"the loss is {second[0]:.6g}, and {first[0]:.6g} in the first recording"
    )
    if is_sum:
        text = f"{why.text}: {times:.6g} times, a sum over examples in place of a mean"
        why = Why("other_loss_reduction", text)
    return [pair.found("loss", why, abs(times - 1), allowed)]


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
