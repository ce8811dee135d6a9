"""Survival analysis compares each patient with all who are still at risk, on whatever rank.

id = "losses/risk_sets"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["havakv/pycox#27", "Novartis/torchsurv#35", "clemsgrs/hipt#19"]
date = "2020-03"
tags = ["ddp", "gathered"]

[wrong.risk_set_has_patients_of_rank]
title = "the risk set has the patients of the rank"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.gathered_risks_have_no_gradient]
title = "gathered risks have no gradient"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.patients_with_equal_time_are_not_at_risk]
title = "patients with an equal time are not at risk"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
PATIENTS, FEATURES = 24, 7


class Gather(torch.autograd.Function):
    """Puts the parts of all ranks together; each rank has a gradient for all of them."""

    @staticmethod
    def forward(ctx, part):
        parts = [torch.empty_like(part) for _ in range(WORLD)]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        if BUG != "gathered_risks_have_no_gradient":
            dist.all_reduce(gradient)
        return gradient.chunk(WORLD)[RANK]


def gathered(part):
    if WORLD == 1 or BUG == "risk_set_has_patients_of_rank":
        return part
    return Gather.apply(part)


def partial_likelihood(risks, times, events):
    """Returns the mean negative logarithm over the patients with an event."""
    at_risk = times[None] >= times[:, None]
    if BUG == "patients_with_equal_time_are_not_at_risk":
        at_risk = (times[None] > times[:, None]) | torch.eye(len(times), dtype=torch.bool)
    totals = torch.where(at_risk, risks[None], -torch.inf).logsumexp(1)
    return ((totals - risks) * events).sum() / events.sum()


def get_cohort(step):
    generator = torch.Generator().manual_seed(60 + step)
    x = torch.randn(PATIENTS, FEATURES, generator=generator)
    times = (4 * torch.exp(-x[:, 0]) * torch.rand(PATIENTS, generator=generator)).ceil()
    events = (torch.rand(PATIENTS, generator=generator) < 0.7).float()
    return x, times, events


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(2)
    network = nn.Sequential(nn.Linear(FEATURES, 18), nn.Mish(), nn.Linear(18, 1, bias=False))
    ddp = DistributedDataParallel(network) if WORLD > 1 else network
    optimizer = torch.optim.RMSprop(network.parameters(), lr=0.02, eps=1e-2, momentum=0.5)
    with harness.training(ddp, optimizer):
        for step in range(2):
            x, times, events = (part.chunk(WORLD)[RANK] for part in get_cohort(step))
            risks, times, events = map(gathered, (ddp(x)[:, 0], times, events))
            optimizer.zero_grad()
            partial_likelihood(risks, times, events).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
