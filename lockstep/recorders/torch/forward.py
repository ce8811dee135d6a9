"""Observes the forward passes of the model: examples, random numbers, outputs."""

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.recorders.common import Hooks
from lockstep.recorders.torch.private import in_transform, tree_leaves
from lockstep.recorders.torch.recording import Recording
from lockstep.recorders.torch.values import (
    Hook,
    computed_in,
    local,
    random_states,
    take,
    with_rows,
)

MOST_BYTES = 2**26  # The most bytes of outputs that are recorded in a step.


class ForwardObserver:
    """Copies what enters and leaves the model in forward passes of its training.

    Args:
        recording: What has the model and the arrays.
        seed: Of the permutation of examples; None without one.
    """

    def __init__(self, recording: Recording, seed: int | None) -> None:
        self.recording, self.seed = recording, seed
        self.inverse: Tensor | None = None
        self.of_last_layer: list[Tensor] = []
        self.num_rows = 0
        self.is_in_ddp, self.is_reduced = False, False  # What DDP does in this forward pass.
        self.outer: nn.Module | None = None  # The model whose forward pass is recorded now.

    def install_always(self, hooks: Hooks) -> None:
        """Installs what sees where a step begins."""
        own = self.recording
        options: dict[str, Any] = {"with_kwargs": True, "prepend": True}
        for model in own.called:
            hooks.callback(model.register_forward_pre_hook(Hook(self._before), **options).remove)
        for name, other in own.variables.others.items():
            if isinstance(other, nn.Module):
                note = Hook(functools.partial(self._note_other, name))
                hooks.callback(other.register_forward_pre_hook(note).remove)

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
        for ddp in own.ddps:
            add(ddp.register_forward_pre_hook(Hook(self.before_ddp)))
            add(ddp.register_forward_hook(Hook(lambda *_: setattr(self, "is_in_ddp", False))))

    def before_ddp(self, ddp: Any, *_: Any) -> None:
        """Notes whether DDP reduces the gradients of the forward pass that begins."""
        self.is_in_ddp, self.is_reduced = True, ddp.require_backward_grad_sync

    def _before(self, module: nn.Module, args: Any, options: Any) -> Any:
        own = self.recording
        if not torch.is_grad_enabled() or own.is_ignored or in_transform():
            return None  # Tensors of `torch.func` have no numbers.
        if own.depth and own.step.num_forward:
            return None  # Checkpointing computes the pass again.
        if own.depth and own.is_updated:
            text = "the model is checkpointed as a whole with use_reentrant=True, which hides its"
            warnings.warn(f"{text} forward pass; pass use_reentrant=False", stacklevel=2)
            return None
        if own.step.outside is not None and module is not self.outer:
            return None  # One model calls another.
        if own.is_over():
            own.end()
        own.step.was_called, own.step.was_called_again = True, own.is_updated
        self.outer = module
        return self._before_recorded(args, options) if own.is_on and module.training else None

    def _before_recorded(self, args: Any, options: Any) -> Any:
        own = self.recording
        own.begin(is_forward=True)
        step, is_inner = own.step, own.step.outside is not None
        if is_inner:  # In Lightning, DDP calls the model, which calls itself: the last call counts.
            step.arrays, self.inverse = step.outside or {}, None
            step.num_forward -= 1
        step.outside = {group: {**arrays} for group, arrays in step.arrays.items()}
        self.of_last_layer = []
        batch = [x for x in tree_leaves((args, options)) if isinstance(x, Tensor)]
        sizes = own.placement.row_sizes = next((local(x).shape for x in batch if x.dim()), ())
        self.num_rows = sizes[0] if sizes else 0
        if self.seed is not None and sizes and not is_inner:
            generator = torch.Generator().manual_seed(self.seed + own.number)
            order = torch.randperm(self.num_rows, generator=generator)
            self.inverse = torch.argsort(order)
            args, options, batch = take((args, options, batch), order, self.num_rows)
        own.add("random", random_states())
        # What another model has computed in this step is no example: only its place is kept.
        several = len(own.called) > 1
        own.add(
            "data", [x.new_zeros(()) if several and x.grad_fn is not None else x for x in batch]
        )
        own.note_modes()
        step.num_forward += 1
        if not is_inner:
            if own.is_updated:
                step.calls.append(f"update {len(step.settings)}")
            step.calls.append("forward")
            step.passes.append("ddp" if self.is_in_ddp and self.is_reduced else "")
        return args, options

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
        inverse, self.inverse = self.inverse, None
        return output if inverse is None else take(output, inverse, len(inverse))

    def _save_outputs(self, outputs: Sequence[Tensor]) -> None:
        own, step = self.recording, self.recording.step
        if not own.placement.is_last:
            return
        for x in outputs:
            number, *row = local(x).shape
            is_sampled = own.sample and own.sample.takes(row)
            size = own.sample.length if own.sample and is_sampled else math.prod(row)
            step.num_bytes += number * size * x.element_size()
        if step.num_bytes > MOST_BYTES:
            for kind in ("y_pred", "y_grad"):
                own.kept(kind).clear()
            return
        for x in outputs:
            own.add("y_pred", [x])
            # Stays 0 if the loss does not use it.
            index = own.add("y_grad", [torch.zeros_like(x)])
            if x.requires_grad and own.placement.knows_loss:
                # The model itself may use an output, as that of an encoder: hook what it has used.
                for source, rows in own.sources.pop(id(x), [(x, None)]):
                    source.register_hook(functools.partial(self._after_loss, step, index, rows))

    def _after_loss(
        self, step: Any, index: int, rows: Tensor | None, gradient: Tensor | None
    ) -> None:
        # DDP gives None for an output that the loss does not use.
        own, place = self.recording, self.recording.placement
        if gradient is not None and step is own.step and (kept := own.kept("y_grad").get(index)):
            if rows is not None:
                whole = gradient.new_zeros(len(kept[""]), *gradient.shape[1:])
                gradient = whole.index_copy(0, rows, gradient)
            text = place.placements.get(f"y_grad/{index}", "")
            array = own.rows(gradient, text) / (step.scale * place.num_parts)
            kept[""] = kept[""] + array if kept[""].shape == array.shape else array
            if place.place("y_grad", index, gradient) is None:
                kept.clear()  # A DTensor that is split in another way than the output.
