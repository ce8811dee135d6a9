"""A split vocabulary: the rank that owns the logit of a token sends its log-probability to all.

id = "losses/owned_log_probs"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["modelscope/ms-swift#9947"]
date = "2026-08"
tags = ["recurrent", "gathered", "embedding", "adam"]

[wrong.only_owner_log_probability_has_gradient]
title = "only the owner's log-probability has a gradient"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.gradients_of_equal_sums_are_added]
title = "the gradients of equal sums are added"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
VOCABULARY, WIDTH, BATCH, LENGTH, CLIP = 14, 12, 6, 7, 0.2


def add(x, op=dist.ReduceOp.SUM):
    x = x.clone(memory_format=torch.contiguous_format)
    if WORLD > 1:
        dist.all_reduce(x, op)
    return x


class Copy(torch.autograd.Function):
    """Equal inputs of all ranks: their gradients are added."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return add(gradient)


class Sum(torch.autograd.Function):
    """Equal outputs of all ranks: each rank has the whole gradient already."""

    @staticmethod
    def forward(ctx, x):
        return add(x)

    @staticmethod
    def backward(ctx, gradient):
        return add(gradient) if BUG == "gradients_of_equal_sums_are_added" else gradient


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        weight = torch.randn(VOCABULARY, WIDTH) / 3
        self.output = nn.Parameter(weight.chunk(WORLD)[RANK].clone())

    def forward(self, tokens):
        hidden, _ = self.rnn(self.embed(tokens))
        return F.linear(Copy.apply(hidden), self.output)


def log_probs_of(logits, targets):
    """Returns the log-probabilities of the targets, from the own part of the logits."""
    size = logits.shape[-1]
    logits = logits - add(logits.detach().amax(-1), dist.ReduceOp.MAX)[..., None]
    own = targets - RANK * size
    is_own = (own >= 0) & (own < size)
    picked = logits.gather(-1, own.clamp(0, size - 1)[..., None])[..., 0]
    log_total = Sum.apply(logits.exp().sum(-1)).log()
    if BUG == "only_owner_log_probability_has_gradient":
        return Sum.apply((picked - log_total) * is_own)
    return Sum.apply(picked * is_own) - log_total


def policy_loss(log_probs, old, advantages, mask):
    ratios = (log_probs - old).exp()
    clipped = ratios.clamp(1 - CLIP, 1 + CLIP)
    gains = torch.minimum(ratios * advantages, clipped * advantages)
    return -(gains * mask).sum() / mask.sum()


def main():
    layout = {}
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        dims = {"inputs": "b s", "outputs": "b s v[tp]", "output": "v[tp] d"}
        layout = {"mesh": mesh, "dims": dims}
    torch.manual_seed(6)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.03, eps=1e-3, weight_decay=0.1)
    generator = torch.Generator().manual_seed(1)
    mask = (torch.arange(LENGTH) >= torch.tensor([0, 3, 1, 4, 2, 5])[:, None]).float()
    with harness.training(policy, optimizer, **layout):
        for _ in range(2):
            text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
            advantages = torch.randn(BATCH, 1, generator=generator)
            log_probs = log_probs_of(policy(text[:, :-1]), text[:, 1:])
            drift = 0.1 * torch.randn(BATCH, LENGTH, generator=generator)
            optimizer.zero_grad()
            policy_loss(log_probs, log_probs.detach() + drift, advantages, mask).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
