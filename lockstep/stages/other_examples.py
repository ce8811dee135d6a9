"""Compares start, examples and loss of a step with those of another trace."""

import collections
import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.answer.text import count
from lockstep.answer.verdict import BY_DESIGN, FAULT, Finding
from lockstep.context import Context
from lockstep.data.trace import Trace
from lockstep.explain.axes import order_of_parts
from lockstep.numeric.arrays import (
    Named,
    add_named,
    dense,
    distance,
    factor_of,
    is_far,
    norm,
    rows_of,
    same_arrays,
)
from lockstep.numeric.tolerance import Tolerance
from lockstep.reference import StepPair, common_steps
from lockstep.stages.examples import why_rows

_LARGE = 100  # Minimum number of elements for a conclusion from the spread of initial values.
_OTHER_SPREAD = 0.2  # Larger than random deviations for that number.
_CLOSE = 1e-4  # For inputs that were scaled in float32.
_DRIFT = 1e-4  # Relative; of states after some steps from equal weights.
_NEAR = 0.1  # Gradients from inputs of another scale differ by more than this.

Why = tuple[str, str]  # Cause and text.
_Rows = collections.Counter  # Row → how often it occurs.
_Inputs = Sequence[np.ndarray]  # Rows of each forward pass.


def compare_starts(pair: StepPair) -> Iterator[Finding]:
    """Compares weights and statistics before a step; later states may differ by rounding."""
    second = pair.second
    second.mark_checked()
    is_first = pair.first.number == min({*pair.first.trace.steps} & {*second.trace.steps})
    if is_first:
        yield from _not_restored(pair)
        yield from _replaced(pair)
    if not (apart := pair.start_distances):
        return
    far = max(apart.values())
    if second.trace.about.replayed:
        text = "the step was to start from the state of the first recording, and does not"
        yield second.found("not_replayed", text, distance=far)
    elif is_first:
        why = _why_start(*pair.states("before"), list(apart))
        yield second.found(*why, tensors=apart, distance=far)


def _not_restored(pair: StepPair) -> Iterator[Finding]:
    """Finds optimizer state that a training lacks that starts from the weights of the first."""
    first, second = pair.first, pair.second
    kind = "replaced" if second.has("replaced") else "before"
    rules = [step.trace.about.optimizer.get("class") for step in (first, second)]
    weights = pair.states("before", kind)
    if rules[0] != rules[1] or not weights[0]:
        return
    if _unlike(pair, *weights):
        return
    given, own = first.named("before")[0], second.named(kind)[0]
    num_arrays, lost = 0, list[str]()  # The latter: names of the weights.
    for weight, slots in first.trace.slots.items():
        keys = second.trace.slots.get(pair.in_second(weight), {})
        for slot, key in slots.items() if weight else ():
            num_arrays += key in given
            if norm(given.get(key, 0.0)) and not norm(own.get(keys.get(slot, ""), 0.0)):
                lost.append(weight)
    if lost:
        text = (
            f"{len(lost)} of {num_arrays} arrays of optimizer state are 0 or missing before the"
            " first step, which starts from the weights of the first recording"
        )
        yield second.found("not_restored", text, tensors=dict.fromkeys(lost))


def _unlike(pair: StepPair, first: Named, second: Named) -> list[str]:
    """Returns the variables that differ by more than the rounding of steps before the recording."""
    allowed = max(_DRIFT, pair.tolerance.usual)
    return [n for n, a in first.items() if distance(second[n], a) > allowed * norm(a)]


def _replaced(pair: StepPair) -> Iterator[Finding]:
    """Finds other initial weights that replay= has replaced: a training without it differs."""
    frameworks = {step.trace.about.framework for step, _ in pair.both}
    if pair.second.number or len(frameworks) > 1 or not pair.second.has("replaced"):
        return
    first, second = pair.states("before", "replaced")
    if unlike := _unlike(pair, first, second):
        cause, text = _why_start(first, second, unlike)
        text += ", before replay= replaced them"
        yield pair.second.found(cause, text, kind="before", tensors=unlike)


def replaced_start(pair: StepPair) -> str:
    """Returns a sentence if replay= has replaced the initial weights of another framework."""
    frameworks = {step.trace.about.framework for step, _ in pair.both}
    if pair.second.number or len(frameworks) == 1 or not pair.second.has("replaced"):
        return ""
    first, second = pair.states("before", "replaced")
    if not (unlike := _unlike(pair, first, second)):
        return ""
    return (
        f"{len(unlike)} of {len(first)} variables started from other values than in the first"
        " recording, before replay= replaced them"
    )


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


def repeated_batch(context: Context, every: bool = True) -> str:
    """Returns a sentence if an earlier step has the same examples in order.

    Args:
        context: the step.
        every: whether every shard has to have the same examples again, or only some.
    """
    for position in range(context.position if context.has("data") else 0):
        earlier = [context.trace.arrays(position, "data", s) or [] for s in context.shards]
        data = list(zip(earlier, context.data, strict=True))
        same = [s for s, (a, b) in enumerate(data) if a and a[0].size and same_arrays(a, b)]
        if same and (len(same) == len(data) or not every):
            whose = "step" if len(same) == len(data) else "replica"
            who = context.number if whose == "step" else ", ".join(map(str, same))
            step = f"step {context.trace.steps[position]}"
            return f"{whose} {who} has the examples of {step} again, in the same order"
    return ""


class _Step(NamedTuple):
    """The inputs of a step in both recordings: row → how often; where they are."""

    given: _Rows
    used: _Rows
    first: Context
    second: Context

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of examples."""
        return self.given.total(), self.used.total()


def has_examples_second(first: Trace, second: Trace) -> bool:
    """Returns whether the examples are the second axis of the inputs, as in (time, batch).

    The first axis then has the same length everywhere, and the second axis of the reference that
    of all replicas together.
    """
    if len(first.shards) > 1 or len(second.shards) < 2:
        return False
    shapes = [
        [[a.shape for shard in step.shards for a in step.inputs(shard)] for step in pair]
        for pair in common_steps(first, second)
    ]
    are_known = all(
        own and other and all(len(s) > 1 for s in (*own, *other)) for own, other in shapes
    )
    return are_known and all(
        {s[0] for s in own} == {s[0] for s in other}
        and sum(s[1] for s in own) == sum(s[1] for s in other)
        and len(own) < len(other)
        for own, other in shapes
    )


def other_examples(first: Trace, second: Trace) -> dict[int, Why] | None:
    """Compares the inputs of all steps, ignoring the order within a step and the replica.

    Returns:
        Number of a step → why its inputs differ; None if a trace has no inputs, or if their first
        axis is not the examples.
    """
    if has_examples_second(first, second):
        return None
    both = list(common_steps(first, second))
    counted = _counted([(_inputs_of(own), _inputs_of(other)) for own, other in both])
    if not all(map(all, counted)):
        return None
    steps = [
        _Step(given, used, own, other)
        for (given, used), (own, other) in zip(counted, both, strict=True)
    ]
    of_first = set().union(*(step.given for step in steps))
    other_size = _why_other_size(steps)
    found: dict[int, Why] = {}
    dropped: Why | None = None  # After a batch that was dropped, all batches are shifted.
    for step in steps:
        if step.given == step.used:
            continue
        if why := other_size or _why_padded(step, steps):
            found[step.first.number] = why
            continue
        dropped = dropped or _why_size(step.sizes, steps[0].sizes)
        if dropped:
            why = dropped
        elif repeated := repeated_batch(step.second, every=False):
            why = "not_reshuffled", repeated
        else:
            why = why_rows(step.given, step.used, step.second.sizes, of_first)
        if why[0] == "other_examples":
            why = _why_other_order(step) or why
        found[step.first.number] = why
    # Another order in each epoch does not begin with that of a script that shuffles once.
    once = [why for why in found.values() if why[0] == "not_reshuffled"]
    return {n: once[0] if once and why[0] == "other_order" else why for n, why in found.items()}


def _counted(steps: Sequence[tuple[_Inputs, _Inputs]]) -> list[tuple[_Rows, _Rows]]:
    """Counts the rows of both recordings in each step, without padding if they differ in length.

    Batches that are padded to their longest example have other shapes on each replica.
    """
    parts = [part for pair in steps for inputs in pair for part in inputs]
    if len({part.shape[1] for part in parts}) <= 1:
        return [(_rows(own), _rows(other)) for own, other in steps]
    # Tokens that are more frequent at the end of rows than padding are removed from all rows, too.
    ends = collections.Counter(value for part in parts for value in part[:, -1:].ravel())
    starts = collections.Counter(value for part in parts for value in part[:, :1].ravel())
    found = []
    for end, start in itertools.product(*(each.most_common(2) for each in (ends, starts))):
        found.append([(_rows(a, start[0], end[0]), _rows(b, start[0], end[0])) for a, b in steps])
        if all(given == used for given, used in found[-1]):
            return found[-1]
    return found[0]


def _rows(inputs: _Inputs, start: float | None = None, end: float | None = None) -> _Rows:
    """Counts rows without a value at their start and one at their end; None for whole rows."""
    if start is None or end is None:
        return sum((rows_of([part]) for part in inputs), collections.Counter())
    found: _Rows = collections.Counter()
    for row in itertools.chain.from_iterable(inputs):
        first, last = np.flatnonzero(row != start), np.flatnonzero(row != end)
        kept = row[first[0] : last[-1] + 1] if len(first) and len(last) else row[:0]
        found[hash(kept.tobytes())] += 1
    return found


def _why_other_size(steps: Sequence[_Step]) -> Why | None:
    """Explains different examples by batches of another size in all steps but the last ones."""
    full, used = (max(step.sizes[i] for step in steps) for i in (0, 1))
    is_usual = sum(step.sizes == (full, used) for step in steps) > 1
    has_others = any(step.used.keys() - step.given.keys() for step in steps)
    if full == used or not has_others or not (is_usual or max(full, used) % min(full, used) == 0):
        return None
    largest = max(steps, key=lambda step: step.sizes[1]).second
    sizes = dict.fromkeys(map(str, largest.sizes))
    micro = largest.trace.micro_batches(largest.position, 0)
    more = f" in {micro} micro-batches" if micro > 1 else ""
    return "other_batch_size", (
        f"a batch has {used} examples, {' or '.join(sizes)} on each replica{more}; in the first"
        f" recording, it has {full}"
    )


def _why_padded(step: _Step, steps: Sequence[_Step]) -> Why | None:
    """Explains more examples in the last batch by a sampler that gives all replicas equally many.

    It repeats as few examples as possible, or fills the batch (accelerate), from the start of the
    epoch.
    """
    extra, sizes = step.used - step.given, step.second.sizes
    full = max(each.sizes[0] for each in steps)
    is_short = step.sizes[0] < full
    is_full = step.sizes[1] == max(each.sizes[1] for each in steps)
    are_few = extra.total() < len(sizes)
    if step.given - step.used or len({*sizes}) > 1 or not (is_short and (is_full or are_few)):
        return None
    earlier = [each for each in steps if each.first.number < step.first.number]
    is_epoch_known = len(earlier) == step.first.number
    ends = [i for i, each in enumerate(earlier) if each.sizes[0] < full]
    epoch = [*earlier, step][ends[-1] + 1 if ends else 0 :]
    start = sum((each.given for each in epoch), collections.Counter())
    if is_epoch_known:
        start = epoch[0].given
    elif are_few:
        start = extra
    if extra - start:
        return None
    return "sampler_padding", (
        f"the sampler repeats {count('example', extra.total())} in the last batch, so that each"
        f" replica has {sizes[0]}"
    )


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
        yield pair.second.found(*why, status=BY_DESIGN if why[0] == "sampler_padding" else FAULT)


def _is_converted_inside(pair: StepPair, cause: str) -> bool:
    """Returns whether inputs of another scale or layout give approximately equal gradients.

    One of the models then scales or transposes its inputs, and a remaining difference has another
    cause.
    """
    terms, near = pair.gradients, Tolerance(given=max(pair.tolerance.usual, _NEAR))
    is_form = cause in ("other_normalisation", "other_layout")
    return is_form and bool(terms.names) and near.fits(terms.given[0], [(1.0, terms.reference)])


def _inputs_of(context: Context) -> _Inputs:
    """Returns the inputs of each forward pass as rows, channels last; empty if not recorded."""
    inputs = [context.inputs(shard) for shard in context.shards]
    rows = []
    for array in itertools.chain.from_iterable(inputs):
        if context.trace.about.data_layout == "NCHW" and array.ndim == 4:
            array = array.transpose(0, 2, 3, 1)
        if array.dtype.kind in "SU":  # A number for each text.
            numbers = [zlib.crc32(str(text).encode()) for text in array.ravel()]
            array = np.reshape(numbers, array.shape)
        if len(array):
            rows.append(array.reshape(len(array), -1).astype(np.float32))
    return rows if all(inputs) else []


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


def _why_other_order(step: _Step) -> Why | None:
    """Explains inputs whose values have another order, or are scaled."""
    inputs = _inputs_of(step.first), _inputs_of(step.second)
    if len({part.shape[1] for parts in inputs for part in parts}) == 1:
        first, second = map(np.concatenate, inputs)
        if order := order_of_parts(first, second, step.second.trace.model_axes):
            return "swapped_parts", order
        return _why_transposed(step) or _why_scaled(first, second)
    return None


def _why_transposed(step: _Step) -> Why | None:
    """Explains inputs of which the axes of each example have another order."""
    arrays = [array for shard in step.first.shards for array in step.first.inputs(shard)]
    if {array.ndim for array in arrays} - {3, 4, 5} or len({a.ndim for a in arrays}) != 1:
        return None
    for axes in itertools.permutations(range(1, arrays[0].ndim)):
        moved = [array.transpose(0, *axes) for array in arrays]
        rows = [array.reshape(len(array), -1).astype(np.float32) for array in moved if len(array)]
        if _rows(rows) == step.used:
            shown = " × ".join(map(str, moved[0].shape[1:]))
            return "other_layout", f"the axes of each example have another order: {shown}"
    return None


def _why_scaled(first: np.ndarray, second: np.ndarray) -> Why | None:
    """Explains second inputs that are a · first + b, with the examples in any order."""
    if first.shape != second.shape or not first.std() or not second.std():
        return None
    first, second = first.astype(np.float64), second.astype(np.float64)
    scale = second.std() / first.std()
    shift = second.mean() - scale * first.mean()
    a, b = (x[np.argsort((x**2).sum(axis=1))] for x in (scale * first + shift, second))
    if not np.allclose(a, b, rtol=_CLOSE, atol=_CLOSE * np.abs(b).max()):
        return None
    return "other_normalisation", (
        f"the inputs of the second recording are {scale:.6g} · x + {shift:.6g}, where x are those"
        " of the first"
    )


def compare_losses(pair: StepPair) -> Iterator[Finding]:
    """Compares the loss of the whole batch: the sum, mean or weighted mean of the shards' losses.

    Scripts report losses in different forms, which do not affect the training: any form of one
    recording may agree with any form of the other.
    """
    first, second, allowed = losses_of(pair.first), losses_of(pair.second), pair.tolerance.of_batch
    if not (pair.computes_the_same and first and second):
        return
    pair.second.mark_checked()
    if any(abs(a - b) <= allowed * abs(a) for a, b in itertools.product(first, second)):
        return
    times = second[0] / first[0] if first[0] else float("nan")
    sizes = {size for step, _ in pair.both for size in step.sizes[:1]} - {0, 1}
    is_sum = any(min(abs(times - size) / size, abs(times * size - 1)) < 1e-3 for size in sizes)
    cause = "other_loss"
    nearest = min(second, key=lambda loss: abs(loss - first[0]))
    text = f"the loss is {nearest:.6g}, and {first[0]:.6g} in the first recording"
    if is_sum:
        cause = "other_loss_reduction"
        text += f": {times:.6g} times, a sum over examples in place of a mean"
    finding = pair.second.found(cause, text, distance=abs(times - 1), allowed=allowed)
    yield finding if is_sum else pair.explained(finding)


def losses_of(context: Context) -> list[float]:
    """Returns the loss of the whole batch in each form that a script may report."""
    kind = context.kind_of_loss
    if not context.has(kind) or not all(context.arrays(kind)):
        return []
    losses = [[float(np.sum(np.float64(a))) for a in arrays] for arrays in context.arrays(kind)]
    times = {1.0, _factor_by_hand(context)}
    forms = [[each[0] for each in losses]]
    # The second array is a part of the first: the regularisation of Keras, or losses whose
    # gradients a script has cleared.
    if all(len(each) > 1 for each in losses):
        forms.append([each[0] - each[1] for each in losses])
    forms += _of_ranks(context, forms[0])
    found = []
    for per_shard in forms:
        found += [float(np.mean(per_shard)), float(np.sum(per_shard))]
        if all(context.sizes):
            found.append(float(np.average(per_shard, weights=context.sizes)))
    return [factor * loss for factor in times for loss in found]


def _of_ranks(context: Context, losses: Sequence[float]) -> list[list[float]]:
    """Returns mean and sum of the losses of each shard's ranks, if these have other parts of it."""
    forms: list[list[float]] = [[], []]
    for shard, loss in enumerate(losses):
        views = context.trace.views(context.position, context.kind_of_loss, shard, 0)
        own = [float(np.sum(np.float64(view))) for view in views.values()]
        own = own if own and is_far(max(own), min(own)) else [loss]
        forms[0].append(float(np.mean(own)))
        forms[1].append(float(np.sum(own)))
    return [form for form in forms if form != losses]


def _factor_by_hand(context: Context) -> float:
    """Returns the factor by which a script multiplies its gradients, in place of its loss; or 1."""
    changed, name = context.changed_by_hand, "sums" if context.has("sums") else "raw"
    if not changed or not context.has(name):
        return 1.0
    own = add_named(context.named(name))
    names = [n for n in changed if n in own]
    factor = factor_of([changed[n] for n in names], [own[n] for n in names])
    is_factor = factor > 0 and not any(is_far(changed[n], factor * dense(own[n])) for n in names)
    return factor * len(context.named(name)) if is_factor else 1.0
