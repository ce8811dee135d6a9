"""A pipeline scales its gradients at each accumulated step, or not at all.

id = "sharded/pipeline_scale"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/torchtitan#1733", "pytorch/torchtitan#2972"]
date = "2026-04"
tags = ["pipeline", "accumulation", "sgd"]

[wrong.all_gradients_so_far_are_scaled_at_each_step]
title = "all gradients so far are scaled at each step"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.sum_is_not_divided_before_backward_pass]
title = "the sum is not divided before the backward pass"
place = { node = "loss", step = 0, ranks = [1], tensors = "all" }
"""

import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH, ACCUMULATED, MICRO_BATCHES = 16, 2, 2


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [6, 12, 12, 12, 4]
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)})

    def forward(self, x):
        for name, layer in self.layers.items():
            x = layer(x)
            x = x if name == "3" else torch.tanh(x)
        return x


def summed_loss(logits, labels):
    loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
    if BUG == "sum_is_not_divided_before_backward_pass":
        return loss
    if BUG == "all_gradients_so_far_are_scaled_at_each_step":
        return loss / (BATCH * ACCUMULATED) * MICRO_BATCHES
    return loss / (BATCH * ACCUMULATED)


def run_pipeline(model, mesh, x, y):
    stage = PipelineStage(model, RANK, WORLD, torch.device("cpu"), group=mesh["pp"].get_group())
    scale = BUG == "all_gradients_so_far_are_scaled_at_each_step"
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=summed_loss, scale_grads=scale)
    if RANK == 0:
        schedule.step(x)
    else:
        schedule.step(target=y)


def main():
    mesh = None
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("pp",))
    torch.manual_seed(0)
    model = Network()
    if WORLD > 1:
        for name in [n for n in model.layers if int(n) * WORLD // 4 != RANK]:
            del model.layers[name]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    with harness.training(model, optimizer, mesh=mesh):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(ACCUMULATED, BATCH, 6, generator=generator)
            y = x[:, :, :4].argmax(-1)
            for part in range(ACCUMULATED):
                if WORLD > 1:
                    run_pipeline(model, mesh, x[part], y[part])
                else:
                    summed_loss(model(x[part]), y[part]).backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
