"""A compiled module does not see a backward hook that was registered later.

id = "random/compiled_hook"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/pytorch#115750", "pytorch/pytorch#117265", "pytorch/pytorch#117758"]
date = "2023-12"
tags = ["sgd"]

[wrong.hook_is_registered_after_compilation]
title = "the hook is registered after the compilation"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["features.*"] }

[wrong.hook_of_second_discriminator_is_lost]
title = "the hook of the second discriminator is lost"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["features.*"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Reversed(nn.Module):
    """A head whose gradient is reversed by a hook before it reaches the features."""

    def __init__(self, width, classes):
        super().__init__()
        self.dense = nn.Linear(width, classes)

    def forward(self, x):
        return self.dense(x)


class Adversarial(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(6, 12), nn.Tanh())
        self.label = nn.Linear(12, 3)
        self.domains = nn.ModuleList([Reversed(12, 2), Reversed(12, 4)])

    def forward(self, x):
        x = self.features(x)
        return self.label(x), *(domain(x) for domain in self.domains)


def reverse(module, grad_input, grad_output):
    return tuple(-0.5 * gradient for gradient in grad_input)


def main():
    torch.manual_seed(0)
    if WORLD > 1:
        dist.init_process_group("gloo")
    model = Adversarial()
    for number, domain in enumerate(model.domains):
        late = BUG == "hook_is_registered_after_compilation" or (
            BUG == "hook_of_second_discriminator_is_lost" and number == 1
        )
        if late:
            domain.compile(backend="aot_eager")
            domain(torch.zeros(8 // WORLD, 12, requires_grad=True))
            domain.dense.register_full_backward_hook(reverse)
        else:
            domain.register_full_backward_hook(reverse)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(8, 6, generator=generator)
            targets = torch.randint(2, (3, 8), generator=generator)[:, RANK::WORLD]
            outputs = model(x[RANK::WORLD])
            loss = sum(map(nn.functional.cross_entropy, outputs, targets))
            optimizer.zero_grad()
            (loss / WORLD).backward()
            for weight in model.parameters() if WORLD > 1 else ():
                dist.all_reduce(weight.grad)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
