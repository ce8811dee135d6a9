"""A sampler groups examples by length after a shuffle whose seed differs between ranks.

reference = "huggingface/transformers#9574"
date = "2021-01"
framework = "torch"

[wrong]
"generator is not synchronised" = ["repeated_examples", "lost_examples", "other_examples"]
"each rank sorts its own part" = ["other_examples", "other_order"]
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

import lockstep

BUG = os.environ.get("BUG", "")
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
EXAMPLES, BATCH, LENGTH = 40, 8, 9


class Text(Dataset):
    """Bags of words of different lengths."""

    def __init__(self):
        generator = torch.Generator().manual_seed(15)
        self.lengths = torch.randint(2, LENGTH, (EXAMPLES,), generator=generator)
        self.words = torch.randint(1, 20, (EXAMPLES, LENGTH), generator=generator)
        self.words *= torch.arange(LENGTH) < self.lengths.unsqueeze(1)

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        return self.words[index], self.words[index].sum() / 40


class LengthGrouped(Sampler):
    """Shuffles, and sorts large groups of examples by length; ranks take turns."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __iter__(self):
        seed = 16 + (RANK if BUG == "generator is not synchronised" else 0)
        order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(seed))
        if BUG == "each rank sorts its own part":
            yield from self.grouped(order.chunk(WORLD)[RANK])
        else:
            yield from self.grouped(order)[RANK::WORLD]

    def grouped(self, order):
        groups = order.split(2 * BATCH)
        return [i for g in groups for i in sorted(g.tolist(), key=lambda i: -self.lengths[i])]


def main():
    torch.manual_seed(17)
    model = nn.Sequential(nn.EmbeddingBag(20, 12, padding_idx=0), nn.Linear(12, 1), nn.Flatten(0))
    if WORLD > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    data = Text()
    loader = DataLoader(data, BATCH // WORLD, sampler=LengthGrouped(data.lengths))
    with lockstep.record(model, optimizer):
        for _, (words, y) in zip(range(2), loader, strict=False):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(words), y).backward()
            optimizer.step()
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
