"""Compares log-probabilities of the same tokens in two programs: a trainer and a generator.

Rounding allows the units of the coarser dtype, times the size of the logits and the root of the
number of layers, which round one after another. A cause is named where a computation gives what
was recorded, or where what it needs differs in both files.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.answer.verdict import Finding, Verdict, finding_of, merged
from lockstep.data.trace import Trace
from lockstep.explain.random_layers import is_random
from lockstep.numeric.arrays import EPS, MARGIN, UNITS, Array, dense, distance, norm

_COARSEST = 20.0  # Temperatures to try: from its inverse to it.
_LEAST = 1e-3  # Of a temperature, from 1.
_LEFT = 0.25  # The part of the mean difference that a temperature may leave.
_MEAN = 0.25  # The mean of many differences by rounding is a small part of the largest.


class Tokens(NamedTuple):
    """The tokens of a batch that count in both programs, one after another.

    Attributes:
        first, second: their log-probabilities.
        places: row and position in the second program, and in the first.
        words: the numbers of the tokens.
        logits: those of the first and of the second; None where they are not known.
    """

    first: np.ndarray
    second: np.ndarray
    places: list[tuple[tuple[int, int], tuple[int, int]]]
    words: np.ndarray
    logits: list[np.ndarray | None]

    @property
    def size(self) -> float:
        """The largest logit, or log-probability: rounding is relative to it."""
        known = [self.first, self.second, *(x for x in self.logits if x is not None)]
        return max(1.0, *(float(np.abs(x).max(initial=0)) for x in known))


def has_log_probs(trace: Trace) -> bool:
    """Returns whether a recording has log-probabilities of tokens."""
    return any(trace.has(position, "log_probs") for position in range(len(trace.steps)))


def compare_log_probs(first: Trace, second: Trace) -> Verdict:
    """Returns the verdict on the log-probabilities of a program, by those of another one.

    Raises:
        ValueError: no batch has the same tokens in both.
    """
    steps = [step for step in first.steps if step in second.steps]
    findings: list[Finding] = []
    compared, notes = list[int](), list[str]()
    for step in steps:
        positions = first.steps.index(step), second.steps.index(step)
        batch = _common(first, second, positions)
        if not len(batch.first):
            notes.append(f"batch {step} has other tokens in both programs, and is not compared")
            continue
        compared.append(step)
        comparison = _Comparison(first, second, positions, batch)
        findings += comparison.findings(step)
        notes.append(f"batch {step}: {comparison.statistics}")
    weights = [{*(trace.named(0, "before", 0) or {})} for trace in (first, second)]
    if not weights[0] & weights[1]:
        notes.append("weights are not compared: none has the same name in both programs")
    if not compared:
        raise ValueError("the recordings have no batch with the same tokens")
    return Verdict(
        name="", reference="", steps=tuple(compared), num_replicas=1, findings=merged(findings),
        checked=("start", "forward"), framework="torch", notes=tuple(notes),
        tolerance="units of the coarser dtype, by the size of the logits and the number of layers",
        step_names={step: f"batch {step}" for step in compared},
    )  # fmt: skip


class _Side(NamedTuple):
    """A batch of one program; `rows` has the numbers of the rows by their counted tokens."""

    tokens: np.ndarray
    counted: np.ndarray
    log_probs: np.ndarray
    logits: np.ndarray | None
    rows: dict[tuple[int, ...], list[int]]

    def columns(self, row: int) -> list[int]:
        """Returns the positions of a row that count."""
        return [*map(int, np.flatnonzero(self.counted[row]))]

    def logits_at(self, places: Sequence[tuple[int, int]]) -> np.ndarray | None:
        """Returns the logits of tokens; None if they are not known."""
        numbers = np.cumsum(self.counted.ravel()).reshape(self.counted.shape) - 1
        return None if self.logits is None else self.logits[_at(numbers, places)]


def _side_of(trace: Trace, position: int) -> _Side | None:
    tokens, counted, values = (
        _one(trace, position, kind) for kind in ("tokens", "counted", "log_probs")
    )
    if tokens is None or counted is None or values is None:
        return None
    rows: dict[tuple[int, ...], list[int]] = {}
    for row in range(len(tokens)):
        rows.setdefault((*tokens[row][counted[row]].tolist(),), []).append(row)
    return _Side(tokens, counted, values, _one(trace, position, "logits"), rows)


def _common(first: Trace, second: Trace, positions: tuple[int, int]) -> Tokens:
    """Returns the tokens of the rows of both that have the same counted tokens, in any order."""
    one, two = _side_of(first, positions[0]), _side_of(second, positions[1])
    places: list[tuple[tuple[int, int], tuple[int, int]]] = []
    if one is None or two is None:
        return Tokens(np.zeros(0), np.zeros(0), places, np.zeros(0, int), [None, None])
    for key, own in two.rows.items():
        for other, row in zip(one.rows.get(key, []), own, strict=False):
            columns = zip(one.columns(other), two.columns(row), strict=True)
            places += [((row, b), (other, a)) for a, b in columns]
    places.sort()
    of_first, of_second = [other for _, other in places], [own for own, _ in places]
    return Tokens(
        _at(one.log_probs, of_first).astype(float),
        _at(two.log_probs, of_second).astype(float),
        places,
        _at(two.tokens, of_second),
        [one.logits_at(of_first), two.logits_at(of_second)],
    )


def _one(trace: Trace, position: int, kind: str) -> np.ndarray | None:
    found = trace.arrays(position, kind, 0)
    return None if not found or found[0] is None else np.asarray(found[0])


def _at(array: np.ndarray, places: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.array([array[place] for place in places], array.dtype)


class _Comparison:
    """The comparison of a batch."""

    def __init__(self, first: Trace, second: Trace, positions: tuple[int, int], batch: Tokens):
        self._traces, self._positions, self._batch = (first, second), positions, batch
        self._dtypes = [trace.about.computed_in for trace in self._traces]
        layers = [sum(bool(x.get("weights")) for x in t.about.layers) for t in self._traces]
        self._depth = max(*layers, 1)
        self._apart = np.abs(batch.second - batch.first)
        self._exact, self._usual = (
            self._bound(dtypes) * batch.size for dtypes in ([""], self._dtypes)
        )

    def _bound(self, dtypes: Sequence[str], depth: float | None = None) -> float:
        """Returns the relative difference that rounding in some dtypes can cause."""
        # A number of 16 bits is rounded to the nearest one: by half a unit at most.
        unit = max(UNITS[x] / 2 if x in UNITS else MARGIN * EPS for x in dtypes)
        return unit * (1 + (self._depth if depth is None else depth) / 2) ** 0.5

    @property
    def _is_reduced(self) -> bool:
        return self._dtypes[0] != self._dtypes[1]

    @property
    def statistics(self) -> str:
        """How far the log-probabilities are apart, in words."""
        allowed = self._exact if self._is_reduced else self._usual
        apart, above = self._apart, self._apart > allowed
        text = (
            f"{above.sum()} of {len(apart)} tokens differ by more than rounding ({allowed:.2g}) in"
            f" log-probability; the largest difference is {apart.max():.3g}, the mean"
            f" {apart.mean():.3g}"
        )
        if above.any():
            (row, place), _ = self._batch.places[int(np.flatnonzero(above)[0])]
            text += f"; the first is at position {place} of row {row}"
        return text

    def findings(self, step: int) -> list[Finding]:
        """Returns what differs, and why."""
        if not self._is_apart:
            return []
        stage, detail, why = self._cause()
        far, allowed = float(self._apart.max()), self._usual / self._batch.size
        found = finding_of(
            stage, detail, f"{why}: {self.statistics}", (step,),
            distance=far / self._batch.size, allowed=allowed,
        )  # fmt: skip
        name = self._first_module() if stage == "forward" else ""
        return [dataclasses.replace(found, module=f"{name}, forward" if name else "")]

    @property
    def _is_apart(self) -> bool:
        """Whether the differences are larger than those of rounding, of one token or of all."""
        allowed = self._exact if self._is_reduced else self._usual
        is_large = self._apart.max() > allowed or self._apart.mean() > allowed * _MEAN
        # Within the rounding of 16 bits, a number may still explain the differences.
        return bool(is_large or self._other_weights() or self._temperature())

    def _cause(self) -> tuple[str, str, str]:
        if weights := self._other_weights():
            text = f"{len(weights)} weights are others ({', '.join(weights[:2])})"
            return "start", "weights_not_synchronised", text
        if text := self._temperature():
            return "forward", "other_temperature", text
        if text := self._shifted() or self._other_positions():
            return "forward", "other_positions", text
        if names := self._other_modes():
            text = f"{len(names)} layers ({names[0]}) are in training mode in one program only"
            return "forward", "inference_mode", text
        if self._is_reduced and self._apart.max() <= self._usual:
            first, second = (dtype or "float32" for dtype in self._dtypes)
            text = f"layers compute in {second}, and in {first} in the first program"
            return "forward", "reduced_precision", text
        return "forward", "other_outputs", "the same tokens and weights have other outputs"

    def _other_weights(self) -> list[str]:
        """Returns names of weights that are not those of the first program, but for rounding."""
        first, second = (trace.named(0, "before", 0) or {} for trace in self._traces)
        found = []
        for name in [name for name in first if name in second]:
            a, b = first[name], second[name]
            is_known = np.shape(dense(a)) == np.shape(dense(b))
            unit = EPS if _is_coarse(a) == _is_coarse(b) else 2.0**-8  # One is rounded.
            if is_known and distance(dense(b), dense(a)) > unit * norm(dense(a)):
                found.append(name)
        return found

    def _temperature(self) -> str:
        """Returns a sentence if logits that are divided by one number explain all."""
        batch = self._batch
        for index, other in enumerate((batch.second, batch.first)):
            logits = batch.logits[index]
            if logits is None:
                continue
            logits = logits.astype(float)
            low, high = np.log(1 / _COARSEST), np.log(_COARSEST)
            for _ in range(60):  # The squared difference has one minimum on a grid's best part.
                grid = np.linspace(low, high, 9)
                errors = [
                    np.sum((_scaled(logits, batch.words, t) - other) ** 2) for t in np.exp(grid)
                ]
                best = int(np.argmin(errors))
                low, high = grid[max(best - 1, 0)], grid[min(best + 1, 8)]
            number = float(np.exp((low + high) / 2))
            far = np.abs(_scaled(logits, batch.words, number) - other)
            is_explained = np.mean(far) <= _LEFT * np.mean(self._apart)
            is_other = abs(number - 1) > _LEAST and self._apart.max() > self._exact
            if is_other and is_explained and far.max() <= self._usual * max(1, 1 / number):
                whose = ("second", "first")[index]
                return f"the logits of the {whose} program are divided by {number:.4g}"
        return ""

    def _shifted(self) -> str:
        """Returns a sentence if each log-probability is that of the token beside it."""
        for shift in (1, -1):
            pairs, known = (
                [],
                dict(zip((p for p, _ in self._batch.places), self._batch.first, strict=True)),
            )
            for (place, _), value in zip(self._batch.places, self._batch.second, strict=True):
                if (beside := (place[0], place[1] + shift)) in known:
                    pairs.append((value, known[beside]))
            far = max((abs(a - b) for a, b in pairs), default=np.inf)
            if len(pairs) > 1 and far <= self._usual:
                where = "after" if shift > 0 else "before"
                return f"the log-probability of each token is that of the one {where} it"
        return ""

    def _other_positions(self) -> str:
        """Returns a sentence if the model got other numbers of positions."""
        ids = [
            _one(t, p, "position_ids") for t, p in zip(self._traces, self._positions, strict=True)
        ]
        if ids[0] is None or ids[1] is None:
            return ""
        found = []
        for (row, place), (other, own) in self._batch.places:
            a, b = ids[0][min(other, len(ids[0]) - 1)], ids[1][min(row, len(ids[1]) - 1)]
            if own <= len(a) and place <= len(b) and a[own - 1] != b[place - 1]:
                found.append((row, place - 1, int(b[place - 1]), int(a[own - 1])))
        if not found:
            return ""
        row, place, given, right = found[0]
        return (
            f"position {place} of row {row} has the number {given} in position_ids, and {right} in"
            " the first program"
        )

    def _other_modes(self) -> list[str]:
        """Returns layers that compute in another way in training, in one program only."""
        off = [t.in_evaluation(p, 0) for t, p in zip(self._traces, self._positions, strict=True)]
        layers = [x for x in self._traces[0].about.layers if is_random(x) or _is_norm(x)]
        names = [str(layer.get("name")) for layer in layers]
        return [name for name in names if (name in off[0]) != (name in off[1])]

    def _first_module(self) -> str:
        """Returns the first module whose output differs; "" if that is not known."""
        first, second = self._traces
        names = [name for name in first.about.modules if name in second.about.modules]
        for number, name in enumerate(names):
            outputs = [
                t.of_module(p, "module_out", 0, 0, name)
                for t, p in zip(self._traces, self._positions, strict=True)
            ]
            rows = []
            for (row, place), (other, own) in self._batch.places:
                where = (other, own - 1), (row, place - 1)
                if all(
                    x is not None and x.ndim > 1 and r < len(x) and p < x.shape[1]
                    for x, (r, p) in zip(outputs, where, strict=True)
                ):
                    rows.append(
                        [x[at] for x, at in zip(outputs, where, strict=True) if x is not None]
                    )
            a, b = (np.array([pair[i] for pair in rows], float) for i in (0, 1))
            bound = self._bound(self._dtypes if not self._is_reduced else [""], number)
            if rows and a.shape == b.shape and norm(b - a) > bound * norm(a):
                return name
        return ""


def _is_coarse(array: Array) -> bool:
    """Returns whether all elements are numbers of 16 bits."""
    elements = np.asarray(getattr(array, "elements", array), np.float32)
    is_bfloat16 = not np.any(elements.view(np.uint32) & 0xFFFF)
    return bool(is_bfloat16 or np.array_equal(elements, elements.astype(np.float16)))


def _is_norm(layer: Mapping[str, Any]) -> bool:
    """Returns whether a layer normalises over the examples of a batch in training."""
    return "batchnorm" in str(layer.get("class", "")).lower()


def _scaled(logits: np.ndarray, words: np.ndarray, temperature: float) -> np.ndarray:
    """Returns the log-probabilities of tokens with logits that are divided by a temperature."""
    scaled = logits / temperature
    scaled = scaled - scaled.max(axis=1, keepdims=True)
    found = scaled[np.arange(len(words)), words]
    return np.asarray(found - np.log(np.exp(scaled).sum(axis=1)))
