"""The weights that FSDP1 has put into flat parameters, and flat copies of weights in DeepSpeed.

Each process has a range of a flat parameter's elements, and tables of the framework say of which
weights they are. A recording gets an array of the whole weight that is 0 where other processes have
it, so that the sum of all of them is the weight: a range of elements is no part along one
dimension.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.recorders.torch.private import (
    Flat,
    Partition,
    flat_parameters,
    flat_wrappers,
    partitions_of,
    unwrapped,
)

_RANKS = "ranks_of_parts"  # Attribute of a tensor.


class FlatWeight:
    """A weight in a flat parameter; it takes the place of a tensor where the model has none.

    Args:
        flat: The flat parameter, or the flat copy of weights.
        number: The number of the weight in it.

    Attributes:
        flat: The same.
        name: Name of the weight, without those of wrappers; "" in a flat copy.
        shape: Shape of the whole weight.
        owner: The tensor that an optimizer has: a part of the weight, or the flat parameter.
    """

    def __init__(self, flat: Flat | Partition, number: int) -> None:
        self.flat, self._number = flat, number
        self.name, self.shape = flat.names[number], flat.shapes[number]
        self.owner: Tensor = flat.originals[number] if flat.originals else flat.parameter

    # What tensors have, too.

    @property
    def device(self) -> torch.device:
        """The device of its elements."""
        return self.flat.parameter.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it is updated."""
        return self.flat.shard.dtype

    @property
    def is_cuda(self) -> bool:
        """Whether it is on a GPU."""
        return self.flat.parameter.is_cuda

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""
        return self.owner.requires_grad

    def dim(self) -> int:
        """Returns the number of dimensions of the whole weight."""
        return len(self.shape)

    @property
    def grad(self) -> Tensor | None:
        """Its gradient as `read` gives it; None while each process has that of its examples.

        That is so between micro-batches, of which the flat parameter is split.
        """
        gradient = self.owner.grad
        if gradient is None or (self.flat.is_split and not self.flat.has_split_gradient):
            return None
        return self.read(gradient)

    # Its part.

    @property
    def is_here(self) -> bool:
        """Whether this process has elements of it."""
        return self.flat.ranges[self._number] is not None

    def _part_of(self, source: Tensor | None) -> Tensor:
        """Returns what is here of this weight: of a tensor like its owner, or of the weight."""
        own = self.flat.ranges[self._number]
        of_owner = source is not None and self.flat.originals
        elements = (self.flat.shard if source is None else source).detach().reshape(-1)
        if own is None:
            return elements[:0]
        start = 0 if of_owner else own.offset
        return elements[start : start + own.length]

    def is_like(self, value: Any) -> bool:
        """Returns whether a value, as of an optimizer, has an element for each of the owner's."""
        return isinstance(value, Tensor) and value.shape == self.owner.shape

    def read(self, source: Tensor | None = None) -> Tensor:
        """Returns a copy of the whole shape of what is here of the weight, or of `source`."""
        part = self._part_of(source)
        own, found = self.flat.ranges[self._number], part.new_zeros(self.shape)
        if own is not None:
            found.view(-1)[own.start : own.start + own.length] = part
        if self.flat.is_split:
            setattr(found, _RANKS, self.flat.ranks)
        return found

    @torch.no_grad()
    def write(self, array: np.ndarray, target: Tensor | None = None) -> None:
        """Assigns what is here of an array of the whole shape to the weight, or to `target`."""
        own, elements = self.flat.ranges[self._number], torch.tensor(array).reshape(-1)
        if own is not None:
            self._part_of(target).copy_(elements[own.start : own.start + own.length])
        gathered = self.flat.gathered if target is None else None
        if gathered is not None:  # An evaluation has left it, and the next pass takes it.
            start = self.flat.starts[self._number]
            gathered[start : start + len(elements)] = elements


def weights_of(module: nn.Module) -> dict[str, Any]:
    """Returns the name of each weight of a model → the weight; those of wrappers are left out."""
    flats = flat_parameters(module)
    if not flats:
        return dict(module.named_parameters())
    known = [x for flat in flats for x in (flat.parameter, *(flat.originals or ()))]
    others = ((name, p) for name, p in module.named_parameters() if all(p is not x for x in known))
    found: dict[str, Any] = {unwrapped(name): p for name, p in others}
    for flat in flats:
        found |= {name: FlatWeight(flat, number) for number, name in enumerate(flat.names)}
    owners = [name for name, _ in modules_of(module)]
    order = {name: number for number, name in enumerate(owners)}
    return dict(sorted(found.items(), key=lambda pair: order[pair[0].rpartition(".")[0]]))


def masters_of(weights: Mapping[str, Any]) -> dict[str, FlatWeight]:
    """Returns name of a weight → its flat copy that an optimizer updates, if it has one."""
    names, found = {id(p): name for name, p in weights.items()}, {}
    for each in partitions_of(weights.values()):
        for number, p in enumerate(each.weights):
            if name := names.get(id(p)):
                found[name] = FlatWeight(each, number)
    return found


def modules_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields names and modules of a model without the wrappers of FSDP."""
    for name, each in module.named_modules():
        if not isinstance(each, flat_wrappers()):
            yield unwrapped(name), each


def buffers_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields names and statistics of a model, without the names of wrappers of FSDP."""
    yield from ((unwrapped(name), buffer) for name, buffer in module.named_buffers())


def ranks_of_parts(value: Any) -> list[int]:
    """Returns the processes whose arrays add up to a whole one; none of other tensors."""
    return getattr(value, _RANKS, [])


def size_of(module: nn.Module) -> int:
    """Returns the bytes of all weights of a model, also of those that other processes have."""
    weights = weights_of(module).values()
    return sum(math.prod(p.shape) * p.dtype.itemsize for p in weights)


def owner_of(weight: Any) -> Any:
    """Returns the tensor of a weight that an optimizer has."""
    return weight.owner if isinstance(weight, FlatWeight) else weight


def is_reduced_now(weight: Any) -> bool:
    """Returns whether a weight of FSDP has a gradient that is reduced over the processes."""
    if not isinstance(weight, FlatWeight):
        return weight.grad is not None
    flat = weight.flat
    has_one = flat.has_split_gradient if flat.is_split else flat.parameter.grad is not None
    return has_one and flat.is_synchronised
