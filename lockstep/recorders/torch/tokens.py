"""Records log-probabilities of tokens: those of a trainer's forward pass, or of a generator."""

import fnmatch
import functools
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.trace import WEIGHT
from lockstep.numeric.sampling import Sample
from lockstep.recorders.common import FORMAT, in_words, require
from lockstep.recorders.output import Output
from lockstep.recorders.torch.modules import indexed
from lockstep.recorders.torch.samples import sample_of
from lockstep.recorders.torch.values import computed_in, floating, layers_of, to_array

ELEMENTS = 1024  # Of each weight; random sums see the others.


class record_log_probs:
    """Records what `add` gets in a `with` block, and samples of the model's weights at its start.

    There is no optimizer, loss or gradient: two programs with the same tokens and weights, as a
    trainer and a generator with a cache, are compared by `python -m lockstep ONE.npz TWO.npz`.

    Args:
        path: File to write, `*.npz`.
        model: What the program calls; its forward passes are observed.
        modules: True, or a pattern of names: also keeps the outputs of these modules, to name the
            first one that differs. Outputs have the axes (row, position, …); a generator may
            compute the positions one after another.
    """

    def __init__(self, path: str, model: nn.Module, modules: bool | str = False) -> None:
        self.path, self.model = path, model
        self._pattern = "*" if modules is True else modules or ""
        self._handles: list[Any] = []
        self._kept: dict[str, list[Tensor]] = {}
        self._about: dict[str, Any] = {
            **FORMAT, "framework": "torch", "num_replicas": 1, "computed_in": "",
            "steps": [], "in_evaluation": [], "variables": [],
        }  # fmt: skip
        self._names: dict[str, None] = {}
        self._modes: dict[str, None] = {}  # Of layers in evaluation mode.

    def __enter__(self) -> "record_log_probs":
        self._output = Output(self.path)
        for name, module in self.model.named_modules():
            self._handles.append(module.register_forward_hook(functools.partial(self._after, name)))
        self._handles.append(self.model.register_forward_pre_hook(self._before))
        sample = Sample(ELEMENTS)
        self._about["sample"] = sample._asdict()
        for index, (name, p) in enumerate(self.model.named_parameters()):
            is_large = sample.takes(p.shape)
            about = {"name": name, "kind": WEIGHT, "shape": tuple(p.shape) if is_large else ()}
            arrays = sample_of(sample, p.detach(), p.shape) if is_large else {"": to_array(p)}
            for end, array in arrays.items():
                self._output.put(f"1/before/0/{index}{end}", array)
            self._about["variables"].append(about)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        for handle in self._handles:
            handle.remove()
        layers = layers_of(self.model.named_modules())
        self._about |= {"layers": layers, "modules": [*self._names], "ended_with": in_words(error)}
        self._output.close(self._about, functools.partial(indexed, [*self._names]))

    def add(
        self, tokens: Any, log_probs: Any = None, *, logits: Any = None, mask: Any = None
    ) -> None:
        """Adds a batch whose forward passes have run since the last call.

        Args:
            tokens: the numbers of all tokens, prompts included, of shape (rows, T).
            log_probs: of each token given those before it, of shape (rows, T), or (rows, T - 1)
                without the first one.
            logits: in place of log_probs, the model's outputs of shape (rows, T or T - 1, words):
                those at t are of the token at t + 1.
            mask: where log-probabilities count, of the shape of tokens; by default all but the
                first of each row.
        """
        tokens = torch.as_tensor(tokens).detach().cpu()
        require(tokens.dim() == 2, "tokens: must have the shape (rows, T)")
        counted = torch.ones_like(tokens, dtype=torch.bool)
        if mask is not None:
            counted = torch.as_tensor(mask).detach().cpu().bool().clone()
        require(counted.shape == tokens.shape, "mask: must have the shape of tokens")
        counted[:, 0] = False
        require((log_probs is None) != (logits is None), "pass log_probs or logits")
        position = len(self._about["steps"]) + 1
        arrays: dict[str, Any] = {"tokens": tokens, "counted": counted}
        if logits is not None:
            logits = torch.as_tensor(logits).detach().float().cpu()[:, : tokens.shape[1] - 1]
            found = logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]
            if counted.any():
                arrays["logits"] = logits[counted[:, 1:]].abs().amax()
        else:
            found = torch.as_tensor(log_probs).detach().float().cpu()
        if found.shape[1] == tokens.shape[1] - 1:
            found = torch.cat([found.new_zeros(len(found), 1), found], 1)
        require(found.shape == tokens.shape, "log_probs: must have the shape of tokens")
        arrays["log_probs"] = found
        for name, parts in self._kept.items():
            if (joined := _joined(parts)) is None:
                continue
            self._names[name] = None
            key = f"module_out/0/0:{name}"
            self._output.put(f"{position}/{key}", self._output.add(key, to_array(joined)))
        self._kept.clear()
        for kind, value in arrays.items():
            self._output.put(f"{position}/{kind}/0/0", to_array(value))
        self._about["steps"].append(position - 1)
        self._about["in_evaluation"].append([*self._modes])
        self._modes.clear()

    def _before(self, module: nn.Module, args: Any) -> None:
        self._modes |= {n: None for n, each in module.named_modules() if not each.training}

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        weights = dict(self.model.named_parameters())
        self._about["computed_in"] = computed_in(output, weights) or self._about["computed_in"]
        tensors = floating(output)
        if tensors and name and self._pattern and fnmatch.fnmatchcase(name, self._pattern):
            self._kept.setdefault(name, []).append(tensors[0].detach().float().cpu())


def _joined(parts: list[Tensor]) -> Tensor | None:
    """Returns the positions of several forward passes as those of one; None if they do not fit."""
    parts = [x[None] if x.dim() == 1 else x for x in parts]
    if any(x.dim() != parts[0].dim() or len(x) != len(parts[0]) for x in parts):
        parts = [x for x in parts if len(x) == len(parts[0])]
    try:
        return torch.cat(parts, 1)
    except RuntimeError:
        return None
