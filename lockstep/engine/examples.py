"""The same examples in two recordings: as multisets of rows, and side by side.

A row has one canonical key: its numbers in the dtype that any framework may use, without padding
that the longest row of its batch adds, wherever that is needed to find it in the other training.
"""

import collections
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.data.trace import Trace
from lockstep.engine.pair import Pair
from lockstep.engine.step import Step
from lockstep.numeric.arrays import dense

KINDS = ("data", "y_pred", "y_grad")
DTYPES = {"f": np.float32, "i": np.int64, "u": np.int64, "b": np.int64}
# Values with which rows may be padded: those with which most rows end, or begin.
NUM_PADDINGS = 3
# Examples that scripts compute differ by rounding alone.
COMPUTED = 1e-5
# Ranks that share a larger part of their examples than half are a fault, not chance.
SAME_PART = 0.5

Arrays = list[tuple[np.ndarray, np.ndarray]]
Rows = collections.Counter  # Key of a row → how often it occurs.


def comparable(array: np.ndarray) -> np.ndarray:
    """Returns an array in the dtype that any framework may use for it."""
    return array.astype(DTYPES.get(array.dtype.kind, array.dtype))


def real_part(row: np.ndarray, padding: float | None) -> slice:
    """Returns where a row begins and ends without a value that pads it."""
    if padding is None or not row.ndim:
        return slice(None)
    other = np.flatnonzero(np.any((row != padding).reshape(len(row), -1), axis=1))
    return slice(int(other[0]), int(other[-1]) + 1) if len(other) else slice(0, 0)


def key_of(row: np.ndarray, padding: float | None) -> bytes:
    """Returns the canonical key of a row."""
    return row[real_part(row, padding)].tobytes() if row.ndim else row.tobytes()


def rows_of(step: Step, padding: float | None, *, is_used: bool = False) -> list[Rows]:
    """Counts the rows of the inputs of each shard: its examples, and not what it computes.

    That is what an earlier forward pass of the step returns, as that of a generator.

    Args:
        step: the step of a training.
        padding: the value that pads rows.
        is_used: count only passes whose outputs the loss uses.
    """
    found, kinds = [], ("y_pred", "y_grad")
    outputs, slopes = (step.arrays(k) if step.has(k) else [[]] * len(step.shards) for k in kinds)
    for shard, own, of_loss in zip(step.shards, outputs, slopes, strict=True):
        made, inputs = set[bytes](), step.inputs(shard)
        rows: Rows = Rows()
        each = len(own) // max(len(inputs), 1)
        for number, part in enumerate(inputs):
            keys = [(row.tobytes(), key_of(row, padding)) for row in comparable(part)]
            if not is_used or any(np.any(x) for x in of_loss[number * each :][:each]):
                rows.update(key for whole, key in keys if whole not in made)
            returned = own[number * each :][:each] if len(inputs) > 1 else []
            made |= {row.tobytes() for x in returned if x.ndim for row in comparable(x)}
        found.append(rows)
    return found


# --- Side by side ---------------------------------------------------------------------------------


class Part(NamedTuple):
    """Arrays of one forward pass of a shard whose first axis is the examples, by kind."""

    shard: int
    number: int
    arrays: Mapping[str, Sequence[np.ndarray]]

    def keys(self, num_leaves: int | None, padding: float | None) -> list[bytes]:
        """Returns a key of each example: that of its inputs."""
        leaves = [comparable(array) for array in self.arrays["data"][:num_leaves]]
        size = len(leaves[0]) if leaves else 0
        return [b"".join(key_of(leaf[row], padding) for leaf in leaves) for row in range(size)]

    def row(self, kind: str, index: int, number: int, padding: float | None) -> np.ndarray | None:
        """Returns the row of an array of some kind, without what pads its input; None if absent."""
        if index >= len(self.arrays[kind]):
            return None
        found, data = self.arrays[kind][index][number], self.arrays["data"][0][number]
        has_positions = found.ndim and data.ndim and len(found) == len(data)
        return found[real_part(data, padding)] if has_positions else found


class Matched(NamedTuple):
    """The examples of one forward pass that both trainings have, each kind in both.

    Attributes:
        part: the forward pass of the training.
        rows: the numbers of its examples.
        sources: for each of them, a forward pass of the reference and its row.
        arrays: kind → pairs of arrays, of the reference and of the training.
    """

    part: Part
    rows: Sequence[int]
    sources: Sequence[tuple[Part, int]]
    arrays: dict[str, Arrays]

    @property
    def shard(self) -> int:
        """The shard of the training."""
        return self.part.shard

    @property
    def number(self) -> int:
        """The number of its forward pass."""
        return self.part.number


def parts_of(step: Step) -> list[Part]:
    """Returns the forward passes of a step in order."""
    found = []
    for shard in step.shards:
        num = step.trace.micro_batches(step.position, shard)
        for number in range(num):
            arrays = {}
            for kind in KINDS:
                own = step.arrays(kind)[shard] if step.has(kind) else []
                each = len(own) // num
                arrays[kind] = own[number * each :][:each] if each * num == len(own) else []
            size = next((len(a) for a in arrays["data"] if a.ndim), -1)
            rows = {k: [a for a in own if a.ndim and len(a) == size] for k, own in arrays.items()}
            found.append(Part(shard, number, rows))
    return found


def matched_examples(pair: Pair, padding: float | None) -> list[Matched]:
    """Returns arrays of the examples with equal inputs; those that occur twice are left out."""
    first, second = parts_of(pair.reference), parts_of(pair.training)
    found: list[Matched] = []
    for num_leaves in (1, None):  # All arrays, if few examples have another first one.
        places, others = (_places(parts, num_leaves, padding) for parts in (first, second))
        if len(others) > sum(len(part.keys(1, padding)) for part in second) / 2:
            break
    for index, part in enumerate(second):
        common = [key for key, (own, _) in others.items() if own == index and key in places]
        if common:
            rows = [others[key][1] for key in common]
            sources = [(first[n], row) for n, row in (places[key] for key in common)]
            arrays = {kind: _side_by_side(kind, part, rows, sources, padding) for kind in KINDS}
            found.append(Matched(part, rows, sources, arrays))
    return found


def _places(
    parts: Sequence[Part], num_leaves: int | None, padding: float | None
) -> dict[bytes, tuple[int, int]]:
    """Returns the key of each example that occurs once → its part and row."""
    found: dict[bytes, list[tuple[int, int]]] = {}
    for number, part in enumerate(parts):
        for row, key in enumerate(part.keys(num_leaves, padding)):
            found.setdefault(key, []).append((number, row))
    return {key: places[0] for key, places in found.items() if len(places) == 1}


def _side_by_side(
    kind: str, part: Part, rows: Sequence[int], sources: Sequence[tuple[Part, int]],
    padding: float | None,
) -> Arrays:  # fmt: skip
    """Returns the arrays of a kind of some rows in both trainings; none if their shapes differ."""
    found = []
    for index in range(len(part.arrays[kind])):
        own, others = list[np.ndarray](), list[np.ndarray]()
        for row, (source, other_row) in zip(rows, sources, strict=True):
            a = part.row(kind, index, row, padding)
            b = source.row(kind, index, other_row, padding)
            if a is None or b is None or a.shape != b.shape:
                return []
            own.append(a)
            others.append(b)
        found.append((_stacked(others), _stacked(own)))
    return found


def _stacked(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Returns rows, which may be of several lengths, as one array; shorter ones end with 0."""
    if len({row.shape for row in rows}) == 1:
        return comparable(np.stack(rows))
    whole = np.zeros((len(rows), max(map(len, rows)), *rows[0].shape[1:]), rows[0].dtype)
    for number, row in enumerate(rows):
        whole[number, : len(row)] = row
    return comparable(whole)


def rows_apart(arrays: Arrays, factor: float = 1.0) -> np.ndarray:
    """Returns the largest distance of each example's arrays, relative to their usual size."""
    found = [np.zeros(len(arrays[0][0]))] if arrays else [np.zeros(0)]
    for first, second in arrays:
        a, b = (dense(each).reshape(len(each), -1) for each in (first, second))
        is_same = (a == b) | (np.isnan(a) & np.isnan(b))  # Both may mask with an infinite value.
        is_finite = np.isfinite(a) & np.isfinite(b)
        gap = np.where(is_finite, b - factor * a, np.where(is_same, 0, np.inf))
        size = abs(factor) * np.linalg.norm(np.where(np.isfinite(a), a, 0), axis=1)
        usual = np.maximum(size, np.sqrt(np.mean(size**2)))
        far = np.linalg.norm(gap, axis=1)
        found.append(np.divide(far, usual, out=np.where(far > 0, np.inf, 0.0), where=usual > 0))
    return np.max(found, axis=0)


def factors_of(arrays: Arrays) -> np.ndarray:
    """Returns for each example the factor of its second arrays over the first; NaN where 0."""
    a, b = (np.concatenate([dense(p[i]).reshape(len(p[i]), -1) for p in arrays], 1) for i in (0, 1))
    squares = np.sum(a * a, axis=1)
    return np.divide(np.sum(a * b, axis=1), squares, out=np.full(len(a), np.nan), where=squares > 0)


def _nearest(first: Rows, second: Rows) -> dict[bytes, bytes]:
    """Returns rows of the second training → those of the first, of which rounding makes them.

    A script may compute its examples, as with a generator. It is empty if some are other ones.
    """
    ordered = list[list[np.ndarray]]()
    for left in (first - second, second - first):
        rows = [np.frombuffer(key, np.float32).astype(float) for key in left.elements()]
        if len({len(row) for row in rows}) != 1:
            return {}
        signs = np.random.default_rng(0).standard_normal(len(rows[0]))
        ordered.append(sorted(rows, key=lambda row: float(row @ signs)))
    a, b = (np.array(rows) for rows in ordered)
    if a.shape != b.shape or not np.all(rows_apart([(a, b)]) <= COMPUTED):
        return {}
    keys = ([row.astype(np.float32).tobytes() for row in x] for x in (b, a))
    return dict(zip(*keys, strict=True))


# --- Of all steps ---------------------------------------------------------------------------------


class Batches:
    """The examples of all common steps of two recordings."""

    def __init__(self, reference: Trace, training: Trace) -> None:
        numbers = [number for number in training.steps if number in reference.steps]
        traces = reference, training
        self._steps = {n: tuple(Step(t, t.steps.index(n)) for t in traces) for n in numbers}

    @functools.cached_property
    def are_known(self) -> bool:
        """Whether the first axis of recorded inputs is the examples."""
        known = [a.has("data") and b.has("data") for a, b in self._steps.values()]
        return bool(known) and all(known) and not self.has_examples_second

    @functools.cached_property
    def has_examples_second(self) -> bool:
        """Whether each shard has as many rows as the whole batch, in all steps: (time, batch)."""
        for both in self._steps.values():
            a, b = ([x.shape for s in step.shards for x in step.inputs(s)] for step in both)
            if len(b) < 2 or len(a) >= len(b) or any(len(shape) < 2 for shape in (*a, *b)):
                return False
            if {s[0] for s in a} != {s[0] for s in b} or sum(s[1] for s in a) != sum(
                s[1] for s in b
            ):
                return False
        return bool(self._steps)

    @functools.cached_property
    def padding(self) -> float | None:
        """The value that pads rows to the longest of a batch, if only it makes examples differ."""
        if not self.are_known or not self._num_other(None):
            return None
        found = [(self._num_other(value), value) for value in self._paddings]
        number, value = min(found, default=(np.inf, None))
        return value if number < self._num_other(None) else None

    def _num_other(self, padding: float | None) -> int:
        """Returns how many rows of all steps are not in the same step of the other training."""
        number = 0
        for reference, training in self._steps.values():
            a, b = (sum(rows_of(step, padding), Rows()) for step in (reference, training))
            number += (a - b).total() + (b - a).total()
        return number

    @property
    def _paddings(self) -> list[float]:
        """The values with which most rows of several lengths begin or end; none without lengths."""
        ends, lengths = collections.Counter[float](), set[int]()
        for both in self._steps.values():
            for array in (x for step in both for shard in step.shards for x in step.inputs(shard)):
                if array.ndim < 2 or array.dtype.kind not in "fiu":
                    return []
                lengths.add(array.shape[1])
                ends.update(float(np.ravel(row)[at]) for row in array for at in (0, -1) if row.size)
        return [value for value, _ in ends.most_common(NUM_PADDINGS)] if len(lengths) > 1 else []

    @functools.cached_property
    def rows(self) -> dict[int, tuple[Rows, list[Rows]]]:
        """Number of a step → rows of the batch in the reference, and those of each shard."""
        found = {}
        for number, (reference, training) in self._steps.items():
            both = reference, training
            firsts, own = (rows_of(step, self.padding) for step in both)
            right = sum(firsts, Rows())
            if right != sum(own, Rows()):
                # Passes that no loss uses, as of an actor, may be the same ones on all ranks.
                used = [rows_of(step, self.padding, is_used=True) for step in both]
                if (of_loss := sum(used[0], Rows())) and of_loss == sum(used[1], Rows()):
                    right, own = of_loss, used[1]
            inputs = (x for step in both for shard in step.shards for x in step.inputs(shard))
            if all(x.dtype.kind == "f" for x in inputs):
                for key, nearest in _nearest(right, sum(own, Rows())).items():
                    for rows in own:
                        rows[nearest] += rows.pop(key, 0)
                own = [+rows for rows in own]
            found[number] = right, own
        return found

    def differ(self, number: int) -> bool:
        """Returns whether a step has other examples, in any order and on any rank."""
        if not self.are_known or number not in self.rows:
            return False
        right, own = self.rows[number]
        return right != sum(own, Rows())

    def are_copied(self, number: int) -> bool:
        """Returns whether each of several shards has the whole batch."""
        if not self.are_known or number not in self.rows:
            return False
        right, own = self.rows[number]
        return len(own) > 1 and bool(right) and all(each == right for each in own)

    def share_examples(self, number: int) -> bool:
        """Returns whether ranks share most of their examples, which the reference has once."""
        right, own = self.rows[number]
        most = max(right.values(), default=0)
        for a, b in itertools.combinations(own, 2):
            size, shared = min(a.total(), b.total()), (a & b).total()
            if size and shared > SAME_PART * size and (shared == size or most == 1):
                return True
        return False

    def is_filled_up(self, number: int) -> bool:
        """Returns whether a sampler fills up the last batch, evenly or wholly, with known rows."""
        right, own = self.rows[number]
        given: Rows = sum(own, Rows())
        extra, full = given - right, max(first.total() for first, _ in self.rows.values())
        is_short = right.total() < full and len({each.total() for each in own}) == 1
        is_even = extra.total() < len(own) or right.total() + extra.total() == full
        seen = {row for earlier in self.earlier(number) for row in self.rows[earlier][0]} | {*right}
        return is_short and is_even and not right - given and {*extra} <= seen

    def earlier(self, number: int) -> Iterator[int]:
        """Yields the steps before a step."""
        yield from (each for each in self._steps if each < number)

    @functools.cached_property
    def known(self) -> set[bytes]:
        """All rows of the reference."""
        return {row for right, _ in self.rows.values() for row in right}

    def have_equal_ids(self, number: int) -> bool:
        """Returns whether a step has the reference's examples, by the ids that scripts note."""
        ids = self.ids(number)
        return bool(ids) and collections.Counter(ids[0]) == collections.Counter(ids[1])

    def ids(self, number: int) -> list[list[int]]:
        """Returns the ids of the examples in the reference, and here; empty if not noted."""
        found = []
        for step in self._steps[number]:
            arrays = [step.trace.arrays(step.position, "ids", shard) for shard in step.shards]
            found.append([x for own in arrays if own for x in np.ravel(own[0]).tolist()])
        return found if all(found) else []
