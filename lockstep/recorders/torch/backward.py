"""Observes backward passes, clipping, loss scales, and the updates of all optimizers."""

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lockstep.recorders.common import Hooks
from lockstep.recorders.torch.added_gradients import AddedGradients
from lockstep.recorders.torch.forward import ForwardObserver
from lockstep.recorders.torch.placement import OF_LOSS
from lockstep.recorders.torch.private import (
    Targets,
    clipping,
    move_first,
    of_pipelines,
    private,
    tree_leaves,
)
from lockstep.recorders.torch.recording import Recording


class GradientObserver:
    """Copies gradients when autograd has computed them, when they are reduced, clipped and applied.

    Those by weights that `fully_shard` has split are copied once they are reduced. A hook of the
    whole weight, which exists within the backward pass, sees each rank's own; but where they are
    recorded, the checks do not look for faults of the parts, as a rank that scales its own part.

    Args:
        recording: What has the model and the arrays.
        forward: Observes its forward passes.
        on_update: Is called when an optimizer has updated a weight.
    """

    def __init__(
        self, recording: Recording, forward: ForwardObserver, on_update: Callable[[], None]
    ) -> None:
        self.recording, self.forward, self.on_update = recording, forward, on_update
        self.added = AddedGradients(recording)
        self.has_gradients = False
        self.settings: dict[int, list[dict[str, Any]]] = {}  # Of optimizers that compute now.
        for owner, name, _ in self._targets():
            private(owner, name)

    def install_always(self, hooks: Hooks) -> None:
        """Installs what sees updates, in all steps."""
        hooks.hook(torch.autograd, "backward", self._backward)
        self.added.install_always(hooks)
        hooks.callback(register_optimizer_step_pre_hook(self._before_any_update).remove)
        hooks.callback(register_optimizer_step_post_hook(self._after_update).remove)

    def install(self) -> None:
        """Installs the hooks of steps that are recorded."""
        own = self.recording
        add = own.hooks.enter_context
        self.added.install()
        for optimizer in own.variables.optimizers:  # After the hooks of the script.
            add(optimizer.register_step_pre_hook(self._before_update))
        for target in self._targets():
            own.hooks.hook(*target)
        for index, (name, p) in enumerate(own.weights.items()):
            if p.requires_grad and p not in own.placement.of_fsdp:
                hook = functools.partial(self._after_gradient, index, name)
                add(move_first(p.register_post_accumulate_grad_hook(hook)))

    # Functions of PyTorch.

    def _targets(self) -> Targets:
        """Returns the functions that clip gradients and scale losses, and what replaces each."""
        utils, scaler = nn.utils, torch.amp.GradScaler
        of_norm, of_value = (functools.partial(self._clip, kind) for kind in ("norm", "value"))
        found: Targets = [(x, "clip_grad_value_", of_value) for x in (utils, utils.clip_grad)]
        if hasattr(utils, "clip_grads_with_norm_"):  # A public name of what clips by a norm.
            found.append((utils, "clip_grads_with_norm_", of_norm))
        found += [(scaler, "scale", self._scale_loss), (scaler, "unscale_", self._unscale)]
        found += [(scaler, "update", self._update_scale), *clipping(of_norm)]
        return found + of_pipelines(self._average_micro_batches, self._without_recording)

    def _clip(self, kind: str, original: Any, parameters: Any, *args: Any, **options: Any) -> Any:
        """Keeps the gradients before the first of several functions clips them."""
        own, step = self.recording, self.recording.step
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        is_own = bool({*own.weights.values()}.intersection(parameters))
        limit = [*args, *(options[x] for x in ("max_norm", "clip_value") if x in options)][0]
        call = f"clip {kind} {float(limit):g}"
        if own.is_on and is_own and step.calls[-1:] != [call]:
            if not step.unclipped:
                step.unclipped = {
                    index: own.arrays_of("unclipped", index, p.grad, step.scale_of(name))
                    for index, (name, p) in enumerate(own.weights.items())
                }
            step.calls.append(call)
        return original(parameters, *args, **options)

    def _scale_loss(self, original: Any, scaler: Any, *args: Any, **options: Any) -> Any:
        scaled = original(scaler, *args, **options)
        if scaler.is_enabled():
            step = self.recording.step
            step.scale = float(scaler.get_scale())
            step.unscaled.clear()
        return scaled

    def _unscale(self, original: Any, scaler: Any, optimizer: Any) -> Any:
        result, step = original(scaler, optimizer), self.recording.step
        names = self.recording.variables.names_of(optimizer)
        if names and scaler.is_enabled():
            step.unscaled.update(names)
            step.calls += ["unscale"] if step.calls[-1:] != ["unscale"] else []
        return result

    def _update_scale(self, original: Any, scaler: Any, *args: Any, **options: Any) -> Any:
        own = self.recording
        if own.step.losses and "unscale" in own.step.calls and not own.is_updated:
            own.skip()
        return original(scaler, *args, **options)

    def _without_recording(self, original: Any, *args: Any, **options: Any) -> Any:
        """Calls what runs the model to learn the shapes of its outputs."""
        self.recording.is_ignored = True
        try:
            return original(*args, **options)
        finally:
            self.recording.is_ignored = False

    def _average_micro_batches(self, original: Any, stage: Any, *args: int, **option: int) -> None:
        """Divides what was copied, as a pipeline divides gradients after the last backward."""
        original(stage, *args, **option)
        number = [*args, *option.values()][0]  # By its name in PyTorch 2.8.
        own, step = self.recording, self.recording.step
        if stage.submod not in (*own.ddps, *own.called, own.module):
            return
        for arrays in [x for kind in OF_LOSS for x in own.kept(kind).values()]:
            for end, array in arrays.items():
                if array.dtype.kind == "f":
                    arrays[end] = array / array.dtype.type(number)
                if end == "/sums":  # The last one is the sum of squares.
                    arrays[end][-1] /= number
        step.losses = [x / number for x in step.losses]
        if own.placement.of_fsdp:  # The schedule reduces after the last backward pass.
            own.save_gradients("sums", own.weights)

    # Backward passes.

    def _after_gradient(self, index: int, name: str, p: Tensor) -> None:
        own = self.recording
        if own.is_on:
            own.begin()
            self.has_gradients = True
            if name not in own.step.updated:
                own.save("raw", index, p.grad, own.step.scale_of(name))

    def _backward(self, inner: Any, tensors: Any, *args: Any, **options: Any) -> None:
        """Takes the place of `torch.autograd.backward`."""
        own = self.recording
        if not own.depth and not own.step.was_called and own.is_over():
            own.end()  # Of a training that calls parts of the model.
        own.step.has_graph = True
        self.has_gradients = bool(own.placement.of_fsdp)
        mesh = own.placement.mesh
        if own.ddp and mesh and mesh.stages:  # The forward pass was in `no_sync`.
            self.forward.before_ddp(own.ddp)
        own.depth += 1
        try:
            inner(tensors, *args, **options)
        finally:
            own.depth -= 1
        if own.is_on and not own.depth:
            self._after_backward(tensors)

    def _after_backward(self, tensors: Any) -> None:
        own, step = self.recording, self.recording.step
        of_fsdp = own.placement.of_fsdp
        is_reduced = self.forward.is_reduced or any(p.grad is not None for p in of_fsdp)
        if step.arrays and self.has_gradients:  # Otherwise, it is the loss of another model.
            scalars = [x.detach().clone() for x in tree_leaves(tensors) if x.numel() == 1]
            step.losses += [x / step.scale for x in scalars]
            step.unclipped = None
            if is_reduced:
                own.save_gradients("sums", own.weights.keys() - step.updated)
            step.calls.append("backward, all-reduced" if is_reduced else "backward")

    # Updates.

    def _before_any_update(self, optimizer: Any, args: Any, options: Any) -> None:
        """Adds an optimizer that was not known; PyTorch calls its new hook in this step, too."""
        own = self.recording
        if own.variables.have_stepped([optimizer]):
            if not own.step.is_differentiated:
                own.end()  # No forward pass has ended it.
            elif own.step.was_called_again:  # The others have not stepped: each update is a step.
                own.together = []
                own.drop(is_replaced=True)
                own.end()
                own.drop(is_replaced=True)
        if own.variables.add(optimizer) and own.has_hooks:
            hook = optimizer.register_step_pre_hook(self._before_update)
            own.hooks.enter_context(hook)

    def _before_update(self, optimizer: Any, args: Any, options: Any) -> Any:
        if not self.recording.variables.names_of(optimizer):
            return None
        if not any(callable(x) for x in [*args[1:], *options.values()]):
            self._save_applied(optimizer)
            return None
        calls = itertools.count()

        def recorded(x: Any) -> Any:
            return functools.partial(self._closed, optimizer, calls, x) if callable(x) else x

        return tuple(map(recorded, args)), {name: recorded(x) for name, x in options.items()}

    def _closed(self, optimizer: Any, calls: Any, closure: Any) -> Any:
        loss = closure()
        own = self.recording
        if not next(calls):
            self._save_applied(optimizer)
        elif own.is_on:
            text = "optimizer.step calls its closure several times, as LBFGS does, which cannot be"
            warnings.warn(f"{text} recorded: its steps are not compared", stacklevel=2)
            own.drop()
        return loss

    def _save_applied(self, optimizer: Any) -> None:
        """Saves the gradients that an optimizer applies, and its settings."""
        own = self.recording
        names = own.variables.names_of(optimizer)
        # A wrapper may update its groups one after another.
        is_again = own.variables.have_stepped([optimizer]) and own.step.updated.issuperset(names)
        is_again |= id(optimizer) in self.settings
        if not own.is_on or not names or is_again:
            return
        own.begin()
        if not own.step.num_forward:  # The whole model is in evaluation mode.
            own.note_modes()
        scale = float(getattr(optimizer, "grad_scale", None) or 1)  # It divides by it itself.
        saved = {*names}
        if not own.is_updated:  # Also of weights that only other ranks' optimizers have.
            others = [x for x in own.variables.optimizers if x is not optimizer]
            saved |= own.weights.keys() - own.step.updated
            saved -= {name for other in others for name in own.variables.names_of(other)} - {*names}
        for index, arrays in (own.step.unclipped or {}).items():
            if [*own.weights][index] in saved:
                own.put("unclipped", index, arrays)
        own.save_set({*names} - own.step.updated)
        own.save_gradients("clipped", names, scale)
        own.save_gradients("clipped", saved - {*names})  # A scaler leaves these scaled.
        self.settings[id(optimizer)] = own.variables.groups_of(optimizer)

    def _after_update(self, optimizer: Any, *_: Any) -> None:
        own = self.recording
        names = own.variables.names_of(optimizer)
        if not names:
            return
        settings = self.settings.pop(id(optimizer), [])
        if own.is_on and getattr(optimizer, "found_inf", None):
            if not own.is_updated:
                own.skip()  # The optimizer skipped the update itself.
            return
        own.variables.note_step(optimizer)
        own.step.settings += settings
        own.is_updated, own.step.was_called_again = True, False
        own.called_others.clear()
        own.step.updated.update(names)
        if own.is_on:
            self._save_after({*names})
        self.on_update()
        if not own.step.is_differentiated and own.variables.have_stepped(own.variables.optimizers):
            own.end()  # The next step begins now, as no forward pass shows where.
            if own.is_on:
                own.begin(is_forward=True)

    def _save_after(self, names: set[str]) -> None:
        """Saves what an update leaves; what others have updated was saved after their updates."""
        own = self.recording
        known, pairs = own.step.updated - names, []
        for pair in (*own.variables.of_model(), *own.variables.of_optimizers()):
            name = pair[0].get("of", pair[0]["name"])
            # Within a backward pass, each weight may have an optimizer: the first saves the others.
            if name in names or not (known and (own.depth or name in known)):
                pairs.append(pair)
        own.save_variables("after", pairs)
