"""The recorder: begins and ends steps, and finishes the file."""

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.recorders.common import (
    DEFAULT_STEPS,
    Hooks,
    Path,
    Request,
    rank_path,
    request_of,
    require,
    require_models,
    require_type,
)
from lockstep.recorders.notes import Notes
from lockstep.recorders.output import Output
from lockstep.recorders.torch.backward import GradientObserver
from lockstep.recorders.torch.forward import ForwardObserver
from lockstep.recorders.torch.modules import Modules, indexed
from lockstep.recorders.torch.private import is_split_by_deepspeed, version_of
from lockstep.recorders.torch.recording import Recording, Step, unwrapped
from lockstep.recorders.torch.replay import Replay
from lockstep.recorders.torch.shards import ShardRunner
from lockstep.recorders.torch.values import layers_of, random_states, settings_of
from lockstep.recording import NotRecording, described, require_optimizer


class Recorder:
    """Begins and ends the steps of a training, in a `with` block; see `record`."""

    def __init__(
        self, request: Request, model: Any, optimizer: Any, others: Any, mesh: Any, dims: Any
    ) -> None:
        self.path, self.request = request.path, request
        module = unwrapped(model)
        request.choose_sample(sum(p.numel() * p.element_size() for p in module.parameters()))
        _require_known(module)
        own = Recording(model, optimizer, others, mesh, dims, request)
        self.recording, place = own, own.placement
        require(place.num_ranks == 1 or not request.shards, "shards='each': is for one process")
        self.replay = Replay(own, request) if request.replay else None
        self.modules = Modules(own, request.modules) if request.modules else None
        self.shards = None
        if request.shards and self.replay:
            # Not if the parts of the other recording compute one BatchNorm together.
            classes = [str(layer.get("class")) for layer in self.replay.trace.about.layers]
            is_local = not any("SyncBatchNorm" in name for name in classes)
            require(is_local, "shards='each': BatchNorm is synchronised; record without shards=")
            self.shards = ShardRunner(own, self.replay, self.modules)
        own.begin, own.end = self._begin, self._end_step
        self.forward = ForwardObserver(own, request.permute)
        self.gradients = GradientObserver(own, self.forward, self._prepare)
        self.counters = Hooks()
        self.notes = Notes(lambda: own.is_updated)

    def __enter__(self) -> None:
        own, place = self.recording, self.recording.placement
        if hasattr(own, "output"):
            raise RuntimeError("the recording has begun already; call record once more")
        path = rank_path(self.path, place.rank) if place.num_ranks > 1 else self.path
        own.output = Output(path)
        self.gradients.install_always(self.counters)
        self.forward.install_always(self.counters)
        self.counters.enter_context(self.notes)
        self._start_step()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self.recording.is_updated:
            self._end_step()
        self.counters.close()
        self.recording.hooks.close()
        self.recording.is_on = False
        self._finish(error)

    # Steps.

    def _start_step(self) -> None:
        """Begins a step, and installs or removes the hooks."""
        own = self.recording
        own.step = Step()
        own.is_on = own.number in own.wanted and not own.output.has_failed
        if own.is_on:
            self._install()
        elif own.has_hooks:
            own.output.forget()
            own.hooks.close()
            own.has_hooks = False

    def _install(self) -> None:
        if not self.recording.has_hooks:
            self.recording.has_hooks = True
            for observer in (self.forward, self.modules, self.shards, self.gradients):
                if observer:
                    observer.install()

    def _prepare(self) -> None:
        """Installs the hooks of the next step, whose first forward pass is too late for it."""
        if self.recording.number + 1 in self.recording.wanted:
            self._install()

    def _begin(self, is_forward: bool = False) -> None:
        """Loads the state to replay and copies all variables, once in a step."""
        own = self.recording
        if own.step.arrays:
            return
        variables = own.variables
        if self.replay:
            own.save_variables("replaced", variables.all())
            if is_forward:
                if self.replay.loads_random:
                    own.add("own_random", random_states())
                self.replay.load()
            else:
                self._warn_of_no_forward_pass(self.replay)
        if self.shards:
            self.shards.begin()
        own.save_variables("before", variables.all())
        own.step.versions = {name: version_of(p) for name, p in own.weights.items()}
        if self.request.keeps_start and not own.per_step["steps"]:
            own.save_variables("start", variables.all())

    def _warn_of_no_forward_pass(self, replay: Replay) -> None:
        own = self.recording
        text = "no forward pass in training mode was seen; call model, after model.train()"
        text = f"{self.path}: replay: step {own.number}: {text}; nothing is loaded"
        warnings.warn(text, stacklevel=2)
        replay.not_loaded |= dict.fromkeys(each["name"] for each, _ in own.variables.all())

    def _end_step(self) -> None:
        """Keeps the arrays of a step whose weights were updated, and begins the next one."""
        own, ids = self.recording, self.notes.take()
        if own.is_on:
            step = own.step
            own.save_ids(ids)
            own.save_variables("after", own.variables.of_others())
            own.save_left()
            if step.losses:
                own.save("loss", 0, sum(step.losses))
            if self.shards:
                self.shards.end(self.path)
            own.keep()
        own.number += 1
        own.is_updated = False
        own.variables.end_step()
        self._start_step()

    # The file.

    def _finish(self, error: BaseException | None) -> None:
        """Writes what is known of all steps, and the index of the file.

        Args:
            error: what ended the training; None if nothing did.
        """
        own = self.recording
        if own.output.has_failed:
            return
        missing = sorted(own.wanted - own.dropped - {*own.per_step["steps"]})
        if len(missing) > own.num_skipped:
            text = f"{self.path}: the training ended before steps {missing}"
            if not own.variables.optimizers:
                text += ": no optimizer updates a weight of the model, as if it was built before it"
                text += " was wrapped or sharded"
            warnings.warn(text, stacklevel=3)
        about = self.request.about("torch", error, self.replay) | self._about()
        own.output.close(about, functools.partial(indexed, about["modules"]))

    def _about(self) -> dict[str, Any]:
        """Returns the description of the recording."""
        own, place = self.recording, self.recording.placement
        described = own.variables.described
        layers = [*layers_of(own.module.named_modules()), *own.variables.layers_of_others()]
        about: dict[str, Any] = {
            "versions": {"torch": str(torch.__version__), "numpy": np.__version__},
            "num_replicas": place.num_replicas,
            "variables": list(described.values()),
            "gradients": list(own.weights),
            "reduction": "mean" if own.ddp else "",
            "computed_in": own.computed_in,
            "device": next((p.device.type for p in own.weights.values()), ""),
            "optimizer": self._optimizer(),
            "layers": layers,
            "tied": own.variables.tied(),
            "not_updated": own.not_updated(),
            "trained": own.number - self.request.first_step,
            "skipped": own.num_skipped,
            "modules": self.modules.names if self.modules else [],
            **own.per_step,
        }
        if not place.mesh:
            return about | {"replicas": [place.rank]}
        placements = {indexed(about["modules"], x): y for x, y in place.placements.items()}
        names = {key: name for key, name in self.request.names.items() if key in described}
        about |= {"mesh": place.mesh.sizes, "ranks": [place.rank], "data_axes": place.mesh.data}
        return about | {"placements": placements, "names": names}

    def _optimizer(self) -> dict[str, Any]:
        """Returns class and settings of the first optimizer that updated a weight."""
        optimizers = self.recording.variables.optimizers
        if not optimizers:
            return {"class": "", "framework": "torch"}
        rule = {"class": type(optimizers[0]).__name__, "framework": "torch"}
        return {**settings_of(optimizers[0].defaults), **rule}


def _require_known(model: nn.Module) -> None:
    """Raises ValueError if a wrapper keeps weights where no recorder sees them."""
    instead = {
        "DataParallel": "DistributedDataParallel",
        "FullyShardedDataParallel": "fully_shard (FSDP2)",
    }
    kinds = {type(module).__name__ for module in model.modules()} & instead.keys()
    text = ", ".join(f"{kind} is not recorded; use {instead[kind]}" for kind in sorted(kinds))
    require(not kinds, f"model: {text}")
    is_sharded = any(map(is_split_by_deepspeed, model.parameters()))
    require(not is_sharded, "model: DeepSpeed's ZeRO is not recorded; use stage 0, or fully_shard")


def record(
    path: Path | None, model: nn.Module | Sequence[nn.Module], optimizer: Any = None,
    steps: int | Sequence[int] = DEFAULT_STEPS, replay: Path | None = None,
    permute: int | None = None, names: Mapping[str, str] | None = None, shards: str | None = None,
    modules: bool | str = False, mesh: Any = None, dims: str | Mapping[str, str] = "",
    first_step: int = 0, others: Mapping[str, Any] | None = None, sample: int | None = None,
    start: bool = False,
) -> Recorder | NotRecording:  # fmt: skip
    """Records the training in a `with` block; its end finishes the file, also if it raises.

    Args:
        path: File to write as arrays come, `*.npz`; an older one is replaced when the block begins.
            None: only runs of `assert_same_training` are recorded.
        model: What the training calls: a plain module, DDP, or sharded by `fully_shard` (FSDP2), or
            a list of several, as of the parts that it calls in place of the whole. In one without
            `forward`, the script calls the modules that it has.
        optimizer: One optimizer or a list; None for all that update a weight of the model. Others
            that do are recorded, too, also those of backward hooks. `step` calls a closure at most
            once. A wrapper, as of Accelerate, has the optimizer in its attribute `optimizer`.
        steps: Numbers of the steps to record, from 0; or the number of first steps to record. A
            step ends at the next forward pass of a model, or with the recording. Each optimizer of
            a list updates once in a step; if one does so twice before others do, each update is a
            step, and later ones are recorded in place of those before this is seen.
        replay: Trace whose weights and statistics are loaded before each recorded step; with the
            same class of optimizer also its state, with as many replicas also the random state.
            What does not fit is not loaded, which a warning says.
        permute: Seed. Permutes the examples (first axis of inputs and outputs) of each recorded
            batch, so that only the order of summation is different. Not for inputs of the layout
            (time, batch), which are not compared example by example.
        names: Names in `replay` by names here. Others are matched by name, else by shape and order.
        shards: "each" runs the model, in one process, once for each replica's part of the batch in
            `replay`, with its random state: layers such as BatchNorm and Dropout then compute what
            each replica does. A loss that the model returns must be a mean over examples.
        modules: True, or a pattern of names such as "layers.*.attention". In recorded steps, also
            copies inputs and outputs of these modules, and the gradients of the loss by them. They
            only explain a difference that other arrays show. With True, none are recorded from the
            first step on in which they have more than 1 GiB. "Before layers.0" in a verdict is the
            code before this module.
        mesh: The devices of all processes, if the training has other parallel axes than data. None
            for that of the DTensors among the weights. An axis `pp`, `pipe…` or `stage…` has the
            stages of a pipeline, one for each process: `model` is the stage's module; pass `names`
            if its weights have other names than in one process, or if a tied weight has two.
        dims: How inputs are split over the axes of the mesh, as in "b[dp] s[cp:zigzag]"; or an
            object with the key "inputs", the key "outputs" if the model's outputs are split in
            another way, and patterns of the names of weights that are no DTensors but parts:
            {"inputs": "b[dp] s", "outputs": "b[dp] s v[tp]", "*.wqkv.weight": "3*o[tp] i"}. State
            is split as its weight, or has patterns such as "*.weight/momentum". If sequences are
            split, loss and gradients of a rank count as parts of a mean where DDP or `fully_shard`
            reduces over their axis; else `clipped` are the only gradients recorded.
        first_step: Number of the first step that this process trains, as the training counts that
            `replay` has: a resumed job does not begin with step 0.
        others: Name → module or mapping of tensors whose state belongs to the training, as averages
            of the weights: {"ema": average}.
        sample: The number of elements that are kept of each variable and gradient, with random sums
            of all elements; smaller arrays are whole. 0 keeps whole arrays; None does so up to 64
            MiB of weights, and keeps 4,096 elements above, or does as `replay`. A sampled recording
            has one step, unless `steps` says more; later ones start from their own weights.
        start: Whether a sampled recording has the whole state before its first step, too, which
            `replay` needs. Without it, both scripts must start from the same weights.

    `lockstep.assert_same_training` gives path, steps, replay and permute in place of the arguments.
    """
    require_models(model, nn.Module, "torch.nn.Module")
    if optimizer is not None:
        require_optimizer(optimizer)
    is_mesh = mesh is None or hasattr(mesh, "mesh_dim_names")
    require(is_mesh, f"mesh: must be a DeviceMesh, and is {described(mesh)}")
    require_type("dims", dims, str | Mapping, "a text, or texts by names")
    require_type("others", others, Mapping | None, "modules by names")
    for each in (others or {}).values():
        require_type("others", each, nn.Module | Mapping, "modules by names")
    request = request_of(
        path, steps=steps, replay=replay, permute=permute, names=names, modules=modules,
        shards=shards, sample=sample, start=start, first_step=first_step,
    )  # fmt: skip
    if request is None:
        return NotRecording()
    return Recorder(request, model, optimizer, others or {}, mesh, dims)
