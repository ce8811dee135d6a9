"""The float32 master weights of a bfloat16 model lose their digits.

reference = "NVIDIA/Megatron-LM#1359, TensorAuto/OpenTau#185"
date = "2025-01"
framework = "torch"
steps = 3

[wrong]
"master weights are made anew from the 16-bit weights" = ["reduced_precision", "reset_state"]
"master weights are kept in bfloat16" = ["reduced_precision"]
"the 16-bit weights are updated in place" = ["reduced_precision", "other_optimizer"]
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import lockstep

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
                if BUG == "the 16-bit weights are updated in place":
                    weight.sub_((group["lr"] * buffer).to(weight.dtype))
                    continue
                if BUG == "master weights are made anew from the 16-bit weights":
                    master.copy_(weight)
                master.sub_(group["lr"] * buffer)
                if BUG == "master weights are kept in bfloat16":
                    master.copy_(master.bfloat16())
                weight.copy_(master)


torch.manual_seed(0)
if WORLD > 1:
    dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).bfloat16()
optimizer = MasterSGD(model.parameters(), lr=2e-3, momentum=0.9)
with lockstep.record(model, optimizer):
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
