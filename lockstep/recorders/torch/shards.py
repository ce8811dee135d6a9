"""Runs the model, in one process, for each replica's part of the batch in another recording."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.recorders.common import require
from lockstep.recorders.parts import places_of
from lockstep.recorders.torch.modules import Modules
from lockstep.recorders.torch.private import buffers_of, tree_leaves, tree_map_only
from lockstep.recorders.torch.recording import Recording
from lockstep.recorders.torch.replay import Part, Replay
from lockstep.recorders.torch.values import (
    random_states,
    set_random_states,
    take,
    to_array,
)


class ShardRunner:
    """Calls the model's `forward` for each part of the batch, in place of one call.

    Args:
        recording: What has the model and the arrays.
        replay: The recording of the replicas.
        seed: Of the permutation of examples; None without one.
        modules: Copies what modules compute; None without it.

    Attributes:
        parts: The parts of the step that are left.
    """

    def __init__(
        self, recording: Recording, replay: Replay, seed: int | None, modules: Modules | None
    ) -> None:
        self.recording, self.replay, self.seed, self.modules = recording, replay, seed, modules
        self.parts: list[Part] = []

    def install(self) -> None:
        """Replaces the model's `forward`."""
        self.recording.hooks.hook(self.recording.called, "forward", self._forward)

    def begin(self) -> None:
        """Reads the parts of a step."""
        parts = enumerate(self.replay.parts(self.recording.number))
        self.parts = [part._replace(number=number) for number, part in parts if part.rows]

    def end(self, path: str) -> None:
        """Warns if the step did not have all parts, and drops what was noted of them."""
        if not self.parts:
            return
        own = self.recording
        text = f"step {own.number} has other examples than {self.replay.name}"
        warnings.warn(f"{path}: {text}; not computed for each shard", stacklevel=2)
        step = own.step
        step.arrays = {x: value for x, value in step.arrays.items() if x[:7] != "shards/"}

    def _forward(self, forward: Any, *args: Any, **options: Any) -> Any:
        """Replica 0 comes last: the model keeps its statistics, and the random state after it."""
        own = self.recording
        batch = [x for x in tree_leaves((args, options)) if isinstance(x, Tensor)]
        is_recorded = own.is_on and own.step.outside is not None and batch
        found = self._find_parts(batch[0]) if is_recorded else []
        if not found:
            return forward(*args, **options)
        size, states, outputs = len(batch[0]), random_states(), []
        numbers = torch.zeros(size, dtype=torch.int64, device=batch[0].device)
        is_drawn = False
        for part, rows in found:
            numbers[rows] = part.number
            before = part.random or states
            set_random_states(before)
            with contextlib.nullcontext() if part.replica == 0 else _copied_buffers(own.module):
                given = take((args, options), rows, size)
                if self.modules:
                    self.modules.rows = rows, size
                outputs.append(forward(*given[0], **given[1]))
            is_drawn |= not all(map(torch.equal, before, random_states()))
            _check_rows(outputs[-1], len(rows))
        if self.modules:
            self.modules.rows = None
        if not is_drawn:
            set_random_states(states)
        own.add("shards", [numbers])
        return _joined(outputs, torch.argsort(torch.cat([rows for _, rows in found])))

    def _find_parts(self, batch: Tensor) -> list[tuple[Part, Tensor]]:
        """Returns the parts that are this batch, and the places of their examples in it.

        It is empty if the batch does not have the examples of whole parts.
        """
        places = places_of(to_array(batch), [part.rows for part in self.parts])
        if not places:
            return []
        found, left = list[tuple[Part, Tensor]](), list[Part]()
        for part, rows in zip(self.parts, places, strict=True):
            if rows:
                rows = rows if self.seed is None else sorted(rows)
                found.append((part, torch.tensor(rows, device=batch.device)))
            else:
                left.append(part)
        self.parts = left
        return sorted(found, key=lambda pair: -pair[0].replica)


@contextlib.contextmanager
def _copied_buffers(module: nn.Module) -> Iterator[None]:
    """Leaves the statistics of a model as they are: a forward pass changes copies of them."""
    owners = [buffers_of(owner) for _, owner in module.named_modules()]
    own = [(owner, name, x) for owner in owners for name, x in owner.items() if x is not None]
    for owner, name, x in own:
        owner[name] = x.clone()
    try:
        yield
    finally:
        for owner, name, x in own:
            owner[name] = x


def _check_rows(output: Any, number: int) -> None:
    """Raises an error if outputs of parts of a batch cannot be put together."""
    for x in tree_leaves(output):
        has_rows = isinstance(x, Tensor) and x.dim() and len(x) == number
        what = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"type {type(x).__name__}"
        require(
            has_rows or isinstance(x, bool | int | float | str | None),
            f"shards='each': the model has an output of {what}, without a row for each example;"
            " compute the loss outside of the model, or record without shards=",
        )


def _joined(outputs: Sequence[Any], order: Tensor) -> Any:
    """Returns the outputs of all parts of a batch as one, in another order of examples."""
    tensors = ([x for x in tree_leaves(each) if isinstance(x, Tensor)] for each in outputs)
    columns = zip(*tensors, strict=True)
    return tree_map_only(Tensor, lambda _: torch.cat(next(columns))[order], outputs[0])
