"""A small GPT in layouts of `torch.distributed`: DDP, FSDP2, tensor and sequence parallel."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from cases import harness
from cases.programs.gpt_parts import GPT, cross_entropy, get_batch
from cases.programs.launch import DEVICE, start

LAYOUT = "tp"  # Or "ddp", "fsdp", "sp"; of four processes "fsdp_tp", "fsdp_sp".
SEED, BFLOAT16, MAX_NORM = 0, False, 0.5


def parallelize(model, mesh):
    """Returns the model in the layout; dimensions of the mesh are "dp" and "tp"."""
    if LAYOUT == "ddp":
        return DistributedDataParallel(model)
    if LAYOUT.endswith("tp"):
        tensor_parallel(model, mesh["tp"])
    if LAYOUT.endswith("sp"):
        sequence_parallel(model, mesh["tp"])
    if LAYOUT.startswith("fsdp"):
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def tensor_parallel(model, mesh):
    plan = {
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(),
    }
    for layer in model.layers.values():
        parallelize_module(layer, mesh, plan)


def sequence_parallel(model, mesh):
    """Splits the sequence over the ranks outside of attention and feed-forward layers."""
    whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    plan = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(**whole),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(**whole),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for layer in model.layers.values():
        parallelize_module(layer, mesh, plan)
    embedding = {"input_layouts": Replicate(), "output_layouts": Shard(1)}
    plan = {
        "tokens": RowwiseParallel(**embedding),
        "positions": RowwiseParallel(**embedding),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


def clip_gradients(model):
    """Clips by the norm over all weights, of which some are on a part of the mesh only."""
    norms = [p.grad.norm() for p in model.parameters()]
    norms = [x.full_tensor() if isinstance(x, DTensor) else x for x in norms]
    norm = torch.stack(norms).norm()
    nn.utils.clip_grads_with_norm_(model.parameters(), MAX_NORM, norm, foreach=False)


def main(rank, world_size):
    torch.manual_seed(SEED)
    num_model = 2 if LAYOUT.endswith(("tp", "sp")) and world_size > 1 else 1
    sizes = world_size // num_model, num_model
    mesh = init_device_mesh(DEVICE, sizes, mesh_dim_names=("dp", "tp"))
    model = GPT()
    if world_size > 1:
        model = parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5, weight_decay=0.1)
    with harness.training(model, optimizer, modules=True):
        for step in range(3):
            batch = get_batch(step, SEED)
            number = rank // num_model
            tokens, positions, targets = (x.chunk(mesh["dp"].size())[number] for x in batch)
            with torch.autocast(DEVICE, torch.bfloat16, enabled=BFLOAT16):
                logits = model(tokens, positions)
            loss = cross_entropy(logits, targets)
            loss.backward()
            if LAYOUT.endswith("tp"):
                clip_gradients(model)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    start(main)
