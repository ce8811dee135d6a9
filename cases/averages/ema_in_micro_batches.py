"""An average of the weights is updated at another time than once after each step.

id = "averages/ema_in_micro_batches"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["SWivid/F5-TTS#631", "lightly-ai/lightly-train#968"]
date = "2024-12"
tags = ["ddp", "accumulation", "averages", "adam"]

[wrong.after_each_micro_batch]
title = "after each micro-batch"
place = { node = "update", step = 1, ranks = "all", tensors = ["ema.*"] }

[wrong.before_step]
title = "before the step"
place = { node = "update", step = 0, ranks = "all", tensors = ["ema.*"] }

[wrong.decay_is_divided_by_ranks]
title = "the decay is divided by the ranks"
place = { node = "update", step = 0, ranks = "all", tensors = ["ema.*"] }
"""

import contextlib
import os
from copy import deepcopy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
DECAY, MICRO_BATCHES = 0.9, 2


class Ema:
    def __init__(self, model):
        self.average = deepcopy(model).requires_grad_(False)
        self.decay = DECAY / WORLD if BUG == "decay_is_divided_by_ranks" else DECAY

    @torch.no_grad()
    def update(self, model):
        for mean, weight in zip(self.average.parameters(), model.parameters(), strict=True):
            mean.lerp_(weight, 1 - self.decay)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(2, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4))
    model = DistributedDataParallel(net) if WORLD > 1 else net
    ema = Ema(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    with harness.training(model, optimizer, others={"ema": ema.average}):
        for _ in range(2):
            x, y = torch.randn(MICRO_BATCHES, 12, 2, 8), torch.randint(4, (MICRO_BATCHES, 12))
            x, y = x[:, RANK::WORLD], y[:, RANK::WORLD]
            for i in range(MICRO_BATCHES):
                is_last = i == MICRO_BATCHES - 1
                skips = WORLD > 1 and not is_last
                with model.no_sync() if skips else contextlib.nullcontext():
                    (F.cross_entropy(model(x[i]), y[i]) / MICRO_BATCHES).backward()
                if BUG == "after_each_micro_batch" and not is_last:
                    ema.update(net)
            if BUG == "before_step":
                ema.update(net)
            optimizer.step()
            optimizer.zero_grad()
            if BUG != "before_step":
                ema.update(net)
    if WORLD > 1:
        dist.destroy_process_group()


main()
