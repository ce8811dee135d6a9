"""Pictures meet the captions of all ranks, and several captions belong to one picture.

id = "gathered/captions_of_one_picture"
framework = "torch"
processes = 2
steps = 2
mode = "pair"
references = ["salesforce/BLIP#41", "salesforce/ALBEF#126"]
date = "2022-03"
tags = ["gathered", "embedding", "adam"]

[wrong.only_own_caption_belongs_to_picture]
title = "only the own caption belongs to a picture"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.captions_on_other_ranks_belong_to_other]
title = "captions on other ranks belong to other pictures"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.all_captions_of_picture_count_in_full]
title = "all captions of a picture count in full"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn.functional import normalize

from cases import harness

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BATCH_SIZE, PIXELS, WORDS, WIDTH = 16, 10, 15, 8


class Encoders(nn.Module):
    def __init__(self):
        super().__init__()
        self.pictures = nn.Sequential(nn.Linear(PIXELS, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.words, self.captions = nn.Embedding(WORDS, 12), nn.Linear(12, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, pictures, captions):
        captions = self.captions(torch.tanh(self.words(captions).mean(1)))
        return normalize(self.pictures(pictures)), self.scale.exp() * normalize(captions)


def of_all_ranks(x):
    if WORLD == 1:
        return x
    return all_gather_tensor_autograd(x, gather_dim=0, group=dist.group.WORLD)


def targets_of(ids):
    """Returns for each picture the share that each caption has in it."""
    everything = of_all_ranks(ids)
    is_own = torch.eye(BATCH_SIZE).chunk(WORLD)[RANK]
    if BUG == "only_own_caption_belongs_to_picture":
        return is_own
    belongs = (ids[:, None] == everything).float()
    if BUG == "captions_on_other_ranks_belong_to_other":
        belongs *= is_own.sum(0)
    if BUG == "all_captions_of_picture_count_in_full":
        return belongs
    return belongs / belongs.sum(1, keepdim=True)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(53)
    model = Encoders()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-4, weight_decay=0.05)
    with harness.training(model, optimizer):
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            ids = torch.randint(6, (BATCH_SIZE,), generator=generator)
            album = torch.randn(6, PIXELS, generator=generator)
            captions = torch.randint(WORDS, (BATCH_SIZE, 4), generator=generator)
            captions[:, 0] = ids
            pictures = album[ids] + 0.5 * torch.randn(BATCH_SIZE, PIXELS, generator=generator)
            ids, pictures, captions = (
                part.chunk(WORLD)[RANK] for part in (ids, pictures, captions)
            )
            pictures, captions = model(pictures, captions)
            targets, loss = targets_of(ids), 0.0
            for own, others in ((pictures, captions), (captions, pictures)):
                logs = (own @ of_all_ranks(others).T).log_softmax(1)
                loss = loss - (targets * logs).sum(1).mean() / 2
            optimizer.zero_grad()
            loss.backward()
            for weight in model.parameters():
                if WORLD > 1:
                    dist.all_reduce(weight.grad)
                    weight.grad /= WORLD
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
