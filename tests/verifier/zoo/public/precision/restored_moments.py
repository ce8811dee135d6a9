"""Loading the optimizer's state casts its moments to 16 bits.

reference = "pytorch/pytorch#43706, facebookresearch/fairscale#50, vllm-project/speculators#899"
date = "2020-08"
framework = "torch"
steps = 3

[wrong]
"moments are saved in bfloat16" = ["not_restored", "reduced_precision"]
"moments are saved in float16" = ["not_restored", "reduced_precision"]
"the count of steps is not saved" = ["reset_state", "not_restored"]
"""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def save(optimizer):
    """Returns what a checkpoint would have."""
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            if BUG == "moments are saved in bfloat16":
                state[name] = state[name].bfloat16()
            if BUG == "moments are saved in float16":
                state[name] = state[name].half()
        if BUG == "the count of steps is not saved":
            state["step"] = torch.tensor(0.0)
    return saved


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 5))
if WORLD > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)
with lockstep.record(model, optimizer):
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(12, 10, generator=generator)
        y = torch.randint(5, (12,), generator=generator)
        loss = nn.functional.cross_entropy(model(x[RANK::WORLD]), y[RANK::WORLD])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1:  # The job is moved to other machines.
            optimizer.load_state_dict(save(optimizer))
if WORLD > 1:
    dist.destroy_process_group()
