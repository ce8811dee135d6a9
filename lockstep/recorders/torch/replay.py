"""Starts each step from the state of another recording."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.data.trace import STATISTIC, WEIGHT, Variable
from lockstep.numeric.arrays import Named
from lockstep.recorders.common import Request
from lockstep.recorders.states import Own, Source, States
from lockstep.recorders.torch.recording import Recording
from lockstep.recorders.torch.values import assign, is_dtensor, set_random_states, to_array

_MOST_NAMED = 3  # Variables in a warning.


class Part(NamedTuple):
    """A forward pass of a replica in another recording: the bytes of its examples, if any."""

    replica: int
    rows: list[bytes] | None
    random: list[Tensor]
    number: int = 0


def rows_of(batch: np.ndarray) -> list[bytes] | None:
    """Returns the bytes of each example; None of a number."""
    return [row.tobytes() for row in batch] if batch.ndim else None


class Replay:
    """The recording whose state is loaded before each recorded step.

    Args:
        recording: What has the model and its variables.
        request: What the script asks for: the other recording, and names there by names here.
        path: That of this recording, for warnings.

    Attributes:
        states: The states of that recording.
        trace: The recording.
        name: Name of its file.
        not_loaded: Names of variables that were not loaded.

    Raises:
        ValueError: A weight here is none there, or the recording does not have all steps.
    """

    def __init__(self, recording: Recording, request: Request, path: str) -> None:
        assert request.replay
        self.recording, self.placement = recording, recording.placement
        self.states = States("torch", request.replay, request.wanted, request.names)
        self.path, self.trace, self.name = path, self.states.trace, self.states.name
        self.not_loaded = self.states.not_loaded
        self.twins: dict[str, str] = {}  # Copies of a weight that the other recording has once.
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

        def fits(index: int, array: np.ndarray, is_named: bool) -> bool:
            name, value = own[index].name, pairs[index][1]
            if is_named and name not in self.placement.texts:
                self.placement.infer(name, value, array)
            return self._part(name, value, array).shape == own[index].shape

        is_part = bool(mesh and mesh.stages)
        found = states.sources(own, (WEIGHT, STATISTIC), is_part=is_part, fits=fits)
        sources = {own[index].name: source for index, source in found.items()}
        values = {each.name: value for each, (_, value) in zip(own, pairs, strict=True)}
        for index, each in enumerate(own):
            if index in found:
                continue
            if twin := self._twin_of(each.name, values[each.name], values):
                sources[each.name] = sources[twin]
            elif each.about["kind"] == WEIGHT or each.name in states.names:
                is_alone = mesh is not None or self.placement.num_ranks == 1
                hint = "" if is_alone else "; or mesh=, if ranks hold parts of it"
                raise ValueError(states.unmatched(each) + hint)
        return sources

    def _part(self, name: str, value: Tensor, whole: np.ndarray) -> np.ndarray:
        return self.placement.own_part(name, value, whole)

    def _twin_of(self, name: str, value: Tensor, own: Mapping[str, Tensor]) -> str:
        """Returns the weight before it of which this one is a copy.

        It had the same values when recording began, or the other recording says that both are one.
        """
        weights, is_named = self.recording.weights, name in self.states.names
        for other, x in own.items():
            if is_named or name in {other, *self.twins} or name not in weights:
                break
            if other not in weights or x.shape != value.shape:
                continue
            array, own_array = to_array(x), to_array(value)
            # Not initial values such as 0.
            is_same = np.array_equal(array, own_array) and array.size and array.std() > 0
            if is_same or any({name, other} <= {*names} for names in self.trace.about.tied):
                text = f"{self.name} has one weight for {other} and its copy {name}: they are"
                warnings.warn(f"{self.path}: {text} tied there, and not here", stacklevel=2)
                self.twins[name] = other
        return self.twins.get(name, "")

    # Examples and random numbers.

    def examples(self, step: int, replica: int) -> list[np.ndarray]:
        """Returns the inputs of the forward passes of a replica in a step, one after another."""
        return self.trace.arrays(self.states.position(step), "data", replica) or []

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
        for replica in self.trace.shards:
            number = self.trace.micro_batches(self.states.position(step), replica)
            data, states = self.examples(step, replica), self._random(step, replica)
            for start in range(number):
                own, of_each = data[start * len(data) // number :], len(states) // number
                random = states[start * of_each :][:of_each]
                yield Part(replica, rows_of(own[0]) if own else [], random)

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
            self._assign(name, value, source.of(before) if source else None)
        if self.states.framework == "torch":
            classes = self._classes(step)
            for name, p in self.recording.weights.items():
                self._load_state(name, p, before, classes)
        if new := [name for name in self.not_loaded if name not in known]:
            text = ", ".join(new[:_MOST_NAMED])
            text += f" and {len(new) - _MOST_NAMED} more" if len(new) > _MOST_NAMED else ""
            why = "not in it, of another shape or optimizer, or used before the step began"
            warnings.warn(
                f"{self.path}: step {step}: not loaded from {self.name}: {text}: {why}",
                stacklevel=2,
            )

    def _assign(self, name: str, value: Any, array: np.ndarray | None) -> None:
        """Assigns an array to a weight or statistic, if it fits."""
        if array is not None:
            array = self._part(name, value, array)
            if tuple(array.shape) == tuple(value.shape):
                try:
                    assign(value, array)
                    return
                except (RuntimeError, TypeError, ValueError):
                    pass  # As of a tensor that cannot be changed: it is not loaded.
        if array is not None or self.states.framework == "torch":
            self.not_loaded[name] = None

    def _classes(self, step: int) -> dict[str, str]:
        """Returns the name of a weight there → class of its optimizer in a step."""
        about, found = self.trace.about, dict[str, str]()
        usual = about.optimizer.get("class", "")
        for group in about.settings[self.states.position(step)] if about.settings else ():
            for name in group.get("weights", ()):
                found.setdefault(name, group.get("optimizer", usual))
        return {v.name: usual for v in about.variables} | found

    def _load_state(self, name: str, p: Tensor, before: Named, classes: Mapping[str, str]) -> None:
        """Loads the state of a weight into its optimizer, if that has the recorded class."""
        source = self.sources[name].key if name in self.sources else ""
        variables = ((self.trace.variables[key], array) for key, array in before.items())
        slots = [(v, array) for v, array in variables if source and v.of == source]
        owners = self.recording.variables.owners_of(name)
        same = [x for x in owners if type(x).__name__ == classes.get(source)]
        if not same:
            self._load_slots(name, p, slots, owners)
            return
        # Of several that update it, the one that keeps such state.
        known = {variable.slot for variable, _ in slots}
        optimizer = max(same, key=lambda x: len(known & x.state.get(p, {}).keys()))
        old = optimizer.state.pop(p, {})
        if not slots:
            return
        is_known = type(optimizer).__module__.partition(".")[0] == "torch"
        if not old and not is_known:  # It is not known which part of the state this rank has.
            self.not_loaded |= dict.fromkeys(f"{name}/{v.slot}" for v, _ in slots)
            return
        state = dict(old)  # Keeps slots that the file lacks, as of another setting.
        for v, array in slots:
            is_like = array.shape == before[source].shape
            array = self._part(name, p, array) if is_like else array
            new = torch.zeros_like(p) if is_like else torch.tensor(array)
            loaded = _loaded(new if old.get(v.slot) is None else old[v.slot], array, self.placement)
            if loaded is None:
                self.not_loaded[f"{name}/{v.slot}"] = None
            else:
                state[v.slot] = loaded
        optimizer.state[p] = state

    def _load_slots(
        self, name: str, p: Tensor, slots: Sequence[tuple[Variable, np.ndarray]], owners: Any
    ) -> None:
        """Loads what an optimizer of another class has, too."""
        for variable, array in slots:
            slot = variable.slot
            state = next((x.state[p] for x in owners if slot in x.state.get(p, {})), None)
            if state is None:
                continue
            loaded = None
            if state[slot] is not None:
                shape = getattr(state[slot], "shape", ())
                array = self._part(name, p, array) if array.shape != tuple(shape) else array
                loaded = _loaded(state[slot], array, self.placement)
            if loaded is None:
                self.not_loaded[f"{name}/{slot}"] = None
            else:
                state[slot] = loaded


def _loaded(old: Any, array: np.ndarray, placement: Any) -> Any:
    """Returns a slot of optimizer state with the values of an array; None if it does not fit.

    A rank may have a part of the state: the chunk along one dimension that is nearest to its own
    values, or the one of its number where all are as near.
    """
    if not isinstance(old, Tensor):
        is_number = isinstance(old, bool | int | float) and array.size == 1
        return type(old)(array.item()) if is_number else None
    if tuple(old.shape) != array.shape and not is_dtensor(old):
        part = _nearest_part(to_array(old), array, placement.rank, placement.num_ranks)
        if part is None:
            return None
        array = part
    try:
        return assign(old, array)
    except (RuntimeError, TypeError, ValueError):
        return None


def _nearest_part(
    own: np.ndarray, whole: np.ndarray, rank: int, num_ranks: int
) -> np.ndarray | None:
    """Returns the chunk of an array that has the shape of `own` and is nearest to it."""
    sizes = [*zip(own.shape, whole.shape, strict=False)]
    split = [k for k, (size, of_whole) in enumerate(sizes) if size != of_whole]
    if own.ndim != whole.ndim or len(split) != 1 or not own.size:
        return None
    size, of_whole = sizes[split[0]]
    if of_whole % size:
        return None
    chunks = np.split(whole, of_whole // size, split[0])
    first = chunks[rank : rank + 1] if len(chunks) == num_ranks else []
    with np.errstate(all="ignore"):
        return min([*first, *chunks], key=lambda x: float(np.nan_to_num(np.abs(x - own).max())))
