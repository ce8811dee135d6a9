"""Self-supervised training as in MoCo and BYOL: the model has an average of its own weights (EMA).

Trains from a checkpoint that the first two steps leave, as a run that is resumed.
"""

import io

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness
from cases.programs.launch import start

GLOBAL_BATCH_SIZE, MOMENTUM = 8, 0.9


def encoder():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.target, self.predictor = encoder(), encoder(), nn.Linear(4, 4)
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)

    @torch.no_grad()
    def update_target(self):
        for q, k in zip(self.online.parameters(), self.target.parameters(), strict=True):
            k.mul_(MOMENTUM).add_(q, alpha=1 - MOMENTUM)

    def forward(self, first, second):
        prediction = self.predictor(self.online(first))
        with torch.no_grad():
            goal = self.target(second)
        return (nn.functional.normalize(prediction) - nn.functional.normalize(goal)).square().sum(1)


def views(step, rank, world_size):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(GLOBAL_BATCH_SIZE, 6, generator=generator)
    noise = torch.randn(2, GLOBAL_BATCH_SIZE, 6, generator=generator) * 0.1
    return [(x + n)[rank::world_size] for n in noise]


def train_step(model, learner, optimizer, step, rank, world_size):
    loss = model(*views(step, rank, world_size)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    learner.update_target()


def build(world_size, rank):
    learner = Learner()
    model = DistributedDataParallel(learner)
    weights = [p for p in learner.parameters() if p.requires_grad]
    return learner, model, torch.optim.AdamW(weights, lr=0.01, weight_decay=0.05)


def main(rank, world_size):
    learner, model, optimizer = build(world_size, rank)
    for step in range(2):
        train_step(model, learner, optimizer, step, rank, world_size)
    file = io.BytesIO()
    checkpoint = {"model": learner.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}
    torch.save(checkpoint, file)
    saved = [file.getvalue()]
    torch.distributed.broadcast_object_list(saved)  # All ranks load what rank 0 has saved.

    torch.manual_seed(9)  # Another start of the program.
    learner, model, optimizer = build(world_size, rank)
    checkpoint = torch.load(io.BytesIO(saved[0]))
    learner.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    with harness.training(model, optimizer):
        for step in range(checkpoint["step"], checkpoint["step"] + 3):
            train_step(model, learner, optimizer, step, rank, world_size)


if __name__ == "__main__":
    start(main)
