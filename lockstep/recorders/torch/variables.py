"""The state that a step changes: weights, statistics, and state of optimizers and averages."""

import gc
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.recorders.common import require
from lockstep.recorders.torch.values import is_dtensor, layers_of, settings_of

LAYOUTS = {nn.Linear: "OI", nn.Conv2d: "OIHW", nn.ConvTranspose2d: "OIHW"}


class Variables:
    """Weights and statistics of a model, the state of its optimizers, and further state.

    Args:
        module: The model.
        optimizer: One optimizer, several, or None for those that exist.
        others: Name → module, or mapping of names to tensors.
    """

    def __init__(self, module: nn.Module, optimizer: Any, others: Mapping[str, Any]) -> None:
        self.module, self.others = module, others
        self.weights = dict(module.named_parameters())  # By name.
        odd = [f"{name} is {p.dtype}" for name, p in self.weights.items() if p.is_complex()]
        text = "which cannot be recorded; keep its real and imaginary part as one real weight"
        require(not odd, f"model: {', '.join(odd[:1])}, {text}")
        # Name of a variable → its description, in the order of their arrays.
        self.described: dict[str, dict[str, Any]] = {}
        # The optimizers that have updated a weight in this step, and in the one before.
        self.stepped, self._stepped_before = list[Any](), list[Any]()
        self._names = {p: name for name, p in self.weights.items()}
        self._layouts = {
            f"{name}.weight".lstrip("."): layout
            for kind, layout in LAYOUTS.items()
            for name, layer in module.named_modules() if isinstance(layer, kind)
        }  # fmt: skip
        self.given = _given(optimizer)
        self.optimizers = [*self.given]  # All that update a weight, as far as they have been seen.
        self.trainers = [*self.given]  # And those that have updated one in any step.
        for each in self.optimizers:
            updated = {p for group in each.param_groups for p in group["params"]}
            require(
                bool(updated & self._names.keys()),
                "optimizer: updates no weight of the model: it is that of another one, or was built"
                " before fully_shard made new ones",
            )
            if more := len(updated - self._names.keys()):
                text = f"optimizer: updates {more} weights that the model does not have: these are"
                warnings.warn(f"{text} not compared, unless others= has them", stacklevel=3)
        self._find_optimizers(is_needed=optimizer is None)
        own = {*self.weights, *(name for name, _ in module.named_buffers())}
        known = {f"{key}.{name}" for key in others for name, _ in self._of_other(key)}
        require(not own & known, "others: have names of the model's own weights or statistics")

    def _find_optimizers(self, is_needed: bool) -> None:
        """Adds the optimizers of the process that update a weight of the model."""
        for each in gc.get_objects():
            kind = type(each)  # Objects may claim another class, and fail when they are asked.
            is_optimizer = issubclass(kind, torch.optim.Optimizer)
            if is_optimizer and {"param_groups", "state"} <= {*vars(each)}:  # And no wrapper.
                self.add(each)
        for name, p in self.weights.items():
            owners = [each for each in self.optimizers if each.state.get(p)]
            require(
                not is_needed or len(owners) < 2,
                f"optimizer: {len(owners)} optimizers have state of {name}; pass those that train"
                " the model",
            )

    def add(self, optimizer: Any) -> bool:
        """Adds an optimizer; returns whether it is new and updates a weight of the model."""
        if any(each is optimizer or each.state is optimizer.state for each in self.optimizers):
            return False
        is_own = bool(self.names_of(optimizer))
        self.optimizers += [optimizer] if is_own else []
        return is_own

    def names_of(self, optimizer: Any) -> list[str]:
        """Returns the names of the model's weights that an optimizer updates."""
        weights = (p for group in optimizer.param_groups for p in group["params"])
        return [self._names[p] for p in weights if p in self._names]

    def groups_of(self, optimizer: Any) -> list[dict[str, Any]]:
        """Returns the settings of an optimizer's groups, with the names of their weights."""
        found = []
        for group in optimizer.param_groups:
            weights = [self._names[p] for p in group["params"] if p in self._names]
            own: dict[str, Any] = {"optimizer": type(optimizer).__name__, "weights": weights}
            if group.get("fused") and any(p.is_cuda for p in group["params"]):
                own["betas_in"] = "float32"
            found += [{**settings_of(group), **own}] if weights else []
        return found

    def have_stepped(self, optimizers: Iterable[Any]) -> bool:
        """Returns whether all of some optimizers have updated a weight in this step."""
        return all(optimizer in self.stepped for optimizer in optimizers)

    def note_step(self, optimizer: Any) -> None:
        """Notes that an optimizer has updated a weight."""
        for noted in (self.stepped, self.trainers):
            noted += [] if optimizer in noted else [optimizer]

    def end_step(self) -> None:
        """Begins a new list of the optimizers that have updated a weight."""
        self._stepped_before, self.stepped = self.stepped or self._stepped_before, []

    def _recent(self) -> list[Any]:
        """Returns the optimizers of the last steps, the latest ones first."""
        return [*self.stepped, *(x for x in self._stepped_before if x not in self.stepped)]

    def owners_of(self, name: str) -> list[Any]:
        """Returns the optimizers that update a weight: those of the last steps, if they have it."""
        has_it = [x for x in self.optimizers if name in self.names_of(x)]
        return [x for x in self._recent() if x in has_it] or has_it

    def all(self) -> Iterator[tuple[dict[str, str], Any]]:
        """Yields the description and the value of each variable."""
        yield from self.of_model()
        yield from self.of_optimizers()
        yield from self.of_others()

    def of_model(self) -> Iterator[tuple[dict[str, str], Any]]:
        """Yields those of weights and statistics."""
        for name, p in self.weights.items():
            yield {"name": name, "kind": "weight", "layout": self._layouts.get(name, "")}, p
        for name, buffer in self.module.named_buffers():
            yield {"name": name, "kind": "statistic", "layout": ""}, real(buffer)

    def of_optimizers(self) -> Iterator[tuple[dict[str, str], Any]]:
        """Yields those of optimizer state; a second optimizer's state of a slot has a number."""
        recent = self._recent()
        for name, p in self.weights.items():
            with_state = [x for x in recent if x.state.get(p)]
            states = [x.state[p] for x in with_state or self.optimizers if x.state.get(p)]
            seen: dict[str, int] = {}
            for slot, value in [pair for state in states for pair in state.items()]:
                number = seen[slot] = seen.get(slot, 0) + 1
                key = slot if number == 1 else f"{slot}#{number}"
                kind = {"kind": "optimizer state", "layout": "", "of": name, "slot": key}
                yield {"name": f"{name}/{key}", **kind}, value

    def of_others(self) -> Iterator[tuple[dict[str, str], Any]]:
        """Yields those of further modules and mappings."""
        for key in self.others:
            for name, value in self._of_other(key):
                yield {"name": f"{key}.{name}", "kind": "statistic", "layout": ""}, real(value)

    def _of_other(self, key: str) -> Iterator[tuple[str, Tensor]]:
        other = self.others[key]
        if isinstance(other, nn.Module):
            yield from other.named_parameters()
            yield from other.named_buffers()
        else:
            yield from ((str(x), value) for x, value in other.items() if isinstance(value, Tensor))

    def layers_of_others(self) -> list[dict[str, Any]]:
        """Returns the layers of further modules that have weights."""
        named = [
            (f"{key}.{name}".rstrip("."), layer)
            for key, other in self.others.items() if isinstance(other, nn.Module)
            for name, layer in other.named_modules()
        ]  # fmt: skip
        return [layer for layer in layers_of(named) if layer["weights"]]

    def tied(self) -> list[list[str]]:
        """Returns the names of weights that have several."""
        names: dict[Any, list[str]] = {}
        for name, p in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(p, []).append(name)
        return [each for each in names.values() if len(each) > 1]


def _given(optimizer: Any) -> list[Any]:
    """Returns the optimizers of an argument, without wrappers, which do not have their hooks."""
    if optimizer is None:
        return []
    found: list[Any] = []
    for each in optimizer if isinstance(optimizer, Sequence) else [optimizer]:
        while isinstance(wrapped := getattr(each, "optimizer", None), torch.optim.Optimizer):
            each = wrapped
        found.append(each)
    return found


def real(value: Tensor) -> Tensor:
    """Returns a view of a complex tensor, such as the rotations of RoPE, as pairs of numbers."""
    is_complex = value.is_complex() and not is_dtensor(value)
    return torch.view_as_real(value.resolve_conj()) if is_complex else value
