"""Each rank compares its pairs with the features of all, which are gathered without a gradient.

id = "gathered/clip_features"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["mlfoundations/open_clip#616", "facebookresearch/SLIP#31"]
date = "2023-09"
tags = ["ddp", "gathered", "embedding", "sgd"]

[wrong.local_loss_no_gradient_of_gathered_features]
title = "local loss, no gradient of gathered features"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["visual.*", "textual.weight"] }

[wrong.global_loss_gradient_of_own_features]
title = "global loss, gradient of the own features"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["visual.*", "textual.weight"] }

[wrong.each_rank_compares_its_own_pairs]
title = "each rank compares its own pairs"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
VOCABULARY, WIDTH = 20, 12
IS_GLOBAL = BUG == "global_loss_gradient_of_own_features"


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = nn.Sequential(
            nn.Conv2d(3, 8, 4, stride=4), nn.GELU(), nn.Flatten(), nn.Linear(32, WIDTH)
        )
        self.textual = nn.EmbeddingBag(VOCABULARY, WIDTH)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, images, texts):
        features = self.visual(images), self.textual(texts)
        return *(F.normalize(x, dim=-1) for x in features), self.logit_scale.exp()


def gathered(features):
    """Returns the features of all ranks."""
    if BUG == "local_loss_no_gradient_of_gathered_features" or IS_GLOBAL:
        parts = [torch.empty_like(features) for _ in range(WORLD)]
        dist.all_gather(parts, features.detach())
        if IS_GLOBAL:
            parts[RANK] = features
        return torch.cat(parts)
    return torch.cat(all_gather(features))


def clip_loss(images, texts, scale):
    all_images, all_texts, first = images, texts, 0
    if WORLD > 1 and BUG != "each_rank_compares_its_own_pairs":
        all_images, all_texts, first = gathered(images), gathered(texts), RANK * len(images)
        if IS_GLOBAL:
            images, texts, first = all_images, all_texts, 0
    labels = first + torch.arange(len(images))
    of_images = F.cross_entropy(scale * images @ all_texts.T, labels)
    return (of_images + F.cross_entropy(scale * texts @ all_images.T, labels)) / 2


if WORLD > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = CLIP()
images, texts = torch.randn(2, 8, 3, 8, 8), torch.randint(VOCABULARY, (2, 8, 5))
if WORLD > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
with harness.training(model, optimizer):
    for step in range(2):
        features = model(images[step, RANK::WORLD], texts[step, RANK::WORLD])
        optimizer.zero_grad()
        clip_loss(*features).backward()
        optimizer.step()
if WORLD > 1:
    dist.destroy_process_group()
