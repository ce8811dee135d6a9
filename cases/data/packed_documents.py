"""In packed sequences, tokens attend to other documents, or positions do not start again.

id = "data/packed_documents"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/nanoVLM#204", "hiyouga/LlamaFactory#7318"]
date = "2026-04"
tags = ["ddp", "embedding", "sgd"]

[wrong.attention_crosses_documents]
title = "attention crosses documents"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }

[wrong.positions_do_not_start_again]
title = "positions do not start again"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["places"] }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
VOCABULARY, WIDTH, LENGTH = 13, 16, 12
LENGTHS = [(5, 4, 3), (7, 5), (2, 6, 4), (3, 3, 6)]  # Of the documents in each sequence.


class PackedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, documents):
        places = torch.arange(LENGTH).expand_as(tokens)
        same = documents.unsqueeze(2) == documents.unsqueeze(1)
        if BUG != "positions_do_not_start_again":
            places = places - same.int().argmax(2)
        x = self.tokens(tokens) + self.places(places)
        q, k, v = self.qkv(x).chunk(3, 2)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand_as(same)
        if BUG != "attention_crosses_documents":
            mask = mask & same
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        return self.head(x)


torch.manual_seed(4)
model = PackedModel()
if WORLD > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
documents = torch.stack(
    [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS]
)
with harness.training(model, optimizer):
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        text = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=generator)
        tokens, targets = text[RANK::WORLD, :-1], text[RANK::WORLD, 1:]
        logits = model(tokens, documents[RANK::WORLD])
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
