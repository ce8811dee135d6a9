"""Weights that the script changes after the update, in one process and in two."""
# ruff: noqa: F403, F405 (the names of `torch_training`)

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lockstep import compare
from torch_training import *

# `clamp` clips weights, `average` averages them over the processes in place of the gradients,
# `hook` normalises their rows in a hook of the optimizer, `checkpoint` computes the forward pass
# again in the backward pass, and `sparse` has an embedding whose rows occur several times. The last
# two are also split over the processes.
KINDS = ("clamp", "average", "hook", "checkpoint", "sparse", "clamp fsdp", "clamp tensor")


def split_over(model, split):
    if split == "fsdp":
        return fully_shard(model)
    if split == "tensor":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model if split == "average" else DistributedDataParallel(model)


@torch.no_grad()
def change(kind, weights, is_wrong):
    """What the script does after the update; wrong: on rank 0 alone, or with another number."""
    rank, number = own_shard()
    if kind == "clamp" and not (is_wrong and rank):
        for weight in weights:
            weight.clamp_(-0.2, 0.2)
    elif kind == "hook":
        for weight in weights[::2]:
            weight.div_(weight.norm(dim=1, keepdim=True) * (2 if is_wrong else 1))
    elif kind == "average" and number > 1:
        for weight in weights[: 3 if is_wrong else 4]:
            dist.all_reduce(weight)
            weight.div_(number)


def train_changed(path, kind, split="", is_wrong=False, **options):
    rank, number = own_shard()
    torch.manual_seed(0)
    x, y, ids = torch.randn(3, 12, 8), torch.randn(3, 12, 4), torch.randint(6, (3, 12, 5))
    layers = [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)]
    if kind == "sparse":
        x, layers = ids, [nn.EmbeddingBag(10, 8, sparse=True), nn.Linear(8, 4)]
    model = nn.Sequential(*layers)
    called = split_over(model, split or kind) if number > 1 else model
    weights = [*model.parameters()]
    if kind == "hook":
        optimizer = torch.optim.AdamW(weights, lr=0.1)
        optimizer.register_step_post_hook(lambda *_: change(kind, weights, is_wrong))
    else:
        optimizer = torch.optim.SGD(weights, lr=0.1)
    calls = functools.partial(checkpoint, called, use_reentrant=False)
    calls = calls if kind == "checkpoint" and number > 1 else called
    own = slice(rank, None, number) if split != "tensor" else slice(None)
    scale = 1.5 if is_wrong and rank and kind in ("checkpoint", "sparse") else 1

    def steps_of(model, optimizer, step):
        optimizer.zero_grad()
        (scale * (calls(x[step, own]) - y[step, own]).square().mean()).backward()
        optimizer.step()
        if kind != "hook":
            change(kind, weights, is_wrong)

    train(called, optimizer, path, steps_of, 3, **options)


def record_one_process():
    for kind in KINDS[:5]:
        train_changed(f"one_{kind}.npz", kind)


def case_later_changes():
    """What a script changes after the update belongs to the step."""
    for kind, _, split in (name.partition(" ") for name in KINDS):
        for is_wrong in (False, True):
            name, one = f"{kind}_{split}_{is_wrong}", f"one_{kind}.npz"
            train_changed(f"{name}.npz", kind, split, is_wrong, replay=one)
            verdict = of_all_ranks(name) and compare(one, f"{name}.npz")
            assert verdict.ok != is_wrong, (name, str(verdict))
