"""Trains a small CNN on Fashion-MNIST with DDP: torchrun --nproc_per_node=2 torch_ddp.py"""

import gzip
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH_SIZE = 96  # Of all processes together.
NUM_EPOCHS = 2
NUM_EXAMPLES = int(os.environ.get("NUM_EXAMPLES", 60000))


class SyncBatchNorm(nn.BatchNorm2d):
    """BatchNorm over the examples of all processes; nn.SyncBatchNorm needs GPUs."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        axes = (0, 2, 3)
        count = all_reduce(torch.tensor(x.numel() / x.shape[1]), "sum", dist.group.WORLD)
        mean = all_reduce(x.sum(axes, keepdim=True), "sum", dist.group.WORLD) / count
        squares = (x - mean).square().sum(axes, keepdim=True)
        var = all_reduce(squares, "sum", dist.group.WORLD) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean.flatten(), self.momentum)
            self.running_var.lerp_(var.flatten() * count / (count - 1), self.momentum)
        scale = self.weight.view(1, -1, 1, 1) / (var + self.eps).sqrt()
        return (x - mean) * scale + self.bias.view(1, -1, 1, 1)


def load_data(folder):
    with gzip.open(os.path.join(folder, "train-images-idx3-ubyte.gz")) as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)
    with gzip.open(os.path.join(folder, "train-labels-idx1-ubyte.gz")) as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    x = torch.tensor(images[:NUM_EXAMPLES] / 255, dtype=torch.float32)
    return TensorDataset(x, torch.tensor(labels[:NUM_EXAMPLES], dtype=torch.long))


def build_model():
    layers = [nn.Conv2d(1, 8, 5, stride=2, padding=2), SyncBatchNorm(8), nn.ReLU()]
    layers += [nn.Conv2d(8, 16, 3, stride=2, padding=1), SyncBatchNorm(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 7 * 7, 10))


def train(model, optimizer, scheduler, loader, sampler):
    for epoch in range(NUM_EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
            optimizer.step()
            scheduler.step()
        print(f"rank {dist.get_rank()}, epoch {epoch + 1}: loss {loss.item():.4f}")


def main():
    dist.init_process_group("gloo")
    rank, num_processes = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = load_data(os.environ["FASHION_MNIST_DIR"])
    sampler = DistributedSampler(data, num_processes, rank)
    loader = DataLoader(data, BATCH_SIZE // num_processes, sampler=sampler)
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    train(model, optimizer, scheduler, loader, sampler)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
