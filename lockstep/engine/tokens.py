"""Programs that compute log-probabilities of the same tokens, and train nothing: node "outputs".

A trainer and a generator compute them of the same policy in other ways. Rounding allows the units
of the coarser dtype, times the size of the logits and the root of the number of layers, which
round one after another.
"""

from collections.abc import Sequence

import numpy as np

from lockstep.data.trace import Trace
from lockstep.engine.look import Finding
from lockstep.engine.pair import Pair
from lockstep.engine.verdict import OUTPUTS, START
from lockstep.numeric.arrays import EPS, MARGIN, UNITS, Array, dense, distance, norm

# The mean of many differences by rounding is a small part of the largest.
MEAN = 0.25
# A weight of 16 bits is rounded to the nearest number: by half a unit of bfloat16 at most.
OF_16_BITS = 2.0**-8

Place = tuple[int, int]  # Row and position.
Batch = Sequence[np.ndarray]  # Tokens, which of them count, log-probabilities; see `data.trace`.


class Tokens:
    """The tokens of a step that count in both programs, one after another.

    Args:
        pair: a step whose recordings have log-probabilities.

    Attributes:
        places: row and position in the second program, and in the first.
    """

    def __init__(self, pair: Pair) -> None:
        self._pair, steps = pair, (pair.reference, pair.training)
        kinds = "tokens", "counted", "log_probs"
        batches = [[np.asarray(step.arrays(kind)[0][0]) for kind in kinds] for step in steps]
        self.places = _common(batches)
        values = [
            np.array([log_probs[places[1 - i]] for places in self.places], float)
            for i, (*_, log_probs) in enumerate(batches)
        ]
        traces = pair.reference.trace, pair.training.trace
        dtypes = [trace.about.computed_in for trace in traces]
        self._is_reduced = dtypes[0] != dtypes[1]
        depth = max(1, *(sum(bool(x.get("weights")) for x in t.about.layers) for t in traces))
        logits = [own[0][0] for step in steps if any(own := step.arrays("logits"))]
        finite = (np.abs(x[np.isfinite(x)]) for x in (*values, *logits))
        size = max(1.0, *(float(x.max(initial=0)) for x in finite))
        unit = _unit([""] if self._is_reduced else dtypes)
        self._allowed = unit * (1 + depth / 2) ** 0.5 * size
        # A token that is masked out has −∞ in both.
        self._apart = np.where(values[0] == values[1], 0, np.abs(values[1] - values[0]))

    @property
    def text(self) -> str:
        """How far the log-probabilities are apart, in words."""
        if not self.places:
            return "other tokens in both programs, which are not compared"
        apart, above = self._apart, ~(self._apart <= self._allowed)
        text = (
            f"{above.sum()} of {len(apart)} tokens differ by more than rounding"
            f" ({self._allowed:.2g}) in log-probability; the largest difference is"
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
        # NaN, in one or both, is no small difference.
        is_right = not self.places or (
            self._apart.max() <= self._allowed and self._apart.mean() <= self._allowed * MEAN
        )
        return None if is_right else Finding(OUTPUTS, seen={"text": self.text})

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


def _common(batches: Sequence[Batch]) -> list[tuple[Place, Place]]:
    """Returns the tokens of the rows of both that have the same counted tokens, in any order."""
    rows = [dict[tuple[int, ...], list[int]]() for _ in batches]
    for (tokens, counted, _), found in zip(batches, rows, strict=True):
        for row in range(len(tokens)):
            found.setdefault((*tokens[row][counted[row]].tolist(),), []).append(row)
    places = list[tuple[Place, Place]]()
    for key, own in rows[1].items():
        for other, row in zip(rows[0].get(key, []), own, strict=False):
            columns = (
                np.flatnonzero(b[1][r]).tolist() for b, r in zip(batches, (other, row), strict=True)
            )
            places += [((row, b), (other, a)) for a, b in zip(*columns, strict=True)]
    return sorted(places)


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
