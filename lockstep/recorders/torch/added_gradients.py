"""Copies what each backward pass adds to the gradients of a step that has several of them."""

from typing import Any

from torch import Tensor

from lockstep.recorders.common import Hooks
from lockstep.recorders.torch.private import (
    ENGINE,
    fsdp_groups,
    has_other_hooks,
    move_first,
    sharded_weight,
    weights_of_group,
    whole_weight,
)
from lockstep.recorders.torch.recording import Recording

_MOST = 50_000  # Arrays of passes in a file, which can have five times as many of all kinds.


class AddedGradients:
    """Counts the backward passes of a step, and copies the gradients that autograd computes.

    Those of the first pass, of which `raw` has most, are kept when a second one begins.

    Args:
        recording: What has the model and the arrays.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.indices = {name: index for index, name in enumerate(recording.weights)}
        self.calls = list[bool]()  # Calls that compute now: whether they add to gradients.
        self.hooked = set[str]()
        self.num_arrays = 0  # That are kept.
        self.is_new = False  # Whether a pass has begun, and given no gradient yet.

    def install_always(self, hooks: Hooks) -> None:
        """Installs what sees passes, in all steps."""
        hooks.hook(*ENGINE, self._run)

    def install(self) -> None:
        """Installs the hooks of steps that are recorded."""
        own = self.recording
        own.hooks.callback(self.hooked.clear)
        for name, p in own.weights.items():
            if p.requires_grad and p not in own.placement.of_fsdp:
                self._hook(name, p)

    def _hook(self, name: str, weight: Tensor) -> None:
        handle: Any = None

        def hook(gradient: Tensor | None) -> None:
            if gradient is None:  # DDP passes an output on that no loss uses.
                return
            # Alone, autograd makes it the weight's gradient, which is copied as `raw`.
            is_alone = weight.grad is None and not has_other_hooks(handle)
            self._see(name, gradient.detach(), is_alone and self.calls[-1:] == [True])

        self.hooked.add(name)
        handle = move_first(weight.register_hook(hook))
        self.recording.hooks.enter_context(handle)

    def _run(self, inner: Any, *args: Any, **options: Any) -> Any:
        """Takes the place of the engine of autograd."""
        if self.recording.is_on and not self.calls:
            self.is_new = True
            self._hook_whole_weights()
        self.calls.append(bool(options.get("accumulate_grad", True)))
        try:
            return inner(*args, **options)
        finally:
            self.calls.pop()

    def _hook_whole_weights(self) -> None:
        """Hooks the whole weights of `fully_shard`, which exist from the first forward pass on."""
        own = self.recording
        if not own.placement.of_fsdp:
            return
        names = {p: name for name, p in own.weights.items()}
        for each in (p for group in fsdp_groups(own.module) for p in weights_of_group(group)):
            name, whole = names.get(sharded_weight(each), ""), whole_weight(each)
            if name and name not in self.hooked and whole is not None and whole.requires_grad:
                self._hook(name, whole)

    def _see(self, name: str, gradient: Tensor, is_alone: bool) -> None:
        """Copies a gradient on its way to a weight; a second one in a pass begins another one."""
        own, step = self.recording, self.recording.step
        is_nested = len(self.calls) > 1 and not self.calls[-1]  # It is returned to another call.
        if not own.is_on or is_nested or name in step.updated:
            return
        own.begin()
        if self.is_new or not step.num_passes or name in step.in_pass:
            self.is_new = False
            step.num_passes += 1
            step.in_pass.clear()
            if step.num_passes == 2:
                for place, arrays in sorted((own.kept("raw") | step.first_pass).items()):
                    self._keep(place, arrays)
        step.in_pass.add(name)
        place = (step.num_passes - 1) * len(self.indices) + self.indices[name]
        if step.num_passes == 1 and is_alone and own.weights[name] not in own.placement.of_fsdp:
            own.placement.place("added", place, gradient)
            return
        arrays = own.arrays_of("added", place, gradient, step.scale_of(name))
        if step.num_passes == 1:
            step.first_pass[place] = arrays
        else:
            self._keep(place, arrays)

    def _keep(self, place: int, arrays: dict[str, Any]) -> None:
        if self.num_arrays < _MOST:
            self.num_arrays += 1
            self.recording.put("added", place, arrays)
