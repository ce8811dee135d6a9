"""Splitting the layers of a model makes new weights, which are trained as all new ones are.

id = "adapters/thawed_by_split"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA-NeMo/Automodel#547"]
date = "2025-10"
tags = ["tensor_parallel", "lora", "adam"]

[wrong.weights_of_split_layers_are_trained]
title = "weights of split layers are trained"
place = { node = "start", step = 0, ranks = "all", tensors = ["up.base.*", "down.base.*"] }

[wrong.split_base_of_last_layer_is_trained]
title = "the split base of the last layer is trained"
place = { node = "start", step = 0, ranks = "all", tensors = ["down.base.weight"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WIDTH, HIDDEN, LORA_RANK, BATCH_SIZE = 6, 12, 2, 14


class LoraLinear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.lora_a = nn.Linear(inputs, LORA_RANK, bias=False)
        self.lora_b = nn.Linear(LORA_RANK, outputs, bias=False)

    def forward(self, x):
        return self.base(x) + self.lora_b(self.lora_a(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = LoraLinear(WIDTH, HIDDEN), LoraLinear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.mish(self.up(x)))


def freeze(model):
    for name, weight in model.named_parameters():
        weight.requires_grad_("lora" in name)


def split(model):
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {"up.base": columns, "up.lora_b": columns, "down.base": rows, "down.lora_a": rows}
    parallelize_module(model, mesh, plan)
    if BUG == "weights_of_split_layers_are_trained":
        for name in plan:
            model.get_submodule(name).requires_grad_(True)
        return
    freeze(model)
    if BUG == "split_base_of_last_layer_is_trained":
        model.down.base.weight.requires_grad_(True)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(23)
    model = Model()
    freeze(model)
    if WORLD > 1:
        split(model)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.RAdam(trained, lr=0.5)
    with harness.training(model, optimizer):
        for step in range(2):
            x = torch.randn(BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            nn.functional.l1_loss(model(x), x.flip(1) ** 2).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
