"""The states of another recording, from which each recorded step starts (`replay=`)."""

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.data.file import TraceError, load
from lockstep.data.match import Matching
from lockstep.data.trace import STATE, STATISTIC, WEIGHT, About, Trace, Variable
from lockstep.numeric.arrays import Named
from lockstep.recorders.common import axes_between, require

Fits = Callable[[int, np.ndarray], bool]


class Own(NamedTuple):
    """A variable of the training that is recorded; `dtype` has the kind of its numbers, or ""."""

    about: Mapping[str, str]
    shape: tuple[int, ...]
    dtype: str = ""

    @property
    def name(self) -> str:
        """Its name."""
        return self.about["name"]


class Source(NamedTuple):
    """A variable of the other recording, and the permutation of its axes to those here."""

    key: str
    axes: tuple[int, ...]

    def of(self, before: Named) -> np.ndarray | None:
        """Returns its array in the layout here; None if it has none in this step."""
        array = before.get(self.key)
        return None if array is None else np.transpose(array, self.axes)


class States:
    """The states before the steps of another recording, of all its processes.

    A sampled one has the whole state before its first step alone: the script continues from there.

    Args:
        framework: that of the training that is recorded.
        path: its file, `one.npz`, also for `one.rank0.npz` and further ones.
        wanted: numbers of the steps that are recorded here.
        names: name of a variable here → its name there.

    Attributes:
        trace: the recording.
        name: name of its file.
        names: the same.
        not_loaded: names of own variables that are not loaded, in their order.

    Raises:
        ValueError: it cannot be read, or does not have the steps or the whole state.
    """

    def __init__(
        self, framework: str, path: str, wanted: Collection[int], names: Mapping[str, str]
    ) -> None:
        try:
            self.trace = load(path)
        except TraceError as error:
            raise ValueError(f"replay={error}") from None
        self._framework, self._path = framework, path
        self.name, self.names = os.path.basename(path), names
        self.not_loaded: dict[str, None] = {}
        self._first = min(wanted)
        positions = enumerate(self.trace.steps)
        steps = [step for position, step in positions if self.trace.has(position, "before")]
        missing = sorted({*wanted} - {*steps})
        require(not missing, f"replay={path}: lacks steps {missing}; it has {steps}")
        self._kind = "start" if self.trace.about.sample else "before"
        require(
            self.trace.has(self.position(self._first), self._kind),
            f"replay={path}: is recorded with sample=, without the whole state before step"
            f" {self._first}; record it with start=True, or leave out replay=",
        )

    @property
    def framework(self) -> str:
        """The framework that was recorded."""
        return self.trace.about.framework

    def position(self, step: int) -> int:
        """Returns the position of a step."""
        return self.trace.steps.index(step)

    def before(self, step: int, copy: int) -> Named:
        """Returns key → array before a step, of a copy of the weights or of another one.

        It is empty if a sampled recording has no whole arrays of the step.
        """
        copies = self.trace.copies
        return self.trace.named(self.position(step), self._kind, copy % len(copies)) or {}

    def sources(
        self, own: Sequence[Own], kinds: Collection[str], *, is_part: bool = False,
        fits: Fits | None = None,
    ) -> dict[int, Source]:  # fmt: skip
        """Matches own variables of some kinds: by name, else as a comparison does.

        Args:
            own: all variables here.
            kinds: those to match.
            is_part: whether they are a part of the model: others than those of equal names are not
                matched.
            fits: whether an array, in the layout here, fits the own variable of an index. By
                default, that has its shape.

        Returns:
            Index of a variable here → what it is there.

        Raises:
            ValueError: `names` has a variable that does not exist here.
        """
        unknown = self.names.keys() - {each.name for each in own}
        listed = ", ".join(sorted(unknown))
        require(is_part or not unknown, f"names has {listed}, which the model does not have")
        others, found = self.before(self._first, 0), dict[int, Source]()
        variables = {key: self.trace.variables[key] for key in others}
        wanted = [self.names.get(each.name, each.name) for each in own]
        free = [key for key, v in variables.items() if v.name not in wanted]
        named = {v.name for v in variables.values()}
        left = [each for each, name in zip(own, wanted, strict=True) if name not in named]
        pairs = {} if is_part else self._paired(left, [variables[key] for key in free])
        partners = {"": ""}  # Weight here → weight there.
        for index, each in enumerate(own):
            if each.about["kind"] not in kinds:
                continue
            if source := pairs.get(each.name):
                found[index], partners[each.name] = source, variables[source.key].name
                continue
            options = [key for key, v in variables.items() if v.name == wanted[index]]
            is_named, is_state = bool(options), each.about["kind"] not in (WEIGHT, STATISTIC)
            if is_state and not (is_named or is_part or each.name in self.names):
                options = free
            options = [key for key in options if self._is_alike(each, variables[key], partners)]
            options.sort(key=lambda key: variables[key].slot != each.about.get("slot", ""))
            for key in options:
                array, layout = np.asarray(others[key]), variables[key].layout
                axes = axes_between(layout, each.about.get("layout", ""), array.ndim)
                source, array = Source(key, axes), np.transpose(array, axes)
                if fits(index, array) if fits else _has_shape(each, array):
                    found[index], partners[each.name] = source, variables[key].name
                    free = [other for other in free if other != key]
                    break
        return found

    def _paired(self, own: Sequence[Own], others: Sequence[Variable]) -> dict[str, Source]:
        """Returns what weights and statistics are there whose names differ, by their names here."""
        kinds = WEIGHT, STATISTIC
        first = [
            Variable(x.name, x.about["kind"], x.about.get("layout", ""), shape=x.shape)
            for x in own if x.about["kind"] in kinds and x.name not in self.names
        ]  # fmt: skip
        second, arrays = [v for v in others if v.kind in kinds], self.before(self._first, 0)
        second = [dataclasses.replace(v, shape=np.shape(arrays[v.name])) for v in second]
        here = Trace(About(self._framework, 1, variables=tuple(first)))
        there = Trace(About(self.framework, 1, variables=tuple(second)))
        pairs = Matching(here, there, {}).pairs
        return {pair.first: Source(pair.second, pair.transpose) for pair in pairs}

    def _is_alike(self, own: Own, other: Variable, partners: Mapping[str, str]) -> bool:
        """Returns whether kinds, weights and slots of two variables may be the same."""
        about = own.about
        # A weight that one of both freezes is no weight there.
        is_named = other.name == self.names.get(own.name, own.name)
        is_kind = is_named and {about["kind"], other.kind} <= {WEIGHT, STATISTIC}
        if (
            not (is_kind or about["kind"] == other.kind)
            or partners.get(about.get("of", "")) != other.of
        ):
            return False
        # Scripts of JAX have names of their own for the state of a weight.
        is_named_freely = self.framework == "jax" and bool(other.of)
        return about.get("slot", "") == other.slot or is_named_freely

    def unmatched(self, own: Own) -> str:
        """Returns that a variable matches none there, and those that there are, in words."""
        kind, others = own.about["kind"], self.before(self._first, 0)
        kinds = self.trace.kinds
        listed = ", ".join(f"{k} {x.shape}" for k, x in others.items() if kinds[k] == kind)
        return (
            f"replay={self._path}: no {kind} fits {own.name} {own.shape}; it has"
            f" {listed or 'none'}; pass names={{{own.name!r}: its name}}"
        )

    def require_all(
        self, own: Sequence[Own], found: Mapping[int, Source], kinds: Collection[str]
    ) -> None:
        """Notes the variables of some kinds that are not matched.

        Raises:
            ValueError: a weight or a statistic is not.
        """
        for index, each in enumerate(own):
            if index not in found and each.about["kind"] in (WEIGHT, STATISTIC):
                raise ValueError(self.unmatched(each))
            if index not in found and each.about["kind"] == STATE and STATE in kinds:
                self.not_loaded[each.name] = None


def _has_shape(own: Own, array: np.ndarray) -> bool:
    """Returns whether an array has an own shape; a counter does not fit a learning rate."""
    is_kind = bool(own.shape) or not own.dtype or own.dtype == array.dtype.kind
    return array.shape == own.shape and is_kind
