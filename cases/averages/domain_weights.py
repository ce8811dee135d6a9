"""Weights of domains follow the losses of all ranks, and lie in a buffer that rank 0 updates.

id = "averages/domain_weights"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["sangmichaelxie/doremi#8"]
date = "2023-07"
tags = ["sgd"]

[wrong.only_rank_0_has_new_weights]
title = "only rank 0 has the new weights"
place = { node = "update", step = 0, ranks = [1], tensors = ["domain_weights"] }

[wrong.rank_0_sends_weights_after_its_own_losses]
title = "rank 0 sends weights after its own losses"
place = { node = "update", step = 0, ranks = "all", tensors = ["domain_weights"] }

[wrong.mean_losses_of_domains_are_averaged]
title = "mean losses of domains are averaged over the ranks"
place = { node = "update", step = 0, ranks = "all", tensors = ["domain_weights"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
DOMAINS, RATE, SMOOTHING = 3, 1.0, 0.05


class Proxy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 5))
        self.register_buffer("domain_weights", torch.full((DOMAINS,), 1 / DOMAINS))

    def forward(self, x):
        return self.layers(x)


@torch.no_grad()
def update_domain_weights(weights, losses, domains):
    totals = torch.zeros(DOMAINS).index_add(0, domains, losses)
    counts = torch.zeros(DOMAINS).index_add(0, domains, torch.ones_like(losses))
    if WORLD > 1 and BUG == "mean_losses_of_domains_are_averaged":
        totals, counts = totals / counts.clamp(min=1), torch.full((DOMAINS,), float(WORLD))
        dist.all_reduce(totals)
    elif WORLD > 1 and BUG != "rank_0_sends_weights_after_its_own_losses":
        dist.all_reduce(totals)
        dist.all_reduce(counts)
    if RANK == 0:
        new = weights * torch.exp(RATE * totals / counts.clamp(min=1))
        weights.copy_((1 - SMOOTHING) * new / new.sum() + SMOOTHING / DOMAINS)
    if WORLD > 1 and BUG != "only_rank_0_has_new_weights":
        dist.broadcast(weights, 0)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(6)
    proxy = Proxy()
    optimizer = torch.optim.SGD(proxy.parameters(), lr=0.3, momentum=0.9)
    domains = torch.tensor([0, 1, 0, 1, 0, 2, 1, 2, 0, 2, 0, 0])
    with harness.training(proxy, optimizer):
        for _ in range(3):
            x = torch.randn(len(domains), 5) * (1 + domains[:, None])
            own, own_domains = x[RANK::WORLD], domains[RANK::WORLD]
            losses = F.mse_loss(proxy(own), own.cos(), reduction="none").mean(1)
            optimizer.zero_grad()
            (losses * DOMAINS * proxy.domain_weights[own_domains]).mean().backward()
            for weight in proxy.parameters() if WORLD > 1 else ():
                dist.all_reduce(weight.grad)
                weight.grad /= WORLD
            optimizer.step()
            update_domain_weights(proxy.domain_weights, losses.detach(), own_domains)
    if WORLD > 1:
        dist.destroy_process_group()


main()
