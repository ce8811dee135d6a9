"""A convolutional network with BatchNorm of each replica and dropout: most DDP scripts."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from cases import harness
from cases.programs.launch import start

BATCH_SIZE = 16


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8)
        self.dropout, self.fc = nn.Dropout(0.25), nn.Linear(8, 4)

    def forward(self, x):
        x = self.bn1(self.conv1(x)).relu()
        x = self.bn2(self.conv2(x)).relu()
        return self.fc(self.dropout(x.mean((2, 3))))


def load_data():
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(46, 2, 7, 7, generator=generator)
    return TensorDataset(images, torch.randint(4, (46,), generator=generator))


def main(rank, world_size):
    model = DistributedDataParallel(CNN())
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler = DistributedSampler(load_data(), shuffle=True)
    loader = DataLoader(load_data(), batch_size=BATCH_SIZE // world_size, sampler=sampler)
    torch.manual_seed(rank)
    model.train()
    with harness.training(model, optimizer):
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for images, target in loader:
                output = model(images)
                loss = criterion(output, target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


if __name__ == "__main__":
    start(main)
