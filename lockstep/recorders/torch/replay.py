"""Reads another recording, and starts each step from its state."""

import functools
import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.recorders.torch.layout import assembled
from lockstep.recorders.torch.recording import Recording
from lockstep.recorders.torch.values import (
    assign,
    is_dtensor,
    rank_path,
    require,
    set_random_states,
    to_array,
    transposed,
)

_MOST_NAMED = 3  # Variables in a warning.


class Part(NamedTuple):
    """A forward pass of a replica in another recording: the bytes of its examples."""

    replica: int
    rows: list[bytes]
    random: list[Tensor]
    number: int = 0


class Trace:
    """A file of another recording."""

    def __init__(self, path: str) -> None:
        self.file = np.load(path, allow_pickle=False)
        self.about = about = json.loads(str(self.file["about"]))
        version = about["version"]
        require(version == 2, f"version {version}, this file reads version 2")
        self.members = {name: name for name in self.file} | about.get("aliases", {})
        all_replicas = range(about.get("num_copies") or about["num_replicas"])
        self.replicas = about.get("ranks") or about.get("replicas") or all_replicas
        mesh = about.get("mesh") or {}
        place = np.unravel_index(self.replicas[0], [*mesh.values()]) if mesh else ()
        self.at = dict(zip(mesh, map(int, place), strict=True))
        others = (self.at[axis] for axis in mesh if axis not in about["data_axes"])
        self.is_first_of_replica = not any(others)

    def arrays(self, kind: str, step: int, rank: int) -> dict[int, np.ndarray]:
        """Returns the arrays of a kind by their index; of another replica if `rank` is not here."""
        start = f"{self.about['steps'].index(step) + 1}/{kind}/"
        start += f"{self.replicas[rank % len(self.replicas)]}/"
        indices = (name.removeprefix(start) for name in self.members if name.startswith(start))
        return {i: self.file[self.members[f"{start}{i}"]] for i in sorted(map(int, indices))}

    def parts(self, step: int) -> Iterator[Part]:
        """Yields the forward passes of a step."""
        position = self.about["steps"].index(step)
        number = (self.about.get("micro_batches") or [1] * (position + 1))[position]
        for rank, replica in enumerate(self.replicas):
            data = [*self.arrays("data", step, rank).values()]
            states = [*map(torch.tensor, self.arrays("random", step, rank).values())]
            states = states if self.about["framework"] == "torch" else []
            for start in range(number):
                own, of_each = data[start * len(data) // number :], len(states) // number
                random = states[start * of_each :][:of_each]
                yield Part(replica, rows_of(own[0]) if own else [], random)


def rows_of(batch: np.ndarray) -> list[bytes]:
    """Returns the bytes of each example."""
    return [row.tobytes() for row in batch] if batch.ndim else []


def sample_in(path: str) -> Mapping[str, int]:
    """Returns how a recording is sampled; empty if it is whole, or cannot be read."""
    found = next(filter(os.path.exists, [path, rank_path(path, 0)]), "")
    try:
        return Trace(found).about.get("sample") or {} if found else {}
    except Exception:  # Reading it for the replay raises an error that says why.
        return {}


class Replay:
    """The recording whose state is loaded before each recorded step.

    Args:
        recording: What has the model and its variables.
        path: File of the other recording.
        own_path: That of this one, for warnings.
        names: Names there by names here.
        is_by_shard: Whether the model runs for each replica's part of a batch there.

    Attributes:
        files: Those of its ranks; the first one has the states to load.
        name: Name of the file.
        not_loaded: Names of variables that were not loaded.
    """

    def __init__(
        self, recording: Recording, path: str, own_path: str, names: Mapping[str, str],
        is_by_shard: bool,
    ) -> None:  # fmt: skip
        self.recording, self.placement = recording, recording.placement
        self.name, self.path, self.names = os.path.basename(path), own_path, names
        self.twins: dict[str, str] = {}  # Copies of a weight that the other recording has once.
        self.files = self._open(path, is_by_shard)
        self.is_sampled = bool(self.files[0].about.get("sample"))
        require(
            not self.is_sampled or self.files[0].arrays("start", min(recording.wanted), 0),
            f"replay={path}: is recorded with sample=, without the whole state before step"
            f" {min(recording.wanted)}; record it with start=True, or leave out replay=",
        )
        # Raises an error before the training, and not in one of its steps.
        self.sources = self._match([*self._read(min(recording.wanted)).values()])
        self.not_loaded: dict[str, None] = {}

    def _open(self, path: str, is_by_shard: bool) -> list[Trace]:
        place = self.placement
        own = [rank_path(path, place.replica)] if place.num_ranks > 1 else []
        found = next(filter(os.path.exists, [*own, path, rank_path(path, 0)]), "")
        require(found, f"replay={path}: does not exist; record the training that it names first")
        try:
            files, of_rank = [Trace(found)], functools.partial(rank_path, path)
            if mesh := files[0].about.get("mesh"):  # Each of its ranks has a part of the weights.
                number = math.prod(mesh.values())
                own_first = sorted(range(number), key=lambda rank: rank != place.rank)
                files = [*map(Trace, map(of_rank, own_first))]
            elif is_by_shard and found == of_rank(0):
                files += map(Trace, map(of_rank, range(1, files[0].about["num_replicas"])))
            steps = set.intersection(*(set(file.about["steps"]) for file in files))
        except Exception as error:
            raise ValueError(f"replay={path}: cannot be read as a trace: {error}") from None
        missing = self.recording.wanted - steps
        require(not missing, f"replay={path}: does not have steps {missing}; record them there")
        return files

    def _read(self, step: int) -> dict[str, dict[str, Any]]:
        """Returns name → variable before a step, with its whole array."""
        found: dict[str, dict[str, Any]] = {}
        kind = "start" if self.is_sampled else "before"
        for file in self.files if self.files[0].at else self.files[:1]:
            names, placements = (file.about.get(key) or {} for key in ("names", "placements"))
            for index, array in file.arrays(kind, step, self.placement.replica).items():
                own = file.about["variables"][index]
                name = names.get(own["name"], own["name"])
                text = placements.get(f"{kind}/{index}", "")
                variable = {**own, "name": name, "array": array, "parts": [], "text": text}
                found.setdefault(name, variable)["parts"].append((file.at, array))
        for v in found.values():
            if v["text"]:
                v["array"] = assembled(v["parts"], v["text"], self.files[0].about["mesh"])
        return found

    def _own(self) -> Iterator[tuple[dict[str, str], Any]]:
        """Yields the variables here that are not optimizer state."""
        yield from self.recording.variables.of_model()
        yield from self.recording.variables.of_others()

    def _match(self, others: list[dict[str, Any]]) -> dict[str, str]:
        """Returns the name of the other recording's variable for each weight and statistic."""
        own = [*self._own()]
        wanted = {v["name"]: self.names.get(v["name"], v["name"]) for v, _ in own}
        free, sources = [v for v in others if v["name"] not in wanted.values()], dict[str, str]()
        mesh = self.placement.mesh
        for this, value in own:
            name, shape = this["name"], tuple(value.shape)
            named = [v for v in others if v["name"] == wanted[name]]
            is_known = named or name in self.names or (mesh and mesh.stages)
            options = named if is_known else free
            options = [transposed(v, this["layout"]) for v in options if v["kind"] == this["kind"]]
            if named and options and name not in self.placement.texts:
                self.placement.infer(name, value, options[0]["array"])
            fits = [v for v in options if self._part(name, value, v["array"]).shape == shape]
            if fits:
                sources[name] = fits[0]["name"]
                free = [v for v in free if v["name"] != fits[0]["name"]]
            elif twin := self._twin_of(name, value, {v["name"]: x for v, x in own}):
                sources[name] = sources[twin]
            elif this["kind"] == "weight" or name in self.names:
                found = ", ".join(f"{v['name']} {v['array'].shape}" for v in options) or "nothing"
                raise ValueError(f"replay: {name} {shape} is not matched by {found}; pass names")
        return sources

    def _part(self, name: str, value: Tensor, whole: np.ndarray) -> np.ndarray:
        return self.placement.own_part(name, value, whole)

    def _twin_of(self, name: str, value: Tensor, own: Mapping[str, Tensor]) -> str:
        """Returns the weight before it that had the values of this one when recording began."""
        weights = self.recording.weights
        for other, x in own.items():
            if name in {other, *self.twins, *self.names} or name not in weights:
                break
            if other not in weights or x.shape != value.shape:
                continue
            array = to_array(x)
            is_same = np.array_equal(array, to_array(value))
            if is_same and array.size and array.std() > 0:  # Not initial values such as 0.
                text = f"{self.name} has one weight for {other} and its copy {name}: they are"
                warnings.warn(f"{self.path}: {text} tied there, and not here", stacklevel=2)
                self.twins[name] = other
        return self.twins.get(name, "")

    def load(self) -> None:
        """Loads the state before this step, and its random state; warns of what does not fit."""
        step, file = self.recording.number, self.files[0]
        if not self.is_sampled or step == min(self.recording.wanted):
            self._load_variables(step)
        is_alike = file.about["num_replicas"] == self.placement.num_replicas
        if file.about["framework"] == "torch" and is_alike:
            states = file.arrays("random", step, self.placement.replica).values()
            set_random_states([*map(torch.tensor, states)])

    @torch.no_grad()
    def _load_variables(self, step: int) -> None:
        before = {*self.not_loaded}
        try:
            others = self._read(step)
        except ValueError as error:
            warnings.warn(f"{self.path}: step {step}: nothing is loaded: {error}", stacklevel=2)
            return
        for variable, value in self._own():
            name = variable["name"]
            if any(name.startswith(f"{key}.") for key in self.recording.called_others):
                self.not_loaded[name] = None  # The graph of this step has its values.
                continue
            source = others.get(self.sources.get(name, ""))
            array = transposed(source, variable["layout"])["array"] if source else None
            self._assign(name, value, array)
        if self.files[0].about["framework"] == "torch":
            classes = self._classes(step)
            for name, p in self.recording.weights.items():
                self._load_state(name, p, others, classes)
        if new := [name for name in self.not_loaded if name not in before]:
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
        if array is not None or self.files[0].about["framework"] == "torch":
            self.not_loaded[name] = None

    def _classes(self, step: int) -> dict[str, str]:
        """Returns the name of a weight there → class of its optimizer in a step."""
        about = self.files[0].about
        position, found = about["steps"].index(step), dict[str, str]()
        usual = (about.get("optimizer") or {}).get("class", "")
        for group in (about.get("settings") or [[]] * (position + 1))[position]:
            for name in group.get("weights", ()):
                found.setdefault(name, group.get("optimizer", usual))
        for variable in about["variables"]:
            found.setdefault(variable["name"], usual)
        names = about.get("names") or {}
        return {names.get(name, name): kind for name, kind in found.items()}

    def _load_state(
        self, name: str, p: Tensor, others: Mapping[str, Any], classes: Mapping[str, str]
    ) -> None:
        """Loads the state of a weight into its optimizer, if that has the recorded class."""
        source = self.sources.get(name, "")
        slots = [v for v in others.values() if v.get("of") == source]
        owners = self.recording.variables.owners_of(p)
        same = [x for x in owners if type(x).__name__ == classes.get(source)]
        if not same:
            self._load_slots(name, p, slots, owners)
            return
        optimizer = same[0]
        old = optimizer.state.pop(p, {})
        if not slots:
            return
        is_known = type(optimizer).__module__.partition(".")[0] == "torch"
        if not old and not is_known:  # It is not known which part of the state this rank has.
            self.not_loaded |= dict.fromkeys(f"{name}/{v['slot']}" for v in slots)
            return
        state = dict(old)  # Keeps slots that the file lacks, as of another setting.
        for v in slots:
            slot, array = v["slot"], v["array"]
            is_like = array.shape == others[source]["array"].shape
            array = self._part(name, p, array) if is_like else array
            new = torch.zeros_like(p) if is_like else torch.tensor(array)
            loaded = _loaded(new if old.get(slot) is None else old[slot], array, self.placement)
            if loaded is None:
                self.not_loaded[f"{name}/{slot}"] = None
            else:
                state[slot] = loaded
        optimizer.state[p] = state

    def _load_slots(self, name: str, p: Tensor, slots: Any, owners: Any) -> None:
        """Loads what an optimizer of another class has, too."""
        for v in slots:
            slot = v["slot"]
            state = next((x.state[p] for x in owners if slot in x.state.get(p, {})), None)
            array = v["array"]
            is_loaded = False
            if state is not None and state[slot] is not None:
                shape = getattr(state[slot], "shape", ())
                array = self._part(name, p, array) if array.shape != tuple(shape) else array
                loaded = _loaded(state[slot], array, self.placement)
                is_loaded = loaded is not None
                state[slot] = loaded if is_loaded else state[slot]
            if not is_loaded and state is not None:
                self.not_loaded[f"{name}/{slot}"] = None


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
