"""A sigmoid loss passes texts around a ring of ranks, whose way back is missing.

id = "gathered/sigmoid_ring"
framework = "torch"
processes = 3
steps = 2
mode = "pair"
references = ["mlfoundations/open_clip#742", "mlfoundations/open_clip#618"]
date = "2023-11"
tags = ["ddp", "recurrent", "adam"]

[wrong.exchange_has_no_backward_pass]
title = "the exchange has no backward pass"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["text.*"] }

[wrong.received_texts_count_as_pairs]
title = "received texts count as pairs"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
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
LEFT, RIGHT = (RANK - 1) % WORLD, (RANK + 1) % WORLD


def shifted(tensor, to, source):
    """Sends a tensor to one rank, and returns that of another."""
    received = torch.empty_like(tensor)
    sends = dist.P2POp(dist.isend, tensor.contiguous(), to)
    for work in dist.batch_isend_irecv([sends, dist.P2POp(dist.irecv, received, source)]):
        work.wait()
    return received


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, texts):
        return shifted(texts, RIGHT, LEFT)

    @staticmethod
    def backward(ctx, gradient):
        return shifted(gradient, LEFT, RIGHT)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 8))
        self.text = nn.GRU(6, 8, batch_first=True)
        self.scale, self.bias = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(-2.0))

    def forward(self, images, texts):
        images, texts = self.image(images), self.text(texts)[1][0]
        return F.normalize(images, dim=1), F.normalize(texts, dim=1), self.scale.exp(), self.bias


def sigmoid_loss(images, texts, scale, bias, only_negative=False):
    signs = -torch.ones(len(images), len(texts))
    if not only_negative:
        signs += 2 * torch.eye(len(images))
    return -F.logsigmoid(signs * (scale * images @ texts.T + bias)).sum() / len(images)


def ring_loss(images, texts, scale, bias):
    loss = sigmoid_loss(images, texts, scale, bias)
    for _ in range(WORLD - 1):
        if BUG == "exchange_has_no_backward_pass":
            texts = shifted(texts.detach(), RIGHT, LEFT)
        else:
            texts = Exchange.apply(texts)
        is_negative = BUG != "received_texts_count_as_pairs"
        loss = loss + sigmoid_loss(images, texts, scale, bias, only_negative=is_negative)
    return loss


if WORLD > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = Towers()
images, texts = torch.randn(2, 12, 12), torch.randn(2, 12, 5, 6)
if WORLD > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-4)
with harness.training(model, optimizer):
    for step in range(2):
        optimizer.zero_grad()
        ring_loss(*model(images[step, RANK::WORLD], texts[step, RANK::WORLD])).backward()
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
