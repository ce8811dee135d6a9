"""Explains why a step has other examples than that of another recording."""

import collections
import itertools
import zlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.answer.text import count
from lockstep.context import Context
from lockstep.explain.axes import order_of_parts
from lockstep.numeric.arrays import (
    hashes_of,
    rows_of,
)

_CLOSE = 1e-4  # For inputs that were scaled in float32.
Why = tuple[str, str]  # Cause and text.
_Rows = collections.Counter  # Row → how often it occurs.
_Inputs = Sequence[np.ndarray]  # Rows of each forward pass.


class StepInputs(NamedTuple):
    """The inputs of a step in both recordings: row → how often; where they are."""

    given: _Rows
    used: _Rows
    first: Context
    second: Context

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of examples."""
        return self.given.total(), self.used.total()


def count_rows(inputs: _Inputs, start: float | None = None, end: float | None = None) -> _Rows:
    """Counts rows without a value at their start and one at their end; None for whole rows."""
    if start is None or end is None:
        return sum((rows_of([part]) for part in inputs), collections.Counter())
    found: _Rows = collections.Counter()
    for row in itertools.chain.from_iterable(inputs):
        first, last = np.flatnonzero(row != start), np.flatnonzero(row != end)
        kept = row[first[0] : last[-1] + 1] if len(first) and len(last) else row[:0]
        found[hash(kept.tobytes())] += 1
    return found


def pairs_of_ids(context: Context) -> list[tuple[int, int]]:
    """Returns id and row of each example; empty unless the script has noted one for each."""
    arrays = [context.trace.arrays(context.position, "ids", shard) for shard in context.shards]
    ids = [number for own in arrays if own for number in np.ravel(own[0]).tolist()]
    rows = [row for part in inputs_of(context) for row in hashes_of([part])] if ids else []
    return [*zip(ids, rows, strict=True)] if len(ids) == len(rows) else []


def why_ids(
    asked: Sequence[tuple[int, int]], given: Sequence[tuple[int, int]], known: Collection[int]
) -> Why | None:
    """Explains different examples by their ids; None if they are not known.

    Args:
        asked: id and row of the examples of the first recording.
        given: those of the second.
        known: the ids of all steps of the first.
    """
    if not (asked and given):
        return None
    first, second = (collections.Counter(own for own, _ in pairs) for pairs in (asked, given))
    missing, extra = first - second, second - first
    if not missing and not extra:
        other = collections.Counter(given) - collections.Counter(asked)
        text = f"{other.total()} of {len(given)} examples have the ids of the first recording"
        return "other_augmentation", f"{text}, and other inputs"
    if extra and extra.keys() <= first.keys():
        text = f"the ids of {extra.total()} examples were received twice"
        return "repeated_examples", f"{text}, those of {missing.total()} not at all"
    if not extra:
        return None
    if extra.keys() <= {*known}:
        text = f"{extra.total()} of {len(given)} ids belong to other steps of the first recording"
        return "other_order", f"{text}: another order of examples"
    text = f"{extra.total()} of {len(given)} ids are not those of the first recording"
    return "other_examples", text


def why_other_size(steps: Sequence[StepInputs]) -> Why | None:
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


def why_padded(step: StepInputs, steps: Sequence[StepInputs]) -> Why | None:
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


def inputs_of(context: Context) -> _Inputs:
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


def why_size(
    sizes: tuple[int, int],
    usual: tuple[int, int],
    names: tuple[str, str] = ("first recording", "second recording"),
) -> Why | None:
    """Explains different examples by a smaller last batch that one recording has.

    Args:
        sizes: numbers of examples of a step in both recordings.
        usual: the same of the first step.
        names: what has these examples.
    """
    is_last = [size < whole for size, whole in zip(sizes, usual, strict=True)]
    if is_last[0] == is_last[1]:
        return None
    short, full = names if is_last[0] else names[::-1]
    return "last_batch_dropped", (
        f"the {short} has a last batch of {min(sizes)} examples here, the {full} a batch of"
        f" {max(sizes)}"
    )


def why_other_order(step: StepInputs) -> Why | None:
    """Explains inputs whose values have another order, or are scaled."""
    inputs = inputs_of(step.first), inputs_of(step.second)
    if len({part.shape[1] for parts in inputs for part in parts}) == 1:
        first, second = map(np.concatenate, inputs)
        if order := order_of_parts(first, second, step.second.trace.model_axes):
            return "swapped_parts", order
        return _why_transposed(step) or _why_scaled(first, second)
    return None


def _why_transposed(step: StepInputs) -> Why | None:
    """Explains inputs of which the axes of each example have another order."""
    arrays = [array for shard in step.first.shards for array in step.first.inputs(shard)]
    if {array.ndim for array in arrays} - {3, 4, 5} or len({a.ndim for a in arrays}) != 1:
        return None
    for axes in itertools.permutations(range(1, arrays[0].ndim)):
        moved = [array.transpose(0, *axes) for array in arrays]
        rows = [array.reshape(len(array), -1).astype(np.float32) for array in moved if len(array)]
        if count_rows(rows) == step.used:
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


def why_rows(
    asked: collections.Counter,
    given: collections.Counter,
    shard_sizes: Sequence[int],
    of_data_set: Collection[int],
) -> tuple[str, str]:
    """Returns cause and text for unexpected or missing rows.

    Args:
        asked: the examples of the batch.
        given: the examples that the shards received.
        shard_sizes: numbers of the shards' examples.
        of_data_set: the examples of other batches, if known.
    """
    missing, extra = asked - given, given - asked
    sizes, num = "/".join(map(str, shard_sizes)), asked.total()
    if extra and not extra.keys() - asked.keys():
        return "repeated_examples", (
            f"{extra.total()} examples were received twice and {missing.total()} not at all; shards"
            f" of {sizes}, batch of {num}"
        )
    if extra:
        if of_data_set and not extra.keys() - {*of_data_set}:
            return "other_order", (
                f"{extra.total()} of {given.total()} examples belong to other batches: another"
                " order of examples"
            )
        return "other_examples", (
            f"{extra.total()} of {given.total()} examples are not in the batch of the reference"
        )
    return "lost_examples", (
        f"{missing.total()} of {num} examples were received by no replica; shards of {sizes}"
    )
