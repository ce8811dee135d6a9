"""Under context parallelism, a masked loss is averaged over the tokens of each rank.

id = "parallel/finding_09_context_parallel_mean"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA/Megatron-LM#7452", "NVIDIA/Megatron-LM#7513"]
date = "2026-09"
tags = ["ddp", "gathered", "embedding", "sgd"]

[wrong.mean_over_own_tokens]
title = "mean over the own tokens"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.mean_of_ddp_is_not_compensated]
title = "mean of DDP is not compensated"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
VOCABULARY, WIDTH, LENGTH = 11, 16, 8


class Gather(torch.autograd.Function):
    """Gathers along the sequence; the gradient of a part is the sum of those of all ranks."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return gradient.chunk(WORLD, 1)[RANK]


class Attention(nn.Module):
    """Each rank has queries of its part of the sequence, and gathers keys and values."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        if WORLD > 1:
            k, v = (Gather.apply(z.contiguous()) for z in (k, v))
        own = torch.arange(LENGTH).chunk(WORLD)[RANK]
        mask = own.unsqueeze(1) >= torch.arange(LENGTH)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.attention, self.head = Attention(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, places):
        x = self.tokens(tokens) + self.places(places)
        return self.head(x + self.attention(x))


def get_batch(step):
    """Answers are short, and most of them at the end of a sequence."""
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=generator)
    mask = torch.arange(LENGTH) >= torch.tensor([6, 3, 5, 7]).unsqueeze(1)
    parts = text[:, :-1], torch.arange(LENGTH).expand(4, -1), text[:, 1:], mask.float()
    return [x.chunk(WORLD, 1)[RANK].contiguous() for x in parts]


def compute_loss(logits, targets, mask):
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    total, count = (losses * mask.flatten()).sum(), mask.sum()
    if BUG == "mean_over_own_tokens":
        return total / count
    if WORLD > 1:
        dist.all_reduce(count)
    return total / count if BUG == "mean_of_ddp_is_not_compensated" else WORLD * total / count


def main():
    torch.manual_seed(11)
    model, layout = Model(), {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("cp",))
        layout = {"mesh": mesh, "dims": "b s[cp]"}
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, nesterov=True, momentum=0.9)
    with harness.training(model, optimizer, **layout):
        for step in range(2):
            tokens, places, targets, mask = get_batch(step)
            optimizer.zero_grad()
            compute_loss(model(tokens, places), targets, mask).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
