"""Copies inputs and outputs of modules, and the gradients of the loss by them."""

import fnmatch
import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.data.trace import OF_MODULES
from lockstep.recorders.common import require
from lockstep.recorders.torch.private import in_transform, number_of
from lockstep.recorders.torch.recording import Recording
from lockstep.recorders.torch.values import Hook, floating

MOST_BYTES = 2**30  # Of the arrays of all modules in a step; those of a pattern may have more.


class Modules:
    """Copies inputs and outputs of modules, and gradients of the loss with respect to them.

    Of a module that a forward pass calls several times, the first call counts. The gradient of an
    output is the whole one; that of an input is the part that flows through the module, as a block
    adds its input to its output elsewhere. No view of a tensor is made, which would change the
    order in which autograd adds.

    Args:
        recording: What has the model and the arrays.
        pattern: True for all modules, or a pattern of their names.
    """

    def __init__(self, recording: Recording, pattern: bool | str) -> None:
        self.recording = recording
        self.names = list[str]()  # The modules in the order of their first call.
        # The examples of the batch that the model computes now, and the size of the batch.
        self.rows: tuple[Tensor, int] | None = None
        self.open = dict[str, tuple[Any, ...]]()  # Those that compute now.
        self.most_bytes = MOST_BYTES if pattern is True else np.inf  # Below 0 once left out.
        wanted = "*" if pattern is True else str(pattern)
        named = recording.module.named_modules()
        self.modules = {n: m for n, m in named if n and fnmatch.fnmatchcase(n, wanted)}
        require(self.modules, f"modules={pattern!r}: no module of the model has such a name")

    def install(self) -> None:
        """Installs the hooks of the modules."""
        add = self.recording.hooks.enter_context
        for name, module in self.modules.items():
            before, after = (Hook(functools.partial(f, name)) for f in (self._before, self._after))
            add(module.register_forward_pre_hook(before, with_kwargs=True))
            add(module.register_forward_hook(after))

    def _before(self, name: str, module: nn.Module, args: Any, options: Any = ()) -> None:
        own, step, rows = self.recording, self.recording.step, self.rows
        is_hidden = step.outside is None or torch.compiler.is_compiling() or in_transform()
        if is_hidden or self.most_bytes < 0:
            return
        place = f"{step.num_forward - 1}:{name}"
        if (place, id(rows)) in step.called:
            return
        step.called.add((place, id(rows)))
        self.names += [] if name in self.names else [name]
        keep = functools.partial(self._keep, place, rows, own.number)
        inputs = floating((args, options))
        edge: tuple[Any, int] = (None, 0)
        if inputs:
            keep("module_in", inputs[0])
            edge = inputs[0].grad_fn, inputs[0].output_nr
        if edge[0] is not None:  # The gradient stays 0 if the module does not send one.
            keep("module_in_grad", torch.zeros_like(inputs[0], requires_grad=False))
        nodes = [x.grad_fn for x in inputs if x.grad_fn is not None]
        self.open[name] = keep, edge, max((number_of(x) for x in nodes), default=0)

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        keep, edge, number = self.open.pop(name, (None, (None, 0), 0))
        outputs = floating(output)
        if not (keep and outputs):
            return
        keep("module_out", outputs[0])
        if outputs[0].requires_grad:
            keep("module_out_grad", torch.zeros_like(outputs[0], requires_grad=False))
            outputs[0].register_hook(lambda gradient: keep("module_out_grad", gradient))
        for node, index in _nodes_to(edge, outputs, number) if edge[0] else ():

            def of_edge(gradients: Any, _: Any, index: int = index) -> None:
                keep("module_in_grad", gradients[index])

            node.register_hook(of_edge)

    def _keep(self, place: str, rows: Any, step: int, kind: str, value: Tensor | None) -> None:
        """Adds an array of the whole batch, or of some rows of it, to what was kept before.

        Args:
            place: The number of the forward pass, and the module.
            rows: The rows and the size of the batch; None for all.
            step: The step of the forward pass.
            kind: The kind of the array.
            value: The array, or the part of it that this process has.
        """
        own, key = self.recording, f"{kind}/{place}"
        is_over = step != own.number or not own.is_on or not own.step.arrays
        if value is None or is_over or self.most_bytes < 0:
            return
        placements, text = own.placement.placements, own.placement.text_of(kind, place, value)
        kept, before = own.kept(kind).get(place, {}), placements.get(key, "")
        is_first = not kept or not kept[""].any()  # The first gradient takes the place of zeros.
        if key in own.step.unknown or text is None or not (is_first or text == before):
            own.step.unknown.add(key)  # Parts of a sum that are split in several ways.
            own.kept(kind).pop(place, None)
            return
        array = own.rows(value, text)
        array = array / (own.step.scale * own.placement.num_parts) if "_grad" in kind else array
        if rows is not None:
            numbers, size = rows[0].cpu().numpy(), rows[1]
            if not array.ndim or len(array) % len(numbers):
                return
            each = len(array) // len(numbers)
            whole = np.zeros((size, each, *array.shape[1:]), array.dtype)
            whole[numbers] = array.reshape(len(numbers), each, *array.shape[1:])
            array = whole.reshape(-1, *array.shape[1:])
        if not kept:
            own.step.num_module_bytes += array.nbytes
            if own.step.num_module_bytes > self.most_bytes:
                self._leave_out()
                return
        own.put(kind, place, {"": array if is_first else kept[""] + array})
        placements |= {key: text} if text or before else {}

    def _leave_out(self) -> None:
        """Drops the arrays of this step, and stops to record modules, with a warning."""
        for kind in OF_MODULES:
            self.recording.kept(kind).clear()
        self.most_bytes = -1
        text = (
            f"inputs and outputs of all modules have more than {MOST_BYTES >> 20:,} MiB in a step"
        )
        advice = 'they are not recorded; pass a pattern, as in modules="layers.*"'
        warnings.warn(f"modules=True: {text}: {advice}", stacklevel=2)


def indexed(names: Sequence[str], name: str) -> str:
    """Returns the name of an array in the file for `POSITION/KIND/RANK/NUMBER:MODULE`.

    `names` has all modules, in their order in the file.
    """
    start, _, module = name.partition(":")
    if not module:
        return name
    start, number = start.rsplit("/", 1)
    return f"{start}/{int(number) * len(names) + names.index(module)}"


def _nodes_to(edge: Any, outputs: Sequence[Tensor], number: int) -> Iterator[tuple[Any, int]]:
    """Yields the nodes of a module that send a gradient to its input, and which of their gradients.

    Args:
        edge: The node that has computed the input, and which of its outputs the input is.
        outputs: What the module has computed.
        number: Nodes with a number above this one were created in the module.
    """
    left = [x.grad_fn for x in outputs if x.grad_fn is not None and x.grad_fn is not edge[0]]
    seen = set(left)
    while left:
        node = left.pop()
        for index, following in enumerate(node.next_functions):
            if following == edge:
                yield node, index
            elif following[0] not in seen and following[0] is not None:
                seen.add(following[0])
                if number_of(following[0]) > number:
                    left.append(following[0])
