"""Loading the optimizer's state casts its moments to 16 bits.

id = "precision/restored_moments"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = [
    "pytorch/pytorch#43706",
    "facebookresearch/fairscale#50",
    "vllm-project/speculators#899",
]
date = "2020-08"
tags = ["ddp", "low_precision", "adam"]

[wrong.moments_are_saved_in_bfloat16]
title = "moments are saved in bfloat16"
place = { node = "between", step = 1, ranks = "all", tensors = "all" }

[wrong.moments_are_saved_in_float16]
title = "moments are saved in float16"
place = { node = "between", step = 1, ranks = "all", tensors = "all" }

[wrong.count_of_steps_is_not_saved]
title = "the count of steps is not saved"
place = { node = "between", step = 1, ranks = "all", tensors = "all" }
"""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def save(optimizer):
    """Returns what a checkpoint would have."""
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            if BUG == "moments_are_saved_in_bfloat16":
                state[name] = state[name].bfloat16()
            if BUG == "moments_are_saved_in_float16":
                state[name] = state[name].half()
        if BUG == "count_of_steps_is_not_saved":
            state["step"] = torch.tensor(0.0)
    return saved


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 16), nn.LayerNorm(16), nn.SiLU(), nn.Linear(16, 5))
if WORLD > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)
with harness.training(model, optimizer):
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
