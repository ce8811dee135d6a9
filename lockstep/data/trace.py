"""Holds what a training computed in some steps: the trace that every check reads.

The arrays of a step belong to *shards*, the parts of a batch with their own examples, loss and
gradient, and to *copies* of the weights. In data parallelism, both are the replicas; a pipeline has
several shards (micro-batches) and one copy. `docs/trace_format.md` describes the file. Any kind of
array may be missing.

Kinds of arrays of a shard:

- `data`: the examples, along the first axis. `ids`: their identities, whole numbers, as the script
  notes them.
- `random`, `random_after`: states of random number generators before the step and after the forward
  pass (`uint8`); unchanged: not used. `own_random`: the copy's own ones before the first forward
  pass, before those of another trace were loaded.
- `shards`: for each forward pass, the number of the part with which each example was computed, if
  the model ran part by part.
- `y_pred`: outputs. `y_grad`: gradients of the loss with
  respect to `y_pred`, where that has a row for each example.
- `module_in`, `module_out`, `module_out_grad`, `module_in_grad`: first floating-point tensor of a
  module's input and output, of its first call in a forward pass, and the gradients (0 if the loss
  does not use it, absent if none is computed); the index is number of the pass · length of
  `modules` + position in `modules`.
- `loss`: the shard's loss, then, if known, its regularisation losses (Keras). In a custom loop
  `objective`: the scalar that is differentiated, then its share of the regularisation losses.
- `raw`: gradients before the all-reduce. `added`: what autograd computes in each backward pass of
  a step that has several, before a script or an engine changes or sums it, and `fully_shard`
  reduces it; the index is number of the pass · length of `gradients` + position in `gradients`.
- `own_before`, `own_after`: the shard's own variables, such as BatchNorm statistics. With `shards`,
  `own_after` has what the forward passes of each part leave, by the number of its replica.

Kinds of arrays of a copy:

- `before`, `after`: all variables. `start`: of a sampled trace, all variables before its first
  step, whole. `set`: those that the script has changed between the start of the step and the
  update, as a first forward pass that initialises them. `left`: those that it has changed
  between the update and the end of the step. `replaced`: the copy's own ones, before those of
  another trace were loaded.
- `sums`: gradients received from the all-reduce. `unclipped`: before the last clipping, if any.
  `clipped`: those that the optimizer applies (of a shard if `order` is "clip, reduce").
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.numeric.arrays import Array, Lazy, Named, Rows, same_bits
from lockstep.numeric.sampling import Sampled

WEIGHT, STATISTIC, STATE, SEED = "weight", "statistic", "optimizer state", "seed"
_OF_ALL_COPIES = ("before", "set", "after", "left", "replaced", "start")
OF_VARIABLES = (*_OF_ALL_COPIES, "own_before", "own_after")
OF_GRADIENTS = ("raw", "sums", "unclipped", "clipped")
OF_BACKWARD = ("added",)  # Gradients that one backward pass adds.
OF_COPIES = (*_OF_ALL_COPIES, "sums", "unclipped")
OF_MODULES = ("module_in", "module_out", "module_in_grad", "module_out_grad")
CLIP_FIRST, REDUCE_FIRST = "clip, reduce", "reduce, clip"
MOST_STEPS, LAST_STEP = 100_000, 10**9  # That are recorded; the largest number of one.


@dataclasses.dataclass(frozen=True)
class Variable:
    """A variable whose arrays are in "before" and "after".

    Attributes:
        name: name in the framework; unique among weights and statistics.
        kind: "weight", "statistic", "optimizer state" or "seed".
        layout: order of the axes, "HWIO", "OIHW", "IO" or "OI" (Height, Width, Input, Output); ""
            if unknown or without meaning.
        of: for optimizer state, the name of its weight; "" if it belongs to none, as a counter.
        slot: for optimizer state, the framework's name for it: "momentum", "exp_avg", "mu".
        shape: of a variable that is sampled, that of the whole array; empty for others.
    """

    name: str
    kind: str
    layout: str = ""
    of: str = ""
    slot: str = ""
    shape: tuple[int, ...] = ()


class Shard(NamedTuple):
    """A part of a batch: the replica that computes it, and its relative size."""

    replica: int
    weight: float


class Mesh(NamedTuple):
    """The devices of a training, in several dimensions; a rank is a row-major position.

    Attributes:
        axes: name of an axis → number of devices along it.
        data_axes: the axes that split the examples: positions on them are replicas.
    """

    axes: Mapping[str, int]
    data_axes: tuple[str, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.axes.values())

    @property
    def num_replicas(self) -> int:
        """The number of positions on the data axes."""
        return math.prod(self.axes[axis] for axis in self.data_axes)

    @property
    def model_axes(self) -> dict[str, int]:
        """The axes that do not split the examples, with their sizes."""
        return {axis: n for axis, n in self.axes.items() if axis not in self.data_axes}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns axis → position of a rank."""
        found = {}
        for axis, size in reversed([*self.axes.items()]):
            rank, found[axis] = divmod(rank, size)
        return {axis: found[axis] for axis in self.axes}

    def replica_of(self, rank: int) -> int:
        """Returns the replica that a rank is part of."""
        at, replica = self.coordinates(rank), 0
        for axis in self.axes:
            if axis in self.data_axes:
                replica = replica * self.axes[axis] + at[axis]
        return replica

    def ranks_of(self, replica: int) -> list[int]:
        """Returns the ranks of a replica."""
        at = {}
        for axis in reversed([axis for axis in self.axes if axis in self.data_axes]):
            replica, at[axis] = divmod(replica, self.axes[axis])
        return self._at(at)

    def along(self, axis: str, rank: int) -> list[int]:
        """Returns the ranks that differ from a rank on one axis only, in order, with it."""
        return self._at({a: at for a, at in self.coordinates(rank).items() if a != axis})

    def _at(self, places: Mapping[str, int]) -> list[int]:
        """Returns the ranks at these places of some axes."""
        ranks = np.arange(self.size).reshape([*self.axes.values()])
        chosen = ranks[tuple(places.get(axis, slice(None)) for axis in self.axes)]
        return [int(rank) for rank in np.ravel(chosen)]

    def name_of(self, rank: int) -> str:
        """Returns "rank 3 (dp 1, tp 1)", or "replica 1" if all axes are data axes."""
        if not self.model_axes:
            return f"replica {self.replica_of(rank)}"
        places = (f"{axis} {place}" for axis, place in self.coordinates(rank).items())
        return f"rank {rank} ({', '.join(places)})"


@dataclasses.dataclass(frozen=True)
class About:
    """The description of a trace: the keys of its member "about", see `docs/trace_format.md`.

    A key that is missing in a file has the default of its attribute.

    Attributes:
        framework: "keras", "torch", "jax", "lockstep" for our own strategies, or another name.
        num_replicas: number of replicas of the whole training.
        steps: number of updates before each recorded step, ascending, from 0.
        variables: the variables of the arrays in "before" and "after"; see `Variable`.
        gradients: names of the weights of the arrays of gradients, such as "raw" and "sums".
        replicas: numbers of the replicas in this file; empty for all of them.
        shards: pairs [replica, relative size], the shards of a batch; empty for one per replica.
        num_copies: number of copies of the weights; 0 for one per replica.
        syncs_batch_norm: whether BatchNorm normalises over all shards.
        reduction: what the all-reduce computes from "raw", "sum" or "mean"; "" if unknown.
        order: "reduce, clip", or "clip, reduce" as Keras' `fit` under a strategy.
        computed_in: dtype in which layers compute, as under autocast; "" for that of the weights.
        device: kind of the devices, as "cpu" or "cuda"; "" if unknown.
        optimizer: class and constant settings.
        settings: for each recorded step, a list of the optimizer's parameter groups: "weights"
            (names) and "learning_rate", "momentum", "dampening", "weight_decay", "beta_1",
            "beta_2", "rho", "epsilon" (numbers or null), "nesterov", "amsgrad" (booleans or null);
            "optimizer", its class, where there are several optimizers.
        layers: for each layer "name", "class" and "weights" (names), and its settings that are
            numbers or words, such as "epsilon", "strides", "rate" (of dropout),
            "scale_grad_by_freq" (of embeddings) and "synchronized" (BatchNorm).
        micro_batches: for each step, the forward passes whose gradients a replica accumulates;
            empty for 1.
        in_evaluation: for each step, the layers in evaluation mode; empty if unknown.
        calls: for each step, the calls that make its gradients, in order; empty if unknown:
            "forward", "backward", "backward, all-reduced", "unscale", "clip norm 1",
            "clip value 0.5".
        loss_scale: for each step, the factor of the loss that avoids underflow, by which "raw",
            "added", "sums", "unclipped" and "loss" are divided; empty for 1.
        passes: for each step, "ddp" for each forward pass whose gradients DDP reduces, and "" for
            another one; empty if unknown.
        tied: the names of each weight that has several.
        not_updated: names of the weights of optimizers that update weights in no recorded step.
        permuted: seed of the permutation of each replica's examples; None without one.
        replayed: name of the trace whose state was loaded before each step, or None.
        not_loaded: names of the variables that were not, as they do not fit.
        draws_apart: whether a reference by parts computed something else with the number of another
            replica from the same random state, in each step.
        left_out: sentences that say what a script keeps and the file does not have, and why.
        mesh: axis of the devices → their number along it, the outer axis first; empty without
            further axes than data.
        data_axes: the axes of the mesh that split the examples; `num_replicas` is the product of
            their sizes.
        ranks: the ranks in this file, whose arrays are local; empty once they are put together.
        placements: "KIND/INDEX" → how local arrays are parts of global ones; see `mesh`.
        names: name of a weight in this file → its name in the reference; two stages of a pipeline
            that hold one tied weight give it one name.
        modules: the modules whose inputs and outputs are recorded, in the order of their calls.
        versions: package → version; also a variable that chooses kernels → its value.
        asked: the steps that the script asked for; empty for those of the recorder's default.
        trained: the steps that the process trained, also those that are not recorded; 0 if unknown.
        skipped: the number of updates that were skipped while steps were recorded, as gradients
            overflow: they are no steps.
        ended_with: the exception with which the recorded run ended, in words; "" without one.
        sample: "elements", "sums" and "seed" of `numeric.sampling.Sample`, if variables and
            gradients with more elements are sampled; empty if all are whole.
    """

    framework: str
    num_replicas: int
    steps: tuple[int, ...] = ()
    variables: tuple[Variable, ...] = ()
    gradients: tuple[str, ...] = ()
    replicas: tuple[int, ...] = ()
    shards: tuple[Shard, ...] = ()
    num_copies: int = 0
    syncs_batch_norm: bool = False
    reduction: str = ""
    order: str = REDUCE_FIRST
    computed_in: str = ""
    device: str = ""
    optimizer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: tuple[Sequence[Mapping[str, Any]], ...] = ()
    layers: tuple[Mapping[str, Any], ...] = ()
    micro_batches: tuple[int, ...] = ()
    in_evaluation: tuple[Sequence[str], ...] = ()
    calls: tuple[tuple[str, ...], ...] = ()
    loss_scale: tuple[float, ...] = ()
    passes: tuple[tuple[str, ...], ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    not_updated: tuple[str, ...] = ()
    permuted: int | None = None
    replayed: str | None = None
    not_loaded: tuple[str, ...] = ()
    draws_apart: bool = False
    left_out: tuple[str, ...] = ()
    mesh: Mapping[str, int] = dataclasses.field(default_factory=dict)
    data_axes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    placements: Mapping[str, str] = dataclasses.field(default_factory=dict)
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    modules: tuple[str, ...] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    asked: tuple[int, ...] = ()
    trained: int = 0
    skipped: int = 0
    ended_with: str = ""
    sample: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def on_mesh(self) -> Mesh | None:
        """The mesh of the devices; None without one."""
        return Mesh(self.mesh, self.data_axes) if self.mesh else None

    @functools.cached_property
    def keys(self) -> list[str]:
        """A unique name of each variable: its name, numbered where names repeat."""
        found, numbers = dict[str, None](), collections.Counter[str]()
        for variable in self.variables:
            name = variable.name
            while name in found:
                numbers[variable.name] += 1
                name = f"{variable.name}#{numbers[variable.name] + 1}"
            found[name] = None
        return [*found]


def is_of_copies(kind: str, about: About) -> bool:
    """Returns whether the items of a kind are copies of the weights, not shards of a batch."""
    return kind in OF_COPIES or (kind == "clipped" and about.order == REDUCE_FIRST)


class _Renamed(collections.UserDict[str, Any]):
    """Arrays of another mapping by other names; each is read when it is asked for."""

    def __init__(self, arrays: Mapping[str, Any], names: dict[str, str]):
        super().__init__(names)
        self._arrays = arrays

    def __getitem__(self, name: str) -> Any:
        return self._arrays[self.data[name]]


def _read(stored: Mapping[str, Any], name: str) -> Array | None:
    """Returns an array of any form; None if it does not exist."""
    if f"{name}/sums" in stored:
        elements, sums = stored[f"{name}/elements"], stored[f"{name}/sums"]
        return Sampled(elements, sums[:-1], float(sums[-1]))
    if f"{name}/rows" in stored:
        values, indices, rows = (stored[f"{name}/{part}"] for part in Rows._fields)
        return Rows(values, indices, int(rows))
    return stored.get(name)


def _members_of(name: str, array: Array | None) -> dict[str, Any]:
    """Returns the members of a file that hold an array of any form."""
    if isinstance(array, Rows):
        return {f"{name}/{part}": each for part, each in array._asdict().items()}
    if isinstance(array, Sampled):
        sums = np.append(array.sums, array.squares)
        return {f"{name}/elements": array.elements, f"{name}/sums": sums}
    return {} if array is None else {name: array}


class Trace:
    """The arrays of some steps, in memory or in files.

    Positions count the recorded steps from 0: `steps[position]` is the number of a step. An array
    that was not recorded is absent; it is never taken to equal another one.

    Args:
        about: the description, also an attribute.
        stored: name of an array, `POSITION/KIND/ITEM/INDEX` with positions from 1 → array.
        name: name for messages.

    Attributes:
        shards: numbers of the shards.
        copies: numbers of the copies of the weights.
        mesh: the mesh of the devices; its ranks are the copies. None without one.
        keys: a unique name for each variable.
        variables: key → the variable.
        kinds: key → kind of the variable.
        of_replica: replica → description in its file, whose settings may be its own.
        numbers: the replicas' numbers in messages, of a trace without some; empty for all of them.
        views_of: name of an array of a shard → rank → its copy, as an object with `read()`.
        parts_of: name of a gradient on a rank → the part that it holds.
        as_data: axis of the model along which all ranks hold whole weights → reads the trace with
            it as an axis of data.
    """

    def __init__(
        self, about: About, stored: MutableMapping[str, np.ndarray] | None = None, name: str = ""
    ):
        self.about, self.name = about, name
        self.mesh = about.on_mesh
        self.shards = range(len(about.shards) or about.num_replicas)
        num_copies = self.mesh.size if self.mesh else about.num_copies
        self.copies = range(num_copies or about.num_replicas)
        self.keys = about.keys
        self.variables = dict(zip(self.keys, about.variables, strict=True))
        self.kinds = {key: variable.kind for key, variable in self.variables.items()}
        self.of_replica: Mapping[int, About] = {}
        self.numbers: Sequence[int] = ()
        self.views_of: Mapping[str, Mapping[int, Any]] = {}
        self.parts_of: Mapping[str, Any] = {}
        self.as_data: Mapping[str, Callable[[], Trace]] = {}
        self._stored = {} if stored is None else stored
        self._index: dict[tuple[int, str, int], set[str]] = {}  # → Names of its arrays.
        for key in self._stored:
            self._add_to_index(key)

    def _add_to_index(self, name: str) -> None:
        position, kind, item, *_ = name.split("/")
        self._index.setdefault((int(position) - 1, kind, int(item)), set()).add(name)

    @property
    def steps(self) -> tuple[int, ...]:
        """The numbers of the recorded steps."""
        return self.about.steps

    @property
    def model_axes(self) -> dict[str, int]:
        """The axes of the mesh that do not split the examples, with their sizes."""
        return self.mesh.model_axes if self.mesh else {}

    def items(self, kind: str) -> range:
        """Returns the shards or the copies, whichever have arrays of a kind."""
        return self.copies if is_of_copies(kind, self.about) else self.shards

    @functools.cached_property
    def slots(self) -> dict[str, dict[str, str]]:
        """Name of a weight → name of a slot of its optimizer state → key of this state.

        Common state of several optimizers, under "", has its whole name.
        """
        found: dict[str, dict[str, str]] = {}
        states = [(key, v) for key, v in self.variables.items() if v.kind == STATE]
        common = collections.Counter(v.slot for _, v in states if not v.of)
        for key, variable in states:
            is_repeated = not variable.of and common[variable.slot] > 1
            found.setdefault(variable.of, {})[key if is_repeated else variable.slot] = key
        return found

    def copy_of(self, shard: int) -> int:
        """Returns the copy of the weights with which a shard is computed."""
        if self.mesh:
            return self.mesh.ranks_of(shard)[0]
        return shard * len(self.copies) // len(self.shards)

    def shards_of(self, copy: int) -> list[int]:
        """Returns the shards that are computed with a copy of the weights."""
        if self.mesh:
            return [self.mesh.replica_of(copy)]
        return [shard for shard in self.shards if self.copy_of(shard) == copy]

    def views(self, position: int, kind: str, item: int, index: int) -> dict[int, np.ndarray]:
        """Returns rank → its copy of an array of a shard, if several ranks have one."""
        members = self.views_of.get(f"{position + 1}/{kind}/{item}/{index}", {})
        return {rank: member.read() for rank, member in members.items()}

    def num_sums(self, shape: Sequence[int]) -> int:
        """Returns the number of sums at the end of a vector of a shape; 0 for a whole array.

        Whole arrays have fewer elements than those that are sampled.
        """
        sample = self.about.sample
        is_sampled = bool(sample) and tuple(shape) == (sample["elements"] + sample["sums"],)
        return sample["sums"] if is_sampled else 0

    def local(self, position: int, kind: str, rank: int) -> Named:
        """Returns weight → the part of its gradient that a rank of the mesh holds."""
        start, parts = f"{position + 1}/{kind}/{rank}/", self.parts_of
        found = {
            name: _read(parts, f"{start}{index}") for index, name in enumerate(self.about.gradients)
        }
        return {name: array for name, array in found.items() if array is not None}

    def replica_of(self, shard: int) -> int:
        """Returns the replica that computes a shard."""
        shards = self.about.shards
        return shards[shard].replica if shards else shard

    def about_of(self, shard: int) -> About:
        """Returns the description in the file of the replica that computes a shard."""
        return self.of_replica.get(self.replica_of(shard), self.about)

    def micro_batches(self, position: int, shard: int) -> int:
        """Returns the number of forward passes whose gradients a shard accumulates in a step."""
        about = self.about_of(shard)
        return about.micro_batches[position] if about.micro_batches else 1

    def in_evaluation(self, position: int, shard: int) -> set[str]:
        """Returns the layers that a shard computes in evaluation mode, as far as it is known."""
        about = self.about_of(shard)
        return set(about.in_evaluation[position]) if about.in_evaluation else set()

    def calls(self, position: int, shard: int) -> tuple[str, ...]:
        """Returns the calls that make the gradients of a shard in a step; () if unknown."""
        about = self.about_of(shard)
        return about.calls[position] if about.calls else ()

    def loss_scale(self, position: int, shard: int) -> float:
        """Returns the factor by which a shard multiplies its loss against underflow."""
        about = self.about_of(shard)
        return about.loss_scale[position] if about.loss_scale else 1.0

    def name_of(self, kind: str, item: int) -> str:
        """Returns "replica 1", "rank 3 (dp 1, tp 1)" or "micro-batch 1 of replica 0"."""
        if self.mesh and self.items(kind) is self.copies:
            return self.mesh.name_of(item)
        per_replica = len(self.shards) // self.about.num_replicas
        if self.items(kind) is self.copies or per_replica <= 1:
            return f"replica {self.numbers[item] if self.numbers else item}"
        of = f" of replica {item // per_replica}" if self.about.num_replicas > 1 else ""
        return f"micro-batch {item % per_replica}{of}"

    def has(self, position: int, kind: str) -> bool:
        """Returns whether every shard, or copy, has arrays of a kind in a step."""
        return all((position, kind, item) in self._index for item in self.items(kind))

    def absent(self, position: int) -> list[int]:
        """Returns the replicas whose training has ended before a step: they have earlier ones only.

        Empty if this cannot be told: on a mesh, and where shards are no replicas.
        """
        if self.mesh or self.about.shards or self.about.num_copies:
            return []
        present = {item for at, _, item in self._index if at == position}
        earlier = {item for at, _, item in self._index if at < position}
        return [replica for replica in self.copies if replica in earlier - present]

    def without(self, replicas: Sequence[int]) -> "Trace":
        """Returns the trace of the other replicas."""
        kept = [replica for replica in self.copies if replica not in replicas]
        about = dataclasses.replace(self.about, num_replicas=len(kept), replicas=())
        names = {}
        for name in self._stored:
            position, kind, item, rest = name.split("/", 3)
            if int(item) in kept:
                names[f"{position}/{kind}/{kept.index(int(item))}/{rest}"] = name
        trace = Trace(about, _Renamed(self._stored, names), self.name)
        trace.of_replica = {
            kept.index(replica): own for replica, own in self.of_replica.items() if replica in kept
        }
        trace.numbers = kept
        return trace

    def names_of(self, kind: str) -> Sequence[str] | None:
        """Returns the names of the arrays of a kind; None if they have no names."""
        if kind in OF_VARIABLES:
            return self.keys
        return self.about.gradients if kind in OF_GRADIENTS else None

    def arrays(self, position: int, kind: str, item: int) -> list[Array] | None:
        """Returns the arrays of a kind in order; None if they were not recorded.

        Kinds of variables and gradients have one entry per variable or weight, None for an array
        that does not exist: optimizer state before the first update, the gradient of a weight that
        the loss does not use.
        """
        found = self._index.get((position, kind, item))
        if found is None:
            return None
        names, prefix = self.names_of(kind), f"{position + 1}/{kind}/{item}"
        number = len(found) if names is None else len(names)
        return [_read(self._stored, f"{prefix}/{index}") for index in range(number)]

    def modules_of(self, shard: int) -> tuple[str, ...]:
        """Returns the modules of a shard's arrays, in their order."""
        return self.about.modules if self.mesh else self.about_of(shard).modules

    def index_of(self, module: str, shard: int, number: int) -> int | None:
        """Returns the index of a module's arrays in a forward pass; None if it is not recorded."""
        names = self.modules_of(shard)
        return number * len(names) + names.index(module) if module in names else None

    def of_module(
        self, position: int, kind: str, shard: int, number: int, module: str
    ) -> np.ndarray | None:
        """Returns an array of a module in a forward pass of a shard; None if not recorded."""
        index = self.index_of(module, shard, number)
        return self._stored.get(f"{position + 1}/{kind}/{shard}/{index}")

    def named(self, position: int, kind: str, item: int) -> Named | None:
        """Returns name → array for a kind of variables or gradients; None if not recorded."""
        found = self._index.get((position, kind, item))
        if found is None:
            return None
        names, prefix = self.names_of(kind) or (), f"{position + 1}/{kind}/{item}"
        places = ((name, f"{prefix}/{index}") for index, name in enumerate(names))
        return Lazy({name: self._source(place) for name, place in places if self._has(place)})

    @functools.cached_property
    def changes(self) -> dict[int, set[str]]:
        """Number of a step → the weights that change in it, on some copy."""
        found = {number: set[str]() for number in self.steps}
        weights = [key for key, kind in self.kinds.items() if kind == WEIGHT]
        for (position, number), copy_ in itertools.product(enumerate(self.steps), self.copies):
            old, new = (self.named(position, kind, copy_) or {} for kind in ("before", "after"))
            both = [n for n in weights if n in old and n in new and n not in found[number]]
            found[number] |= {name for name in both if not same_bits(old[name], new[name])}
        return found

    @functools.cached_property
    def changed_weights(self) -> set[str]:
        """The weights that change in some step, or of which a step has no update."""
        found = set[str]().union(*self.changes.values())
        weights = {key for key, kind in self.kinds.items() if kind == WEIGHT}
        for position in range(len(self.steps)):
            if self.has(position, "after"):
                ends = [self.named(position, "after", copy_) or {} for copy_ in self.copies]
                found |= weights.difference(*ends)
        return found

    def backward_passes(self, position: int, shard: int) -> list[Named]:
        """Returns what each backward pass of a shard adds to gradients; empty of a single pass."""
        names, prefix = self.about.gradients, f"{position + 1}/added/{shard}"
        own = [int(n.split("/")[3]) for n in self._index.get((position, "added", shard), ())]
        found = [Named() for _ in range(max(own, default=-1) // max(len(names), 1) + 1)]
        for index in sorted({*own}):
            name = names[index % len(names)]
            found[index // len(names)][name] = self._source(f"{prefix}/{index}")
        return [Lazy(sources) for sources in found]

    def _source(self, place: str) -> Callable[[], Array | None]:
        return functools.partial(_read, self._stored, place)

    def _has(self, place: str) -> bool:
        return any(f"{place}{part}" in self._stored for part in ("", "/sums", "/rows"))

    def put(self, position: int, kind: str, item: int, arrays: Sequence[Array]) -> None:
        """Adds the arrays of a kind, or replaces them; None for one that does not exist."""
        for name in self._index.get((position, kind, item), ()):
            del self._stored[name]
        self._index[position, kind, item] = set()
        for index, array in enumerate(arrays):
            name = f"{position + 1}/{kind}/{item}/{index}"
            for member, each in _members_of(name, array).items():
                self._stored[member] = np.asarray(each)
                self._add_to_index(member)

    def stored(self) -> Mapping[str, np.ndarray]:
        """Returns all arrays by their names in the file."""
        return self._stored
