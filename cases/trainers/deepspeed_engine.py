"""The engine of DeepSpeed divides each loss by the number of micro-batches that it is told.

id = "trainers/deepspeed_engine"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
requires = ["deepspeed", "ninja"]
launched = true
tags = ["zero", "accumulation", "adam"]

[right.zero_1]
title = "ZeRO stage 1"
arguments = ["--stage=1"]

[right.zero_2]
title = "ZeRO stage 2"
arguments = ["--stage=2"]

[wrong.accumulation_unset]
title = "gradient_accumulation_steps left at 1, the loss divided by hand"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }

[wrong.accumulation_unset_zero_1]
title = "gradient_accumulation_steps left at 1, in ZeRO stage 1"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }
arguments = ["--stage=1"]

[wrong.accumulation_unset_zero_2]
title = "gradient_accumulation_steps left at 1, in ZeRO stage 2"
place = { node = "examples", step = 0, ranks = "all", tensors = "all" }
arguments = ["--stage=2"]

[wrong.divided_twice]
title = "the loss is divided by the number of micro-batches, as the engine does"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.divided_twice_zero_1]
title = "the loss is divided by hand and by the engine, in ZeRO stage 1"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
arguments = ["--stage=1"]

[wrong.divided_twice_zero_2]
title = "the loss is divided by hand and by the engine, in ZeRO stage 2"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
arguments = ["--stage=2"]
"""

import argparse
import os

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "").partition("_zero_")[0]
BATCH, NUM_MICRO_BATCHES = 8, 2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=0, choices=[0, 1, 2])
    options = parser.parse_args()
    dist.init_process_group("gloo")
    deepspeed.init_distributed("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    config = {
        "train_micro_batch_size_per_gpu": BATCH // size,
        "gradient_accumulation_steps": 1 if BUG == "accumulation_unset" else NUM_MICRO_BATCHES,
        "zero_optimization": {"stage": options.stage if size > 1 else 0},
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    x, y = torch.randn(4, BATCH, 8), torch.randn(4, BATCH, 4)
    is_divided = BUG in ("accumulation_unset", "divided_twice")
    with harness.training(engine.module):
        for inputs, targets in zip(x, y, strict=True):
            loss = nn.functional.mse_loss(engine(inputs[rank::size]), targets[rank::size])
            engine.backward(loss / NUM_MICRO_BATCHES if is_divided else loss)
            engine.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
