"""Embeddings are computed in chunks without a graph, and their gradients are cached and gathered.

id = "gathered/cached_embeddings"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["lightonai/pylate#156", "luyug/GradCache#25"]
date = "2025-09"
tags = ["gathered", "embedding", "sgd"]

[wrong.gradients_of_documents_are_not_summed]
title = "gradients of documents are not summed"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.loss_has_factor_of_ranks]
title = "the loss has the factor of the ranks"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.only_last_chunk_reaches_weights]
title = "only the last chunk reaches the weights"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
VOCABULARY, CHUNK, GLOBAL_BATCH = 24, 2, 8


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 16)
        self.layer, self.out = nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, tokens):
        x = self.words(tokens)
        return F.normalize(self.out((x + F.gelu(self.layer(x))).mean(1)), dim=1)


def embed(model, tokens):
    """Returns embeddings without a graph, chunk by chunk."""
    with torch.no_grad():
        return torch.cat([model(chunk) for chunk in tokens.split(CHUNK)])


def cached_gradients(queries, documents):
    """Returns the gradients of the mean loss of all ranks by this rank's embeddings."""
    size, own = len(documents), slice(RANK * len(documents), (RANK + 1) * len(documents))
    if WORLD > 1:
        parts = [torch.empty_like(documents) for _ in range(WORLD)]
        dist.all_gather(parts, documents)
        documents = torch.cat(parts)
    queries, documents = queries.requires_grad_(), documents.requires_grad_()
    labels = RANK * size + torch.arange(size)
    loss = F.cross_entropy(8 * queries @ documents.T, labels, reduction="sum") / GLOBAL_BATCH
    if BUG == "loss_has_factor_of_ranks":
        loss = loss * WORLD
    loss.backward()
    if WORLD > 1 and BUG != "gradients_of_documents_are_not_summed":
        dist.all_reduce(documents.grad)
    return queries.grad, documents.grad[own]


def backward(model, tokens, gradients):
    for chunk, gradient in zip(tokens.split(CHUNK), gradients.split(CHUNK), strict=True):
        if BUG == "only_last_chunk_reaches_weights":
            model.zero_grad()
        (model(chunk) * gradient).sum().backward()


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Embedder()
    data = torch.randint(VOCABULARY, (2, 2, GLOBAL_BATCH, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    with harness.training(model, optimizer):
        for queries, documents in data[:, :, RANK::WORLD]:
            optimizer.zero_grad()
            gradients = cached_gradients(embed(model, queries), embed(model, documents))
            backward(model, torch.cat([queries, documents]), torch.cat(gradients))
            for weight in model.parameters() if WORLD > 1 else ():
                dist.all_reduce(weight.grad)
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


main()
