"""The loss is computed chunk by chunk, and each chunk has another number of tokens that count.

id = "losses/chunked_logits"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA-NeMo/Automodel#3803", "Lightning-AI/litgpt#751"]
date = "2023-11"
tags = ["fsdp2", "embedding", "sgd"]

[wrong.means_of_chunks_are_added]
title = "means of the chunks are added"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.means_of_chunks_are_averaged]
title = "means of the chunks are averaged"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.tokens_of_prompts_are_in_mean]
title = "tokens of prompts are in the mean"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
VOCABULARY, WIDTH, LENGTH, BATCH_SIZE, CHUNK, IGNORED = 11, 16, 12, 8, 16, -100


class GatedConvolutions(nn.Module):
    """A language model whose layers see the token and the two before it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([nn.Conv1d(WIDTH, 2 * WIDTH, 3) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens).mT
        for layer in self.layers:
            x = x + F.glu(layer(F.pad(x, (2, 0))), dim=1)
        return self.head(x.mT)


def chunked_loss(logits, labels, num_tokens):
    """Returns the sum of the losses of the own tokens, divided by those of all ranks."""
    logits, labels = logits.flatten(0, 1).split(CHUNK), labels.flatten().split(CHUNK)
    pairs = list(zip(logits, labels, strict=True))
    if BUG.startswith("means_of_chunks"):
        total = sum(F.cross_entropy(*pair, ignore_index=IGNORED) for pair in pairs)
        return total if BUG == "means_of_chunks_are_added" else total / len(pairs)
    losses = [F.cross_entropy(*pair, ignore_index=IGNORED, reduction="none") for pair in pairs]
    if BUG == "tokens_of_prompts_are_in_mean":
        return torch.cat(losses).mean()
    return WORLD * torch.cat(losses).sum() / num_tokens


def get_batch(step):
    generator = torch.Generator().manual_seed(30 + step)
    text = torch.randint(VOCABULARY, (BATCH_SIZE, LENGTH + 1), generator=generator)
    tokens, labels = text[:, :-1], text[:, 1:].clone()
    prompts = torch.tensor([3, 10, 5, 9, 1, 10, 2, 8])
    labels[torch.arange(LENGTH) < prompts[:, None]] = IGNORED
    return tokens, labels


def main():
    torch.manual_seed(3)
    model = GatedConvolutions()
    if WORLD > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9, nesterov=True)
    with harness.training(model, optimizer):
        for step in range(2):
            tokens, labels = get_batch(step)
            num_tokens = (labels != IGNORED).sum()
            own = slice(RANK, None, WORLD)
            chunked_loss(model(tokens[own]), labels[own], num_tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
