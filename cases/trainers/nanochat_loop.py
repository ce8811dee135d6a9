"""A loop like nanochat's has no DDP: its Muon and AdamW average the gradients and split the update.

id = "trainers/nanochat_loop"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
tags = ["accumulation", "muon", "adam", "embedding"]

[wrong.not_divided]
title = "the loss is not divided by the number of micro-batches"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.summed]
title = "gradients are summed, not averaged"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WORDS, WIDTH, LENGTH, BATCH, NUM_MICRO_BATCHES = 32, 16, 12, 8, 2


class MuonAdamW(torch.optim.Optimizer):
    """Muon for matrices, AdamW for embeddings; each rank owns every `WORLD`-th weight."""

    def __init__(self, matrices, others):
        groups = [{"params": matrices, "lr": 0.02}, {"params": others, "lr": 0.01}]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self):
        """Averages the gradients, updates the weights of this rank, and broadcasts them."""
        for muon, group in enumerate(self.param_groups):
            for number, weight in enumerate(group["params"]):
                if WORLD > 1:
                    dist.all_reduce(weight.grad)
                    if BUG != "summed":
                        weight.grad /= WORLD
                if number % WORLD == RANK:
                    self.update(weight, group["lr"], is_matrix=not muon)
                if WORLD > 1:
                    dist.broadcast(weight, number % WORLD)

    def update(self, weight, learning_rate, *, is_matrix):
        state = self.state[weight]
        velocity = state.setdefault("velocity", torch.zeros_like(weight))
        if is_matrix:
            velocity.lerp_(weight.grad, 0.05)
            x = weight.grad.lerp(velocity, 0.95)
            x = x / (x.norm() + 1e-7)
            for _ in range(5):  # Newton and Schulz: singular values become nearly 1.
                square = x @ x.T
                x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
            weight.sub_(x, alpha=learning_rate)
            return
        squares = state.setdefault("squares", torch.zeros_like(weight))
        step = state["step"] = state.get("step", 0) + 1
        velocity.lerp_(weight.grad, 0.2)
        squares.lerp_(weight.grad.square(), 0.05)
        scale = (squares / (1 - 0.95**step)).sqrt() + 1e-10
        weight.sub_(velocity / (1 - 0.8**step) / scale, alpha=learning_rate)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.ReLU(),
        nn.Linear(2 * WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WORDS, bias=False),
    )  # fmt: skip
    matrices, others = [model[1].weight, model[3].weight], [model[0].weight, model[4].weight]
    optimizer = MuonAdamW(matrices, others)
    tokens = torch.randint(0, WORDS, (2, NUM_MICRO_BATCHES, BATCH, LENGTH + 1))
    divisor = 1 if BUG == "not_divided" else NUM_MICRO_BATCHES
    with harness.training(model, optimizer):
        for micro_batches in tokens:
            for rows in micro_batches:
                x = rows[RANK::WORLD]
                logits = model(x[:, :-1]).flatten(0, 1)
                loss = nn.functional.cross_entropy(logits, x[:, 1:].flatten())
                (loss / divisor).backward()
            optimizer.step()
            model.zero_grad(set_to_none=True)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
