"""Names the first module whose output, or gradient, is not that of the reference.

In a forward pass, inputs and outputs of modules are events in time; the backward pass has them in
reverse. What an event gives depends on earlier ones only: if these are right, the module that ends
with the first wrong event is wrong, or the code around it.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lockstep.answer.causes import OF_WEIGHTS
from lockstep.answer.verdict import Finding
from lockstep.explain.axes import sizes_of_axes
from lockstep.explain.pairing import Located, located_examples
from lockstep.numeric.arrays import EPS, MARGIN, TINY, UNITS, dense, norm
from lockstep.reference import StepPair
from lockstep.stages.forward import usual_factor
from lockstep.stages.module_arrays import Event, ModuleArrays, Rows, apart, events_of

_UNKNOWN = {"unexplained", "other_outputs", "other_loss", "other_statistics", "scaled_gradient"}
_STAGES = ("forward", "loss", "gradients", "statistics")
_CLOSE = 1e-3  # Relative; of factors that arrays give.


class Wrong(NamedTuple):
    """The first wrong event.

    Attributes:
        module: the module, with the name of the pass; "" if weights of several are wrong alone.
        detail: a key of `causes.DETAILS`.
        text: what is wrong.
        shards: the shards on which it is.
        distance: the largest relative distance of an example's array.
        allowed: the one that rounding can cause.
    """

    module: str
    detail: str
    text: str
    shards: list[int]
    distance: float
    allowed: float


def with_modules(pair: StepPair) -> list[Finding]:
    """Returns the findings of a step with the first wrong module, which may be their cause."""
    affected = [finding for finding in pair.findings if finding.stage in _STAGES]
    if not (affected and pair.computes_the_same and pair.has("data", "module_out")):
        return pair.findings
    if not (found := first_wrong_module(pair)):
        return pair.findings
    return [_named(pair, f, found) if f in affected else f for f in pair.findings]


def _named(pair: StepPair, finding: Finding, found: Wrong) -> Finding:
    if not found.module:  # The backward pass of modules is right.
        is_known = finding.detail not in ("unexplained", "other_backward")
        text = f"{finding.text}; {found.text}"
        return finding if is_known else dataclasses.replace(finding, text=text, seen=OF_WEIGHTS)
    if finding.detail not in _UNKNOWN:
        return dataclasses.replace(finding, module=found.module)
    shards = [] if found.shards == [*pair.second.shards] else found.shards
    of_module = pair.second.found("gradients", found.detail, found.text, items=shards)
    return dataclasses.replace(
        finding, module=found.module, detail=found.detail, text=found.text, items=of_module.items
    )


def first_wrong_module(pair: StepPair) -> Wrong | None:
    """Returns the first wrong event of the forward pass, else of the backward pass."""
    return _Step(pair).first_wrong_of_all()


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
        self._arrays = ModuleArrays(pair.first, pair.second)
        shards = [(step, shard) for step, _ in pair.both for shard in step.shards]
        dtypes = {step.trace.about_of(shard).computed_in for step, shard in shards}
        self._unit = max(UNITS.get(dtype, MARGIN * EPS) for dtype in dtypes)
        self._compared = set[Event]()
        self._factors: dict[int, float] = {}  # Number in `_located` → that of its gradients.

    def first_wrong_of_all(self) -> Wrong | None:
        """Returns the first wrong event of the forward pass, else of the backward pass."""
        if found := self.first_wrong(is_backward=False):
            return found
        if any(finding.stage == "loss" for finding in self._pair.findings):
            return None
        return self.first_wrong(is_backward=True) or self._of_own_weights()

    def first_wrong(self, *, is_backward: bool) -> Wrong | None:
        """Returns what is wrong in the first wrong event of a pass.

        Ranks may have summands of an array as long as the code adds them before it uses them.
        """
        start = len(self.events) if is_backward else 0
        self._summands: list[tuple[Event, str]] = []  # Of the events just before, and their axis.
        for number, event in enumerate(self.events[:: -1 if is_backward else 1]):
            if found := self._wrong(start + number, event, is_backward):
                return self._not_reduced(found, is_backward) or found
        is_last = is_backward or self._pair.found_in("forward")
        nowhere = Wrong("", "", "", [], 0.0, self.allowed(start))
        return self._not_reduced(nowhere, is_backward) if is_last else None

    def _wrong(self, number: int, event: Event, is_backward: bool) -> Wrong | None:
        """Returns what is wrong if an array differs on some shards."""
        allowed, axes = self.allowed(number), set[str]()
        found: list[tuple[int, Rows]] = []
        arrays = [self._arrays.rows(event, located, is_backward) for located in self._located]
        if not any(arrays):
            return None
        self._compared.add(event)
        for place, (located, copies) in enumerate(zip(self._located, arrays, strict=True)):
            if not copies:
                continue
            factor = self._factor(place, copies[0]) if is_backward else 1.0
            worst = max(copies, key=lambda rows: apart(rows, factor))
            if apart(worst, factor) <= allowed:
                continue
            if axis := self._axis_of_summands(event, located, is_backward, factor, allowed):
                axes.add(axis)
            else:
                found.append((place, (factor * worst[0], worst[1])))
        if not found:
            self._summands = [*self._summands, (event, axes.pop())] if axes else []
            return None
        first, second = (np.concatenate([rows[i] for _, rows in found]) for i in (0, 1))
        where, text = self._place(event, is_backward)
        cause = "other_backward" if is_backward else "other_outputs"
        if event.is_output != is_backward:
            places = [] if is_backward else [place for place, _ in found]
            usual = _why_factor(self._pair, cause, (first, second), allowed)
            cause, why = self._with_bias(event, places, allowed) or usual
            text += why
        shards = sorted({self._located[i].part.shard for i, _ in found})
        return Wrong(where, cause, text, shards, apart((first, second), 1.0), allowed)

    def _axis_of_summands(
        self, event: Event, located: Located, is_backward: bool, factor: float, allowed: float
    ) -> str:
        """Returns an axis of the mesh along which arrays add up to the right one; "" if none."""
        for axis in self._pair.second.trace.model_axes:
            sums = self._arrays.rows(event, located, is_backward, axis)
            if sums and all(apart(rows, factor) <= allowed for rows in sums):
                return axis
        return ""

    def _not_reduced(self, found: Wrong, is_backward: bool) -> Wrong | None:
        """Returns where the sum of the arrays of ranks was right until the code used them."""
        if not self._summands:
            return None
        event, axis = self._summands[0]
        where, _ = self._place(event, is_backward)
        what = "the gradient of its input" if is_backward else "its output"
        text = f"each rank along {axis} has its own part of {what}: the sum over {axis} is right"
        cause = "forgotten_backward_sum" if is_backward else "partial_not_reduced"
        return found._replace(module=where, detail=cause, text=f"{text}, and is not reduced")

    def allowed(self, number: int) -> float:
        """Returns the relative distance that rounding can cause after a number of events.

        Each layer rounds its result, and these errors add up like a random walk. In float32, sums
        over features are rounded as often as they have terms; those of 16 bits are in float32.
        """
        return self._unit * (1 + self._depth * number / 2) ** 0.5

    def _factor(self, place: int, rows: Rows) -> float:
        """Returns the factor of the gradients of a forward pass: that of the first ones.

        A mean over fewer examples, or over a part of a sequence, multiplies all of them.
        """
        if place not in self._factors:
            self._factors[place] = usual_factor([rows])
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
                is_known = Event(name, is_output=False) in self._compared
                before = "its input is" if is_known else "the modules before it are"
                text = f"{before} right, and its output is not"
            text += "; its modules are right, so that it is its own code" if children else ""
            return f"{name}, {what}", text
        side = "after" if is_backward else "before"
        text = f"the first difference is in the code {side} {name}"
        return f"{ancestors[-1] if ancestors else f'{side} {name}'}, {what}", text

    def _with_bias(
        self, event: Event, places: Sequence[int], allowed: float
    ) -> tuple[str, str] | None:
        """Explains an output, or its sum over ranks, by a bias that is added several times."""
        axes = self._pair.second.trace.model_axes
        weights = self._pair.states("before")[0]
        names = [n for n in weights if n.replace("/", ".").startswith(event.module)]
        own = {name: dense(weights[name]) for name in names}
        biases = {name: bias for name, bias in own.items() if bias.ndim == 1 and norm(bias)}
        for axis in ("", *axes):
            of_each = [self._arrays.rows(event, self._located[i], False, axis) for i in places]
            if not (of_each and all(of_each)):
                continue
            first, second = (dense(np.concatenate([r[0][i] for r in of_each])) for i in (0, 1))
            for name, bias in biases.items():
                times = _times_added(second - first, bias, allowed * norm(first))
                if axis and times == axes[axis] - 1:
                    text = f": without {name}, the sum of the ranks' outputs over {axis} is right"
                    return "partial_not_reduced", f"{text}, and is not reduced"
                if times and not axis:
                    cause = "repeated_bias" if times > 0 else "other_outputs"
                    return cause, f": {name} is added {times + 1} times"
        return None

    def _of_own_weights(self) -> Wrong | None:
        """Returns the module that has all weights with a wrong gradient; "" for several."""
        far = self._pair.different_gradients
        owners = {
            max((m for m in self._modules if name.startswith(f"{m}.")), key=len, default="")
            for name in far
        }
        if not (far and "" not in owners and self._factors):
            return None
        is_one = len(owners) == 1
        places = "its output and input" if is_one else "outputs and inputs of modules"
        weights = "its weights" if is_one else "these weights"
        text = f"the gradients of {places} are right, and those of {weights} are not"
        allowed = max(self._pair.tolerance.allowed([*far]), self.allowed(2 * len(self.events)))
        if max(far.values()) <= allowed:
            return None
        where = f"{owners.pop()}, backward" if is_one else ""
        return Wrong(where, "other_backward", text, [], max(far.values()), allowed)


def _why_factor(pair: StepPair, cause: str, rows: Rows, allowed: float) -> tuple[str, str]:
    """Returns a cause and a text if an array is a multiple of the right one; else `cause`, ""."""
    times = usual_factor([rows])
    if not (abs(times) > TINY and apart(rows, times) <= allowed):
        return cause, ""
    text = f": it is {times:.4g} times the right one"
    for factor, named, why in sizes_of_axes(pair):
        if abs(times - factor) <= allowed * factor:
            return named, f"{text}, {why}"
    return cause, text


def _times_added(more: np.ndarray, bias: np.ndarray, allowed: float) -> int:
    """Returns how many times a bias is in an array with channels; 0 if it is not."""
    for axis in (-1, 2):  # Of channels, behind the examples and what they were split into.
        moved = np.moveaxis(more, axis, -1) if more.ndim > 2 else more
        if moved.shape[-1:] == bias.shape:
            times = float(np.mean(moved @ bias) / np.sum(bias**2))
            if norm(moved - times * bias) <= allowed and abs(times - round(times)) < _CLOSE:
                return round(times)
    return 0
