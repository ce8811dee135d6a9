"""Records what a PyTorch training computes, step by step, in a file of plain arrays.

This file is standalone: copy it next to your script, or `from lockstep import record_torch`. It
needs PyTorch and NumPy.

    with record_torch.record("two.npz", model, optimizer, steps=[0, 1, 2, 234, 235]):
        train(model, optimizer)  # Your own loop, unchanged.

Of several processes, each writes one file: `two.rank0.npz`, `two.rank1.npz`, with the parts of
weights and batches that it has, and their places in the whole ones. Recording does not change the
bits of the training; between recorded steps, the model has no hooks. A gradient is copied when
autograd has computed it (`raw`: before DDP reduces it; not visible with FSDP2), at the end of
`backward` if DDP or FSDP2 has reduced it (`sums`), when it is clipped (`unclipped`), and in
`optimizer.step` (`clipped`). All but the last are divided by the loss scale of a `GradScaler`. What
does not exist has no array: optimizer state before the first update, `sums` if DDP is bypassed.
Outputs with one row for each example (`y_pred`) and the gradients of the loss with respect to them
(`y_grad`) are copied, too, up to 64 MiB of outputs in a step. If the model returns the loss only,
they are those of the layer that was called last.
"""

import collections
import contextlib
import dataclasses
import fnmatch
import functools
import itertools
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

NAMES = {"lr": "learning_rate", "eps": "epsilon", "alpha": "rho", "stride": "strides", "p": "rate"}
OF_LAYERS = ("eps", "momentum", "stride", "padding", "dilation", "groups", "p")
LAYOUTS = {nn.Linear: "OI", nn.Conv2d: "OIHW", nn.ConvTranspose2d: "OIHW"}
FORMAT = {"format": "lockstep trace", "version": 2, "framework": "torch", "order": "reduce, clip"}
CLIPPING = ("clip_grad_norm_", "clip_grads_with_norm_", "_clip_grads_with_norm_")
MOST_BYTES = 2**26  # The most bytes of outputs that are recorded in a step.
OF_ROWS = ("data", "y_pred", "y", "module_in", "module_out")  # And gradients by them.
OF_LOSS = ("raw", "sums", "loss", "y_grad", "module_in_grad", "module_out_grad")
DATA, STAGES = (  # Names of axes that split the batch, and the layers of a pipeline.
    re.compile("(dp|data|fsdp|ddp|hsdp|replicate|shard|batch)", re.IGNORECASE),
    re.compile("(pp|pipe|stage)", re.IGNORECASE),
)
DEFAULT_STEPS = (0, 1, 2, 234, 235)  # A shorter training has recorded all that was asked for.
DIMENSION = re.compile(r"(?:(\d+)\*)?(\w+)(?:\[([\w,]+)(:zigzag)?\])?")
AXES: dict[Any, Any] = {("HWIO", "OIHW"): (3, 2, 0, 1), ("IO", "OI"): (1, 0)}


class record:
    """Records the training in a `with` block and writes `path` at its end, also if it raises.

    Args:
        path: File to write, `*.npz`. None: only runs of `assert_same_training` are recorded.
        model: What the training calls: a plain module, DDP, or sharded by `fully_shard` (FSDP2).
        optimizer: Ends each step with `optimizer.step()`, which calls a closure at most once. A
            wrapper, as of Accelerate, has the optimizer in its attribute `optimizer`.
        steps: Numbers of the steps to record, from 0; or the number of first steps to record.
        replay: Trace whose weights and statistics are loaded before each recorded step; with the
            same class of optimizer also its state, with as many replicas also the random state.
        permute: Seed. Permutes the examples (first axis of inputs and outputs) of each recorded
            batch, so that only the order of summation is different. Not for inputs of the layout
            (time, batch), which are not compared example by example.
        names: Names in `replay` by names here. Others are matched by name, else by shape and order.
        shards: "each" runs the model, in one process, once for each replica's part of the batch in
            `replay`, with its random state: layers such as BatchNorm and Dropout then compute what
            each replica does. The loss must be computed outside of the model.
        feed_examples: Gives the model, in recorded steps, this process' part of the examples in
            `replay`, recorded in one process. The model must return the loss, so that no target
            of another example enters it.
        modules: True, or a pattern of names such as "layers.*.attention". In recorded steps, also
            copies inputs and outputs of these modules, and the gradients of the loss by them. They
            only explain a difference that other arrays show. "Before layers.0" in a finding is the
            code before this module.
        mesh: The devices of all processes, if the training has other parallel axes than data. None
            for that of the DTensors among the weights. An axis `pp`, `pipe…` or `stage…` has the
            stages of a pipeline, one for each process: `model` is the stage's module; pass `names`
            if its weights have other names than in one process, or if a tied weight has two.
        dims: How inputs are split over the axes of the mesh, as in "b[dp] s[cp:zigzag]"; or an
            object with the key "inputs", the key "outputs" if the model's outputs are split in
            another way, and patterns of the names of weights that are no DTensors but parts:
            {"inputs": "b[dp] s", "outputs": "b[dp] s v[tp]", "*.wqkv.weight": "3*o[tp] i"}. For
            weights without a pattern, `replay` tells how, by shapes and first values. If sequences
            are split, loss and gradients of a rank count as parts of a mean where DDP or
            `fully_shard` reduces over their axis; else `clipped` are the only gradients recorded.

    `lockstep.assert_same_training` gives path, steps, replay and permute in place of the arguments.
    """

    def __init__(
        self,
        path: str | None,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        steps: int | Sequence[int] = DEFAULT_STEPS,
        replay: str | None = None,
        permute: int | None = None,
        names: Mapping[str, str] | None = None,
        shards: str | None = None,
        feed_examples: bool = False,
        modules: bool | str = False,
        mesh: Any = None,
        dims: str | Mapping[str, str] = "",
    ) -> None:
        while isinstance(wrapped := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            optimizer = wrapped  # The wrapper does not have the hooks of an optimizer.
        if given := json.loads(os.environ.get("LOCKSTEP_RECORD", "null")):
            path, steps = given["path"], given.get("steps", steps)
            replay, permute = given.get("replay"), given.get("permute")
            shards, names = given.get("shards"), given.get("names") or names
            modules = given.get("modules") or modules
        self.is_recording = path is not None
        if path is None:
            return
        self.path, self.optimizer, self.seed, self.names = path, optimizer, permute, names or {}
        self.wanted = set(range(steps) if isinstance(steps, int) else steps)
        self.asked = [] if steps is DEFAULT_STEPS else sorted(self.wanted)
        self.ddp: Any = model if isinstance(model, nn.parallel.DistributedDataParallel) else None
        self.called = model.module if self.ddp else model
        self.module = getattr(self.called, "_orig_mod", self.called)  # Of torch.compile.
        self.weights = dict(self.module.named_parameters())
        self._find_layout(mesh, {"inputs": dims} if isinstance(dims, str) else dims)
        self.variables: dict[str, dict[str, str]] = {}  # In the order of their arrays.
        kept = ("steps", "settings", "micro_batches", "in_evaluation", "calls", "loss_scale")
        self.per_step: dict[str, list[Any]] = {key: [] for key in kept}
        self.arrays: dict[str, Any] = {}
        self.computed_in, self.is_ignored = "", False  # The first of all steps.
        self.step, self.hooks = 0, contextlib.ExitStack()
        self.num_backward: int | None = None  # Since the last update; None before the first pass.
        self.twins: dict[str, str] = {}  # Copies of a weight that `replay` has once.
        is_file = path.endswith(".npz") and os.path.isdir(os.path.dirname(path) or ".")
        _require(is_file, f"{path}: must be an .npz file in a folder that exists")
        _require(self.wanted and min(self.wanted) >= 0, f"steps={steps}: must be numbers from 0")
        wrapper = type(model).__name__
        is_known = wrapper not in ("DataParallel", "FullyShardedDataParallel")
        _require(is_known, f"model: {wrapper} cannot be recorded; use DDP or fully_shard")
        updated = {p for options in optimizer.param_groups for p in options["params"]}
        is_own = updated <= set(self.weights.values())
        _require(is_own, "optimizer: updates weights that model does not have; pass their model")
        self.replay = os.path.basename(replay) if replay else None
        is_alone = shards is None or (shards == "each" and replay and self.num_ranks == 1)
        _require(is_alone, f"shards={shards!r}: must be 'each', with replay= and in one process")
        self.is_by_shard, self.parts = shards is not None, list[_Part]()
        if replay:
            self.files = self._open(replay)
            self._match(self._read(min(self.wanted)))  # Raises an error before the training.
            names_of = [str(x.get("class")) for x in self.files[0].about.get("layers", ())]
            is_local = not (shards and any("SyncBatchNorm" in name for name in names_of))
            _require(is_local, "shards='each': BatchNorm is synchronised; record without shards=")
        is_whole = replay and self.files[0].about["num_replicas"] == len(self.files) == 1
        _require(
            is_whole or not feed_examples,
            "feed_examples: needs replay= and a recording of one process, whose examples are given",
        )
        _require(self.num_parts == 1 or not feed_examples, "feed_examples: dims split the inputs")
        self.feeds = feed_examples
        self.modules = _Modules(self, modules) if modules else None

    def _find_layout(self, mesh: Any, dims: Mapping[str, str]) -> None:
        """Finds the axes of the devices, and how plain weights are split over them."""
        groups = _fsdp_groups(self.module)
        self.of_fsdp = {p.sharded_param for group in groups for p in group.fsdp_params}
        group = self.ddp.process_group if self.ddp else None
        is_distributed = dist.is_available() and dist.is_initialized()
        self.rank = self.replica = dist.get_rank(group) if is_distributed else 0
        self.num_ranks = self.num_replicas = dist.get_world_size(group) if is_distributed else 1
        self.mesh = _mesh_of(mesh, groups, self.weights.values()) if is_distributed else None
        self.placements: dict[str, str] = {}  # "KIND/INDEX" → how an array is part of a whole one.
        self.texts: dict[str, str] = {}  # The same by the names of weights that are no DTensors.
        self.dims: dict[str, list[_Dimension]] = {"inputs": [], "outputs": []}
        self.is_first = self.is_last = self.knows_loss = True  # Of the stages of a pipeline.
        self.row_sizes: Sequence[int] = ()  # Of the first input.
        self.num_parts = 1  # Of a sequence, whose loss is the mean of the losses of its parts.
        if self.mesh is None:
            _require(self.num_ranks == 1 or not any(dims.values()), "dims: needs mesh=")
            return
        self.rank, self.num_ranks = self.mesh.rank, self.mesh.ranks.size
        along = [each.mesh_info.mesh.mesh.flatten().tolist() for each in groups]
        along += [dist.get_process_group_ranks(group)] if self.ddp else []
        axes = [self.mesh.axes_of(ranks) for ranks in along]
        _require(None not in axes, "mesh: has no axes over which the model is reduced; pass it")
        reduced = {axis for each in axes for axis in each or ()}
        own = {**dict(self.module.named_buffers()), **self.weights}
        for pattern, text in dims.items():
            found = self.mesh.dimensions(text)
            self.dims |= {pattern: found} if pattern in self.dims else {}
            for name in fnmatch.filter(own, pattern):
                _require(len(found) == own[name].dim(), f"dims: {text!r} is not that of {name}")
                self.texts.setdefault(name, text)
        self.mesh.name_axes(reduced, self.dims["inputs"])
        idle = [p for p in dims if p not in self.dims and not fnmatch.filter(own, p)]
        is_known = not idle or self.mesh.stages  # Another stage may have them.
        _require(is_known, f"dims: no weight has a name like {', '.join(idle)}")
        self.replica, self.num_replicas = self.mesh.place(self.mesh.data)
        stage, num_stages = self.mesh.place(self.mesh.stages)
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.num_parts = self.mesh.place(self.mesh.sequence)[1]
        self.knows_loss = reduced.issuperset(self.mesh.sequence)

    def _open(self, path: str) -> list["_Trace"]:
        """Returns the files of the trace to replay; the first one has the states to load."""
        own = [_rank_path(path, self.replica)] if self.num_ranks > 1 else []
        found = next(filter(os.path.exists, [*own, path, _rank_path(path, 0)]), "")
        _require(found, f"replay={path}: does not exist; record the training that it names first")
        try:
            files, of_rank = [_Trace(found)], functools.partial(_rank_path, path)
            if mesh := files[0].about.get("mesh"):  # Each of its ranks has a part of the weights.
                number = math.prod(mesh.values())
                own_first = sorted(range(number), key=lambda rank: rank != self.rank)
                files = [*map(_Trace, map(of_rank, own_first))]
            elif self.is_by_shard and found == of_rank(0):
                files += map(_Trace, map(of_rank, range(1, files[0].about["num_replicas"])))
            missing = self.wanted - set.intersection(*(set(x.about["steps"]) for x in files))
        except Exception as error:
            raise ValueError(f"replay={path}: cannot be read as a trace: {error}") from None
        _require(not missing, f"replay={path}: does not have steps {missing}; record them there")
        return files

    def __enter__(self) -> None:
        if not self.is_recording:
            return
        self.original, torch.autograd.backward = torch.autograd.backward, self._backward
        self.counter = self.optimizer.register_step_post_hook(self._after_update)
        self._install_hooks()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if not self.is_recording:
            return
        self.ended_with = _in_words(error)
        torch.autograd.backward = self.original
        self.counter.remove()
        self.hooks.close()
        self.is_on = False
        self._write()

    def _install_hooks(self) -> None:
        """Removes the hooks of the last step, and installs those of a step that is recorded."""
        self.hooks.close()
        self.in_evaluation: dict[str, None] = {}  # Names of layers.
        self.inverse, self.is_reduced = None, False
        self.outside: Any = None  # During a forward pass, the arrays from before it.
        self.of_last_layer: list[Tensor] = []
        self.is_evaluated = False  # Whether the model was called in evaluation mode.
        self._forget()
        self.is_on = self.step in self.wanted
        if not self.is_on:
            return
        add, first = self.hooks.enter_context, {"with_kwargs": True, "prepend": True}
        add(self.called.register_forward_pre_hook(self._before_forward, **first))
        add(self.called.register_forward_hook(self._after_forward))
        add(self.optimizer.register_step_pre_hook(self._before_update))
        for _, layer in self.module.named_modules():
            add(layer.register_forward_hook(self._note_dtype))
        if self.modules:
            self.modules.install()
        self._replace_functions()
        if self.ddp:
            add(self.ddp.register_forward_pre_hook(self._before_ddp))
        if self.is_by_shard:
            own = {key: x for key, x in vars(self.called).items() if key == "forward"}
            new = functools.partial(self._forward_by_shard, self.called.forward)
            vars(self.called)["forward"] = new
            self.hooks.callback(vars(self.called).update, own)
            self.hooks.callback(vars(self.called).pop, "forward", None)
        for index, p in enumerate(self.weights.values()):
            if p.requires_grad and p not in self.of_fsdp:
                hook = functools.partial(self._after_gradient, index)
                add(p.register_post_accumulate_grad_hook(hook))

    def _forget(self) -> None:
        """Forgets what was seen of a step: it begins, or GradScaler skipped its update."""
        self.now: dict[str, np.ndarray] = {}
        self.losses: list[Tensor] = []
        self.num_cleared = 0  # Of the losses: the script has cleared their gradients.
        self.calls: list[str] = []
        self.removed: dict[int, np.ndarray] = {}  # Between backward passes, by number of weight.
        self.unclipped: tuple[list[Tensor | None], float] | None = None  # With their scale.
        self.num_forward, self.loss_scale, self.num_bytes = 0, 1.0, 0  # The last: of outputs.
        self.num_fed = 0  # Examples of `replay` that the model was given.
        self.scale = 1.0  # Of the gradients now: 1 after `unscale_`.

    def _replace_functions(self) -> None:
        """Replaces the functions that clip gradients and scale losses, until the step ends."""
        utils = nn.utils
        for owner in (utils, getattr(utils, "clip_grad", None)):
            for name in CLIPPING:  # The last is called by the first, however that was imported.
                self._replace(owner, name, functools.partial(self._clip, "norm"))
            self._replace(owner, "clip_grad_value_", functools.partial(self._clip, "value"))
        scaler = getattr(getattr(torch, "amp", None), "GradScaler", None)
        self._replace(scaler, "scale", self._scale_loss)
        self._replace(scaler, "unscale_", self._unscale)
        self._replace(scaler, "update", self._update_scale)
        pipelining = sys.modules.get("torch.distributed.pipelining.stage")
        stage = getattr(pipelining, "_PipelineStageBase", None)
        self._replace(stage, "scale_grads", self._average_micro_batches)
        stage = getattr(pipelining, "PipelineStage", None)
        self._replace(stage, "_forward_metadata_inference", self._without_recording)

    def _replace(self, owner: Any, name: str, function: Any) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def replaced(*args: Any, **options: Any) -> Any:
            return function(original, *args, **options)

        setattr(owner, name, replaced)
        self.hooks.callback(setattr, owner, name, original)

    def _clip(self, kind: str, original: Any, parameters: Any, *args: Any, **options: Any) -> Any:
        """Keeps the gradients before the first of several functions clips them."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        own = {*self.weights.values()}.intersection(parameters)
        limit = [*args, *(options[x] for x in ("max_norm", "clip_value") if x in options)][0]
        call = f"clip {kind} {float(limit):g}"
        if self.is_on and own and self.calls[-1:] != [call]:
            if not self.unclipped:
                gradients = [p.grad for p in self.weights.values()]
                copies = [None if g is None else g.detach().clone() for g in gradients]
                self.unclipped = copies, self.scale
            self.calls.append(call)
        return original(parameters, *args, **options)

    def _scale_loss(self, original: Any, scaler: Any, *args: Any, **options: Any) -> Any:
        scaled = original(scaler, *args, **options)
        if scaler.is_enabled():
            self.loss_scale = self.scale = float(scaler.get_scale())
        return scaled

    def _unscale(self, original: Any, scaler: Any, optimizer: Any) -> Any:
        result = original(scaler, optimizer)
        if optimizer is self.optimizer and scaler.is_enabled():
            self.scale = 1.0
            self.calls.append("unscale")
        return result

    def _update_scale(self, original: Any, scaler: Any, *args: Any, **options: Any) -> Any:
        if self.losses and "unscale" in self.calls:
            self._forget()
        return original(scaler, *args, **options)

    def _without_recording(self, original: Any, *args: Any, **options: Any) -> Any:
        """Calls what runs the model to learn the shapes of its outputs."""
        self.is_ignored = True
        try:
            return original(*args, **options)
        finally:
            self.is_ignored = False

    def _average_micro_batches(self, original: Any, stage: Any, number: int) -> None:
        """Divides what was copied, as a pipeline divides gradients after the last backward."""
        original(stage, number)
        if all(stage.submod is not model for model in (self.ddp, self.called, self.module)):
            return
        for key, array in self.now.items():
            if key.split("/")[0] in (*OF_LOSS, "removed") and array.dtype.kind == "f":
                self.now[key] = array / array.dtype.type(number)
        self.losses = [x / number for x in self.losses]
        if self.of_fsdp:  # The schedule reduces after the last backward pass.
            self._save("sums", [p.grad for p in self.weights.values()], 0, self.scale)

    def _before_ddp(self, *_: Any) -> None:
        self.is_reduced = self.ddp.require_backward_grad_sync

    def _before_forward(self, module: nn.Module, args: Any, options: Any) -> Any:
        if not torch.is_grad_enabled() or not module.training or self.is_ignored:
            self.is_evaluated |= torch.is_grad_enabled() and not self.is_ignored
            return None
        if self.losses and self._is_skipped():
            self._forget()
        self._begin(is_forward=True)
        is_inner = self.outside is not None
        if is_inner:  # In Lightning, DDP calls the model, which calls itself: the last call counts.
            self.now, self.num_forward, self.inverse = self.outside, self.num_forward - 1, None
        self.outside, self.of_last_layer = dict(self.now), []
        own = [x for x in tree_leaves((args, options)) if isinstance(x, Tensor)]
        self.row_sizes = next((x.shape for x in map(_local, own) if x.dim()), ())
        if self.feeds and not is_inner:
            args, options = self._fed((args, options))
        batch = [x for x in tree_leaves((args, options)) if isinstance(x, Tensor)]
        sizes = [len(_local(x)) for x in batch if x.dim()]
        if self.seed is not None and sizes and not is_inner:
            generator = torch.Generator().manual_seed(self.seed + self.step)
            order = torch.randperm(sizes[0], generator=generator)
            self.inverse = torch.argsort(order)
            args, options, batch = _take((args, options, batch), order, len(order))
        self._add("random", _random_states())
        self._add("data", batch)
        self.num_rows = sizes[0] if sizes else 0
        self._note_modes()
        self.num_forward += 1
        self.calls += [] if is_inner else ["forward"]
        return args, options

    def _fed(self, nest: Any) -> Any:
        """Returns arguments of the model with the next examples of `replay` in place of its own."""
        own = [x for x in tree_leaves(nest) if isinstance(x, Tensor)]
        arrays = [*self.files[0].arrays("data", self.step, 0).values()]
        # The examples of all micro-batches of the step.
        columns = [np.concatenate(arrays[i :: len(own)]) for i in range(len(own))]
        share = len(columns[0]) // self.num_replicas if columns else 0
        start = self.replica * share + self.num_fed
        size = len(own[0]) if own and own[0].dim() else 0
        self.num_fed += size
        is_enough = size and self.num_fed <= share and len(arrays) % len(own) == 0
        shapes = [(c.shape[1:], tuple(x.shape[1:])) for c, x in zip(columns, own, strict=True)]
        _require(
            is_enough and all(given == wanted for given, wanted in shapes),
            f"feed_examples: step {self.step} of {self.replay} does not have the examples for a"
            f" batch of shapes {', '.join(str(tuple(x.shape)) for x in own)} on each process",
        )
        given = (torch.tensor(c[start : start + size]) for c in columns)
        return tree_map_only(Tensor, lambda x: torch.zeros_like(x).copy_(next(given)), nest)

    def _is_skipped(self) -> bool:
        """Returns whether the script has discarded gradients that overflow, without an update."""
        if any(p.grad is not None for p in self.weights.values()):
            return False
        # Outputs and modules may have masks of -inf.
        arrays = [x for key, x in self.now.items() if key[:2] not in ("y_", "mo")]
        arrays += map(_to_array, self.losses)
        return not all(np.isfinite(x).all() for x in arrays)

    def _note_modes(self) -> None:
        modes = {name: module.training for name, module in self.module.named_modules()}
        self.in_evaluation |= {name: None for name, is_training in modes.items() if not is_training}

    def _note_dtype(self, layer: nn.Module, args: Any, output: Any) -> None:
        """Keeps the dtype in which layers compute; a model may convert its own outputs."""
        if torch.is_grad_enabled() and self.module.training:
            self.computed_in = _computed_in(output, self.weights) or self.computed_in
            if self.outside is not None and not torch.compiler.is_compiling():
                self.of_last_layer = _with_rows(output, self.num_rows) or self.of_last_layer

    def _add(self, kind: str, values: Sequence[Tensor]) -> None:
        self._save(kind, values, sum(key.startswith(f"{kind}/") for key in self.now))

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        is_recorded = torch.is_grad_enabled() and module.training and self.outside is not None
        if not is_recorded:
            return None
        self.outside = None
        tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
        _require(
            not self.feeds or any(not x.dim() for x in tensors),
            "feed_examples: the model returns no loss; targets outside of it would be those of"
            " other examples",
        )
        self._add("random_after", _random_states())
        outputs = _with_rows(output, self.num_rows)
        if not outputs and (self.dims["outputs"] or not (self.mesh and self.mesh.model)):
            outputs = self.of_last_layer  # On a mesh, it may be a part, of which nothing is known.
        self._save_outputs(outputs)
        inverse, self.inverse = self.inverse, None
        return output if inverse is None else _take(output, inverse, len(inverse))

    def _save_outputs(self, outputs: Sequence[Tensor]) -> None:
        if not self.is_last:
            return
        self.num_bytes += sum(_local(x).numel() * x.element_size() for x in outputs)
        if self.num_bytes > MOST_BYTES:
            self.now = {k: v for k, v in self.now.items() if not k.startswith(("y_pred", "y_grad"))}
            return
        for x in outputs:
            self._add("y_pred", [x])
            self._add("y_grad", [torch.zeros_like(x)])  # Stays 0 if the loss does not use it.
            if x.requires_grad and self.knows_loss:
                key = [key for key in self.now if key.startswith("y_grad/")][-1]
                x.register_hook(functools.partial(self._after_loss, self.step, key))

    def _after_loss(self, step: int, key: str, gradient: Tensor | None) -> None:
        # DDP gives None for an output that the loss does not use.
        if gradient is not None and step == self.step and key in self.now:
            array, before = _to_array(gradient) / (self.scale * self.num_parts), self.now[key]
            self.now[key] = before + array if before.shape == array.shape else array
            if not self._place("y_grad", int(key.split("/")[-1]), gradient):
                del self.now[key]  # A DTensor that is split in another way than the output.

    def _after_gradient(self, index: int, p: Tensor) -> None:
        self._begin()
        self.has_gradients = True
        self._save("raw", [p.grad], index, self.scale)

    def _backward(self, tensors: Any, *args: Any, **options: Any) -> None:
        """Takes the place of `torch.autograd.backward`."""
        self.has_gradients = bool(self.of_fsdp)
        self.num_backward = (self.num_backward or 0) + 1
        if self.is_on:
            self._note_removed()
        if self.ddp and self.mesh and self.mesh.stages:  # The forward pass was in `no_sync`.
            self._before_ddp()
        self.original(tensors, *args, **options)
        is_reduced = self.is_reduced or any(p.grad is not None for p in self.of_fsdp)
        if self.now and self.has_gradients:  # Otherwise, it is the loss of another model.
            scalars = [x.detach().clone() for x in tree_leaves(tensors) if x.numel() == 1]
            self.losses += [x / self.scale for x in scalars]
            self.unclipped = None
            if is_reduced:
                self._save("sums", [p.grad for p in self.weights.values()], 0, self.scale)
            self.calls.append("backward, all-reduced" if is_reduced else "backward")

    def _note_removed(self) -> None:
        """Adds what the script took from the gradients since the last backward pass."""
        passes = [call for call in self.calls if call.startswith("backward")]
        if not passes:
            return
        kind = "sums" if passes[-1] != "backward" else "raw"
        is_left, removed = False, dict[int, np.ndarray]()
        for index, p in enumerate(self.weights.values()):
            left = self.now.get(f"{kind}/{self.rank}/{index}")
            if left is None:
                continue
            array = np.zeros_like(left) if p.grad is None else _to_array(p.grad) / self.scale
            is_left |= bool(array.any())
            removed[index] = left - array
        is_removed = any(x.any() for x in removed.values())
        for index, array in removed.items() if is_removed else ():
            if self.mesh or array.any():  # Another process may have a part that is not 0.
                self.removed[index] = self.removed.get(index, 0) + array
                text = self.placements.get(f"{kind}/{index}", "")
                self.placements |= {f"removed/{index}": text} if text else {}
        if is_removed and not is_left:
            self.calls.append("clear")
            self.num_cleared = len(self.losses)

    def _before_update(self, optimizer: Any, args: Any, options: Any) -> Any:
        if not any(callable(x) for x in [*args[1:], *options.values()]):
            if not self._is_repeated():
                self._save_gradients()
            return None

        def recorded(x: Any) -> Any:
            return functools.partial(self._with_gradients, x) if callable(x) else x

        return tuple(map(recorded, args)), {name: recorded(x) for name, x in options.items()}

    def _with_gradients(self, closure: Any) -> Any:
        loss = closure()
        is_first = not any(key.startswith("clipped/") for key in self.now)
        _require(is_first, "optimizer.step: calls its closure twice, which cannot be recorded")
        self._save_gradients()
        return loss

    def _save_gradients(self) -> None:
        self._begin()
        if not self.num_forward:  # The whole model is in evaluation mode.
            self._note_modes()
        cleared = self.losses[: self.num_cleared]
        self._save("loss", [sum(x) for x in (self.losses, cleared) if x])
        for index, array in self.removed.items():
            self.now[f"removed/{self.rank}/{index}"] = array
        gradients = [p.grad for p in self.weights.values()]
        if self.unclipped:
            self._save("unclipped", self.unclipped[0], 0, self.unclipped[1])
        scale = getattr(self.optimizer, "grad_scale", None)  # The optimizer divides by it itself.
        self._save("clipped", gradients, 0, scale)
        names = {p: name for name, p in self.weights.items()}
        groups = [(x, [names[p] for p in x["params"]]) for x in self.optimizer.param_groups]
        self.groups = [{**_settings(group), "weights": weights} for group, weights in groups]

    def _is_repeated(self) -> bool:
        """Returns whether an update has the gradients of the last one, as in the same step."""
        return self.num_backward == 0 and not self.now

    def _after_update(self, *_: Any) -> None:
        if self._is_repeated():
            if self.per_step["steps"][-1:] == [self.step - 1]:
                self._save_variables("after")
                self._keep_arrays(len(self.per_step["steps"]))
                self._forget()
            return
        if self.is_on and getattr(self.optimizer, "found_inf", None):
            self._forget()  # The optimizer skipped the update itself.
            return
        if self.is_on:
            self._save_variables("after")
            self.per_step["steps"].append(self.step)
            self.per_step["settings"].append(self.groups)
            self.per_step["micro_batches"].append(max(self.num_forward, 1))
            self.per_step["in_evaluation"].append([*self.in_evaluation])
            self.per_step["calls"].append(self.calls)
            self.per_step["loss_scale"].append(self.loss_scale)
            if self.parts:
                text = f"step {self.step} has other examples than {self.replay}"
                warnings.warn(f"{self.path}: {text}; not computed for each shard", stacklevel=2)
                self.now = {x: value for x, value in self.now.items() if x[:7] != "shards/"}
            self._keep_arrays(len(self.per_step["steps"]))
        self.step += 1
        self.num_backward = self.num_backward and 0
        if self.is_on or self.step in self.wanted:
            self._install_hooks()

    def _forward_by_shard(self, forward: Any, *args: Any, **options: Any) -> Any:
        """Runs in place of the model's `forward`, and calls it for each part of the batch.

        Replica 0 comes last: the model keeps its statistics, and the random state after it.
        """
        batch = [x for x in tree_leaves((args, options)) if isinstance(x, Tensor)]
        found = self._find_parts(batch[0]) if self.outside is not None and batch else []
        if not found:
            return forward(*args, **options)
        size, states, outputs = len(batch[0]), _random_states(), []
        numbers = torch.zeros(size, dtype=torch.int64)
        is_drawn = False
        for part, rows in found:
            numbers[rows] = part.number
            before = part.random or states
            _set_random_states(before)
            with contextlib.nullcontext() if part.replica == 0 else _copied_buffers(self.module):
                given = _take((args, options), rows, size)
                if self.modules:
                    self.modules.rows = rows, size
                outputs.append(forward(*given[0], **given[1]))
            is_drawn |= not all(map(torch.equal, before, _random_states()))
            _check_rows(outputs[-1], len(rows))
        if self.modules:
            self.modules.rows = None
        if not is_drawn:
            _set_random_states(states)
        self._add("shards", [numbers])
        return _joined(outputs, torch.argsort(torch.cat([rows for _, rows in found])))

    def _find_parts(self, batch: Tensor) -> list[tuple["_Part", Tensor]]:
        """Returns the parts that are this batch, and the places of their examples in it.

        It is empty if the batch does not have the examples of whole parts.
        """
        places = collections.defaultdict(list)
        for place, row in enumerate(_rows(_to_array(batch))):
            places[row].append(place)
        found = []
        for part in self.parts:
            counts = collections.Counter(part.rows)
            if all(len(places[row]) >= count for row, count in counts.items()):
                rows = [places[row].pop(0) for row in part.rows]
                rows = rows if self.seed is None else sorted(rows)
                found.append((part, torch.tensor(rows, device=batch.device)))
        if any(places.values()):
            return []
        self.parts = [part for part in self.parts if all(part is not taken for taken, _ in found)]
        return sorted(found, key=lambda pair: -pair[0].replica)

    def _keep_arrays(self, position: int) -> None:
        """Keeps the arrays of a step; the own state is mostly that after the step before it."""
        for key, value in self.now.items():
            if key.startswith("replaced/"):
                after = self.arrays.get(f"{position - 1}/after{key.removeprefix('replaced')}")
                if after is not None and after.tobytes() == value.tobytes():
                    value = after
            self.arrays[f"{position}/{key}"] = value

    def _begin(self, is_forward: bool = False) -> None:
        """Loads the state to replay and copies all variables, once in a step."""
        if not self.now:
            if self.replay:
                seen = "no forward pass was seen; call model, in train mode"
                if self.is_evaluated:
                    seen = "the model is called in evaluation mode; call model.train() before it"
                _require(is_forward, f"replay: step {self.step}: {seen}")
                self._save_variables("replaced")
                self._load()
            if self.is_by_shard:
                files = [file for file in self.files if file.is_first_of_replica]
                parts = [part for file in files for part in file.parts(self.step)]
                self.parts = [x._replace(number=i) for i, x in enumerate(parts) if x.rows]
            self._save_variables("before")

    def _read(self, step: int) -> list[dict[str, Any]]:
        """Returns the variables before a step in the trace to replay, with their whole arrays."""
        found: dict[str, dict[str, Any]] = {}
        for file in self.files if self.files[0].at else self.files[:1]:
            names, placements = (file.about.get(key) or {} for key in ("names", "placements"))
            for index, array in file.arrays("before", step, self.replica).items():
                own = file.about["variables"][index]
                name = names.get(own["name"], own["name"])
                text = placements.get(f"before/{index}", "")
                variable = {**own, "name": name, "array": array, "parts": [], "text": text}
                found.setdefault(name, variable)["parts"].append((file.at, array))
        for v in found.values():
            if v["text"]:
                v["array"] = _assembled(v["parts"], v["text"], self.files[0].about["mesh"])
        return [*found.values()]

    @torch.no_grad()
    def _load(self) -> None:
        """Assigns the recorded state before this step to the variables."""
        file, others = self.files[0], self._read(self.step)
        sources = self._match(others)
        for variable, value in self._variables():
            if variable["name"] in sources:
                source = sources[variable["name"]]["array"]
                _assign(value, self._own_part(variable["name"], value, source))
        if file.about["framework"] != "torch":
            return
        is_same = file.about["optimizer"]["class"] == type(self.optimizer).__name__
        for name, p in self.weights.items():
            state = self.optimizer.state
            old = state.pop(p, {}) if is_same else state[p]
            slots = [v for v in others if v.get("of") == sources[name]["name"]]
            if is_same and slots:
                state[p] = dict(old)  # Keeps slots that the file lacks, as of another setting.
            for other in slots:
                x, slot = other["array"], other["slot"]
                is_like = x.shape == sources[name]["array"].shape
                x = self._own_part(name, p, x) if is_like else x
                if is_same or slot in old:
                    new = torch.zeros_like(p) if is_like else torch.tensor(x)
                    state[p][slot] = _assign(new if old.get(slot) is None else old[slot], x)
        if file.about["num_replicas"] == self.num_replicas:
            states = file.arrays("random", self.step, self.replica).values()
            _set_random_states([*map(torch.tensor, states)])

    def _match(self, others: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Returns the variable of the other trace for the name of each weight and statistic."""
        own = [(v, x) for v, x in self._variables() if v["kind"] != "optimizer state"]
        wanted = {v["name"]: self.names.get(v["name"], v["name"]) for v, _ in own}
        free, sources = [v for v in others if v["name"] not in wanted.values()], {}
        for this, value in own:
            name, shape = this["name"], tuple(value.shape)
            named = [v for v in others if v["name"] == wanted[name]]
            is_known = named or name in self.names or (self.mesh and self.mesh.stages)
            options = named if is_known else free
            options = [_transposed(v, this["layout"]) for v in options if v["kind"] == this["kind"]]
            if named and options and name not in self.texts:
                self._infer_placement(name, value, options[0]["array"])
            fits = [v for v in options if self._own_part(name, value, v["array"]).shape == shape]
            if fits:
                sources[name] = fits[0]
                free = [v for v in free if v["name"] != fits[0]["name"]]
            elif twin := self._twin_of(name, value, {v["name"]: x for v, x in own}):
                sources[name] = sources[twin]
            elif this["kind"] == "weight" or name in self.names:
                found = ", ".join(f"{v['name']} {v['array'].shape}" for v in options) or "nothing"
                raise ValueError(f"replay: {name} {shape} is not matched by {found}; pass names")
        return sources

    def _own_part(self, name: str, value: Tensor, whole: np.ndarray) -> np.ndarray:
        """Returns this process' part of an array; all of it for a DTensor, which is split later."""
        if name not in self.texts or not self.mesh or _is_dtensor(value):
            return whole
        dimensions = self.mesh.dimensions(self.texts[name])
        if len(dimensions) != whole.ndim:
            return whole
        return whole[_places(dimensions, whole.shape, self.mesh.sizes, self.mesh.at)]

    def _infer_placement(self, name: str, value: Tensor, whole: np.ndarray) -> None:
        """Notes how a weight is split whose shape is that of a part of the one in `replay`.

        Its values tell whether it is fused of several matrices, each of which is split.
        """
        if not self.mesh or len(self.mesh.model) != 1 or value.dim() != whole.ndim:
            return
        axis, dims = self.mesh.model[0], [f"d{k}" for k in range(whole.ndim)]
        other = [k for k, n in enumerate(whole.shape) if n != value.shape[k]]
        is_part = [value.shape[k] * self.mesh.sizes[axis] == whole.shape[k] for k in other]
        if is_part != [True] or _is_dtensor(value):
            return
        array, owner = _to_array(value), name.rpartition(".")[0]
        like = [text for x, text in self.texts.items() if x.rpartition(".")[0] == owner]
        blocks = {max(each.blocks for each in self.mesh.dimensions(text)) for text in like}
        if np.ptp(array):  # The values of a bias such as 0 do not tell; it is as its weight.
            blocks = {1, 2, 3, 4, 6, 8}
        for number in (*sorted(blocks), 1):
            dims[other[0]] = f"{number}*d{other[0]}[{axis}]".removeprefix("1*")
            self.texts[name] = " ".join(dims)
            if np.array_equal(self._own_part(name, value, whole), array):
                return

    def _twin_of(self, name: str, value: Tensor, own: Mapping[str, Tensor]) -> str:
        """Returns the weight before it that had the values of this one when recording began."""
        for other, x in own.items():
            if name in {other, *self.twins, *self.names} or name not in self.weights:
                break
            if other not in self.weights or x.shape != value.shape:
                continue
            array = _to_array(x)
            is_same = np.array_equal(array, _to_array(value))
            if is_same and array.size and array.std() > 0:  # Not initial values such as 0.
                text = f"{self.replay} has one weight for {other} and its copy {name}: they are"
                warnings.warn(f"{self.path}: {text} tied there, and not here", stacklevel=2)
                self.twins[name] = other
        return self.twins.get(name, "")

    def _variables(self) -> Iterator[tuple[dict[str, str], Any]]:
        """Yields the description and the value of each weight, statistic and optimizer state."""
        owners = {f"{name}.weight": layer for name, layer in self.module.named_modules()}
        for name, p in self.weights.items():
            layout = [LAYOUTS[kind] for kind in LAYOUTS if isinstance(owners.get(name), kind)]
            yield {"name": name, "kind": "weight", "layout": "".join(layout)}, p
        for name, buffer in self.module.named_buffers():
            yield {"name": name, "kind": "statistic", "layout": ""}, buffer
        for name, p in self.weights.items():
            for slot, value in self.optimizer.state.get(p, {}).items():
                kind = {"kind": "optimizer state", "layout": "", "of": name, "slot": slot}
                yield {"name": f"{name}/{slot}", **kind}, value

    def _save_variables(self, kind: str) -> None:
        for variable, value in self._variables():
            self.variables.setdefault(variable["name"], variable)
            self._save(kind, [value], list(self.variables).index(variable["name"]))

    def _save(self, kind: str, values: Sequence[Any], start: int = 0, scale: Any = None) -> None:
        for index, value in enumerate(values, start):
            key = f"{kind}/{self.rank}/{index}"
            if isinstance(value, Tensor):
                if not self._place(kind, index, value):
                    continue
                value = _local(value)
            if scale not in (None, 1) and value is not None:
                value = value / float(scale)
            if isinstance(value, Tensor) and value.is_sparse and value.sparse_dim() == 1:
                self.now[f"{key}/values"] = _to_array(value._values())
                self.now[f"{key}/indices"] = _to_array(value._indices()[0])
                self.now[f"{key}/rows"] = np.array(len(value))
            elif isinstance(value, Tensor | int | float):
                self.now[key] = _to_array(torch.as_tensor(value))

    def _place(self, kind: str, index: Any, value: Tensor) -> bool:
        """Notes how an array is part of the whole one; returns whether this is known."""
        text = self._text_of(kind, index, value) if self.mesh else ""
        self.placements.pop(f"{kind}/{index}", None)
        self.placements |= {f"{kind}/{index}": text} if text else {}
        return text is not None

    def _text_of(self, kind: str, index: Any, value: Tensor) -> str | None:
        """Returns how an array is part of the whole one; "" for all of it, None if not known."""
        assert self.mesh
        is_here = self.is_first if kind == "data" else self.is_last
        if kind in ("data", "y_pred", "y_grad", "loss") and not is_here:
            return None
        if kind in OF_LOSS and not self.knows_loss:  # It is not known how losses are added.
            return None
        text: str | None = ""
        if _is_dtensor(value):
            text = self.mesh.text_of(value)
        elif kind.removesuffix("_grad") in OF_ROWS:
            text = self._text_of_rows(kind, value)
            if kind.startswith("module_"):
                text = self._text_of_layer(kind, index.partition(":")[2], value, text)
        elif self.texts and kind in ("before", "after", "replaced"):
            variable = [*self.variables.values()][index]
            name = variable.get("of", variable["name"])
            is_like = "of" not in variable or value.shape == self.weights[name].shape
            text = self.texts.get(name, "") if is_like else ""
        elif self.texts and kind in ("raw", "sums", "unclipped", "clipped"):
            text = self.texts.get([*self.weights][index], "")
        if kind in ("raw", "loss") and self.num_parts > 1 and text is not None:
            text = text or " ".join(f"d{k}" for k in range(value.dim()))
            text = f"{text} mean({','.join(self.mesh.sequence)})".strip()
        return text

    def _text_of_layer(self, kind: str, name: str, value: Tensor, text: str) -> str | None:
        """Returns the same if a layer's weight is split: so are its outputs, or its inputs."""
        assert self.mesh
        weight = self.weights.get(f"{name}.weight", torch.zeros(1))
        of_weight, size = self.texts.get(f"{name}.weight", ""), 1
        if _is_dtensor(weight):  # The module may give its local output.
            of_weight = self.mesh.text_of(weight) or ""
        dims = _dimensions(of_weight)
        if len(dims) != 2 or not value.dim():
            return text
        side = int("_in" in kind)  # Of the weight: outputs come first.
        words = text.split() or [f"d{k}" for k in range(value.dim())]
        axes = [axis for axis in dims[side].axes if axis not in self.mesh.data]
        if _is_dtensor(weight):
            size = math.prod(self.mesh.sizes[axis] for axis in axes)
        if axes and value.shape[-1] * size == weight.shape[side]:
            words[-1] = f"{dims[side].blocks}*d[{','.join(axes)}]"
        is_plain = type(self.module.get_submodule(name)) is nn.Linear and not _is_dtensor(weight)
        if is_plain and kind in ("module_out", "module_in_grad") and dims[1 - side].axes:
            words.append(f"sum({','.join(dims[1 - side].axes)})")  # The script adds later.
        found = " ".join(words)
        counts = [len(re.findall(rf"[\[,(]{axis}\b", found)) for axis in self.mesh.sizes]
        return found if max(counts) < 2 else None  # Two rules say different things.

    def _text_of_rows(self, kind: str, value: Tensor) -> str:
        """Returns how inputs or outputs are split: like the first input in dimensions as long."""
        left = [*zip(self.dims["inputs"], self.row_sizes, strict=False)]
        outputs = self.dims["outputs"]
        if kind[:2] == "y_" and len(outputs) == value.dim():
            return " ".join(each.text for each in outputs)
        of_model = self.mesh.model if self.mesh and kind.startswith("module_") else ()
        model = {axis: self.mesh.sizes[axis] for axis in of_model} if self.mesh else {}
        found = []
        for k, size in enumerate(value.shape if left or model else ()):
            same = next((each for each in left if each[1] == size), None)
            left = [each for each in left if each is not same]
            found.append(same[0].text if same else f"d{k}")
            for axis, number in model.items() if k and not same else ():
                if [size * number] == [*self.row_sizes[k : k + 1]]:  # Sequence parallelism.
                    found[-1] = f"d{k}[{axis}]"
        return " ".join(found)

    def _write(self) -> None:
        """Writes the recorded steps to a temporary file, and renames it."""
        if missing := sorted(self.wanted - set(self.per_step["steps"])):
            warnings.warn(f"{self.path}: the training ended before steps {missing}", stacklevel=3)
        rule = {"class": type(self.optimizer).__name__, "framework": "torch"}
        wrapper = "fully_shard" if self.of_fsdp else type(self.ddp).__name__ if self.ddp else ""
        about = {
            "versions": {"torch": str(torch.__version__), "numpy": np.__version__},
            "num_replicas": self.num_replicas,
            "replicas": [self.rank],
            "wrapper": wrapper,
            "variables": list(self.variables.values()),
            "gradients": list(self.weights),
            "reduction": "mean" if self.ddp else "",
            "computed_in": self.computed_in,
            "optimizer": {**_settings(self.optimizer.defaults), **rule},
            "layers": _layers(self.module),
            "data_layout": "NCHW" if "OIHW" in str(self.variables) else "",
            "permuted": self.seed,
            "replayed": self.replay,
            "asked": self.asked,
            "ended_with": self.ended_with,
            **(FORMAT | self.per_step),
        }
        if self.modules:
            about["modules"] = self.modules.names
            indexed, arrays, texts = self.modules.indexed, self.arrays, self.placements
            self.arrays = {indexed(name): array for name, array in arrays.items()}
            self.placements = {indexed(name): text for name, text in texts.items()}
        if self.mesh:
            del about["replicas"]
            about |= {"mesh": self.mesh.sizes, "ranks": [self.rank], "data_axes": self.mesh.data}
            names = {key: name for key, name in self.names.items() if key in self.variables}
            about |= {"placements": self.placements, "names": names}
        firsts: dict[int, str] = {}  # Of arrays that are kept by several names.
        first_of = {name: firsts.setdefault(id(x), name) for name, x in self.arrays.items()}
        about["aliases"] = {name: first for name, first in first_of.items() if name != first}
        written = {name: self.arrays[name] for name in firsts.values()}
        path = _rank_path(self.path, self.rank) if self.num_ranks > 1 else self.path
        temporary = f"{path}.{os.getpid()}.tmp"
        with open(temporary, "wb") as file:
            np.savez(file, about=np.array(json.dumps(about)), **written)
            file.flush()
            os.fsync(file.fileno())  # A power cut leaves the whole file, or none.
        os.replace(temporary, path)


def _in_words(error: BaseException | None) -> str:
    """Returns the exception that ended the training in one line; "" for none and `sys.exit(0)`."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return ""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return "".join(c for c in text if c.isprintable())[:200].removesuffix(": ").removesuffix(":")


class _Modules:
    """Copies inputs and outputs of modules, and gradients of the loss with respect to them.

    Of a module that a forward pass calls several times, the first call counts. The gradient of an
    output is the whole one; that of an input is the part that flows through the module, as a block
    adds its input to its output elsewhere. No view of a tensor is made, which would change the
    order in which autograd adds.

    Args:
        recorder: What has the model and the arrays.
        pattern: True for all modules, or a pattern of their names.

    Attributes:
        names: The modules in the order of their first call.
        rows: The examples of the batch that the model computes now, and the size of the batch.
    """

    def __init__(self, recorder: record, pattern: bool | str) -> None:
        self.recorder, self.names, self.now = recorder, list[str](), dict[str, Any]()
        self.rows: tuple[Tensor, int] | None = None
        self.seen, self.open = set[tuple[str, int]](), dict[str, tuple[Any, ...]]()
        self.defaults, self.unknown = set[str](), set[str]()  # Names of arrays.
        wanted = "*" if pattern is True else str(pattern)
        named = recorder.module.named_modules()
        self.modules = {n: m for n, m in named if n and fnmatch.fnmatchcase(n, wanted)}
        _require(self.modules, f"modules={pattern!r}: no module of the model has such a name")

    def install(self) -> None:
        add = self.recorder.hooks.enter_context
        for name, module in self.modules.items():
            before, after = (functools.partial(f, name) for f in (self._before, self._after))
            add(module.register_forward_pre_hook(before, with_kwargs=True))
            add(module.register_forward_hook(after))

    def _before(self, name: str, module: nn.Module, args: Any, options: Any) -> None:
        own = self.recorder
        if own.outside is None or torch.compiler.is_compiling():
            return
        if self.now is not own.now:  # Another step, or attempt at it.
            self.now, self.seen, self.defaults, self.unknown = own.now, set(), set(), set()
        place = f"{own.rank}/{own.num_forward - 1}:{name}"
        rows = self.rows if own.is_by_shard else None
        if (place, id(rows)) in self.seen:
            return
        self.seen.add((place, id(rows)))
        self.names += [] if name in self.names else [name]
        inputs = _floating((args, options))
        edge: tuple[Any, int] = (None, 0)
        if inputs:
            self._keep(f"module_in/{place}", rows, own.step, inputs[0])
            edge = inputs[0].grad_fn, inputs[0].output_nr
        if edge[0] is not None:  # The gradient stays 0 if the module does not send one.
            zeros = torch.zeros_like(inputs[0], requires_grad=False)
            self._keep(f"module_in_grad/{place}", rows, own.step, zeros, is_default=True)
        nodes = [x.grad_fn for x in inputs if x.grad_fn is not None]
        self.open[name] = place, rows, edge, max((x._sequence_nr() for x in nodes), default=0)

    def _after(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        place, rows, edge, number = self.open.pop(name, ("", None, (None, 0), 0))
        outputs = _floating(output)
        if not (place and outputs):
            return
        keep = functools.partial(self._keep, rows=rows, step=self.recorder.step)
        keep(f"module_out/{place}", value=outputs[0])
        if outputs[0].requires_grad:
            key = f"module_out_grad/{place}"
            zeros = torch.zeros_like(outputs[0], requires_grad=False)
            keep(key, value=zeros, is_default=True)
            outputs[0].register_hook(lambda gradient: keep(key, value=gradient))
        for node, index in _nodes_to(edge, outputs, number) if edge[0] else ():

            def of_edge(gradients: Any, _: Any, index: int = index) -> None:
                keep(f"module_in_grad/{place}", value=gradients[index])

            node.register_hook(of_edge)

    def _keep(
        self, key: str, rows: Any, step: int, value: Tensor | None, is_default: bool = False
    ) -> None:
        """Adds an array of the whole batch, or of some rows of it, to what was kept before.

        Args:
            key: Name of the array.
            rows: The rows and the size of the batch; None for all.
            step: The step of the forward pass.
            value: The array, or the part of it that this process has.
            is_default: Whether it is replaced by the next one.
        """
        own = self.recorder
        if value is None or step != own.step or not own.is_on or not own.now:
            return
        kind, _, place = key.split("/", 2)
        text = own._text_of(kind, place, value) if own.mesh else ""
        is_first = key not in own.now or key in self.defaults
        before = own.placements.get(f"{kind}/{place}", "")
        if key in self.unknown or text is None or not (is_first or text == before):
            self.unknown.add(key)  # Parts of a sum that are split in several ways.
            own.now.pop(key, None)
            return
        array = _to_array(value)
        array = array / (own.scale * own.num_parts) if "_grad" in kind else array
        if rows is not None:
            numbers, size = rows[0].cpu().numpy(), rows[1]
            if not array.ndim or len(array) % len(numbers):
                return
            each = len(array) // len(numbers)
            whole = np.zeros((size, each, *array.shape[1:]), array.dtype)
            whole[numbers] = array.reshape(len(numbers), each, *array.shape[1:])
            array = whole.reshape(-1, *array.shape[1:])
        own.now[key] = array if is_first and rows is None else own.now.get(key, 0) + array
        own.placements |= {f"{kind}/{place}": text} if text or before else {}
        (self.defaults.add if is_default else self.defaults.discard)(key)

    def indexed(self, name: str) -> str:
        """Returns the name of an array in the file for `POSITION/KIND/RANK/NUMBER:MODULE`."""
        start, _, module = name.partition(":")
        if not module:
            return name
        start, number = start.rsplit("/", 1)
        return f"{start}/{int(number) * len(self.names) + self.names.index(module)}"


def _floating(nest: Any) -> list[Tensor]:
    """Returns the floating-point tensors of inputs or outputs of a module."""
    nests = [vars(x) if dataclasses.is_dataclass(x) else x for x in tree_leaves(nest)]
    tensors = [x for x in tree_leaves(nests) if isinstance(x, Tensor)]
    return [x for x in tensors if x.is_floating_point()]


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
                if following[0]._sequence_nr() > number:
                    left.append(following[0])


class _Part(NamedTuple):
    """A forward pass of a replica in another recording: the bytes of its examples."""

    replica: int
    rows: list[bytes]
    random: list[Tensor]
    number: int = 0


class _Trace:
    """A file of another recording."""

    def __init__(self, path: str) -> None:
        self.file = np.load(path, allow_pickle=False)
        self.about = about = json.loads(str(self.file["about"]))
        version = about["version"]
        _require(version == 2, f"version {version}, this file reads version 2")
        self.members = {name: name for name in self.file} | about.get("aliases", {})
        all_replicas = range(about.get("num_copies") or about["num_replicas"])
        self.replicas = about.get("ranks") or about.get("replicas") or all_replicas
        mesh = about.get("mesh") or {}
        place = np.unravel_index(self.replicas[0], [*mesh.values()]) if mesh else ()
        self.at = dict(zip(mesh, map(int, place), strict=True))
        others = (self.at[axis] for axis in mesh if axis not in about["data_axes"])
        self.is_first_of_replica = not any(others)

    def arrays(self, kind: str, step: int, rank: int) -> dict[int, np.ndarray]:
        """Returns the arrays of a kind by their index; of another replica if `rank` is not here."""
        start = f"{self.about['steps'].index(step) + 1}/{kind}/"
        start += f"{self.replicas[rank % len(self.replicas)]}/"
        indices = (name.removeprefix(start) for name in self.members if name.startswith(start))
        return {i: self.file[self.members[f"{start}{i}"]] for i in sorted(map(int, indices))}

    def parts(self, step: int) -> Iterator[_Part]:
        """Yields the forward passes of a step."""
        position = self.about["steps"].index(step)
        number = (self.about.get("micro_batches") or [1] * (position + 1))[position]
        for rank, replica in enumerate(self.replicas):
            data = [*self.arrays("data", step, rank).values()]
            states = [*map(torch.tensor, self.arrays("random", step, rank).values())]
            states = states if self.about["framework"] == "torch" else []
            for start in range(number):
                own, of_each = data[start * len(data) // number :], len(states) // number
                random = states[start * of_each :][:of_each]
                yield _Part(replica, _rows(own[0]) if own else [], random)


def _rows(batch: np.ndarray) -> list[bytes]:
    return [row.tobytes() for row in batch] if batch.ndim else []


@contextlib.contextmanager
def _copied_buffers(module: nn.Module) -> Iterator[None]:
    """Leaves the statistics of a model as they are: a forward pass changes copies of them."""
    owners = [owner._buffers for _, owner in module.named_modules()]
    own = [(owner, name, x) for owner in owners for name, x in owner.items() if x is not None]
    for owner, name, x in own:
        owner[name] = x.clone()
    try:
        yield
    finally:
        for owner, name, x in own:
            owner[name] = x


def _check_rows(output: Any, number: int) -> None:
    """Raises an error if outputs of parts of a batch cannot be put together."""
    for x in tree_leaves(output):
        has_rows = isinstance(x, Tensor) and x.dim() and len(x) == number
        what = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"type {type(x).__name__}"
        _require(
            has_rows or isinstance(x, bool | int | float | str | None),
            f"shards='each': the model has an output of {what}, without a row for each example;"
            " compute the loss outside of the model, or record without shards=",
        )


def _joined(outputs: Sequence[Any], order: Tensor) -> Any:
    """Returns the outputs of all parts of a batch as one, in another order of examples."""
    tensors = ([x for x in tree_leaves(each) if isinstance(x, Tensor)] for each in outputs)
    columns = zip(*tensors, strict=True)
    return tree_map_only(Tensor, lambda _: torch.cat(next(columns))[order], outputs[0])


def _random_states() -> list[Tensor]:
    """Returns the state of the generator of the CPU, and of the GPU if it is used."""
    on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *on_gpu]


def _set_random_states(states: Sequence[Tensor]) -> None:
    restore = (torch.set_rng_state, torch.cuda.set_rng_state)[: 1 + torch.cuda.is_initialized()]
    for set_state, state in zip(restore, states, strict=False):
        set_state(state)


def _computed_in(output: Any, weights: Mapping[str, Tensor]) -> str:
    """Returns the 16-bit dtype of a forward pass: that of autocast, or of its outputs; else ""."""
    dtypes = [x.dtype for x in tree_leaves(output) if isinstance(x, Tensor)]
    for device in {p.device.type for p in weights.values()}:
        if torch.is_autocast_enabled(device):
            dtypes.append(torch.get_autocast_dtype(device))
    names = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return next((name for name in names if name in ("bfloat16", "float16")), "")


def _with_rows(output: Any, count: int) -> list[Tensor]:
    """Returns the floating-point tensors of an output that have a row for each example."""
    return [x for x in _floating(output) if x.dim() and len(_local(x)) == count]


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


class _Dimension(NamedTuple):
    """A dimension of a whole array: the axes of the mesh over which it is split, outer ones first.

    It has `blocks` parts, each of which is split. With `is_zigzag`, rank r of n has the chunks r
    and 2n - 1 - r of 2n.
    """

    text: str
    blocks: int = 1
    axes: tuple[str, ...] = ()
    is_zigzag: bool = False


class _Mesh:
    """The devices on named axes, and the place of this process among them.

    Attributes:
        ranks: The processes, as `torch.distributed` numbers them.
        sizes: Name of an axis → number of devices along it.
        rank: The row-major position of this process.
        at: Name of an axis → the position of this process along it.
        data, sequence, stages, model: The axes that split the examples, other dimensions of the
            inputs, the layers of a pipeline, and weights only.
    """

    def __init__(self, mesh: Any, default: str) -> None:
        self.ranks = np.array(mesh.mesh)
        names = mesh.mesh_dim_names or [default] * (self.ranks.ndim == 1)
        names = names or [f"axis{i}" for i in range(self.ranks.ndim)]
        names = [re.sub(r"\W", "_", name) for name in names]
        place = np.argwhere(self.ranks == dist.get_rank())
        _require(len(place), "mesh: does not have this process")
        self.sizes = dict(zip(names, self.ranks.shape, strict=True))
        self.at = dict(zip(names, place[0].tolist(), strict=True))
        self.rank = self.place(names)[0]
        self.data, self.sequence, self.stages, self.model = (list[str]() for _ in range(4))
        self.known: dict[Any, str | None] = {}  # Texts of DTensors.

    def name_axes(self, reduced: set[str], inputs: Sequence[_Dimension]) -> None:
        """Finds the kinds of the axes.

        Args:
            reduced: Those over which DDP or FSDP2 reduces gradients.
            inputs: The dimensions of the inputs; the first are the examples.
        """
        long = [axis for axis, size in self.sizes.items() if size > 1]
        split = {axis for each in inputs[1:] for axis in each.axes}
        data = {axis for each in inputs[:1] for axis in each.axes} | reduced
        data = data or {axis for axis in self.sizes if DATA.match(axis)}
        self.data = [axis for axis in self.sizes if axis in data - split]
        self.sequence = [axis for axis in long if axis in split]
        self.stages = [axis for axis in long if STAGES.match(axis) and axis not in self.data]
        known = {*self.data, *self.sequence, *self.stages}
        self.model = [axis for axis in long if axis not in known]

    def place(self, axes: Sequence[str]) -> tuple[int, int]:
        """Returns the row-major position of this process along axes, and the number of them."""
        found, number = 0, 1
        for axis in axes:
            found, number = found * self.sizes[axis] + self.at[axis], number * self.sizes[axis]
        return found, number

    def axes_of(self, ranks: Sequence[int]) -> tuple[str, ...] | None:
        """Returns the axes along which these processes are, of which this one is one."""
        long = [axis for axis, size in self.sizes.items() if size > 1]
        for number in range(len(long) + 1):
            for axes in itertools.combinations(long, number):
                along = (slice(None) if axis in axes else i for axis, i in self.at.items())
                if self.ranks[tuple(along)].flatten().tolist() == [*ranks]:
                    return axes
        return None

    def text_of(self, value: Any) -> str | None:
        """Returns how the local part of a DTensor is part of it; None if there is no text."""
        key = value.device_mesh, tuple(value.placements), value.dim()
        if key not in self.known:
            self.known[key] = self._text_of(value)
        return self.known[key]

    def _text_of(self, value: Any) -> str | None:
        ranks = np.array(value.device_mesh.mesh)
        (place,) = np.argwhere(ranks == dist.get_rank())
        split: list[list[tuple[str, int]]] = [[] for _ in value.shape]  # Text and size of axes.
        sums = ""
        for i, placement in reversed([*enumerate(value.placements)]):
            along = (slice(None) if i == k else at for k, at in enumerate(place))
            axes = self.axes_of(ranks[tuple(along)].tolist())
            if axes is None:
                return None
            if axes and hasattr(placement, "dim"):
                own, number, factor = split[placement.dim], 0, getattr(placement, "split_factor", 1)
                while factor > 1 and number < len(own):  # FSDP2 splits what others have split.
                    number, factor = number + 1, factor // own[number][1]
                if factor != 1:
                    return None
                own.insert(number, (",".join(axes), ranks.shape[i]))
            elif axes and (name := getattr(placement, "reduce_op", "")):
                if name not in ("sum", "avg") or type(placement).__name__ != "Partial":
                    return None
                sums += f" {'sum' if name == 'sum' else 'mean'}({','.join(axes)})"
        if not (sums or any(split)):
            return ""
        texts = (f"[{','.join(text for text, _ in own)}]" if own else "" for own in split)
        return " ".join(f"d{k}{text}" for k, text in enumerate(texts)) + sums

    def dimensions(self, text: str) -> list[_Dimension]:
        """Parses a text of a user, such as "3*o[tp] i"."""
        found = _dimensions(text)
        other = {axis for each in found for axis in each.axes} - {*self.sizes}
        _require(not other, f"dims: {text!r}: mesh has no axis {', '.join(sorted(other))}")
        return found


def _dimensions(text: str) -> list[_Dimension]:
    found = []
    for word in text.split():
        if match := DIMENSION.fullmatch(word):
            axes = tuple(match[3].split(",")) if match[3] else ()
            found.append(_Dimension(word, int(match[1] or 1), axes, bool(match[4])))
        else:
            _require(re.fullmatch(r"(sum|mean)\([\w,]+\)", word), f"dims: {word!r} in {text!r}")
    return found


def _places(
    dimensions: Sequence[_Dimension],
    shape: Sequence[int],
    sizes: Mapping[str, int],
    at: Mapping[str, int],
) -> tuple[np.ndarray, ...]:
    """Returns the places of the part of a process along each dimension of a whole array."""
    found = []
    for each, length in zip(dimensions, shape, strict=True):
        pieces = np.array_split(np.arange(length), each.blocks)
        for axis in each.axes:
            number, i = sizes[axis], at[axis]
            for k, piece in enumerate(pieces):
                if each.is_zigzag:
                    chunks = np.array_split(piece, 2 * number)
                    pieces[k] = np.concatenate([chunks[i], chunks[2 * number - 1 - i]])
                else:
                    size = -(-len(piece) // number)  # As `torch.chunk`; the last may have less.
                    pieces[k] = piece[i * size : (i + 1) * size]
        found.append(np.concatenate(pieces))
    return np.ix_(*found)


def _assembled(
    parts: Sequence[tuple[Mapping[str, int], np.ndarray]], text: str, mesh: Mapping[str, int]
) -> np.ndarray:
    """Returns the whole array of the parts that processes have; `mesh` has the sizes of axes."""
    dimensions, shape = _dimensions(text), []
    for k, each in enumerate(dimensions):
        others = [axis for axis in mesh if axis not in each.axes]
        shape.append(sum(x.shape[k] for at, x in parts if not any(at[axis] for axis in others)))
    whole = np.zeros(shape, parts[0][1].dtype)
    for at, array in parts:
        places = _places(dimensions, shape, mesh, at)
        _require(whole[places].shape == array.shape, f"replay: parts {text!r} do not fit together")
        whole[places] = array
    return whole


def _fsdp_groups(module: nn.Module) -> list[Any]:
    """Returns the groups of weights that `fully_shard` has split."""
    owners = [owner for _, owner in module.named_modules() if hasattr(owner, "_get_fsdp_state")]
    states = [owner._get_fsdp_state() for owner in owners]
    groups = [
        getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] for state in states
    ]
    return [group for each in groups for group in each if group is not None]


def _mesh_of(mesh: Any, groups: Sequence[Any], weights: Any) -> _Mesh | None:
    """Returns the devices of all processes; None if the weights are not split."""
    found = [p.device_mesh for p in weights if _is_dtensor(p)]
    found = [mesh] if mesh is not None else found + [group.mesh_info.mesh for group in groups]
    roots = [x._get_root_mesh() if hasattr(x, "_get_root_mesh") else x for x in found]
    root, number = max(roots, key=lambda x: x.mesh.numel(), default=None), dist.get_world_size()
    if root is None or root.mesh.numel() == number == 1:
        return None
    what = f"mesh: has {root.mesh.numel()} of {number} processes"
    _require(root.mesh.numel() == number, f"{what}; pass a mesh of all, of which others are parts")
    return _Mesh(root, "data" if groups else "axis0")


def _rank_path(path: str, rank: int) -> str:
    return f"{path.removesuffix('.npz')}.rank{rank}.npz"


def _to_array(value: Tensor) -> np.ndarray:
    value = _local(value)
    value = value if value.layout == torch.strided else value.to_dense()
    value = value.float() if value.dtype == torch.bfloat16 else value  # NumPy does not have it.
    return np.array(value.detach().cpu())


def _is_dtensor(value: Any) -> bool:
    return hasattr(value, "full_tensor")


def _local(value: Any) -> Any:
    """Returns the part of a DTensor that this process has."""
    return value.detach().to_local() if _is_dtensor(value) else value


def _assign(target: Any, array: np.ndarray) -> Any:
    value: Any = torch.tensor(array)
    if _is_dtensor(target):
        shard = dist.tensor.distribute_tensor
        value = shard(value, target.device_mesh, target.placements, src_data_rank=None)
    return target.copy_(value)


def _transposed(variable: dict[str, Any], layout: str) -> dict[str, Any]:
    array = variable["array"]
    axes = AXES.get((variable["layout"], layout), range(array.ndim))
    return {**variable, "array": array.transpose(axes)}


def _take(nest: Any, rows: Tensor, size: int) -> Any:
    """Returns a nest of tensors, with these rows of the batches, which have `size` examples."""
    return tree_map_only(Tensor, lambda x: x[rows] if x.shape[:1] == (size,) else x, nest)


def _settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of an optimizer that are plain values."""
    betas = {f"beta_{i}": beta for i, beta in enumerate(options.get("betas", ()), 1)}
    plain = {NAMES.get(name, name): value for name, value in {**options, **betas}.items()}
    plain = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in plain.items()}
    return {k: v for k, v in plain.items() if isinstance(v, bool | int | float | str)}


def _layers(module: nn.Module) -> list[dict[str, Any]]:
    layers = []
    for name, layer in module.named_modules():
        settings = {NAMES.get(x, x): getattr(layer, x) for x in OF_LAYERS if hasattr(layer, x)}
        parts = nn.Module, Tensor  # A layer in it, or a weight, may have the name of a setting.
        settings = {x: value for x, value in settings.items() if not isinstance(value, parts)}
        own = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
        if settings or own:
            kind = {"name": name, "class": type(layer).__name__}
            kind["weights"] = [f"{name}.{x}" if name else x for x, _ in own]
            layers.append(kind | settings)
    return layers
