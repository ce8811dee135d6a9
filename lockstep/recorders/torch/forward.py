"""Observes the forward passes of the model: examples, random numbers, outputs."""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.recorders.common import Hooks
from lockstep.recorders.torch.modules import Modules
from lockstep.recorders.torch.private import in_transform, tree_leaves, uncompiled
from lockstep.recorders.torch.recording import Recording, called_in
from lockstep.recorders.torch.replay import Replay
from lockstep.recorders.torch.shards import ShardRunner
from lockstep.recorders.torch.values import (
    Hook,
    computed_in,
    is_dtensor,
    local,
    random_states,
    take,
    to_array,
    whole_numbers,
    with_rows,
)

MOST_BYTES = 2**26  # The most bytes of outputs that are recorded in a step.


class ForwardObserver:
    """Copies what enters and leaves the model in forward passes of its training.

    Args:
        recording: What has the model and the arrays.
        replay: The recording to start from; None without one.
        seed: Of the permutation of examples; None without one.
        shards: Runs the model for each part of a batch; None to run it as it is.
        modules: Copies what modules compute; None without it.
        begin: Is called before the first arrays of a step; with True, in a forward pass.
        end: Is called at the end of the step before.
    """

    def __init__(
        self, recording: Recording, replay: Replay | None, *, seed: int | None,
        shards: ShardRunner | None, modules: Modules | None, begin: Callable[..., None],
        end: Callable[[], None],
    ) -> None:  # fmt: skip
        self.recording, self.replay, self.seed = recording, replay, seed
        self.shards, self.modules, self.begin, self.end = shards, modules, begin, end
        self.inverse: Tensor | None = None
        self.of_last_layer: list[Tensor] = []
        self.num_rows = 0
        self.is_in_ddp, self.is_reduced = False, False  # What DDP does in this forward pass.
        self.calls_whole = False
        self.outer: nn.Module | None = None  # The model whose forward pass is recorded now.

    def install_always(self, hooks: Hooks) -> None:
        """Installs what sees where a step begins."""
        own = self.recording
        options: dict[str, Any] = {"with_kwargs": True, "prepend": True}
        for model in own.called:
            hooks.callback(model.register_forward_pre_hook(Hook(self._before), **options).remove)
            # A script can call these in place of the whole.
            for part in (x for child in uncompiled(model).children() for x in called_in(child)):
                hooks.callback(part.register_forward_pre_hook(Hook(self._before_part)).remove)
        for name, other in own.variables.others.items():
            if isinstance(other, nn.Module):
                note = Hook(functools.partial(self._note_other, name))
                hooks.callback(other.register_forward_pre_hook(note).remove)

    def _before_part(self, part: nn.Module, *_: Any) -> None:
        """Begins a step of a training that calls parts of the model, and never the whole."""
        own = self.recording
        if self.calls_whole or not part.training or own.is_ignored or own.is_in_backward:
            return
        if in_transform() or not torch.is_grad_enabled():
            return
        if own.is_over():
            self.end()
        own.step.has_graph = True
        if own.is_on:
            self.begin(is_forward=True)

    def _note_other(self, name: str, *_: Any) -> None:
        """Notes that a further module has been called with gradients."""
        if torch.is_grad_enabled():
            self.recording.called_others.add(name)

    def install(self) -> None:
        """Installs the hooks of steps that are recorded."""
        own = self.recording
        add = own.hooks.enter_context
        for model in own.called:
            add(model.register_forward_hook(Hook(self._after)))
        for _, layer in own.module.named_modules():
            add(layer.register_forward_hook(Hook(self._note_dtype)))
        if self.modules:
            self.modules.install()
        for ddp in own.ddps:
            add(ddp.register_forward_pre_hook(Hook(self.before_ddp)))
            add(ddp.register_forward_hook(Hook(self._after_ddp)))
        if self.shards:
            self.shards.install()

    def before_ddp(self, ddp: Any, *_: Any) -> None:
        """Notes whether DDP reduces the gradients of the forward pass that begins."""
        self.is_in_ddp, self.is_reduced = True, ddp.require_backward_grad_sync

    def _after_ddp(self, *_: Any) -> None:
        self.is_in_ddp = False

    def _before(self, module: nn.Module, args: Any, options: Any) -> Any:
        own = self.recording
        if not torch.is_grad_enabled() or own.is_ignored:
            return None
        self.calls_whole = True
        if in_transform():
            text = (
                "the model is called within torch.func, whose tensors cannot be recorded: of this"
            )
            warnings.warn(f"{text} pass, only gradients that are applied are seen", stacklevel=2)
            own.step.is_transformed = True
            return None
        if own.is_in_backward and own.step.num_forward:
            return None  # Checkpointing computes the pass again.
        if own.is_in_backward and own.is_updated:
            text = "the model is checkpointed as a whole with use_reentrant=True, which hides its"
            warnings.warn(f"{text} forward pass; pass use_reentrant=False", stacklevel=2)
            return None
        if own.step.outside is not None and module is not self.outer:
            return None  # One model calls another.
        if own.is_over():
            self.end()
        own.step.was_called, self.outer = True, module
        if not module.training:
            own.step.is_evaluated = True
            return None
        return self._before_recorded(args, options) if own.is_on else None

    def _before_recorded(self, args: Any, options: Any) -> Any:
        own = self.recording
        if own.is_skipped():
            own.skip()
            own.step.was_called = True
        self.begin(is_forward=True)
        step, is_inner = own.step, own.step.outside is not None
        if is_inner:  # In Lightning, DDP calls the model, which calls itself: the last call counts.
            step.arrays, step.num_forward, self.inverse = (
                step.outside or {},
                step.num_forward - 1,
                None,
            )
        step.outside, self.of_last_layer = dict(step.arrays), []
        tensors = [x for x in tree_leaves((args, options)) if isinstance(x, Tensor)]
        shapes = (x.shape for x in map(local, tensors) if x.dim())
        own.placement.row_sizes = next(shapes, ())
        batch = [x for x in tree_leaves((args, options)) if isinstance(x, Tensor)]
        sizes = [len(local(x)) for x in batch if x.dim()]
        if self.seed is not None and sizes and not is_inner:
            generator = torch.Generator().manual_seed(self.seed + own.number)
            order = torch.randperm(sizes[0], generator=generator)
            self.inverse = torch.argsort(order)
            args, options, batch = take((args, options, batch), order, len(order))
        own.add("random", random_states())
        # What another model has computed in this step is no example: only its place is kept.
        is_made = [len(own.called) > 1 and x.grad_fn is not None for x in batch]
        pairs = zip(batch, is_made, strict=True)
        own.add("data", [x.new_zeros(()) if made else x for x, made in pairs])
        self.num_rows = sizes[0] if sizes else 0
        own.note_modes()
        step.num_forward += 1
        if not is_inner:
            if own.is_updated:
                step.calls.append(f"update {len(step.settings)}")
            step.calls.append("forward")
            step.passes.append(self._way())
        return args, options

    def _way(self) -> str:
        """Returns how the gradients of a forward pass are reduced."""
        if not self.recording.ddp:
            return ""
        if not self.is_in_ddp:
            return "module"
        return "ddp" if self.is_reduced else "no_sync"

    def _note_dtype(self, layer: nn.Module, args: Any, output: Any) -> None:
        """Keeps the dtype in which layers compute; a model may convert its own outputs."""
        own = self.recording
        is_training = torch.is_grad_enabled() and own.module.training
        if own.is_on and is_training and not in_transform():
            own.computed_in = computed_in(output, own.weights) or own.computed_in
            if own.step.outside is not None and not torch.compiler.is_compiling():
                self.of_last_layer = with_rows(output, self.num_rows) or self.of_last_layer

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        own = self.recording
        is_training = torch.is_grad_enabled() and module.training
        is_outer = own.step.outside is not None and module is self.outer
        if not (own.is_on and is_training and is_outer):
            return None
        own.step.outside = None
        own.add("random_after", random_states())
        outputs = with_rows(output, self.num_rows)
        mesh = own.placement.mesh
        if not outputs and (own.placement.dims["outputs"] or not (mesh and mesh.model)):
            outputs = self.of_last_layer  # On a mesh, it may be a part, of which nothing is known.
        self._save_outputs(outputs)
        if outputs and not (own.sample or mesh):
            own.add("y_other", whole_numbers(output, self.num_rows))
        inverse, self.inverse = self.inverse, None
        return output if inverse is None else take(output, inverse, len(inverse))

    def _save_outputs(self, outputs: Sequence[Tensor]) -> None:
        own, step = self.recording, self.recording.step
        if not own.placement.is_last:
            return
        for x in outputs:
            shape = local(x).shape
            is_sampled = own.sample and own.sample.takes(shape[1:])
            size = own.sample.length if own.sample and is_sampled else math.prod(shape[1:])
            step.num_bytes += len(local(x)) * size * x.element_size()
        if step.num_bytes > MOST_BYTES:
            outside = ("y_pred", "y_grad")
            step.arrays = {k: v for k, v in step.arrays.items() if not k.startswith(outside)}
            return
        for x in outputs:
            own.add("y_pred", [x])
            # Stays 0 if the loss does not use it.
            is_large = own.sample and not is_dtensor(x)
            zeros = x.new_zeros(()).expand_as(x) if is_large else torch.zeros_like(x)
            own.add("y_grad", [zeros])
            if x.requires_grad and own.placement.knows_loss:
                key = [key for key in step.arrays if key.startswith("y_grad/")][-1]
                # The model itself may use an output, as that of an encoder: hook what it has used.
                sources = self.shards.sources.pop(id(x), None) if self.shards else None
                for source, places in sources or [(x, None)]:
                    hook = functools.partial(self._after_loss, step, key, places)
                    source.register_hook(hook)

    def _after_loss(
        self, step: Any, key: str, places: Tensor | None, gradient: Tensor | None
    ) -> None:
        # DDP gives None for an output that the loss does not use.
        own = self.recording
        if gradient is not None and step is own.step and key in step.arrays:
            if places is not None:
                whole = gradient.new_zeros(len(step.arrays[key]), *gradient.shape[1:])
                gradient = whole.index_copy(0, places, gradient)
            text = own.placement.placements.get(f"y_grad/{key.split('/')[-1]}", "")
            rows = own.rows("y_grad", gradient, text)
            array = to_array(rows) / (step.scale * own.placement.num_parts)
            before = step.arrays[key]
            step.arrays[key] = before + array if before.shape == array.shape else array
            if not own.placement.place("y_grad", int(key.split("/")[-1]), gradient):
                del step.arrays[key]  # A DTensor that is split in another way than the output.
