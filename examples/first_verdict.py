"""A small training in PyTorch, right on one device and wrong on two; a loss curve does not show it.

    python -m lockstep run --reference "python examples/first_verdict.py" \
        --variant "torchrun --nproc_per_node=2 examples/first_verdict.py"

The verdict says where the two part, and what to do. With `--right`, the training has done it.
"""

import os
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep

BATCH_SIZE, NUM_STEPS = 32, 8  # Examples in a step, over all processes.

rank, num_processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(0)
images, labels = torch.rand(NUM_STEPS * BATCH_SIZE, 784), torch.arange(NUM_STEPS * BATCH_SIZE) % 10
model = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
if num_processes > 1:
    torch.distributed.init_process_group("gloo")
    model = DistributedDataParallel(model)  # Averages the gradients of all processes.
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

with lockstep.record(model, optimizer):
    for step in range(NUM_STEPS):
        rows = slice(step * BATCH_SIZE + rank, (step + 1) * BATCH_SIZE, num_processes)
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows], reduction="sum")
        # Dividing by the whole batch suits a sum of gradients, not their average.
        loss = loss / (len(labels[rows]) if "--right" in sys.argv else BATCH_SIZE)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

if num_processes > 1:
    torch.distributed.destroy_process_group()
