"""A training with PyTorch that is wrong as its arguments say, in a way that has no name."""

import os
import sys

import torch
import torch.nn.functional as F
from torch import nn

import lockstep

KINDS = sys.argv[1:]
if "short" in KINDS and '"modules": true' in os.environ["LOCKSTEP_RECORD"]:
    raise MemoryError


class Block(nn.Module):
    """Multiplies by a function of its input, which may get no gradient."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        way = self.inner(x).tanh()
        return self.outer(x) + way * (
            x.exp().detach() if {"detached", "short"} & {*KINDS} else x.exp()
        )


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), Block(), nn.Linear(6, 1))
    torch.manual_seed(1)
    if "hooked" in KINDS:
        for p in model.parameters():
            p.register_hook(lambda gradient: gradient + 0.1 * gradient.roll(1) ** 2)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    with lockstep.record(model, optimizer):
        for _ in range(2):
            x, y = torch.randn(12, 5), torch.randn(12, 1)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
