"""Trains a small model with a loop like that of nanochat: Muon and AdamW, no DDP.

python -m lockstep run --reference "python examples/trainers/nanochat_loop.py" \
    --variant "torchrun --nproc_per_node=2 examples/trainers/nanochat_loop.py"

The optimizer averages the gradients and updates each weight on one rank, which broadcasts it.
`accumulation` as argument forgets to divide the loss by the number of micro-batches, and `sum`
adds the gradients of the ranks and does not average them: wrong trainings.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lockstep

WORDS, WIDTH, LENGTH, BATCH, NUM_MICRO_BATCHES = 32, 16, 12, 8, 2
RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class MuonAdamW(torch.optim.Optimizer):
    """Muon for matrices, AdamW for embeddings; each rank owns every `WORLD_SIZE`-th weight."""

    def __init__(self, matrices: list[Tensor], others: list[Tensor], operation: str) -> None:
        groups = [{"params": matrices, "lr": 0.02}, {"params": others, "lr": 0.01}]
        super().__init__(groups, {})
        self.operation = operation

    @torch.no_grad()
    def step(self) -> None:
        """Averages the gradients, updates the weights of this rank, and broadcasts them."""
        for muon, group in enumerate(self.param_groups):
            for number, weight in enumerate(group["params"]):
                if WORLD_SIZE > 1:
                    dist.all_reduce(weight.grad)
                    if self.operation != "sum":
                        weight.grad /= WORLD_SIZE
                if number % WORLD_SIZE == RANK:
                    self.update(weight, group["lr"], is_matrix=not muon)
                if WORLD_SIZE > 1:
                    dist.broadcast(weight, number % WORLD_SIZE)

    def update(self, weight: Tensor, learning_rate: float, *, is_matrix: bool) -> None:
        """Updates one weight."""
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


def main(bug: str = "") -> None:
    """Trains for two steps of two micro-batches."""
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.ReLU(),
        nn.Linear(2 * WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WORDS, bias=False),
    )  # fmt: skip
    matrices, others = [model[1].weight, model[3].weight], [model[0].weight, model[4].weight]
    optimizer = MuonAdamW(matrices, others, bug)
    tokens = torch.randint(0, WORDS, (2, NUM_MICRO_BATCHES, BATCH, LENGTH + 1))
    divisor = 1 if bug == "accumulation" else NUM_MICRO_BATCHES
    with lockstep.record(model, optimizer):
        for micro_batches in tokens:
            for rows in micro_batches:
                x = rows[RANK::WORLD_SIZE]
                logits = model(x[:, :-1]).flatten(0, 1)
                loss = nn.functional.cross_entropy(logits, x[:, 1:].flatten())
                (loss / divisor).backward()
            optimizer.step()
            model.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
