"""Records what a PyTorch training computes, step by step, in a file of plain arrays.

This file is standalone: copy it next to your script. It needs PyTorch and NumPy.

    with lockstep_torch.record("two.npz", model, optimizer, steps=[0, 1, 2, 234, 235]):
        train(model, optimizer)  # Your own loop, unchanged.

`model` is a plain module, DistributedDataParallel (DDP), or sharded by `fully_shard` (FSDP2). Of
several processes, each writes one file: `two.rank0.npz`, `two.rank1.npz`. Recording does not change
the bits of the training; between recorded steps, the model has no hooks. A step ends with
`optimizer.step()`. Gradients are copied when autograd has computed them (`raw`: before DDP reduces
them; not visible with FSDP2), after `backward` if DDP or FSDP2 has reduced them (`sums`), and in
`optimizer.step` (`clipped`). What a step does not have is not in the file: the optimizer state
before the first update, `sums` if the forward pass bypasses DDP.
"""

import contextlib
import functools
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

NAMES = {"lr": "learning_rate", "eps": "epsilon", "alpha": "rho", "stride": "strides", "p": "rate"}
OF_LAYERS = ("eps", "momentum", "stride", "padding", "dilation", "groups", "p")
LAYOUTS = {nn.Linear: "OI", nn.Conv2d: "OIHW", nn.ConvTranspose2d: "OIHW"}


@contextlib.contextmanager
def record(
    path: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int | Sequence[int] = (0, 1, 2, 234, 235),
    replay: str | None = None,
    permute: int | None = None,
    names: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Records the training within the `with` block and writes `path`, also if the block raises.

    Args:
        path: File to write, `*.npz`.
        model: What the training calls, after wrapping and sharding.
        optimizer: Updates the weights of `model`, without a closure.
        steps: Numbers of the steps to record, from 0; or the number of first steps to record.
        replay: Another trace. Its weights and statistics are loaded before each recorded step; from
            the same class of PyTorch's optimizers, its optimizer state, too; and from as many
            replicas, the states of the random number generators.
        permute: Seed. Permutes the examples (first axis of inputs and outputs) within each batch of
            the recorded steps, so that only the order of summation is different.
        names: Names in `replay` by names here. Other weights and statistics are matched by name, or
            else in their order among those of equal shape.
    """
    recorder = _Recorder(path, model, optimizer, steps, permute)
    recorder.replay = _Replay(replay, recorder, names or {}) if replay is not None else None
    original = torch.autograd.backward
    torch.autograd.backward = functools.partial(recorder.backward, original)
    try:
        with optimizer.register_step_post_hook(recorder.after_update), recorder.hooks:
            recorder.install_hooks()
            yield
    finally:
        torch.autograd.backward = original
        recorder.write()


class _Recorder:
    """Copies what one replica computes in the wanted steps."""

    def __init__(self, path: str, model: Any, optimizer: Any, steps: Any, seed: int | None) -> None:
        self.path, self.optimizer, self.seed = path, optimizer, seed
        self.wanted = set(range(steps) if isinstance(steps, int) else steps)
        self.ddp = model if isinstance(model, nn.parallel.DistributedDataParallel) else None
        self.module = model.module if self.ddp else model
        self.weights = {_plain(name): p for name, p in self.module.named_parameters()}
        self.is_sharded = any(hasattr(p, "full_tensor") for p in self.weights.values())
        self.wrapper = type(model).__name__ if self.ddp else "fully_shard" * self.is_sharded
        group = self.ddp.process_group if self.ddp else None
        is_distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if is_distributed else 0
        self.num_replicas = dist.get_world_size(group) if is_distributed else 1
        self.replay: _Replay | None = None
        self.variables: dict[str, dict[str, str]] = {}  # In the order of their arrays.
        self.per_step: dict[str, list[Any]] = {"steps": [], "settings": [], "micro_batches": []}
        self.arrays: dict[str, np.ndarray] = {}
        self.step, self.hooks = 0, contextlib.ExitStack()
        _check(self, model)

    def install_hooks(self) -> None:
        """Removes the hooks of the last step, and installs those of a step that is recorded."""
        self.hooks.close()
        self.now: dict[str, np.ndarray] = {}
        self.losses: list[Tensor] = []
        self.num_forward, self.inverse = 0, None
        self.is_in_ddp = self.is_reduced = self.has_gradients = False
        self.is_on = self.step in self.wanted
        if not self.is_on:
            return
        add, first = self.hooks.enter_context, {"with_kwargs": True, "prepend": True}
        add(self.module.register_forward_pre_hook(self.before_forward, **first))
        add(self.module.register_forward_hook(self.after_forward))
        add(self.optimizer.register_step_pre_hook(self.before_update))
        if self.ddp:
            add(self.ddp.register_forward_pre_hook(lambda *_: setattr(self, "is_in_ddp", True)))
        for index, p in enumerate(self.weights.values()):
            if p.requires_grad and not self.is_sharded:
                hook = functools.partial(self.after_gradient, index)
                add(p.register_post_accumulate_grad_hook(hook))

    def before_forward(self, module: nn.Module, args: Any, options: Any) -> Any:
        is_in_ddp, self.is_in_ddp = self.is_in_ddp, False
        if not torch.is_grad_enabled() or not module.training:
            return None
        if self.has_gradients and all(p.grad is None for p in self.weights.values()):
            self.install_hooks()  # GradScaler has skipped the update: the step begins again.
        self.is_reduced = self.is_sharded or (is_in_ddp and self.ddp.require_backward_grad_sync)
        self.begin()
        batch = [x for x in tree_leaves((args, options)) if isinstance(x, Tensor)]
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed + self.step)
            order = torch.randperm(len(batch[0]), generator=generator)
            self.inverse = torch.argsort(order)
            args, options, batch = _take((args, options, batch), order)
        for kind, values in {"random": _random_states(), "data": batch}.items():
            self.save(kind, values, sum(key.startswith(kind) for key in self.now))
        self.num_forward += 1
        return args, options

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        inverse, self.inverse = self.inverse, None
        return output if inverse is None else _take(output, inverse)

    def after_gradient(self, index: int, p: Tensor) -> None:
        self.begin()
        self.has_gradients = True
        self.save("raw", [p.grad], index)

    def backward(self, original: Any, tensors: Any, *args: Any, **options: Any) -> None:
        """Stands for `torch.autograd.backward` within the `with` block."""
        original(tensors, *args, **options)
        self.has_gradients |= self.is_sharded and bool(self.now)
        if self.is_on and self.has_gradients:  # Otherwise, it is the loss of another model.
            self.losses += [x.detach().clone() for x in tree_leaves(tensors) if x.numel() == 1]
            if self.is_reduced:
                self.save("sums", [p.grad for p in self.weights.values()])

    def before_update(self, optimizer: Any, args: Any, options: Any) -> None:
        if any(callable(x) for x in [*args[1:], *options.values()]):
            raise ValueError("optimizer.step: a closure cannot be recorded; call it without one")
        self.begin()
        self.save("loss", [sum(self.losses)] if self.losses else [])
        self.save("clipped", [p.grad for p in self.weights.values()])
        names = {p: name for name, p in self.weights.items()}
        self.groups = [
            {**_settings(group), "weights": [names[p] for p in group["params"]]}
            for group in optimizer.param_groups
        ]

    def after_update(self, *_: Any) -> None:
        if self.is_on:
            self.save_variables("after")
            for key, value in zip(
                self.per_step, (self.step, self.groups, self.num_forward), strict=True
            ):
                self.per_step[key].append(value)
            position = len(self.per_step["steps"])
            self.arrays |= {f"{position}/{key}": value for key, value in self.now.items()}
        self.step += 1
        if self.is_on or self.step in self.wanted:
            self.install_hooks()

    def begin(self) -> None:
        """Loads the variables to replay and copies all variables, once in a step."""
        if not self.now:
            if self.replay:
                self.replay.load(self.step)
            self.save_variables("before")

    def live_variables(self) -> Iterator[tuple[dict[str, str], Any]]:
        """Yields the description and the value of each weight, statistic and optimizer state."""
        modules = {_plain(f"{name}.weight"): m for name, m in self.module.named_modules()}
        for name, p in self.weights.items():
            layout = [LAYOUTS[kind] for kind in LAYOUTS if isinstance(modules.get(name), kind)]
            yield {"name": name, "kind": "weight", "layout": "".join(layout)}, p
        for name, buffer in self.module.named_buffers():
            yield {"name": _plain(name), "kind": "statistic", "layout": ""}, buffer
        for name, p in self.weights.items():
            for slot, value in self.optimizer.state.get(p, {}).items():
                kind = {"name": f"{name}/{slot}", "kind": "optimizer state", "layout": ""}
                yield {**kind, "of": name, "slot": slot}, value

    def save_variables(self, kind: str) -> None:
        for variable, value in self.live_variables():
            self.variables.setdefault(variable["name"], variable)
            self.save(kind, [value], list(self.variables).index(variable["name"]))

    def save(self, kind: str, values: Sequence[Any], start: int = 0) -> None:
        for index, value in enumerate(values, start):
            key = f"{kind}/{self.rank}/{index}"
            if isinstance(value, Tensor) and value.is_sparse:
                self.now[f"{key}/values"] = _to_array(value._values())
                self.now[f"{key}/indices"] = _to_array(value._indices()[0])
                self.now[f"{key}/rows"] = np.array(len(value))
            elif isinstance(value, Tensor | int | float):
                self.now[key] = _to_array(torch.as_tensor(value))

    def write(self) -> None:
        """Writes the recorded steps to a temporary file, and renames it."""
        missing = sorted(self.wanted - set(self.per_step["steps"]))
        if missing:
            warnings.warn(f"{self.path}: the training ended before steps {missing}", stacklevel=4)
        about = {
            **{"format": "lockstep trace", "version": 1, "framework": "torch", **self.per_step},
            **{"versions": {"torch": str(torch.__version__), "numpy": np.__version__}},
            **{"num_replicas": self.num_replicas, "replicas": [self.rank], "wrapper": self.wrapper},
            **{"variables": list(self.variables.values()), "gradients": list(self.weights)},
            **{"reduction": "mean" if self.ddp else "", "order": "reduce, clip"},
            "optimizer": {
                **_settings(self.optimizer.defaults),
                **{"class": type(self.optimizer).__name__, "framework": "torch"},
            },
            "layers": _layers(self.module),
            "data_layout": "NCHW" if "OIHW" in str(self.variables) else "",
            "permuted": self.seed,
            "replayed": self.replay and self.replay.name,
        }
        path = _rank_path(self.path, self.rank) if self.num_replicas > 1 else self.path
        temporary = f"{path}.{os.getpid()}.tmp"
        try:
            with open(temporary, "wb") as file:
                np.savez(file, about=np.array(json.dumps(about)), **self.arrays)
            os.replace(temporary, path)
        finally:
            if os.path.exists(temporary):
                os.remove(temporary)


class _Replay:
    """Another trace, from which the state of the training is loaded."""

    def __init__(self, path: str, recorder: _Recorder, names: Mapping[str, str]) -> None:
        own = [_rank_path(path, recorder.rank)] if recorder.num_replicas > 1 else []
        found = next(filter(os.path.exists, [*own, path, _rank_path(path, 0)]), path)
        try:
            self.file = np.load(found, allow_pickle=False)
            self.about = json.loads(str(self.file["about"]))
        except Exception as error:
            raise ValueError(f"replay={path}: cannot be read as a trace: {error}") from None
        missing = sorted(recorder.wanted - set(self.about["steps"]))
        if missing:
            raise ValueError(f"replay={path}: does not have step {missing[0]}; record it there")
        self.recorder, self.name = recorder, os.path.basename(path)
        replicas = self.about["replicas"]
        self.replica = recorder.rank if recorder.rank in replicas else replicas[0]
        self.sources: dict[str, str] = {}  # Names in the other trace by names of this training.
        taken = {names.get(v["name"], v["name"]) for v, _ in recorder.live_variables()}
        for variable, value in recorder.live_variables():
            if variable["kind"] != "optimizer state":
                self.match(variable, tuple(value.shape), names, taken)

    def match(self, variable: dict, shape: tuple, names: Mapping[str, str], taken: set) -> None:
        """Finds the variable of the other trace from which `variable` is loaded."""
        name, kind, layout = (variable[key] for key in ("name", "kind", "layout"))
        others = [v for v in self.about["variables"] if v["name"] == names.get(name, name)]
        if not others and name not in names:
            others = [v for v in self.about["variables"] if v["kind"] == kind]
            others = [v for v in others if v["name"] not in taken]
        for other in others:
            array = self.array(0, other["name"], layout)
            if array is not None and array.shape == shape:
                self.sources[name] = other["name"]
                taken.add(other["name"])
                return
        if kind == "weight" or name in names:
            found = ", ".join(f"{v['name']}" for v in others) or "none"
            raise ValueError(
                f"replay: no variable for {name} {shape} (compared: {found}); pass names={{...}}"
            )

    def array(self, position: int, name: str, layout: str = "") -> np.ndarray | None:
        """Returns the value of a variable before a recorded step, transposed to `layout`."""
        index = [v["name"] for v in self.about["variables"]].index(name)
        value = self.file.get(f"{position + 1}/before/{self.replica}/{index}")
        other = self.about["variables"][index]["layout"]
        if value is None or sorted(layout) != sorted(other):
            return value
        return value.transpose([other.index(axis) for axis in layout]) if layout else value

    @torch.no_grad()
    def load(self, step: int) -> None:
        """Assigns the recorded state before a step."""
        recorder, position = self.recorder, self.about["steps"].index(step)
        optimizer = recorder.optimizer
        for variable, value in recorder.live_variables():
            if variable["name"] in self.sources:
                source = self.sources[variable["name"]]
                _assign(value, self.array(position, source, variable["layout"]))
        if self.about["framework"] != "torch":
            return
        if self.about["optimizer"]["class"] == type(optimizer).__name__:
            for name, p in recorder.weights.items():
                state, old = optimizer.state[p], dict(optimizer.state[p])
                state.clear()
                for v in self.about["variables"]:
                    array = self.array(position, v["name"])
                    if v.get("of") == self.sources[name] and array is not None:
                        new = (
                            torch.as_tensor(array)
                            if array.shape != p.shape
                            else torch.zeros_like(p)
                        )
                        state[v["slot"]] = old.get(v["slot"], new)
                        _assign(state[v["slot"]], array)
        if self.about["num_replicas"] == recorder.num_replicas:
            prefix = f"{position + 1}/random/{self.replica}"
            torch.set_rng_state(torch.from_numpy(self.file[f"{prefix}/0"]))
            if f"{prefix}/1" in self.file and torch.cuda.is_initialized():
                torch.cuda.set_rng_state(torch.from_numpy(self.file[f"{prefix}/1"]))


def _check(recorder: _Recorder, model: Any) -> None:
    """Refuses what cannot be recorded."""
    path, wanted = recorder.path, recorder.wanted
    if not path.endswith(".npz") or not os.path.isdir(os.path.dirname(path) or "."):
        raise ValueError(f"{path}: must be the name of an .npz file in a folder that exists")
    if not wanted or min(wanted) < 0:
        raise ValueError(f"steps={sorted(wanted)}: must be at least one number, from 0")
    if type(model).__name__ in ("DataParallel", "FullyShardedDataParallel"):
        raise ValueError(
            f"model: {type(model).__name__} cannot be recorded; use DistributedDataParallel or"
            " fully_shard"
        )
    known = set(recorder.weights.values())
    params = [p for group in recorder.optimizer.param_groups for p in group["params"]]
    if not known.issuperset(params):
        raise ValueError("optimizer: updates weights that model does not have; pass their model")


def _plain(name: str) -> str:
    """Returns the name of a variable as it is without `torch.compile`."""
    return name.replace("_orig_mod.", "")


def _rank_path(path: str, rank: int) -> str:
    return f"{path.removesuffix('.npz')}.rank{rank}.npz"


def _to_array(value: Tensor) -> np.ndarray:
    """Copies a tensor, which may be sharded, to an array."""
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    value = value.float() if value.dtype == torch.bfloat16 else value  # Unknown to NumPy.
    return np.array(value.detach().cpu())


def _assign(target: Tensor, array: np.ndarray) -> None:
    value = torch.from_numpy(np.array(array))
    if hasattr(target, "full_tensor"):
        shards = dist.tensor.distribute_tensor
        value = shards(value, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(value)


def _random_states() -> list[Tensor]:
    on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *on_gpu]


def _take(nest: Any, order: Tensor) -> Any:
    """Returns a nest with all tensors of examples in the given order."""

    def taken(x: Any) -> Any:
        is_batch = isinstance(x, Tensor) and x.dim() > 0 and len(x) == len(order)
        return x[order.to(x.device)] if is_batch else x

    return tree_map(taken, nest)


def _settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings of an optimizer or a layer under the names of this format."""
    betas = {f"beta_{i}": beta for i, beta in enumerate(options.get("betas", ()), 1)}
    plain = {NAMES.get(name, name): value for name, value in {**options, **betas}.items()}
    plain = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in plain.items()}
    return {k: v for k, v in plain.items() if isinstance(v, bool | int | float | str)}


def _layers(module: nn.Module) -> list[dict[str, Any]]:
    layers = []
    for name, layer in module.named_modules():
        settings = {NAMES.get(x, x): getattr(layer, x) for x in OF_LAYERS if hasattr(layer, x)}
        own = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
        if settings or own:
            weights = [_plain(f"{name}.{x}" if name else x) for x, _ in own]
            kind = {"name": _plain(name), "class": type(layer).__name__, "weights": weights}
            layers.append({**kind, **settings})
    return layers
