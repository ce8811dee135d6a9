"""A small vision transformer with dropout and label smoothing, as in timm's recipes."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cases import harness
from cases.programs.launch import start

GLOBAL_BATCH_SIZE, DROPOUT = 8, 0.1


class VisionTransformer(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 3, stride=3)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 5, width) * 0.02)
        self.layer = nn.TransformerEncoderLayer(
            width, 2, 16, dropout=DROPOUT, activation="gelu", batch_first=True, norm_first=True
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.layer(x)[:, 0]))


def batch(step, rank, world_size):
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(GLOBAL_BATCH_SIZE, 1, 6, 6, generator=generator)
    labels = torch.randint(3, (GLOBAL_BATCH_SIZE,), generator=generator)
    return images[rank::world_size], labels[rank::world_size]


def main(rank, world_size):
    model = DistributedDataParallel(VisionTransformer())
    torch.manual_seed(100 + rank)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    with harness.training(model, optimizer):
        for step in range(3):
            images, labels = batch(step, rank, world_size)
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()


if __name__ == "__main__":
    start(main)
