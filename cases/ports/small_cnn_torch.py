"""Trains a small CNN with PyTorch: the original of small_cnn.py.

It runs twice, the second time with permuted examples.
"""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cases import harness

NUM_EXAMPLES, BATCH_SIZE, EPOCHS = 76, 32, 2  # Steps 2 and 5 have the last, short batch.


def load_data():
    generator = np.random.default_rng(0)
    labels = generator.integers(10, size=NUM_EXAMPLES)
    images = generator.random((NUM_EXAMPLES, 1, 28, 28)) + 0.1 * labels[:, None, None, None]
    return TensorDataset(torch.tensor(images, dtype=torch.float32), torch.tensor(labels))


def build_model():
    layers = [nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    layers += [nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 7 * 7, 10))


def build_optimizer(options, model):
    if options.adam:
        return torch.optim.Adam(model.parameters(), lr=0.001)
    decay = {"momentum": 0.9, "nesterov": True, "weight_decay": options.weight_decay}
    return torch.optim.SGD(model.parameters(), lr=0.05, **decay)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--adam", action="store_true")
    parser.add_argument("--weight_decay", type=float, default=0.0)
    parser.add_argument("--class_weights", action="store_true")
    parser.add_argument("--gamma", type=float, default=1.0, help="of the learning rate, per step")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = build_model()
    optimizer = build_optimizer(options, model)
    class_weights = torch.linspace(0.5, 2, 10) if options.class_weights else None
    loss_function = nn.CrossEntropyLoss(class_weights)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=options.gamma)
    loader = DataLoader(load_data(), batch_size=BATCH_SIZE)
    with harness.training(model, optimizer):
        for _ in range(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                loss_function(model(x), y).backward()
                optimizer.step()
                scheduler.step()


if __name__ == "__main__":
    main()
