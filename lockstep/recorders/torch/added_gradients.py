"""Copies what each backward pass adds to the gradients of a step that has several of them.

A step with one pass costs nothing: its gradients are copied as `raw`, which are those of the first
pass when a second one begins. Only those that a script adds itself, or that were not 0 before, and
those by weights that `fully_shard` has split are copied in the first pass, too.
"""

from typing import Any

from torch import Tensor

from lockstep.recorders.common import Hooks
from lockstep.recorders.torch.private import (
    ENGINE,
    fsdp_groups,
    has_other_hooks,
    in_transform,
    move_first,
    sharded_weight,
    weights_of_group,
    whole_weight,
)
from lockstep.recorders.torch.recording import Recording
from lockstep.recorders.torch.values import local

_MOST = 50_000  # Arrays of passes in a file, which can have five times as many of all kinds.


class AddedGradients:
    """Counts the backward passes of a step, and copies the gradients that autograd computes.

    Args:
        recording: What has the model and the arrays.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.indices = {name: index for index, name in enumerate(recording.weights)}
        self.calls = list[bool]()  # Calls that compute now: whether they add to gradients.
        self.hooked = set[str]()
        self.num_arrays = 0  # That are copied.
        self.is_new = False  # Whether a pass has begun, and given no gradient yet.
        # In the last step, and in this one so far; the first one may have several.
        self.had_several = self.has_several = True

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
        self.hooked.add(name)
        handle: Any = None

        def hook(gradient: Tensor) -> None:
            self._see(name, weight, gradient, handle)

        handle = move_first(weight.register_hook(hook))
        self.recording.hooks.enter_context(handle)

    def _run(self, inner: Any, *args: Any, **options: Any) -> Any:
        """Takes the place of the engine of autograd."""
        own = self.recording
        own.step.has_graph |= own.step.was_called and not in_transform()
        if own.is_on and not self.calls:
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

    def _see(self, name: str, weight: Tensor, gradient: Tensor, handle: Any) -> None:
        """Copies a gradient on its way to a weight; a second one in a pass begins another one."""
        own, step = self.recording, self.recording.step
        is_nested = len(self.calls) > 1 and not self.calls[-1]  # It is returned to another call.
        if not own.is_on or is_nested or name in step.updated:
            return
        own.begin()
        if self.is_new or not step.num_passes or name in step.in_pass:
            self._begin_pass()
        step.in_pass.add(name)
        is_first = step.num_passes == 1
        if self.num_arrays >= _MOST or (is_first and self._is_seen_later(name, weight, handle)):
            return
        self.num_arrays += 1
        index = self.indices[name]
        place = (step.num_passes - 1) * len(self.indices) + index
        arrays = own.arrays_of("added", place, gradient.detach(), step.scale_of(name))
        if is_first:
            step.first_pass[index] = arrays
        else:
            own.put("added", place, arrays)

    def _begin_pass(self) -> None:
        step = self.recording.step
        step.num_passes += 1
        step.in_pass.clear()
        self.is_new = False
        if step.num_passes == 1:
            self.had_several, self.has_several = self.has_several, False
        elif step.num_passes == 2:
            self.has_several = True
            self._keep_first()

    def _is_seen_later(self, name: str, weight: Tensor, handle: Any) -> bool:
        """Returns whether nothing is copied in the first pass: its gradient becomes `raw`."""
        if self.recording.weights[name] in self.recording.placement.of_fsdp:
            return not self.had_several  # It is reduced next, and never seen.
        is_added = bool(self.calls) and self.calls[-1] and not has_other_hooks(handle)
        return is_added and is_zero(weight.grad)

    def _keep_first(self) -> None:
        """Keeps the gradients of the first pass, as a second one begins."""
        own, first = self.recording, self.recording.step.first_pass
        kept, placements = own.kept("raw"), own.placement.placements
        for index in kept.keys() - first.keys():
            text = placements.get(f"raw/{index}", "")
            placements |= {f"added/{index}": text} if text else {}
        for index, arrays in sorted((kept | first).items()):
            own.put("added", index, arrays)


def is_zero(gradient: Tensor | None) -> bool:
    """Returns whether a weight has no gradient, or one of zeros."""
    if gradient is None:
        return True
    return not gradient.is_sparse and not bool(local(gradient).any())
