"""The average is kept by rank 0 alone, which writes it back into the model.

id = "averages/ema_goes_back"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["lucidrains/ema-pytorch#9"]
date = "2023-04"
tags = ["averages", "embedding", "adam"]

[wrong.rank_0_alone_takes_average]
title = "rank 0 alone takes the average"
place = { node = "update", step = 0, ranks = [1], tensors = "all" }

[wrong.average_of_each_rank_own_weights]
title = "the average of each rank's own weights"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Denoiser(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.time = nn.Embedding(10, width)
        self.inner, self.outer = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x, t):
        return self.outer(F.silu(self.inner(x) + self.time(t)))


def average_gradients(model):
    for weight in model.parameters():
        dist.all_reduce(weight.grad)
        weight.grad /= WORLD


@torch.no_grad()
def write_back(model, ema):
    for weight, mean in zip(model.parameters(), ema.module.parameters(), strict=True):
        weight.copy_(mean)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(2)
    model = Denoiser()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with harness.training(model, optimizer, others={"ema": ema}):
        for _ in range(3):
            x, noise, t = torch.randn(16, 4), torch.randn(16, 4), torch.randint(10, (16,))
            x, noise, t = x[RANK::WORLD], noise[RANK::WORLD], t[RANK::WORLD]
            loss = F.mse_loss(model(x + noise, t), noise)
            optimizer.zero_grad()
            loss.backward()
            if WORLD > 1 and BUG != "average_of_each_rank_own_weights":
                average_gradients(model)
            optimizer.step()
            ema.update_parameters(model)
            if RANK == 0 or BUG != "rank_0_alone_takes_average":
                write_back(model, ema)
    if WORLD > 1:
        dist.destroy_process_group()


main()
