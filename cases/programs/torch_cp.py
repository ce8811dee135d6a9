"""A small GPT with context parallelism: each rank has two chunks of every sequence (zigzag)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from cases import harness
from cases.programs.gpt_parts import GPT, LENGTH, cross_entropy, get_batch
from cases.programs.launch import DEVICE, start

SEED, BFLOAT16, MAX_NORM = 0, False, 0.5
DIMS = "b[dp] s[cp:zigzag]"


def zigzag(x, rank, size, dim=1):
    """Returns chunks `rank` and `2 * size - 1 - rank` of a sequence: equal work for all ranks."""
    chunks = x.chunk(2 * size, dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim)


class GatherSequence(torch.autograd.Function):
    """Gathers keys or values of all ranks, rank after rank; the gradients are summed."""

    @staticmethod
    def forward(ctx, x, mesh):
        ctx.mesh = mesh
        parts = [torch.empty_like(x) for _ in range(mesh.size())]
        dist.all_gather(parts, x.contiguous(), mesh.get_group())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.mesh.get_group())
        return gradient.chunk(ctx.mesh.size(), 2)[ctx.mesh.get_local_rank()], None


class ContextParallelAttention:
    def __init__(self, mesh):
        self.mesh = mesh
        places = torch.arange(LENGTH)
        orders = [zigzag(places, rank, mesh.size(), 0) for rank in range(mesh.size())]
        self.mask = orders[mesh.get_local_rank()].unsqueeze(1) >= torch.cat(orders)

    def __call__(self, q, k, v):
        k, v = GatherSequence.apply(k, self.mesh), GatherSequence.apply(v, self.mesh)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)


def main(rank, world_size):
    torch.manual_seed(SEED)
    cp_size = min(world_size, 2)
    mesh = init_device_mesh(DEVICE, (world_size // cp_size, cp_size), mesh_dim_names=("dp", "cp"))
    model = GPT()
    if world_size > 1:
        for layer in model.layers.values():
            layer.attention.attend = ContextParallelAttention(mesh["cp"])
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5, weight_decay=0.1)
    with harness.training(model, optimizer, mesh=mesh, dims=DIMS, modules=True):
        for step in range(3):
            batch = [x.chunk(mesh["dp"].size())[rank // cp_size] for x in get_batch(step, SEED)]
            tokens, positions, targets = (zigzag(x, rank % cp_size, cp_size) for x in batch)
            with torch.autocast(DEVICE, torch.bfloat16, enabled=BFLOAT16):
                logits = model(tokens, positions)
            loss = cross_entropy(logits, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    start(main)
