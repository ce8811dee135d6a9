"""Observes the random numbers that a script or its model draws by PyTorch's functions."""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.recorders.torch.private import in_transform
from lockstep.recorders.torch.recording import Drawn, Recording
from lockstep.recorders.torch.values import to_array

MOST_BYTES = 2**24  # Of a step; one that draws more is recorded without them.
_FUNCTIONS = (
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"),
    *("rand_like", "randn_like", "randint_like"),
)
_METHODS = (
    *("bernoulli", "multinomial", "normal_", "uniform_", "bernoulli_", "exponential_", "random_"),
    *("geometric_", "cauchy_", "log_normal_"),
)
# A loader draws the seed of its workers, and a sampler an order of examples.
_NOT_OF_SCRIPTS = "torch.utils.data.", "lockstep."


class DrawObserver:
    """Copies random numbers as they are drawn, those of a forward pass of the model apart.

    Numbers that are drawn after an update belong to the next step. What `torch.compile` and layers
    such as dropout draw is not seen: of these, the state of the generator is recorded.

    Args:
        recording: What has the model and the arrays.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording

    def install(self) -> None:
        """Installs the hooks of steps that are recorded."""
        for owner, name in _targets():
            self.recording.hooks.hook(owner, name, self._draw)
        if dist.is_available():
            self.recording.hooks.hook(dist, "broadcast", self._broadcast)

    def _draw(self, inner: Callable[..., Any], *args: Any, **options: Any) -> Any:
        result = inner(*args, **options)
        if not torch.compiler.is_compiling():
            self._note(result, sys._getframe(2).f_globals.get("__name__", ""))
        return result

    def _note(self, result: Any, caller: str) -> None:
        own = self.recording
        is_left_out = own.is_in_backward or own.is_ignored or caller.startswith(_NOT_OF_SCRIPTS)
        if is_left_out or in_transform() or type(result) is not Tensor or result.is_meta:
            return
        drawn = self._drawn
        if drawn is None:
            return
        is_inside = own.step.outside is not None
        drawn.append(Drawn("drawn_inside" if is_inside else "drawn", to_array(result), result))
        if sum(each.array.nbytes for each in drawn) > MOST_BYTES:
            if own.is_updated:
                own.next_drawn = None
            else:
                own.step.drawn = None

    @property
    def _drawn(self) -> list[Drawn] | None:
        own = self.recording
        return own.next_drawn if own.is_updated else own.step.drawn

    def _broadcast(self, inner: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Copies random numbers again that another rank has sent in place of a rank's own.

        Of those from which a tensor that is sent may be computed, it is unknown what is used.
        """
        result = inner(*args, **options)
        tensor: Any = args[0] if args else options.get("tensor")
        drawn = self._drawn or []
        is_drawn = any(each.tensor is tensor for each in drawn)
        for number, each in enumerate(drawn):
            if is_drawn and each.tensor is tensor and result is None:
                drawn[number] = each._replace(array=to_array(tensor))
            elif each.tensor is tensor or (not is_drawn and each.array.size == tensor.numel()):
                drawn[number] = each._replace(array=np.zeros(0))
        return result


@functools.cache
def _targets() -> list[tuple[Any, str]]:
    return [*_of(torch, _FUNCTIONS), *_of(Tensor, _METHODS)]


def _of(owner: Any, names: tuple[str, ...]) -> Iterator[tuple[Any, str]]:
    return ((owner, name) for name in names if hasattr(owner, name))
