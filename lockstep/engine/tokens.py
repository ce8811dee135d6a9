"""Programs that compute log-probabilities of the same tokens, and train nothing: node "outputs".

A trainer and a generator compute them of the same policy in other ways. Rounding allows the units
of the coarser dtype, times the size of the logits and the root of the number of layers, which round
one after another.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.data.trace import Trace
from lockstep.engine.look import Finding
from lockstep.engine.pair import Pair
from lockstep.engine.solve import Formula
from lockstep.engine.step import Step
from lockstep.engine.verdict import OUTPUTS, START
from lockstep.numeric.arrays import EPS, MARGIN, UNITS, Array, dense, distance, norm

# The mean of many differences by rounding is a small part of the largest.
MEAN = 0.25
# A weight of 16 bits is rounded to the nearest number: by half a unit of bfloat16 at most.
OF_16_BITS = 2.0**-8
# Temperatures to try are up to this, and 1 over it; one is known to 3 digits.
COARSEST, LEAST = 20.0, 1e-3
# The part of the mean difference that a temperature may leave.
LEFT = 0.25

Place = tuple[int, int]  # Row and position.


class Batch(NamedTuple):
    """A batch of one program.

    Attributes:
        tokens, counted, log_probs: `(rows, T)`; see `data.trace`.
        logits: of the tokens that count, one after another; None if they are not known.
        rows: the counted tokens of a row → numbers of the rows that have them.
    """

    tokens: np.ndarray
    counted: np.ndarray
    log_probs: np.ndarray
    logits: np.ndarray | None
    rows: dict[tuple[int, ...], list[int]]

    def logits_at(self, places: Sequence[Place]) -> np.ndarray | None:
        """Returns the logits of tokens; None if they are not known."""
        numbers = np.cumsum(self.counted.ravel()).reshape(self.counted.shape) - 1
        return None if self.logits is None else self.logits[_at(numbers, places)]


class Tokens:
    """The tokens of a step that count in both programs, one after another.

    Args:
        pair: a step whose recordings have log-probabilities.

    Attributes:
        places: row and position in the second program, and in the first.
    """

    def __init__(self, pair: Pair) -> None:
        self._pair, batches = pair, [_batch_of(step) for step in (pair.reference, pair.training)]
        self.places = sorted(_common(*batches))
        at = [[place for _, place in self.places], [place for place, _ in self.places]]
        self._values = [
            _at(b.log_probs, own).astype(float) for b, own in zip(batches, at, strict=True)
        ]
        self._logits = [b.logits_at(own) for b, own in zip(batches, at, strict=True)]
        self._words = _at(batches[1].tokens, at[1])
        traces = pair.reference.trace, pair.training.trace
        dtypes = [trace.about.computed_in for trace in traces]
        self._is_reduced = dtypes[0] != dtypes[1]
        depth = max(1, *(sum(bool(x.get("weights")) for x in t.about.layers) for t in traces))
        known = [*self._values, *(x for x in self._logits if x is not None)]
        size = max(1.0, *(float(np.abs(x).max(initial=0)) for x in known))
        self._exact = _unit([""]) * (1 + depth / 2) ** 0.5 * size
        self._usual = _unit(dtypes) * (1 + depth / 2) ** 0.5 * size
        self._apart = np.abs(self._values[1] - self._values[0])

    @property
    def allowed(self) -> float:
        """The difference that rounding can cause."""
        return self._exact if self._is_reduced else self._usual

    @property
    def text(self) -> str:
        """How far the log-probabilities are apart, in words."""
        if not self.places:
            return "other tokens in both programs, which are not compared"
        apart, above = self._apart, ~(self._apart <= self.allowed)
        text = (
            f"{above.sum()} of {len(apart)} tokens differ by more than rounding"
            f" ({self.allowed:.2g}) in log-probability; the largest difference is"
            f" {apart.max():.3g}, the mean {apart.mean():.3g}"
        )
        if above.any():
            (row, place), _ = self.places[int(np.flatnonzero(above)[0])]
            text += f"; the first is at position {place} of row {row}"
        return text

    def finding(self) -> Finding | None:
        """Returns what differs: the weights, or the outputs of equal ones."""
        if weights := _other_weights(self._pair):
            return Finding(START, weights, seen={"text": f"{len(weights)} weights are others"})
        temperature = self._temperature() if self.places else ""
        # NaN, in one or both, is no small difference.
        is_large = self.places and not (
            self._apart.max() <= self.allowed and self._apart.mean() <= self.allowed * MEAN
        )
        if not (is_large or temperature):
            return None
        words = temperature or self._shifted() or self._other_positions()
        formula = (Formula(("log_probs",), (), (), (), words=words),) if words else ()
        text = f"{words}: {self.text}" if words else self.text
        return Finding(OUTPUTS, given=formula, seen={"text": text, "is_explained": bool(words)})

    def _temperature(self) -> str:
        """Returns in words that logits, divided by one number, explain all."""
        for index, whose in ((0, "second"), (1, "first")):
            logits, other = self._logits[index], self._values[1 - index]
            if logits is None:
                continue
            number = _fitted(logits.astype(float), self._words, other)
            far = np.abs(_scaled(logits.astype(float), self._words, number) - other)
            is_explained = np.mean(far) <= LEFT * np.mean(self._apart)
            is_other = abs(number - 1) > LEAST and self._apart.max() > self._exact
            if is_other and is_explained and far.max() <= self._usual * max(1, 1 / number):
                return f"the logits of the {whose} program are divided by {number:.4g}"
        return ""

    def _shifted(self) -> str:
        """Returns in words that each log-probability is that of the token beside it."""
        known = dict(zip((own for own, _ in self.places), self._values[0], strict=True))
        for shift, where in ((1, "after"), (-1, "before")):
            pairs = [
                (value, known[row, place + shift])
                for ((row, place), _), value in zip(self.places, self._values[1], strict=True)
                if (row, place + shift) in known
            ]
            far = max((abs(a - b) for a, b in pairs), default=np.inf)
            if len(pairs) > 1 and far <= self._usual:
                return f"the log-probability of each token is that of the one {where} it"
        return ""

    def _other_positions(self) -> str:
        """Returns in words that the model got other numbers of positions."""
        first, second = (
            _one(step, "position_ids") for step in (self._pair.reference, self._pair.training)
        )
        if first is None or second is None:
            return ""
        for (row, place), (other, own) in self.places:
            a, b = first[min(other, len(first) - 1)], second[min(row, len(second) - 1)]
            if own <= len(a) and place <= len(b) and a[own - 1] != b[place - 1]:
                numbers = f"{int(b[place - 1])} in position_ids, and {int(a[own - 1])}"
                return f"position {place - 1} of row {row} has the number {numbers} in the first"
        return ""

    def first_module(self) -> str:
        """Returns the first module whose output differs, with its pass; "" if it is not known."""
        steps = self._pair.reference, self._pair.training
        modules = [step.trace.about.modules for step in steps]
        for number, name in enumerate(x for x in modules[0] if x in modules[1]):
            first, second = (s.trace.of_module(s.position, "module_out", 0, 0, name) for s in steps)
            if first is None or second is None or min(first.ndim, second.ndim) < 2:
                continue
            both = [
                (first[other, own - 1], second[row, place - 1])
                for (row, place), (other, own) in self.places
                if _has(first, (other, own - 1)) and _has(second, (row, place - 1))
            ]
            a, b = (np.array([each[i] for each in both], float) for i in (0, 1))
            dtypes = [""] if self._is_reduced else [steps[1].trace.about.computed_in]
            allowed = _unit(dtypes) * (1 + number / 2) ** 0.5
            if both and a.shape == b.shape and norm(b - a) > allowed * norm(a):
                return f"{name}, forward"
        return ""


def has_log_probs(trace: Trace) -> bool:
    """Returns whether a recording has log-probabilities of tokens."""
    return any(trace.has(position, "log_probs") for position in range(len(trace.steps)))


def _batch_of(step: Step) -> Batch:
    tokens, counted, values = (
        np.asarray(step.arrays(kind)[0][0]) for kind in ("tokens", "counted", "log_probs")
    )
    rows: dict[tuple[int, ...], list[int]] = {}
    for row in range(len(tokens)):
        rows.setdefault((*tokens[row][counted[row]].tolist(),), []).append(row)
    return Batch(tokens, counted, values, _one(step, "logits"), rows)


def _common(one: Batch, two: Batch) -> list[tuple[Place, Place]]:
    """Returns the tokens of the rows of both that have the same counted tokens, in any order."""
    found = list[tuple[Place, Place]]()
    for key, own in two.rows.items():
        for other, row in zip(one.rows.get(key, []), own, strict=False):
            columns = (np.flatnonzero(b.counted[r]).tolist() for b, r in ((two, row), (one, other)))
            found += [((row, b), (other, a)) for b, a in zip(*columns, strict=True)]
    return found


def _one(step: Step, kind: str) -> np.ndarray | None:
    found = step.trace.arrays(step.position, kind, 0)
    return np.asarray(found[0]) if found and found[0] is not None else None


def _at(array: np.ndarray, places: Sequence[Place]) -> np.ndarray:
    return np.array([array[place] for place in places], array.dtype)


def _has(array: np.ndarray, place: Place) -> bool:
    return place[0] < len(array) and 0 <= place[1] < array.shape[1]


def _unit(dtypes: Sequence[str]) -> float:
    """Returns the relative rounding of the coarsest dtype: half a unit of one of 16 bits."""
    return max(UNITS[x] / 2 if x in UNITS else MARGIN * EPS for x in dtypes)


def _other_weights(pair: Pair) -> tuple[str, ...]:
    """Returns the weights that are not the reference's, but for rounding of their dtypes."""
    if not pair.has("before"):
        return ()
    first, second, found = *(s.named("before")[0] for s in (pair.reference, pair.training)), []
    for variable in pair.variables:
        if variable.first in first and variable.second in second:
            a, b = first[variable.first], second[variable.second]
            unit = EPS if _is_coarse(a) == _is_coarse(b) else OF_16_BITS  # One is rounded.
            if distance(variable.as_first(b), dense(a)) > unit * norm(dense(a)):
                found.append(variable.first)
    return tuple(found)


def _is_coarse(array: Array) -> bool:
    """Returns whether all elements are numbers of 16 bits."""
    elements = np.asarray(getattr(array, "elements", array), np.float32)
    is_bfloat16 = not np.any(elements.view(np.uint32) & 0xFFFF)
    return bool(is_bfloat16 or np.array_equal(elements, elements.astype(np.float16)))


def _fitted(logits: np.ndarray, words: np.ndarray, other: np.ndarray) -> float:
    """Returns the temperature that brings log-probabilities nearest to others."""
    low, high = np.log(1 / COARSEST), np.log(COARSEST)
    for _ in range(60):  # The squared difference has one minimum on a grid's best part.
        grid = np.linspace(low, high, 9)
        errors = [np.sum((_scaled(logits, words, t) - other) ** 2) for t in np.exp(grid)]
        best = int(np.argmin(errors))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, 8)]
    return float(np.exp((low + high) / 2))


def _scaled(logits: np.ndarray, words: np.ndarray, temperature: float) -> np.ndarray:
    """Returns the log-probabilities of tokens with logits that are divided by a temperature."""
    scaled = logits / temperature
    scaled = scaled - scaled.max(axis=1, keepdims=True)
    found: Any = scaled[np.arange(len(words)), words]
    return np.asarray(found - np.log(np.exp(scaled).sum(axis=1)))
