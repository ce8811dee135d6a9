"""Communication overlaps with computation, and a buffer is read before its data arrived.

id = "sharded/overlapped_gather"
framework = "torch"
processes = 2
steps = 3
mode = "pair"
references = [
    "EleutherAI/gpt-neox#1004",
    "deepspeedai/DeepSpeed#5545",
    "deepspeedai/DeepSpeed#8061",
]
date = "2023-07"
tags = ["gathered", "embedding"]
note = "The races of the reports are made deterministic: a late buffer has what it had before."

[wrong.last_layer_gather_is_one_step_late]
title = "the last layer's gather is one step late"
place = { node = "update", step = 0, ranks = "all", tensors = ["output.weight"] }

[wrong.first_layer_sends_gradients_of_one_step]
title = "the first layer sends the gradients of one step before"
place = { node = "sum", step = 0, ranks = "all", tensors = ["embedding.weight"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class OverlappedSgd(torch.optim.Optimizer):
    """Each rank updates its rows of each weight, and gathers those of other ranks."""

    def __init__(self, params, lr=0.2, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.weights = self.param_groups[0]["params"]
        self.buffers = {p: torch.zeros_like(p) for p in self.weights}
        self.gathered = {p: p.detach().clone() for p in self.weights}

    @torch.no_grad()
    def step(self, closure=None):
        late_gradient = BUG == "first_layer_sends_gradients_of_one_step"
        group, works = self.param_groups[0], []
        for p in reversed(self.weights):
            gradient = p.grad.clone()
            if late_gradient and p is self.weights[0]:
                gradient, self.buffers[p] = self.buffers[p].clone(), gradient
            if WORLD > 1:
                dist.all_reduce(gradient, dist.ReduceOp.AVG)
            own = gradient.chunk(WORLD)[RANK]
            velocity = self.state[p].setdefault("momentum_buffer", torch.zeros_like(own))
            velocity.mul_(group["momentum"]).add_(own)
            rows = self.gathered[p].chunk(WORLD)[RANK] - group["lr"] * velocity
            works.append((p, *self.start_gather(rows)))
        for p, rows, work in works:
            self.finish_gather(p, rows, work)

    def start_gather(self, rows):
        if WORLD == 1:
            return [rows], None
        parts = [torch.empty_like(rows) for _ in range(WORLD)]
        return parts, dist.all_gather(parts, rows.contiguous(), async_op=True)

    def finish_gather(self, p, parts, work):
        if work is not None:
            work.wait()
        old, self.gathered[p] = self.gathered[p], torch.cat(parts)
        is_late = p is self.weights[-1] and BUG == "last_layer_gather_is_one_step_late"
        p.copy_(old if is_late else self.gathered[p])


class Tagger(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embedding = nn.Embedding(14, width)
        self.hidden = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, 6, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens).cumsum(1)
        return self.output(torch.tanh(self.hidden(x)))


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Tagger()
    optimizer = OverlappedSgd(model.parameters())
    with harness.training(model, optimizer):
        for step in range(3):
            tokens = torch.randint(14, (12, 5), generator=torch.Generator().manual_seed(step))
            own = tokens[RANK::WORLD]
            logits = model(own)
            nn.functional.cross_entropy(logits.flatten(0, 1), (own % 6).flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
