"""A student learns from softened outputs: the divergence is summed over classes, not averaged.

id = "losses/distillation_mean"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["HikariTJU/LD#74", "facebookresearch/deit#61", "huggingface/transformers#1181"]
date = "2019-09"
tags = ["ddp", "averages", "sgd"]

[wrong.divergence_is_averaged_over_classes_too]
title = "the divergence is averaged over classes, too"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.square_of_temperature_is_missing]
title = "the square of the temperature is missing"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.teacher_outputs_are_not_softened]
title = "the teacher's outputs are not softened"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
CLASSES, TEMPERATURE, SHARE = 5, 3.0, 0.7


def network(width):
    layers = [nn.Conv2d(1, width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4 * width, CLASSES))


def distillation_loss(student, teacher, labels):
    hard = F.cross_entropy(student, labels)
    softness = 1.0 if BUG == "teacher_outputs_are_not_softened" else TEMPERATURE
    soft = F.kl_div(
        F.log_softmax(student / TEMPERATURE, 1),
        F.softmax(teacher / softness, 1),
        reduction="mean" if BUG == "divergence_is_averaged_over_classes_too" else "batchmean",
    )
    if BUG != "square_of_temperature_is_missing":
        soft = soft * TEMPERATURE**2
    return (1 - SHARE) * hard + SHARE * soft


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(12)
    teacher = network(10).requires_grad_(False)
    teacher[-1].weight *= 20
    student = network(4)
    model = DistributedDataParallel(student) if WORLD > 1 else student
    optimizer = torch.optim.SGD(student.parameters(), lr=0.5, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            images = torch.randn(12, 1, 8, 8, generator=generator)[RANK::WORLD]
            labels = images.mean((1, 2, 3)).mul(20).long() % CLASSES
            optimizer.zero_grad()
            distillation_loss(model(images), teacher(images), labels).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
