"""Holds what was seen of the current step, and the arrays of the steps before it."""

import collections
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.data.trace import OF_VARIABLES
from lockstep.recorders.common import Hooks, Request
from lockstep.recorders.notes import IDS
from lockstep.recorders.output import Output
from lockstep.recorders.parts import SAMPLED, has_rows
from lockstep.recorders.torch.placement import Placement
from lockstep.recorders.torch.private import (
    indices_of_sparse,
    uncompiled,
    values_of_sparse,
    version_of,
)
from lockstep.recorders.torch.samples import rows_sampled, sample_of
from lockstep.recorders.torch.values import is_dtensor, local, to_array
from lockstep.recorders.torch.variables import Variables

# Kinds that stay as they are when they are saved, and are most of a step.
_WRITTEN_AT_ONCE = (
    *("before", "start", "replaced", "set", "added", "unclipped", "clipped", "after", "left"),
)


def called_in(model: Any) -> Iterator[nn.Module]:
    """Yields the models that a script calls: those of several, or in a module without `forward`."""
    several = model if isinstance(model, list | tuple) else None
    if several is None and getattr(model.forward, "__func__", None) is nn.Module.forward:
        several = [*model.children()]
    for each in several or ():
        yield from called_in(each)
    if not several:
        yield model


def unwrapped(model: Any) -> Any:
    """Returns the module that has the weights, without DDP and compilation; one of several."""
    model = nn.ModuleList(model) if isinstance(model, list | tuple) else model
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        return nn.ModuleDict({name: unwrapped(each) for name, each in model.named_children()})
    is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    return uncompiled(model.module if is_ddp else model)


# "KIND/ITEM" → INDEX → end of a name → array, or what the file has of it already; None if that
# cannot be written.
Arrays = dict[str, dict[Any, dict[str, Any]]]


class Step:
    """What was seen of a step since its begin, or since GradScaler skipped its update."""

    def __init__(self) -> None:
        self.arrays: Arrays = {}
        self.outside: Arrays | None = None  # During a forward pass, the arrays from before it.
        self.losses = list[Tensor]()  # Of the backward passes.
        self.calls = list[str]()  # Those that make gradients.
        self.passes = list[str]()  # For each forward pass, how its gradients are reduced.
        self.settings: list[dict[str, Any]] = []  # Groups of optimizers, in the order of updates.
        self.versions = dict[str, int]()  # How often weights had been changed at the start.
        self.updated = set[str]()  # Names of weights.
        self.num_passes = 0  # Backward passes that give gradients.
        self.in_pass = set[str]()  # Names of the weights of which the last one has given one.
        # Number of a weight → what is known of the first pass, beside `raw`; and before clipping.
        self.first_pass: dict[int, dict[str, np.ndarray]] = {}
        self.unclipped: dict[int, dict[str, np.ndarray]] | None = None
        self.in_evaluation: dict[str, None] = {}  # Names of layers.
        self.num_forward, self.num_bytes = 0, 0  # Forward passes in train mode; of outputs.
        self.scale = 1.0  # The factor of the loss.
        self.unscaled = set[str]()  # Names of the weights whose gradients are no longer scaled.
        self.was_called = self.was_called_again = False  # The model; since the last update.
        self.has_graph = False  # A backward pass has begun.
        # Of recorded modules: the calls, the arrays that cannot be added, and the number of bytes.
        self.called, self.unknown, self.num_module_bytes = set[Any](), set[str](), 0

    @property
    def is_differentiated(self) -> bool:
        """Whether autograd computes gradients: not `torch.func`, and not from losses alone."""
        return self.has_graph or self.was_called

    def scale_of(self, name: str) -> float:
        """Returns the factor of the gradient of a weight."""
        return 1.0 if name in self.unscaled else self.scale


class Recording:
    """The model, its variables, and the current step; earlier ones are in the file.

    Args:
        model: As that of `record`.
        optimizer, others, mesh, dims: The same.
        request: The steps to record, and how large arrays are sampled.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, others: Any, mesh: Any, dims: Any, request: Request
    ) -> None:
        called = [*called_in(model)]
        self.ddps = [x for x in called if isinstance(x, nn.parallel.DistributedDataParallel)]
        self.ddp = self.ddps[0] if len(self.ddps) == len(called) else None  # If all are in DDP.
        self.called = [each.module if each in self.ddps else each for each in called]
        self.module = unwrapped(model)  # That has the weights.
        self.variables = Variables(self.module, optimizer, others)
        self.weights = self.variables.weights
        dims = {"inputs": dims} if isinstance(dims, str) else dims
        self.placement = Placement(self.variables, self.ddp, mesh, dims)
        self.wanted, self.number = request.wanted, request.first_step  # That of the current step.
        self.sample, self.step = request.sample, Step()
        self.is_on = False  # Whether the current step is recorded.
        self.is_ignored = False  # Whether forward passes are not those of the training.
        self.depth = 0  # Backward passes that are computed now, one within another.
        self.is_updated = False  # Whether an optimizer has updated a weight in this step.
        # Optimizers that each update once in a step; none if each update is a step.
        found = self.variables.given or (self.variables.optimizers if len(called) > 1 else [])
        self.together = [*found] if len(found) > 1 else []
        self.called_others = set[str]()  # Further modules that were called since the last update.
        self.dropped = set[int]()  # Numbers of steps that cannot be recorded.
        self.num_skipped = 0  # Updates that were skipped, as gradients overflow.
        self.hooks, self.has_hooks = Hooks(), False  # Those of steps that are recorded.
        self.begin: Callable[..., None]  # Before the first arrays; with True, in a forward pass.
        self.end: Callable[[], None]  # The step has ended.
        self.output: Output
        self.shapes: dict[str, tuple[int, ...]] = {}  # "KIND/INDEX" → that of a sampled array.
        # Of a forward pass by parts: the id of an output → what it was joined from, and the rows.
        self.sources: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.per_step = collections.defaultdict[str, list[Any]](list)  # Keys of the description.
        self.computed_in = ""  # 16-bit dtype of the layers.

    def is_over(self) -> bool:
        """Returns whether a forward pass begins the next step.

        Several optimizers that are given, or those of several models, each update once in a step.
        """
        return self.is_updated and self.variables.have_stepped(self.together)

    def skip(self) -> None:
        """Forgets what was seen of a step whose update GradScaler skips."""
        self.num_skipped += bool(self.step.losses)
        self.step = Step()

    def drop(self, *, is_replaced: bool = False) -> None:
        """Leaves the step out of the file; `is_replaced` records a later one in its place."""
        self.step, self.is_on = Step(), False
        if is_replaced and self.number in self.wanted:
            self.wanted ^= {self.number, max(self.wanted) + 1}
        self.dropped.add(self.number)

    def kept(self, kind: str) -> dict[Any, dict[str, Any]]:
        """Returns the arrays of a kind in this step, as those of `Arrays`."""
        return self.step.arrays.get(f"{kind}/{self.placement.rank}", {})

    def add(self, kind: str, values: Sequence[Tensor]) -> int:
        """Adds arrays to those of a kind; returns the index of the first one."""
        start = len(self.kept(kind))
        for index, value in enumerate(values, start):
            self.save(kind, index, value)
        return start

    def save_variables(
        self, kind: str, pairs: Iterable[tuple[dict[str, str], Any]], item: int | None = None
    ) -> None:
        """Saves the values of variables, given with their descriptions, of this rank or an item."""
        described = self.variables.described
        numbers = {name: index for index, name in enumerate(described)}
        for variable, value in pairs:
            name = variable["name"]
            if name not in numbers:
                described[name], numbers[name] = variable, len(numbers)
            self.save(kind, numbers[name], value, item=item)
            if shape := self.shapes.get(f"{kind}/{numbers[name]}"):
                described[name]["shape"] = shape

    def save_left(self) -> None:
        """Saves what the script has changed since the update: averaged, sent or clipped weights.

        Parts of other ranks may not have changed: those of a whole array are what the update left.
        """
        self.save_variables("left", [*self.variables.of_model(), *self.variables.of_optimizers()])
        self._drop_unchanged("left", "after")

    def save_set(self, names: Collection[str]) -> None:
        """Saves the weights of these names that the script has changed since the step began."""
        versions = self.step.versions
        names = {n for n in names if version_of(self.weights[n]) != versions.get(n)}
        pairs = [pair for pair in self.variables.of_model() if pair[0]["name"] in names]
        if versions and pairs:
            self.save_variables("set", pairs)
            self._drop_unchanged("set", "before")

    def _drop_unchanged(self, kind: str, since: str) -> None:
        """Drops the arrays of a kind that are those of another kind, with all parts of a sample."""
        kept, before = self.kept(kind), self.kept(since)
        for index, own in [*kept.items()]:
            if all(before.get(index, {}).get(end) in (None, array) for end, array in own.items()):
                del kept[index]

    def save_ids(self, noted: Sequence[np.ndarray]) -> None:
        """Saves the identities of the examples of the step, without those of a skipped update."""
        leaves = [x for each in self.kept("data").values() for x in each.values()]
        each = max(len(leaves) // max(self.step.num_forward, 1), 1)
        first = next((i for i, x in enumerate(leaves[:each]) if x.ndim), 0)
        number = sum(len(x) for x in leaves[first::each] if x.ndim)
        if noted and number:
            self.put(IDS, 0, {"": np.concatenate(noted)[-number:]})

    def save_gradients(self, kind: str, names: Iterable[str], scale: float | None = None) -> None:
        """Saves the gradients of weights, divided by their own scale or by a given one."""
        wanted = {*names}
        for index, (name, p) in enumerate(self.weights.items()):
            if name in wanted:
                own = self.step.scale_of(name) if scale is None else scale
                self.save(kind, index, p.grad, own)

    def save(
        self, kind: str, index: int, value: Any, scale: float = 1.0, item: int | None = None
    ) -> None:
        """Saves one array; None and what is no number are left out."""
        is_written = self._is_written_at_once(kind)
        self.put(kind, index, self.arrays_of(kind, index, value, scale, copy=not is_written), item)

    def put(
        self, kind: str, index: Any, arrays: Mapping[str, Any], item: int | None = None
    ) -> None:
        """Adds arrays of `arrays_of` to the step: in the file, if they stay, else in memory."""
        group = f"{kind}/{self.placement.rank if item is None else item}"
        if self._is_written_at_once(kind):
            arrays = {x: self.output.add(f"{group}/{index}{x}", y) for x, y in arrays.items()}
        if arrays:
            self.step.arrays.setdefault(group, {})[index] = {**arrays}

    def _is_written_at_once(self, kind: str) -> bool:
        mesh = self.placement.mesh
        # A pipeline may divide what each pass adds after the last one.
        return kind in _WRITTEN_AT_ONCE and not (kind == "added" and mesh and mesh.stages)

    def arrays_of(
        self, kind: str, index: int, value: Any, scale: float = 1.0, *, copy: bool = True
    ) -> dict[str, np.ndarray]:
        """Returns the arrays that hold a value, by the ends of their names; none of no number.

        Without `copy`, they may share the memory of the value.
        """
        if not isinstance(value, Tensor):
            is_number = isinstance(value, int | float)
            return {"": to_array(torch.as_tensor(value))} if is_number else {}
        place, key = self.placement, f"{kind}/{index}"
        placed = place.place(kind, index, value)
        if placed is None:
            return {}
        shape = value.shape if is_dtensor(value) else placed.whole_shape(value.shape, place.sizes)
        is_sampled = self.sample is not None and kind in SAMPLED and self.sample.takes(shape)
        value = local(value) / float(scale) if scale != 1 else local(value)
        if is_sampled or kind in OF_VARIABLES:  # As the momentum of a sparse gradient.
            value = value.to_dense()
        if self.sample and is_sampled:
            self.shapes[key] = tuple(shape)
            if key in place.placements:  # Samples of parts are summands of that of the whole.
                place.placements[key] = placed.of_sample
            part = placed.places(shape, place.sizes, place.at)
            return sample_of(self.sample, value.detach(), shape, part)
        if has_rows(kind):
            return {"": self.rows(value, place.placements.get(key, ""))}
        if value.is_sparse and value.sparse_dim() == 1:
            return {
                "/values": to_array(values_of_sparse(value)),
                "/indices": to_array(indices_of_sparse(value)[0]),
                "/rows": np.array(len(value)),
            }
        return {"": to_array(value, copy=copy)}

    def rows(self, value: Tensor, text: str) -> np.ndarray:
        """Returns outputs of the model, or of modules, with samples of long rows.

        Those that are split, which a text says, stay whole.
        """
        if self.sample is None or text:
            return to_array(value)
        return rows_sampled(self.sample, local(value).detach())

    def keep(self) -> None:
        """Writes the arrays of the step, which has ended, and keeps what was noted of it."""
        step, position = self.step, len(self.per_step["steps"]) + 1
        facts = {
            "steps": self.number, "settings": step.settings,
            "micro_batches": max(step.num_forward, 1), "in_evaluation": [*step.in_evaluation],
            "calls": step.calls, "loss_scale": step.scale, "passes": step.passes,
        }  # fmt: skip
        for key, value in facts.items():
            self.per_step[key].append(value)
        # One that equals the latest gradient is an alias: a sum that is applied, before its parts.
        groups = sorted(step.arrays, key=lambda group: group.startswith("raw/"))
        places = [
            (f"{group}/{index}", x) for group in groups for index, x in step.arrays[group].items()
        ]
        for key, array in [(key + end, x) for key, own in places for end, x in own.items()]:
            # The index of an array of a module is known at the end.
            found = self.output.add(key, array) if ":" in key else array
            self.output.put(f"{position}/{key}", found)

    def not_updated(self) -> list[str]:
        """Returns the weights whose optimizers have updated a weight in no recorded step."""
        steps = itertools.chain(*self.per_step["settings"])
        updated = {name for group in steps for name in group["weights"]}
        trained = {*itertools.chain(*map(self.variables.names_of, self.variables.trainers))}
        return [name for name in self.weights if name in trained - updated]

    def note_modes(self) -> None:
        """Notes the layers that are in evaluation mode."""
        modes = {name: module.training for name, module in self.module.named_modules()}
        self.step.in_evaluation |= {name: None for name, is_on in modes.items() if not is_on}
