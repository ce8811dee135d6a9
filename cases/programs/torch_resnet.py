"""A small ResNet as in the ImageNet example: SGD with Nesterov momentum, synchronised BatchNorm."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from cases import harness
from cases.programs.launch import start

BATCH_SIZE = 12


class SyncBatchNorm(nn.BatchNorm2d):
    """BatchNorm over the batches of all processes; PyTorch's own one needs a GPU."""

    def forward(self, x):
        if not self.training or dist.get_world_size() == 1:
            return super().forward(x)
        count = torch.tensor(float(x.numel() / x.shape[1]))
        sums = torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), count[None]])
        sums = all_reduce(sums)
        mean, square = sums[:-1].view(2, -1) / sums[-1]
        variance = square - mean * mean
        with torch.no_grad():
            self.num_batches_tracked += 1
            unbiased = variance * sums[-1] / (sums[-1] - 1)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(unbiased, self.momentum)
        mean, variance = mean[:, None, None], variance[:, None, None]
        x = (x - mean) * torch.rsqrt(variance + self.eps)
        return x * self.weight[:, None, None] + self.bias[:, None, None]


class BasicBlock(nn.Module):
    def __init__(self, in_channels, channels, stride, norm_layer):
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = norm_layer(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = norm_layer(channels)
        self.downsample = nn.Sequential(
            nn.Conv2d(in_channels, channels, 1, stride, bias=False), norm_layer(channels)
        )

    def forward(self, x):
        out = nn.functional.softplus(self.bn1(self.conv1(x)))
        return nn.functional.softplus(self.bn2(self.conv2(out)) + self.downsample(x))


class ResNet(nn.Module):
    def __init__(self, norm_layer):
        super().__init__()
        self.block = BasicBlock(2, 4, 2, norm_layer)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(self.pool(self.block(x)).flatten(1))


def load_data():
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(36, 2, 6, 6, generator=generator)
    return TensorDataset(images, torch.randint(3, (36,), generator=generator))


def train(loader, model, criterion, optimizer, scheduler, rank):
    model.train()
    for images, target in loader:
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scheduler.step()


def main(rank, world_size):
    model = DistributedDataParallel(ResNet(SyncBatchNorm))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    sampler = DistributedSampler(load_data())
    loader = DataLoader(load_data(), batch_size=BATCH_SIZE // world_size, sampler=sampler)
    with harness.training(model, optimizer):
        for epoch in range(2):
            sampler.set_epoch(epoch)
            train(loader, model, criterion, optimizer, scheduler, rank)


if __name__ == "__main__":
    start(main)
