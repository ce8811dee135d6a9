"""Trains a small CNN with PyTorch: the original of port_keras.py.

PYTHONPATH=. python port_torch.py --trace=torch.npz
PYTHONPATH=. python port_torch.py --trace=permuted.npz --replay=torch.npz --permute=1
"""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lockstep import record_torch

STEPS = [0, 1, 2, 9, 10]  # Step 9 has the last, short batch, and step 10 begins the second epoch.


def load_data():
    generator = np.random.default_rng(0)
    labels = generator.integers(10, size=300)
    images = generator.random((300, 1, 28, 28)) + 0.1 * labels[:, None, None, None]
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


def train(options, model, optimizer):
    class_weights = torch.linspace(0.5, 2, 10) if options.class_weights else None
    loss_function = nn.CrossEntropyLoss(class_weights)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=options.gamma)
    loader = DataLoader(load_data(), batch_size=32)
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_function(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--adam", action="store_true")
    parser.add_argument("--weight_decay", type=float, default=0.0)
    parser.add_argument("--class_weights", action="store_true")
    parser.add_argument("--gamma", type=float, default=1.0, help="of the learning rate, per step")
    parser.add_argument("--trace", required=True)
    parser.add_argument("--replay")
    parser.add_argument("--permute", type=int)
    options = parser.parse_args()
    torch.set_num_threads(2)  # With one, a unit turns over beside the regularisation of one port.
    torch.manual_seed(0)
    model = build_model()
    optimizer = build_optimizer(options, model)
    more = {"replay": options.replay, "permute": options.permute}
    with record_torch.record(options.trace, model, optimizer, STEPS, **more):
        train(options, model, optimizer)


if __name__ == "__main__":
    main()
