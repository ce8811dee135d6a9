"""The first wrong module: the place within a step's outputs and gradients.

In a forward pass, inputs and outputs of modules are events in time; the backward pass has them in
reverse. What an event gives depends on earlier ones only: if these are right, the module that ends
with the first wrong event is wrong, or the code around it. It is said of a step that is wrong, and
decides nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.data.trace import Mesh
from lockstep.engine.examples import Matched, Part, factors_of, rows_apart
from lockstep.engine.look import Look
from lockstep.engine.step import Step
from lockstep.engine.verdict import GRADIENT, LOSS, OUTPUTS, SUM
from lockstep.numeric.arrays import EPS, MARGIN, UNITS, dense

NODES = OUTPUTS, LOSS, GRADIENT, SUM
# Blocks of a dimension each of which ranks split, as queries, keys and values: up to 8 of them.
BLOCKS = 1, 2, 3, 4, 6, 8

Rows = tuple[np.ndarray, np.ndarray]  # Of the same examples in both trainings.


class Event(NamedTuple):
    """An array of a module: its input or output, or the gradient of the loss by it."""

    module: str
    is_output: bool


def events_of(modules: Sequence[str]) -> list[Event]:
    """Returns inputs and outputs in time; modules are in the order of their first calls."""
    found, open_modules = [], list[str]()
    for name in modules:
        while open_modules and not name.startswith(f"{open_modules[-1]}."):
            found.append(Event(open_modules.pop(), True))
        open_modules.append(name)
        found.append(Event(name, False))
    return [*found, *(Event(name, True) for name in reversed(open_modules))]


def first_wrong(look: Look, node: str) -> str:
    """Returns the first wrong module and its pass, as in "layers.3.attn.wo, backward".

    Args:
        look: the step.
        node: its first wrong node.

    Returns:
        "" if modules were not recorded, or are all right.
    """
    if node not in NODES or not look.pair.has("data", "module_out"):
        return ""
    passes = _Passes(look)
    found = passes.first_wrong(is_backward=False)
    if not found and node != LOSS:
        found = passes.first_wrong(is_backward=True) or passes.of_own_weights()
    return found


class _Passes:
    """The forward and backward passes of the modules of a step that both trainings have."""

    def __init__(self, look: Look) -> None:
        self._look, pair = look, look.pair
        self._steps = pair.reference, pair.training
        others = {name for s in pair.shards for name in pair.training.trace.modules_of(s)}
        self._modules = [name for name in pair.reference.trace.about.modules if name in others]
        self.events = events_of(self._modules)
        traces = pair.reference.trace, pair.training.trace
        self._depth = max(len(trace.about.layers) for trace in traces) / max(len(self._modules), 1)
        dtypes = {trace.about_of(shard).computed_in for trace in traces for shard in trace.shards}
        self._unit = max(UNITS.get(dtype, MARGIN * EPS) for dtype in dtypes)
        self._factors: dict[int, float] = {}  # Number in `matched` → that of its gradients.
        self._axes: dict[tuple[Event, int], int | None] = {}  # → Axis of the examples.

    def first_wrong(self, *, is_backward: bool) -> str:
        """Returns the module of the first wrong event of a pass.

        Ranks may have summands of an array as long as the code adds them before it uses them.
        """
        start, summed = len(self.events) if is_backward else 0, list[Event]()
        for number, event in enumerate(self.events[:: -1 if is_backward else 1]):
            how = self._judge(event, start + number, is_backward)
            if how == "wrong":
                return self._place(summed[0] if summed else event, is_backward)
            if how:
                summed = [*summed, event] if how == "summed" else []
        return self._place(summed[0], is_backward) if summed and is_backward else ""

    def _judge(self, event: Event, number: int, is_backward: bool) -> str:
        """Returns "right", "wrong", or "summed" if ranks have parts of a sum; "" if unknown."""
        # Each layer rounds its result, and these errors add up like a random walk.
        allowed = self._unit * (1 + max(1.0, self._depth) * number / 2) ** 0.5
        found, axes = "", ("", *self._look.pair.training.trace.model_axes)
        for place, matched in enumerate(self._look.matched):
            options = [self._rows(event, place, matched, is_backward, axis) for axis in axes]
            if not options[0]:
                continue
            if is_backward and place not in self._factors:
                # A mean over fewer examples multiplies all gradients of a forward pass.
                factors = factors_of([options[0][0]])
                known = np.isfinite(factors)
                self._factors[place] = float(np.median(factors[known])) if known.any() else 0.0
            factor = self._factors[place] if is_backward else 1.0
            fits = [bool(o) and all(_apart(x, factor) <= allowed for x in o) for o in options]
            if not any(fits):
                return "wrong"
            found = found or "right" if fits[0] else "summed"
        return found

    def _place(self, event: Event, is_backward: bool) -> str:
        name, what = event.module, "backward" if is_backward else "forward"
        if event.is_output != is_backward:
            return f"{name}, {what}"
        ancestors = [other for other in self._modules if name.startswith(f"{other}.")]
        side = "after" if is_backward else "before"
        return f"{ancestors[-1] if ancestors else f'{side} {name}'}, {what}"

    def of_own_weights(self) -> str:
        """Returns the module that has all weights with a wrong gradient; "" for several."""
        wrong = {name for names in self._look.wrong_sums.values() for name in names}
        owners = {
            max((m for m in self._modules if name.startswith(f"{m}.")), key=len, default="")
            for name in wrong
        }
        return f"{owners.pop()}, backward" if len(owners) == 1 and "" not in owners else ""

    # Arrays side by side.

    def _rows(
        self, event: Event, place: int, matched: Matched, is_backward: bool, sum_over: str
    ) -> list[Rows]:
        """Returns each rank's array of an event, of the same examples as in the reference.

        Args:
            event: the event.
            place: the number of the forward pass.
            matched: its examples.
            is_backward: whether gradients are asked for.
            sum_over: axis of the mesh over which the arrays of ranks are added, if they differ.
        """
        kind = ("module_out" if event.is_output else "module_in") + "_grad" * is_backward
        first, second = self._steps
        parts = {(p.shard, p.number): p for p, _ in matched.sources}
        right = {k: _copies(first, kind, p, event.module).get(-1) for k, p in parts.items()}
        known = {key: array for key, array in right.items() if array is not None}
        copies = _copies(second, kind, matched.part, event.module)
        if len(known) < len(parts) or not copies:
            return []
        like, mesh = next(iter(known.values())), second.trace.mesh
        if mesh and sum_over:
            groups = groups_along(sum_over, copies, mesh)
            if all(np.array_equal(own, group[0]) for group in groups for own in group):
                return []  # Copies of a mean, or of another array that is wrong.
            copies = {number: np.sum(group, axis=0) for number, group in enumerate(groups)}
        options = []
        for whole in wholes_of(copies, like, mesh) if mesh else [[*copies.values()][:1]]:
            rows = [self._aligned(event, place, matched, known, x, is_backward) for x in whole]
            options.append([each for each in rows if each is not None])
        best = [max((_apart(rows, 1.0) for rows in each), default=np.inf) for each in options]
        return options[int(np.argmin(best))] if best else []

    def _aligned(
        self, event: Event, place: int, matched: Matched,
        right: Mapping[tuple[int, int], np.ndarray], own: np.ndarray, is_backward: bool,
    ) -> Rows | None:  # fmt: skip
        """Returns the arrays of the same examples; None if they cannot be compared."""
        found: dict[int | None, Rows] = {}  # Axis of the examples → arrays.
        for axis in (0, 1):
            of_own, a = _by_example(own, matched.part, axis), list[np.ndarray]()
            for part, row in matched.sources:
                by_example = _by_example(right[part.shard, part.number], part, axis)
                a += [dense(by_example[row])] if by_example is not None else []
            is_known = of_own is not None and len(a) == len(matched.sources)
            if of_own is not None and is_known and {x.shape for x in a} == {of_own.shape[1:]}:
                found[axis] = np.stack(a), of_own[[*matched.rows]]
        like = dense(next(iter(right.values())))
        if like.shape == own.shape:  # Such as the embeddings of places, the same for all examples.
            found[None] = like[None], own[None]
        if not is_backward and found:
            # Of equal pairs, an example is farther by the root of their number at most.
            times = {axis: 2 * len(matched.rows) ** 0.5 if axis is None else 1 for axis in found}
            self._axes[event, place] = min(found, key=lambda x: times[x] * _apart(found[x], 1.0))
        # The gradient of an array without examples is a sum over those of a batch.
        best = self._axes.get((event, place))
        return found.get(best) if best is not None or not is_backward else None


def _apart(rows: Rows, factor: float) -> float:
    """Returns the largest relative distance of the arrays of an example; inf for NaN."""
    far = float(np.max(rows_apart([rows], factor), initial=0.0))
    return np.inf if np.isnan(far) else far


def _copies(step: Step, kind: str, part: Part, module: str) -> dict[int, np.ndarray]:
    """Returns rank → its array of a module; with -1 → that of any rank."""
    index = step.trace.index_of(module, part.shard, part.number)
    found = step.trace.of_module(step.position, kind, part.shard, part.number, module)
    if found is None or index is None:
        return {}
    return {-1: found} | step.trace.views(step.position, kind, part.shard, index)


def groups_along(axis: str, copies: Mapping[int, np.ndarray], mesh: Mesh) -> list[list[np.ndarray]]:
    """Returns groups of the arrays of ranks along an axis; none if one is missing."""
    groups: dict[tuple[int, ...], list[np.ndarray]] = {}
    for rank in sorted(copies.keys() - {-1}):
        at = mesh.coordinates(rank)
        groups.setdefault((*(at[x] for x in at if x != axis),), []).append(copies[rank])
    found = [*groups.values()]
    is_whole = all(len(x) == mesh.axes[axis] and len({a.shape for a in x}) == 1 for x in found)
    return found if is_whole else []


def wholes_of(
    copies: Mapping[int, np.ndarray], like: np.ndarray, mesh: Mesh
) -> Iterator[list[np.ndarray]]:
    """Yields the global arrays of ranks whose own arrays may be parts of them.

    The shape of the reference's array says whether a dimension is split, or blocks of it.
    """
    arrays = [array for rank, array in copies.items() if rank >= 0 or len(copies) == 1]
    shape = arrays[0].shape if arrays else ()
    other = [d for d in range(1, len(shape)) if shape[d : d + 1] != like.shape[d : d + 1]]
    if len(shape) != like.ndim or not other:
        yield arrays
        return
    for axis in mesh.model_axes if len(other) == 1 else ():
        along = other[0]
        for number in BLOCKS if shape[along] * mesh.axes[axis] == like.shape[along] else ():
            if shape[along] % number == 0:
                groups = groups_along(axis, copies, mesh)
                split = [[np.split(own, number, along) for own in group] for group in groups]
                yield [
                    np.concatenate([own[b] for b in range(number) for own in group], along)
                    for group in split
                ]


def _by_example(array: np.ndarray, part: Part, axis: int) -> np.ndarray | None:
    """Returns an array with one entry for each example; None if it has another shape."""
    size = len(part.arrays["data"][0])
    if array.ndim <= axis or not size:
        return None
    if axis:
        return np.moveaxis(array, 1, 0)[:, None] if array.shape[1] == size else None
    rows, rest = divmod(len(array), size)
    return None if rest else array.reshape(size, rows, *array.shape[1:])
