"""After sharding, the base is not frozen, or adapters are not updated or not synchronised.

id = "adapters/frozen_base_fsdp"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/peft#1402", "hao-ai-lab/FastVideo#926", "hao-ai-lab/FastVideo#1666"]
date = "2024-01"
tags = ["fsdp2", "lora", "adam"]

[wrong.optimizer_has_parameters_of_before]
title = "the optimizer has the parameters of before"
place = { node = "start", step = 0, ranks = "all", tensors = ["0.lora_*", "2.lora_*"] }

[wrong.base_is_trained_too]
title = "the base is trained, too"
place = { node = "start", step = 0, ranks = "all", tensors = ["0.base.*", "2.base.*"] }

[wrong.fsdp_does_not_manage_adapters]
title = "FSDP does not manage the adapters"
place = { node = "sum", step = 0, ranks = "all", tensors = ["0.lora_*", "2.lora_*"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class LoraConv(nn.Module):
    """A frozen convolution, and a trained one of low rank beside it."""

    def __init__(self, inputs, outputs, rank=2):
        super().__init__()
        self.base = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.lora_a = nn.Conv2d(inputs, rank, 3, padding=1, bias=False)
        self.lora_b = nn.Conv2d(rank, outputs, 1, bias=False)

    def forward(self, x):
        return self.base(x) + self.lora_b(self.lora_a(x))


def is_adapter(name):
    return "lora" in name or "5" in name


def build():
    torch.manual_seed(0)
    layers = [LoraConv(2, 6), nn.ReLU(), LoraConv(6, 6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4)]
    model = nn.Sequential(*layers)
    for name, p in model.named_parameters():
        p.requires_grad_(is_adapter(name))
    return model


def shard(model):
    mesh = init_device_mesh("cpu", (WORLD,))
    if BUG == "base_is_trained_too":
        model.requires_grad_(True)
    ignored = set()
    if BUG == "fsdp_does_not_manage_adapters":
        ignored = {p for name, p in model.named_parameters() if "lora" in name}
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, ignored_params=ignored)
    fully_shard(model, mesh=mesh, ignored_params=ignored)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    model = build()
    before = [p for name, p in model.named_parameters() if is_adapter(name)]
    if WORLD > 1:
        shard(model)
    trained = [p for name, p in model.named_parameters() if is_adapter(name)]
    if BUG == "base_is_trained_too":
        trained = list(model.parameters())
    if BUG == "optimizer_has_parameters_of_before":
        trained = before[:2] + list(model[5].parameters())
    optimizer = torch.optim.AdamW(trained, lr=0.01, eps=1e-4, weight_decay=0.1)
    images, labels = torch.randn(2, 8, 2, 4, 4), torch.randint(4, (2, 8))
    with harness.training(model, optimizer):
        for x, y in zip(images, labels, strict=True):
            nn.functional.cross_entropy(model(x[RANK::WORLD]), y[RANK::WORLD]).backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
