"""Each layer of experts is to be balanced for itself, by its tokens that are no padding.

id = "experts/balance_of_layers"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/transformers#28255", "huggingface/transformers#28505"]
date = "2023-12"
tags = ["experts", "embedding", "sgd"]

[wrong.layers_are_put_together]
title = "layers are put together before they are balanced"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.padding_counts_as_tokens]
title = "padding counts as tokens"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WORDS, WIDTH, EXPERTS, LENGTH, BATCH_SIZE, PADDING = 12, 8, 4, 6, 8, 0


def sum_over_ranks(x):
    if WORLD > 1:
        dist.all_reduce(x)
    return x


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 10) / 2)
        self.down = nn.Parameter(torch.randn(EXPERTS, 10, WIDTH) / 3)

    def forward(self, x):
        scores = (2 * self.router(x)).softmax(-1)
        gates = torch.where(scores >= scores.topk(2, -1).values[..., 1:], scores, 0)
        hidden = F.silu(torch.einsum("btd,edh->bteh", x, self.up))
        return x + torch.einsum("bteh,ehd,bte->btd", hidden, self.down, gates), scores


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x, everything = self.embed(tokens), []
        for layer in self.layers:
            x, scores = layer(x)
            everything.append(scores)
        return self.head(x), torch.stack(everything)


def balance(scores, is_word):
    """Returns the own part of the balancing loss, from (layers, batch, length, experts)."""
    if BUG == "padding_counts_as_tokens":
        is_word = torch.ones_like(is_word)
    number = sum_over_ranks(is_word.sum())
    chosen = scores.detach() >= scores.detach().topk(2, -1).values[..., 1:]
    shares = sum_over_ranks((chosen * is_word.unsqueeze(-1)).sum((1, 2))) / number
    means = (scores * is_word.unsqueeze(-1)).sum((1, 2)) / number
    if BUG == "layers_are_put_together":
        shares, means = (each.mean(0, keepdim=True) for each in (shares, means))
    return EXPERTS * (shares * means).sum(1).mean()


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(48)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            text = torch.randint(1, WORDS, (BATCH_SIZE, LENGTH + 1), generator=generator)
            lengths = torch.tensor([7, 4, 6, 3, 2, 5, 7, 3])
            text[torch.arange(LENGTH + 1) >= lengths[:, None]] = PADDING
            text = text.chunk(WORLD)[RANK]
            tokens, targets = text[:, :-1], text[:, 1:]
            logits, scores = model(tokens)
            losses = F.cross_entropy(
                logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum"
            )
            number = sum_over_ranks((targets != PADDING).sum().float())
            optimizer.zero_grad()
            (losses / number + 0.5 * balance(scores, (tokens != PADDING).float())).backward()
            for weight in model.parameters():
                sum_over_ranks(weight.grad)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
