"""Runs the model, in one process, for each replica's part of the batch in another recording."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.recorders.common import require
from lockstep.recorders.parts import places_of
from lockstep.recorders.torch.modules import Modules
from lockstep.recorders.torch.private import tree_leaves, tree_map_only, with_buffers
from lockstep.recorders.torch.recording import Recording
from lockstep.recorders.torch.replay import Part, Replay
from lockstep.recorders.torch.values import (
    random_states,
    set_random_states,
    take,
    to_array,
)
from lockstep.recorders.torch.variables import real

OF_MEAN = 1e-4  # The relative difference of a mean that rounding can cause.
NO_ROWS = (
    "shards='each': the model has an output {}; compute the loss outside of the model, or record"
    " without shards="
)


class ShardRunner:
    """Calls the model's `forward` for each part of the batch, in place of one call.

    Args:
        recording: What has the model and the arrays.
        replay: The recording of the replicas.
        modules: Copies what modules compute; None without it.
    """

    def __init__(self, recording: Recording, replay: Replay, modules: Modules | None) -> None:
        self.recording, self.replay, self.modules = recording, replay, modules
        self.parts: list[Part] = []  # Those of the step that are left.
        # Replica → name of a statistic → its value after the replica's passes in the step.
        self.buffers: dict[int, dict[str, Tensor]] = {}

    def install(self) -> None:
        """Replaces the model's `forward`."""
        for model in self.recording.called:
            self.recording.hooks.hook(model, "forward", self._forward)

    def begin(self) -> None:
        """Reads the parts of a step."""
        self.buffers = {}
        parts = self.replay.parts(self.recording.number)
        self.parts = [part for part in parts if part.rows != []]

    def end(self, path: str) -> None:
        """Saves the statistics of each replica, or warns if the step did not have all parts."""
        own = self.recording
        known = own.variables.described
        if self.parts:
            text = f"step {own.number} has other examples than {self.replay.name}"
            warnings.warn(f"{path}: {text}; not computed for each shard", stacklevel=2)
            own.kept("shards").clear()
            return
        for replica, buffers in self.buffers.items():
            pairs = [(known[x], real(value)) for x, value in buffers.items() if x in known]
            own.save_variables("own_after", pairs, replica)

    def _forward(self, forward: Any, *args: Any, **options: Any) -> Any:
        """Replica 0 comes last: the model keeps its statistics, and the random state after it."""
        own = self.recording
        own.sources.clear()
        batch = _tensors((args, options))
        is_recorded = own.is_on and own.step.outside is not None and batch
        found = self._find_parts(batch[0]) if is_recorded else []
        if not found:
            return forward(*args, **options)
        size, states, outputs, is_drawn = len(batch[0]), random_states(), [], False
        numbers = torch.zeros(size, dtype=torch.int64, device=batch[0].device)
        for part, rows in found:
            numbers[rows] = part.number
            before = part.random or states
            set_random_states(before)
            left = self.buffers.setdefault(part.replica, {})
            with _buffers_of_replica(own.module, left, is_model=part.replica == 0):
                if self.modules:
                    self.modules.rows = rows, size
                outputs.append(_called(forward, args, options, size, rows))
            is_drawn |= not all(map(torch.equal, before, random_states()))
            _check_rows(outputs[-1], len(rows))
        if self.modules:
            self.modules.rows = None
        states = random_states() if is_drawn else states
        places = [rows for _, rows in found]
        if len(found) > 1 and not all(x.dim() for x in _tensors(outputs)):
            self._check_means(functools.partial(_called, forward, args, options, size), places)
        set_random_states(states)
        own.add("shards", [numbers])
        joined = _joined(outputs, places)
        columns = zip(*map(_tensors, outputs), strict=True)
        for x, column in zip(_tensors(joined), columns, strict=True):
            if x.dim():
                own.sources[id(x)] = [*zip(column, places, strict=True)]
        return joined

    @torch.no_grad()
    def _check_means(self, call: Callable[[Tensor], Any], places: Sequence[Tensor]) -> None:
        """Raises an error unless numbers of the model are means over examples, if it is not random.

        Args:
            call: Returns what the model computes for some examples.
            places: Those of each part.
        """
        own = self.recording
        training = [module for module in own.module.modules() if module.training]
        own.is_on = False
        try:
            for module in training:  # `eval` of a layer of its own may change its weights.
                module.training = False
            joined, whole = _joined([*map(call, places)], places), call(torch.cat(places).sort()[0])
        finally:
            own.is_on = True
            for module in training:
                module.training = True
        for a, b in zip(*map(tree_leaves, (joined, whole)), strict=True):
            is_mean = not isinstance(a, Tensor) or a.dim() or torch.allclose(a, b, OF_MEAN, 0)
            what = "which is no mean over examples, or draws numbers in evaluation mode"
            require(is_mean, NO_ROWS.format(what))

    def _find_parts(self, batch: Tensor) -> list[tuple[Part, Tensor]]:
        """Returns the parts that are this batch, and the places of their examples in it.

        It is empty if the batch does not have the examples of whole parts.
        """
        places = places_of(to_array(batch), [part.rows or [] for part in self.parts])
        found = [
            (part, torch.tensor(rows, device=batch.device))
            for part, rows in zip(self.parts, places, strict=False) if rows
        ]  # fmt: skip
        numbers = {part.number for part, _ in found}
        self.parts = [part for part in self.parts if part.number not in numbers]
        return sorted(found, key=lambda pair: -pair[0].replica)


@contextlib.contextmanager
def _buffers_of_replica(
    module: nn.Module, left: dict[str, Tensor], *, is_model: bool
) -> Iterator[None]:
    """Gives a forward pass the statistics that a replica's last pass has left, or the model's.

    Only those of one replica stay in the model.
    """
    own = {name: left.get(name, value).clone() for name, value in module.named_buffers()}
    with contextlib.nullcontext() if is_model else with_buffers(module, own):
        yield
    left |= {name: value.clone() for name, value in module.named_buffers()} if is_model else own


def _check_rows(output: Any, number: int) -> None:
    """Raises an error if outputs of parts of a batch cannot be put together."""
    for x in tree_leaves(output):
        has_rows = isinstance(x, Tensor) and (not x.dim() or len(x) == number)
        what = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"type {type(x).__name__}"
        is_known = has_rows or isinstance(x, bool | int | float | str | None)
        require(is_known, NO_ROWS.format(f"of {what}, without a row for each example"))


def _called(forward: Any, args: Any, options: Any, size: int, rows: Tensor) -> Any:
    """Returns what a model computes for some examples of a batch."""
    args, options = take((args, options), rows, size)
    return forward(*args, **options)


def _tensors(nest: Any) -> list[Tensor]:
    return [x for x in tree_leaves(nest) if isinstance(x, Tensor)]


def _joined(outputs: Sequence[Any], places: Sequence[Tensor]) -> Any:
    """Returns the outputs of all parts of a batch as one, by the places of their examples.

    A number without rows, as a loss, is the mean over all examples.
    """
    columns = zip(*map(_tensors, outputs), strict=True)
    order = torch.argsort(torch.cat([*places]))

    def join(first: Tensor) -> Tensor:
        column = next(columns)
        if first.dim():
            return torch.cat(column)[order]
        sums = (x * len(rows) for x, rows in zip(column, places, strict=True))
        return torch.stack([*sums]).sum() / len(order)

    return tree_map_only(Tensor, join, outputs[0])
