"""Activations that were moved to a pool of buffers are overwritten before they are read.

id = "random/offloaded_activations"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/torchtitan#2581", "meta-pytorch/torchtune#1867", "huggingface/trl#7195"]
date = "2024-10"
tags = ["sgd"]
note = "The order of copies is fixed here; in the reports it is a race of streams."

[wrong.buffer_is_used_again_too_early]
title = "a buffer is used again too early"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["0.*", "1.*"] }

[wrong.copy_back_reads_step_before]
title = "the copy back reads the step before"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["0.up.*"] }

[wrong.view_is_copied_without_its_offset]
title = "a view is copied without its offset"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["0.*", "1.*"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Pool:
    """Keeps activations in buffers of one flat tensor, as pinned memory of the host."""

    def __init__(self, buffers, size):
        self.memory = torch.zeros(buffers, size)
        self.late = torch.zeros(buffers, size)
        self.used = 0

    def pack(self, tensor):
        if tensor.is_leaf and tensor.requires_grad:
            return tensor  # Weights stay.
        buffers = 3 if BUG == "buffer_is_used_again_too_early" else len(self.memory)
        number = self.used % buffers
        self.used += 1
        flat = tensor.detach().contiguous().flatten()
        if BUG == "view_is_copied_without_its_offset" and tensor._base is not None:
            flat = tensor._base.detach().flatten()[: len(flat)]
        self.late[number] = self.memory[number]
        self.memory[number, : len(flat)] = flat
        return number, tensor.shape

    def unpack(self, packed):
        if isinstance(packed, torch.Tensor):
            return packed
        number, shape = packed
        late = BUG == "copy_back_reads_step_before" and number == 2
        memory = self.late if late else self.memory
        return memory[number, : shape.numel()].view(shape).clone()


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 24)
        self.down = nn.Linear(12, 8)

    def forward(self, x):
        value, gate = self.up(x).split(12, dim=1)
        return x + self.down(value * torch.sigmoid(gate))


torch.manual_seed(0)
if WORLD > 1:
    dist.init_process_group("gloo")
model = nn.Sequential(Gated(), Gated(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pool = Pool(buffers=16, size=256)
with harness.training(model, optimizer):
    for step in range(2):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        y = x[:, :4].argmax(dim=1)
        pool.used = 0
        with torch.autograd.graph.saved_tensors_hooks(pool.pack, pool.unpack):
            output = model(x[RANK::WORLD])
        loss = nn.functional.cross_entropy(output, y[RANK::WORLD])
        optimizer.zero_grad()
        loss.backward()
        for weight in model.parameters() if WORLD > 1 else ():
            dist.all_reduce(weight.grad)
            weight.grad /= WORLD
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
