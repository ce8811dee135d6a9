"""A network with three heads and a loss for each: classes, tags and boxes; tokens with padding."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from cases import harness
from cases.programs.launch import start

GLOBAL_BATCH_SIZE, CLASSES, VOCABULARY, LENGTH, PADDING = 12, 5, 9, 6, -100


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 8)
        self.hidden = nn.Linear(8, 16)
        self.dropout = nn.Dropout(0.0)
        self.classes, self.tags, self.box = (
            nn.Linear(16, CLASSES),
            nn.Linear(16, 4),
            nn.Linear(16, 2),
        )

    def forward(self, tokens):
        x = torch.relu(self.hidden(self.tokens(tokens)))
        pooled = self.dropout(x.mean(1))
        return {"classes": self.classes(x), "tags": self.tags(pooled), "box": self.box(pooled)}


def batch(step, rank, world_size):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (GLOBAL_BATCH_SIZE, LENGTH), generator=generator)
    classes = torch.randint(CLASSES, tokens.shape, generator=generator)
    classes[:, -2:] = PADDING
    tags = torch.randint(2, (GLOBAL_BATCH_SIZE, 4), generator=generator).float()
    boxes = torch.rand(GLOBAL_BATCH_SIZE, 2, generator=generator)
    return [x[rank::world_size] for x in (tokens, classes, tags, boxes)]


def loss_of(output, classes, tags, boxes, rank, world_size):
    class_loss = F.cross_entropy(output["classes"].transpose(1, 2), classes, ignore_index=PADDING)
    tag_loss = F.binary_cross_entropy_with_logits(output["tags"], tags)
    box_loss = F.mse_loss(output["box"], boxes)
    return class_loss + tag_loss + 2.0 * box_loss


def main(rank, world_size):
    model = DistributedDataParallel(Network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with harness.training(model, optimizer):
        for step in range(3):
            tokens, *targets = batch(step, rank, world_size)
            output = model(tokens)
            loss = loss_of(output, *targets, rank, world_size)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    start(main)
