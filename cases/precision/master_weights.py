"""The float32 master weights of a bfloat16 model lose their digits.

id = "precision/master_weights"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["NVIDIA/Megatron-LM#1359", "TensorAuto/OpenTau#185"]
date = "2025-01"
tags = ["low_precision", "sgd"]

[wrong.master_weights_are_made_anew_from_16_bit]
title = "master weights are made anew from the 16-bit weights"
place = { node = "update", step = 1, ranks = "all", tensors = "all" }

[wrong.master_weights_are_kept_in_bfloat16]
title = "master weights are kept in bfloat16"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }

[wrong.with_16_bit_weights_are_updated_in_place]
title = "the 16-bit weights are updated in place"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class MasterSGD(torch.optim.Optimizer):
    """SGD with momentum on float32 copies of the weights."""

    def __init__(self, params, lr, momentum):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["master_weight"] = weight.detach().float()
                    state["momentum_buffer"] = torch.zeros_like(state["master_weight"])
                master, buffer = state["master_weight"], state["momentum_buffer"]
                buffer.mul_(group["momentum"]).add_(weight.grad.float())
                if BUG == "with_16_bit_weights_are_updated_in_place":
                    weight.sub_((group["lr"] * buffer).to(weight.dtype))
                    continue
                if BUG == "master_weights_are_made_anew_from_16_bit":
                    master.copy_(weight)
                master.sub_(group["lr"] * buffer)
                if BUG == "master_weights_are_kept_in_bfloat16":
                    master.copy_(master.bfloat16())
                weight.copy_(master)


torch.manual_seed(0)
if WORLD > 1:
    dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).bfloat16()
optimizer = MasterSGD(model.parameters(), lr=2e-3, momentum=0.9)
with harness.training(model, optimizer):
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 8, generator=generator)
        y = x[:, :4] * x[:, 4:]
        x, y = x[RANK::WORLD], y[RANK::WORLD]
        loss = (model(x.bfloat16()).float() - y).square().mean() / WORLD
        loss.backward()
        if WORLD > 1:
            for weight in model.parameters():
                total = weight.grad.float()
                dist.all_reduce(total)
                weight.grad.copy_(total)
        optimizer.step()
        optimizer.zero_grad()
if WORLD > 1:
    dist.destroy_process_group()
