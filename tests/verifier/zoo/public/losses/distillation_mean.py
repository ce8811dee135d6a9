"""A student learns from softened outputs: the divergence is summed over classes, not averaged.

reference = "HikariTJU/LD#74, facebookresearch/deit#61, huggingface/transformers#1181"
date = "2019-09"
framework = "torch"

[wrong]
"the divergence is averaged over classes, too" = ["other_loss_reduction", "other_loss"]
"the square of the temperature is missing" = ["other_loss"]
"the teacher's outputs are not softened" = ["other_temperature", "other_targets", "other_loss"]
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
CLASSES, TEMPERATURE, SHARE = 5, 3.0, 0.7


def network(width):
    layers = [nn.Conv2d(1, width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4 * width, CLASSES))


def distillation_loss(student, teacher, labels):
    hard = F.cross_entropy(student, labels)
    softness = 1.0 if BUG == "the teacher's outputs are not softened" else TEMPERATURE
    soft = F.kl_div(
        F.log_softmax(student / TEMPERATURE, 1),
        F.softmax(teacher / softness, 1),
        reduction="mean" if BUG == "the divergence is averaged over classes, too" else "batchmean",
    )
    if BUG != "the square of the temperature is missing":
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
    with lockstep.record(model, optimizer):
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
