"""The smoothed part of the loss counts padding, whose amount depends on how ranks pad their part.

id = "losses/smoothed_padding"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["pytorch/pytorch#73205", "huggingface/transformers#5919"]
date = "2022-02"
tags = ["ddp", "recurrent", "gathered", "embedding"]

[wrong.smoothed_part_counts_padding]
title = "the smoothed part counts padding"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.padding_is_in_number_of_tokens]
title = "padding is in the number of tokens"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.mean_over_own_tokens]
title = "the mean over the own tokens"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
VOCABULARY, PAD, SMOOTHING = 14, 0, 0.2
LENGTHS = [[4, 9, 3, 8, 2, 7, 3, 9], [9, 4, 5, 3, 8, 2, 9, 4]]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12, padding_idx=PAD)
        self.rnn, self.head = nn.GRU(12, 16, batch_first=True), nn.Linear(16, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


def get_batch(step):
    """Returns the sequences of this rank, padded to the longest of them, and their labels."""
    generator = torch.Generator().manual_seed(20 + step)
    pairs = [torch.randint(1, VOCABULARY, (2, n), generator=generator) for n in LENGTHS[step]]
    inputs, labels = zip(*pairs[RANK::WORLD], strict=True)
    return pad_sequence(inputs, batch_first=True), pad_sequence(labels, batch_first=True)


def smoothed_loss(logits, labels):
    """Returns the sum of a cross-entropy with smoothed labels over the tokens of this rank."""
    log_chances = logits.log_softmax(-1)
    is_token = labels != PAD
    exact = -log_chances.gather(-1, labels[..., None])[..., 0]
    smooth = -log_chances.mean(-1)
    if BUG != "smoothed_part_counts_padding":
        smooth = smooth * is_token
    return ((1 - SMOOTHING) * exact * is_token + SMOOTHING * smooth).sum()


def number_of(labels):
    """Returns by what each rank divides its sum, as DDP averages over ranks."""
    number = (labels != PAD).sum().float()
    if BUG == "mean_over_own_tokens":
        return number
    if BUG == "padding_is_in_number_of_tokens":
        return labels.numel()
    if WORLD > 1:
        dist.all_reduce(number)
    return number / WORLD


if WORLD > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = Tagger()
if WORLD > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, eps=1e-3)
with harness.training(model, optimizer):
    for step in range(2):
        inputs, labels = get_batch(step)
        optimizer.zero_grad()
        (smoothed_loss(model(inputs), labels) / number_of(labels)).backward()
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
