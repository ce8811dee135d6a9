"""A classifier trained with DDP, as tutorials do: DistributedSampler, one epoch after another."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from cases import harness
from cases.programs.launch import start

GLOBAL_BATCH_SIZE, EPOCHS = 8, 2


class Points(Dataset):
    """Points in six dimensions, of three classes."""

    def __init__(self, number=22):
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(number, 6, generator=generator)
        self.labels = (self.inputs[:, :3] * 2).argmax(1)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index]


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.classifier = nn.Linear(8, 3)

    def forward(self, x):
        return self.classifier(self.features(x))


class Trainer:
    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size
        dataset = Points()
        self.sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True)
        self.loader = DataLoader(
            dataset, batch_size=GLOBAL_BATCH_SIZE // world_size, sampler=self.sampler
        )
        self.network = Network()
        self.model = DistributedDataParallel(self.network)
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.5)

    def run_batch(self, x, y):
        self.optimizer.zero_grad()
        output = self.model(x)
        loss = self.criterion(output, y)
        loss.backward()
        self.optimizer.step()

    def train(self):
        for epoch in range(EPOCHS):
            self.sampler.set_epoch(epoch)
            self.model.train()
            for x, y in self.loader:
                self.run_batch(x, y)
            self.scheduler.step()


def main(rank, world_size):
    trainer = Trainer(rank, world_size)
    with harness.training(trainer.model, trainer.optimizer):
        trainer.train()


if __name__ == "__main__":
    start(main)
