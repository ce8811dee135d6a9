"""Features learn to hide their domain: a domain classifier sends its gradient back reversed.

id = "losses/reversed_gradient"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = ["easezyc/deep-transfer-learning#21", "VisionLearningGroup/DAL#1"]
date = "2021-05"
tags = ["ddp", "sgd"]

[wrong.optimizer_is_created_in_each_step]
title = "the optimizer is created in each step"
place = { node = "between", step = 0, ranks = "all", tensors = ["features.*", "classes.*"] }

[wrong.domain_classifier_optimizer_does_not_step]
title = "the domain classifier's optimizer does not step"
place = { node = "update", step = 0, ranks = "all", tensors = ["domain.*"] }

[wrong.gradient_is_not_reversed]
title = "the gradient is not reversed"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["features.*"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, FEATURES, WIDTH, CLASSES, STRENGTH = 16, 6, 14, 4, 0.5


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return STRENGTH * (gradient if BUG == "gradient_is_not_reversed" else -gradient)


class Adversarial(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Softsign())
        self.classes, self.domain = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 1)

    def forward(self, x):
        features = self.features(x)
        return self.classes(features), self.domain(Reverse.apply(features))[:, 0]


def make_optimizers(model):
    main = [*model.features.parameters(), *model.classes.parameters()]
    return [
        torch.optim.SGD(main, lr=0.3, momentum=0.9),
        torch.optim.SGD(model.domain.parameters(), lr=0.6, momentum=0.9),
    ]


def compute_loss(outputs, y, is_target):
    """Only examples of the source domain, half of each part, have classes."""
    logits, domains = outputs
    losses = nn.functional.cross_entropy(logits, y, reduction="none") * ~is_target
    of_domains = nn.functional.binary_cross_entropy_with_logits(domains, is_target.float())
    return 2 * losses.mean() + of_domains


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(31)
    model = Adversarial()
    ddp = DistributedDataParallel(model) if WORLD > 1 else model
    optimizers = make_optimizers(model)
    with harness.training(ddp):
        for step in range(3):
            x = torch.randn(BATCH_SIZE, FEATURES, generator=torch.Generator().manual_seed(step))
            y, is_target = x[:, :CLASSES].argmax(1), torch.arange(BATCH_SIZE) % 2 == 1
            x[is_target] = 0.7 * x[is_target] + 0.5
            own = slice(RANK * BATCH_SIZE // WORLD, (RANK + 1) * BATCH_SIZE // WORLD)
            if BUG == "optimizer_is_created_in_each_step":
                optimizers[0] = make_optimizers(model)[0]
            model.zero_grad()
            compute_loss(ddp(x[own]), y[own], is_target[own]).backward()
            optimizers[0].step()
            if BUG != "domain_classifier_optimizer_does_not_step":
                optimizers[1].step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
