"""Accelerate wraps the model in DDP, which the loop has to call, and no module inside it.

id = "trainers/accelerate_loop"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
requires = ["accelerate"]
tags = ["ddp", "accumulation", "loader", "adam"]

[wrong.unwrapped]
title = "the loop calls accelerator.unwrap_model(model)"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cases import harness

BUG = os.environ.get("BUG", "")
BATCH = 16


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    examples = TensorDataset(torch.randn(64, 8), torch.randn(64, 4))
    loader = DataLoader(examples, BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    called = accelerator.unwrap_model(model) if BUG == "unwrapped" else model
    with harness.training(model, optimizer):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(called(x), y))
                optimizer.step()
                optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main()
