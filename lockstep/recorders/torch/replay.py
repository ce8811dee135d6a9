"""Starts each step from the state of another recording."""

import contextlib
import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.data.trace import STATISTIC, WEIGHT
from lockstep.numeric.arrays import Named
from lockstep.recorders.common import Request
from lockstep.recorders.parts import rows_of
from lockstep.recorders.states import Own, Source, States
from lockstep.recorders.torch.recording import Recording
from lockstep.recorders.torch.values import assign, set_random_states

_MOST_NAMED = 3  # Variables in a warning.


class Part(NamedTuple):
    """A forward pass of a replica in another recording: the bytes of its examples, if any."""

    number: int
    replica: int
    rows: list[bytes] | None
    random: list[Tensor]


class Replay:
    """The recording whose state is loaded before each recorded step.

    Args:
        recording: What has the model and its variables.
        request: What the script asks for: the other recording, and names there by names here.

    Raises:
        ValueError: A weight here is none there, or the recording does not have all steps.
    """

    def __init__(self, recording: Recording, request: Request) -> None:
        assert request.replay
        self.recording, self.placement = recording, recording.placement
        self.states = States("torch", request.replay, request.wanted, request.names)
        self.path, self.trace, self.name = request.path, self.states.trace, self.states.name
        self.not_loaded = self.states.not_loaded  # Names of variables.
        self.asked: dict[str, str] = {}  # Of what is not loaded: what to pass if it is a part.
        # Raises an error before the training, and not in one of its steps.
        self.sources = self._match()

    def _before(self, step: int) -> Named:
        place = self.placement
        return self.states.before(step, place.rank if self.trace.mesh else place.replica)

    def _own(self) -> Iterator[tuple[dict[str, str], Any]]:
        """Yields the variables here that are not optimizer state."""
        yield from self.recording.variables.of_model()
        yield from self.recording.variables.of_others()

    def _match(self) -> dict[str, Source]:
        """Returns what each weight and statistic is in the other recording."""
        pairs, mesh, states = [*self._own()], self.placement.mesh, self.states
        own = [Own(about, tuple(value.shape)) for about, value in pairs]

        def fits(index: int, array: np.ndarray) -> bool:
            name = own[index].name
            part = self.placement.own_part(self.placement.given(name), pairs[index][1], array)
            if part.shape != own[index].shape:
                asked = self.placement.asked(name, own[index].shape, array.shape)
                self.asked.setdefault(name, asked)
            return part.shape == own[index].shape

        is_part = bool(mesh and mesh.stages)
        found = states.sources(own, (WEIGHT, STATISTIC), is_part=is_part, fits=fits)
        sources = {own[index].name: source for index, source in found.items()}
        # Names there of a weight that here are several weights.
        tied = {name: first for first, *others in self.trace.about.tied for name in others}
        for each in own:
            if each.name in sources:
                continue
            if (first := tied.get(each.name)) in sources and each.name not in states.names:
                sources[each.name] = sources[first]
            elif each.about["kind"] == WEIGHT or each.name in states.names:
                asked = self.asked.get(each.name)
                raise ValueError(
                    f"replay={self.name}: {asked}" if asked else states.unmatched(each)
                )
        return sources

    # Examples and random numbers.

    def _random(self, step: int, replica: int) -> list[Tensor]:
        """Returns the random states of a replica's forward passes, of this rank if it has them."""
        trace, position = self.trace, self.states.position(step)
        if self.states.framework != "torch":
            return []
        found = enumerate(trace.arrays(position, "random", replica) or [])
        views = ((trace.views(position, "random", replica, i), array) for i, array in found)
        return [torch.tensor(own.get(self.placement.rank, array)) for own, array in views]

    def parts(self, step: int) -> Iterator[Part]:
        """Yields the forward passes of a step."""
        numbers = itertools.count()
        for replica in self.trace.shards:
            number = self.trace.micro_batches(self.states.position(step), replica)
            data = self.trace.arrays(self.states.position(step), "data", replica) or []
            states = self._random(step, replica)
            for start in range(number):
                own, of_each = data[start * len(data) // number :], len(states) // number
                random = states[start * of_each :][:of_each]
                rows = rows_of(own[0]) if own and own[0].ndim else []
                yield Part(
                    next(numbers), replica, None if own and not own[0].ndim else rows, random
                )

    # Loading.

    @property
    def loads_random(self) -> bool:
        """Whether random states are loaded: both trainings have as many replicas."""
        is_alike = self.trace.about.num_replicas == self.placement.num_replicas
        return self.states.framework == "torch" and is_alike

    def load(self) -> None:
        """Loads the state before this step, and its random state; warns of what does not fit."""
        step = self.recording.number
        try:
            before = self._before(step)
        except ValueError as error:
            warnings.warn(f"{self.path}: step {step}: nothing is loaded: {error}", stacklevel=2)
            return
        if before:
            self._load_variables(step, before)
        if self.loads_random:
            set_random_states(self._random(step, self.placement.replica))

    @torch.no_grad()
    def _load_variables(self, step: int, before: Named) -> None:
        known = {*self.not_loaded}
        for variable, value in self._own():
            name = variable["name"]
            if any(name.startswith(f"{key}.") for key in self.recording.called_others):
                self.not_loaded[name] = None  # The graph of this step has its values.
                continue
            source = self.sources.get(name)
            array = source.of(before) if source else None
            if array is not None:
                self._loaded(name, self.placement.given(name), value, array)
            elif self.states.framework == "torch":
                self.not_loaded[name] = None
        if self.states.framework == "torch":
            # Optimizers by turns update other weights in other steps; that of this one comes last.
            settings, position = self.trace.about.settings, self.states.position(step)
            groups = itertools.chain(*settings, *settings[position : position + 1])
            classes = {x: str(group.get("optimizer")) for group in groups for x in group["weights"]}
            for name, p in self.recording.weights.items():
                self._load_state(name, p, before, classes)
        if new := [name for name in self.not_loaded if name not in known]:
            text = ", ".join(new[:_MOST_NAMED])
            text += f" and {len(new) - _MOST_NAMED} more" if len(new) > _MOST_NAMED else ""
            why = "not in it, or of another shape or optimizer"
            why += next((f"; {self.asked[name]}" for name in new if self.asked.get(name)), "")
            warnings.warn(
                f"{self.path}: step {step}: not loaded from {self.name}: {text}: {why}",
                stacklevel=2,
            )

    def _load_state(self, name: str, p: Tensor, before: Named, classes: Mapping[str, str]) -> None:
        """Loads the state of a weight into its optimizer, if that has the recorded class."""
        source = self.sources[name].key if name in self.sources else ""
        variables = ((self.trace.variables[key], array) for key, array in before.items())
        slots = {v.slot: array for v, array in variables if source and v.of == source}
        owners = self.recording.variables.owners_of(name)
        same = [x for x in owners if type(x).__name__ == classes.get(source)]
        # Of several that update it, the one that keeps such state.
        optimizer = max(
            same or owners,
            key=lambda x: len(slots.keys() & x.state.get(p, {}).keys()),
            default=None,
        )
        if optimizer is None:
            return
        old = optimizer.state.get(p, {})
        if same:
            optimizer.state.pop(p, None)
        else:  # One of another class may have some of the slots.
            slots = {slot: array for slot, array in slots.items() if slot in old}
        is_known = type(optimizer).__module__.partition(".")[0] == "torch"
        if slots and not old and not is_known:  # Which part of the state this rank has.
            self.not_loaded |= dict.fromkeys(f"{name}/{slot}" for slot in slots)
        elif slots:
            state = optimizer.state[p] = {**old}  # With slots that the file lacks.
            for slot, array in slots.items():
                is_like = array.shape == before[source].shape
                text = self.placement.given(name, slot, is_like=is_like)
                new = torch.zeros_like(p) if is_like else torch.tensor(array)
                value = new if old.get(slot) is None else old[slot]
                found = self._loaded(f"{name}/{slot}", text, value, array)
                if found is not None:
                    state[slot] = found

    def _loaded(self, name: str, text: str, value: Any, array: np.ndarray) -> Any:
        """Returns a tensor or number with the values of an array, or of the part of this rank.

        Args:
            name: Of the variable.
            text: How it is a part of the whole array.
            value: A tensor, which is changed, or a number.
            array: The whole array.

        Returns:
            None if the array does not fit, which is noted.
        """
        found: Any = None
        if isinstance(value, Tensor):
            array = self.placement.own_part(text, value, array)
            found = _assigned(value, array)
            if found is None:
                self.asked.setdefault(name, self.placement.asked(name, value.shape, array.shape))
        elif isinstance(value, bool | int | float) and array.size == 1:
            found = type(value)(array.item())
        if found is None:
            self.not_loaded[name] = None
        return found


def _assigned(value: Tensor, array: np.ndarray) -> Tensor | None:
    """Returns a tensor with the values of an array; None if it has another shape, or stays."""
    if tuple(value.shape) != array.shape:
        return None
    if value.is_sparse:
        dense = torch.tensor(array, dtype=value.dtype, device=value.device)
        return dense.to_sparse(value.sparse_dim())
    with contextlib.suppress(RuntimeError, TypeError, ValueError):  # It cannot be changed.
        found: Tensor = assign(value, array)
        return found
    return None
