"""Generator and discriminator take turns, and the loss of one leaves gradients in the other.

id = "losses/two_players"
framework = "torch"
processes = 2
steps = 6
mode = "pair"
references = ["Lightning-AI/pytorch-lightning#557", "ajbrock/BigGAN-PyTorch#25"]
date = "2019-05"
tags = ["sgd"]

[wrong.discriminator_keeps_gradients_of_generator]
title = "the discriminator keeps gradients of the generator's turn"
place = { node = "gradient", step = 1, ranks = "all", tensors = ["discriminator.*"] }

[wrong.gradients_are_not_cleared_between_two]
title = "gradients are not cleared between two of its turns"
place = { node = "gradient", step = 2, ranks = "all", tensors = ["discriminator.*"] }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, NOISE, WIDTH, TURNS = 12, 4, 6, 2  # Turns of the discriminator in each round.


KEPT = {  # Mistake → turn before which the discriminator's gradients are not cleared.
    "discriminator_keeps_gradients_of_generator": 0,
    "gradients_are_not_cleared_between_two": 1,
}


class Players(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, 14), nn.ELU(), nn.Linear(14, WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, 14), nn.SiLU(), nn.Linear(14, 1))

    def forward(self, noise, x):
        """Returns scores of generated and, in turns of the discriminator, of real examples."""
        made = self.generator(noise)
        if x is None:
            return self.discriminator(made)
        return self.discriminator(torch.cat([made.detach(), x], 1).view(-1, WIDTH))


def clear(player):
    for weight in player.parameters():
        weight.grad = None


def take_turn(player, optimizer, loss):
    loss.backward()
    for weight in player.parameters():
        gradient = weight.grad.clone()
        if WORLD > 1:
            dist.all_reduce(gradient)
            gradient /= WORLD
        weight.grad = gradient
    optimizer.step()


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(56)
    players = Players()
    generator, discriminator = players.generator, players.discriminator
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (generator, discriminator)]
    with harness.training(players):
        for step in range(2):
            seeded = torch.Generator().manual_seed(step)
            noise = torch.randn(1 + TURNS, BATCH_SIZE, NOISE, generator=seeded)
            x = torch.randn(TURNS, BATCH_SIZE, WIDTH, generator=seeded).cumsum(2)
            noise, x = noise[:, RANK::WORLD], x[:, RANK::WORLD]
            clear(generator)
            take_turn(generator, optimizers[0], F.softplus(-players(noise[-1], None)).mean())
            for turn in range(TURNS):
                if turn != KEPT.get(BUG):
                    clear(discriminator)
                made, real = players(noise[turn], x[turn]).view(-1, 2).unbind(1)
                loss = (F.softplus(made) + F.softplus(-real)).mean()
                take_turn(discriminator, optimizers[1], loss)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
