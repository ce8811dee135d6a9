"""With one expert for each token, its score must not be normalised: it is the router's gradient.

id = "experts/one_choice"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["databricks/megablocks#87", "jingyaogong/minimind#858", "jingyaogong/minimind#859"]
date = "2024-01"
tags = ["ddp", "experts", "embedding", "adam"]

[wrong.one_score_is_normalised_to_one]
title = "one score is normalised to one"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["1.router"] }

[wrong.scores_are_normalised_over_tokens]
title = "scores are normalised over the tokens"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["1.router"] }
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
WORDS, WIDTH, EXPERTS, LENGTH = 16, 12, 3, 7


class Router(nn.Linear):
    def forward(self, x):
        weight, expert = super().forward(x).softmax(-1).max(-1)  # A number for each token.
        if BUG == "one_score_is_normalised_to_one":
            weight = weight / weight.unsqueeze(-1).sum(-1)
        elif BUG == "scores_are_normalised_over_tokens":
            weight = weight / weight.norm(p=1, dim=-1, keepdim=True)
        return weight, F.one_hot(expert, EXPERTS).float()


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = Router(WIDTH, EXPERTS, bias=False)
        self.gate, self.up = (nn.Parameter(torch.randn(EXPERTS, WIDTH, 16) / 3) for _ in range(2))
        self.down = nn.Parameter(torch.randn(EXPERTS, 16, WIDTH) / 4)

    def forward(self, x):
        weight, chosen = self.router(x)
        gate, up = (torch.einsum("bsd,edh->bseh", x, each) for each in (self.gate, self.up))
        y = torch.einsum("bseh,ehd->bsed", F.silu(gate) * up, self.down)
        return x + weight.unsqueeze(-1) * (y * chosen.unsqueeze(-1)).sum(2)


def main():
    torch.manual_seed(14)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Experts(), nn.RMSNorm(WIDTH))
    model.append(nn.Linear(WIDTH, WORDS, bias=False))
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.RAdam(model.parameters(), lr=0.5, eps=1e-4)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            text = torch.randint(WORDS, (8, LENGTH + 1), generator=generator)[RANK::WORLD]
            logits = model(text[:, :-1])
            optimizer.zero_grad()
            F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
