"""An average of the weights is updated at another time than once after each step.

reference = "SWivid/F5-TTS#631, lightly-ai/lightly-train#968"
date = "2024-12"
framework = "torch"
note = "No detail names an average of the weights: stale_average and other_average_decay should."

[wrong]
"after each micro-batch" = ["doubled_average", "other_statistics"]
"before the step" = ["stale_average", "other_statistics"]
"the decay is divided by the ranks" = ["other_average_decay", "other_statistics"]
"""

import contextlib
import os
from copy import deepcopy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
DECAY, MICRO_BATCHES = 0.9, 2


class Ema:
    def __init__(self, model):
        self.average = deepcopy(model).requires_grad_(False)
        self.decay = DECAY / WORLD if BUG == "the decay is divided by the ranks" else DECAY

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
    with lockstep.record(model, optimizer, others={"ema": ema.average}):
        for _ in range(2):
            x, y = torch.randn(MICRO_BATCHES, 12, 2, 8), torch.randint(4, (MICRO_BATCHES, 12))
            x, y = x[:, RANK::WORLD], y[:, RANK::WORLD]
            for i in range(MICRO_BATCHES):
                is_last = i == MICRO_BATCHES - 1
                skips = WORLD > 1 and not is_last
                with model.no_sync() if skips else contextlib.nullcontext():
                    (F.cross_entropy(model(x[i]), y[i]) / MICRO_BATCHES).backward()
                if BUG == "after each micro-batch" and not is_last:
                    ema.update(net)
            if BUG == "before the step":
                ema.update(net)
            optimizer.step()
            optimizer.zero_grad()
            if BUG != "before the step":
                ema.update(net)
    if WORLD > 1:
        dist.destroy_process_group()


main()
