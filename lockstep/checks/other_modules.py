"""Names the first module whose output, or gradient, is not that of the reference.

In a forward pass, inputs and outputs of modules are events in time; the backward pass has them in
reverse. What an event gives depends on earlier ones only: if these are right, the module that ends
with the first wrong event is wrong, or the code around it.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lockstep.arithmetic import EPS, MARGIN, TINY, UNITS, dense, norm
from lockstep.checks.other_forward import rows_apart, usual_factor
from lockstep.context import Context
from lockstep.matched_examples import Located, Part, located_examples, pairs_of
from lockstep.reference import StepPair
from lockstep.verdict import Finding

_UNKNOWN = (*("unexplained", "other_outputs", "other_loss", "other_statistics", "scaled_gradient"),)
_STAGES = ("forward", "loss", "gradients", "statistics")
_CLOSE = 1e-3  # Relative; of factors that arrays give.
_MOST_TIMES = 64  # The largest factor that is looked for.

Rows = tuple[np.ndarray, np.ndarray]  # Of the same examples in both traces.


class Event(NamedTuple):
    """An array of a module: its input or output, or the gradient of the loss by it."""

    module: str
    is_output: bool


class Wrong(NamedTuple):
    """The first wrong event.

    Attributes:
        module: the module, with the name of the pass.
        cause: a key of `causes.CAUSES`.
        text: what is wrong.
        shards: the shards on which it is.
        distance: the largest relative distance of an example's array.
        allowed: the one that rounding can cause.
    """

    module: str
    cause: str
    text: str
    shards: list[int]
    distance: float
    allowed: float


def with_modules(pair: StepPair) -> list[Finding]:
    """Returns the findings of a step with the first wrong module, which may be their cause."""
    affected = [finding for finding in pair.findings if finding.stage in _STAGES]
    if not (affected and pair.computes_the_same and pair.has("data", "module_out")):
        return pair.findings
    found = first_wrong_module(pair)
    if found is None:
        return pair.findings
    return [_named(pair, f, found) if f in affected else f for f in pair.findings]


def _named(pair: StepPair, finding: Finding, found: Wrong) -> Finding:
    if finding.cause not in _UNKNOWN:
        return dataclasses.replace(finding, module=found.module)
    shards = [] if found.shards == [*pair.second.shards] else found.shards
    of_module = pair.second.found(found.cause, found.text, items=shards)
    return dataclasses.replace(
        finding, module=found.module, cause=found.cause, text=found.text, items=of_module.items
    )


def first_wrong_module(pair: StepPair) -> Wrong | None:
    """Returns the first wrong event of the forward pass, else of the backward pass."""
    step = _Step(pair)
    for number, event in enumerate(step.events):
        if wrong := step.wrong(number, event, is_backward=False):
            return wrong
    if any(finding.stage == "loss" for finding in pair.findings):
        return None
    for number, event in enumerate(reversed(step.events)):
        if wrong := step.wrong(len(step.events) + number, event, is_backward=True):
            return wrong
    return step.of_own_weights()


def events_of(modules: Sequence[str]) -> list[Event]:
    """Returns inputs and outputs in time; modules are in the order of their first calls."""
    found, open_modules = [], list[str]()
    for name in modules:
        while open_modules and not name.startswith(f"{open_modules[-1]}."):
            found.append(Event(open_modules.pop(), True))
        open_modules.append(name)
        found.append(Event(name, False))
    return [*found, *(Event(name, True) for name in reversed(open_modules))]


class _Step:
    """The modules of a step that both traces have.

    Attributes:
        events: their inputs and outputs in time.
    """

    def __init__(self, pair: StepPair):
        self._pair, self._located = pair, located_examples(pair)
        others = {name for s in pair.second.shards for name in pair.second.trace.modules_of(s)}
        self._modules = [name for name in pair.first.trace.about.modules if name in others]
        self.events = events_of(self._modules)
        layers = max(len(step.trace.about.layers) for step, _ in pair.both)
        self._depth = max(1.0, layers / max(len(self._modules), 1))  # Layers per recorded module.
        self._axes: dict[tuple[Event, int, int], int | None] = {}  # Of the examples.
        self._factors: dict[int, float] = {}  # Number in `_located` → that of its gradients.

    def wrong(self, number: int, event: Event, *, is_backward: bool) -> Wrong | None:
        """Returns what is wrong if an array differs on some shards."""
        allowed, found, shards = self.allowed(number), list[Rows](), list[int]()
        for place, located in enumerate(self._located):
            rows = self._rows(event, located, is_backward)
            if rows is None:
                continue
            factor = self._factor(place, located, rows) if is_backward else 1.0
            far = rows_apart([rows], factor)
            if not np.all(far <= allowed):
                found.append((factor * rows[0], rows[1]))
                shards.append(located.part.shard)
        if not found:
            return None
        first, second = (np.concatenate([rows[i] for rows in found]) for i in (0, 1))
        where, text = self._place(event, is_backward)
        cause = "other_backward" if is_backward else "other_outputs"
        if event.is_output != is_backward:
            cause, why = self._why(event, first, second, cause, allowed)
            text += why
        distance = float(np.max(rows_apart([(first, second)])))
        return Wrong(where, cause, text, sorted({*shards}), distance, allowed)

    def allowed(self, number: int) -> float:
        """Returns the relative distance that rounding can cause after a number of events.

        Each layer rounds its result, and these errors add up like a random walk. In float32, sums
        over features are rounded as often as they have terms; those of 16 bits are in float32.
        """
        dtypes = {
            step.trace.about_of(shard).computed_in
            for step, _ in self._pair.both
            for shard in step.shards
        }
        unit = max(UNITS.get(dtype, MARGIN * EPS) for dtype in dtypes)
        return unit * (1 + self._depth * number / 2) ** 0.5

    def _rows(self, event: Event, located: Located, is_backward: bool) -> Rows | None:
        """Returns an event's arrays of the same examples; None if they cannot be compared."""
        kind = ("module_out" if event.is_output else "module_in") + "_grad" * is_backward
        part, first, second = located.part, self._pair.first, self._pair.second
        parts = {(p.shard, p.number): p for p, _ in located.sources}
        own = _array(second, kind, part, event.module)
        arrays = {key: _array(first, kind, p, event.module) for key, p in parts.items()}
        whole = next(iter(arrays.values()))
        if own is None or whole is None or any(array is None for array in arrays.values()):
            return None
        sources = [(p.shard, p.number) for p, _ in located.sources]
        found: dict[int | None, Rows] = {}  # Axis of the examples → arrays.
        for axis in (0, 1):
            by_example = {key: _by_example(arrays[key], parts[key], axis) for key in parts}
            of_own = _by_example(own, part, axis)
            if of_own is None or any(each is None for each in by_example.values()):
                continue
            places = zip(sources, located.sources, strict=True)
            a = [dense(by_example[key])[row] for key, (_, row) in places]
            if {each.shape for each in a} == {of_own.shape[1:]}:
                found[axis] = np.stack(a), of_own[located.rows]
        if whole.shape == own.shape:  # Such as the embeddings of places, the same for all examples.
            found[None] = whole[None], own[None]
        place = event, part.shard, part.number
        if not is_backward and found:
            self._axes[place] = min(found, key=lambda x: float(np.max(rows_apart([found[x]]))))
        # The gradient of an array without examples is a sum over those of a batch.
        best = self._axes.get(place)
        return found.get(best) if best is not None or not is_backward else None

    def _factor(self, place: int, located: Located, rows: Rows) -> float:
        """Returns by what a mean over fewer examples multiplies their gradients."""
        if place not in self._factors:
            pairs = pairs_of("y_grad", located)
            self._factors[place] = usual_factor(pairs or [rows])
        return self._factors[place]

    def _place(self, event: Event, is_backward: bool) -> tuple[str, str]:
        """Returns the wrong module with its pass, and how it was found."""
        name, what = event.module, "backward" if is_backward else "forward"
        ancestors = [n for n in self._modules if name.startswith(f"{n}.")]
        children = any(n.startswith(f"{name}.") for n in self._modules)
        if event.is_output != is_backward:
            if is_backward:
                text = "the gradient of its output is right, and that of its input is not"
            else:
                text = "its input is right, and its output is not"
            text += "; its modules are right, so that it is its own code" if children else ""
            return f"{name}, {what}", text
        side = "after" if is_backward else "before"
        text = f"the first difference is in the code {side} {name}"
        return f"{ancestors[-1] if ancestors else f'{side} {name}'}, {what}", text

    def _why(
        self, event: Event, first: np.ndarray, second: np.ndarray, cause: str, allowed: float
    ) -> tuple[str, str]:
        """Returns the cause of a wrong array if a prediction confirms one, and a text."""
        times = usual_factor([(first, second)])
        if abs(times) > TINY and np.all(rows_apart([(first, second)], times) <= allowed):
            return cause, f": it is {times:.4g} times the right one"
        bias = dense(self._pair.states("before")[0].get(f"{event.module}.bias", np.zeros(0)))
        difference = dense(second) - dense(first)
        for axis in (-1, 2):  # Of channels, behind the examples and what they were split into.
            if not (bias.ndim == 1 and norm(bias) and difference.ndim > 2):
                continue
            moved = np.moveaxis(difference, axis, -1)
            if moved.shape[-1:] != bias.shape:
                continue
            more = float(np.mean(moved @ bias) / np.sum(bias**2))
            is_all = norm(moved - more * bias) <= allowed * norm(first)
            if is_all and abs(more - round(more)) < _CLOSE and event.is_output:
                text = f": its bias is added {round(more) + 1} times"
                return "repeated_bias" if more > 0 else cause, text
        return cause, ""

    def of_own_weights(self) -> Wrong | None:
        """Returns the module that has all weights with a wrong gradient, if it is one module."""
        far = self._pair.different_gradients
        owners = {
            max((m for m in self._modules if name.startswith(f"{m}.")), key=len, default="")
            for name in far
        }
        if not (far and len(owners) == 1 and "" not in owners and self._factors):
            return None
        text = "the gradients of its output and input are right, and those of its weights are not"
        allowed = max(self._pair.tolerance.allowed([*far]), self.allowed(2 * len(self.events)))
        if max(far.values()) <= allowed:
            return None
        where = f"{owners.pop()}, backward"
        return Wrong(where, "other_backward", text, [], max(far.values()), allowed)


def _array(step: Context, kind: str, part: Part, module: str) -> np.ndarray | None:
    return step.trace.of_module(step.position, kind, part.shard, part.number, module)


def _by_example(array: np.ndarray | None, part: Part, axis: int) -> np.ndarray | None:
    """Returns an array with one entry for each example; None if it has another shape."""
    size = len(part.arrays["data"][0])
    if array is None or array.ndim <= axis or not size:
        return None
    if axis:
        return np.moveaxis(array, 1, 0)[:, None] if array.shape[1] == size else None
    rows, rest = divmod(len(array), size)
    return None if rest else array.reshape(size, rows, *array.shape[1:])
