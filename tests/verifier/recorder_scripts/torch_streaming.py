"""A training with PyTorch that raises an error, or whose disk is full, as KIND says.

`python torch_streaming.py KIND` records `KIND.npz` in the current folder, and prints the sum of the
weights and the peak of memory from step 2 on, if the training comes to its end.
"""

import resource
import sys
import tracemalloc

import torch
from torch import nn

from lockstep import record_torch

SIZE, STEPS = 300, 6  # Weights of 360 kB; 1.8 MB in a step of AdamW.


def train(kind):
    """Trains, and returns the sum of the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    path = None if kind == "alone" else f"{kind}.npz"
    with record_torch.record(path, model, optimizer, STEPS):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(8, SIZE)).square().mean()
            if step == 2 and kind == "whole":
                tracemalloc.start()  # Of arrays of NumPy, not of tensors.
            if step == 2 and kind == "raised":
                raise RuntimeError("a step\nfailed")
            loss.backward()
            optimizer.step()
    return float(sum(p.detach().double().sum() for p in model.parameters()))


if __name__ == "__main__":
    if sys.argv[1] == "full":  # A write beyond this fails as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
    print(repr(train(sys.argv[1])))
    print(tracemalloc.get_traced_memory()[1])
