"""Trains LeNet on Fashion-MNIST with PyTorch, in one process or with DDP in several.

    python frameworks/torch_lenet.py --processes=2 --epochs=1

It is the training of "Dive into Deep Learning", section "Training on Multiple GPUs", with
`DistributedDataParallel` over gloo: weights N(0, 0.01²), plain SGD. It needs PyTorch and NumPy, and
the four files of Fashion-MNIST in `$FASHION_MNIST_DIR`.

With `--replay=single.npz`, a recording of the same network by Lockstep, it trains the recorded
steps instead: each starts from the recorded weights, with the recorded batch, and `--trace` is
written for `main.py verify --traces=single.npz,torch.npz`.
"""

import argparse
import contextlib
import gzip
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "recorders"))
import lockstep_torch

Batch = tuple[Tensor, Tensor]


class LeNet(nn.Module):
    """LeNet for images `(n, 1, 28, 28)`; flattened with the channels last, as in TensorFlow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 20, 3), nn.Conv2d(20, 50, 5)
        self.hidden, self.logits = nn.Linear(800, 128), nn.Linear(128, 10)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.01) if parameter.ndim > 1 else nn.init.zeros_(
                parameter
            )

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits `(n, 10)`."""
        x = F.avg_pool2d(F.relu(self.conv1(images)), 2)
        x = F.avg_pool2d(F.relu(self.conv2(x)), 2)
        x = x.permute(0, 2, 3, 1).flatten(1)
        return self.logits(F.relu(self.hidden(x)))


def load_images(kind: str) -> Batch:
    """Loads images `(n, 1, 28, 28)` in [0, 1] and labels `(n,)` of "train" or "t10k"."""
    folder = pathlib.Path(os.environ["FASHION_MNIST_DIR"])
    with gzip.open(folder / f"{kind}-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)
    with gzip.open(folder / f"{kind}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    return torch.tensor(images) / 255, torch.tensor(labels, dtype=torch.long)


def epoch_of(data: Batch, seed: int, global_batch_size: int) -> Iterator[Batch]:
    """Yields the global batches of an epoch, in an order that follows from the seed."""
    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(seed))
    for rows in order.split(global_batch_size):
        yield data[0][rows], data[1][rows]


def recorded_batches(path: str, num_steps: int) -> Iterator[Batch]:
    """Yields the batches of a recording with images NHWC of bytes and labels, of all replicas."""
    with np.load(path) as trace:
        for position in range(1, num_steps + 1):
            replicas = sum(f"{position}/data/{r}/0" in trace for r in range(64))
            images, labels = (
                np.concatenate([trace[f"{position}/data/{r}/{i}"] for r in range(replicas)])
                for i in (0, 1)
            )
            images = torch.tensor(images).permute(0, 3, 1, 2).contiguous() / 255
            yield images, torch.tensor(labels).long().flatten()


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Batch]
) -> None:
    """Trains one step for each global batch, of which this process takes its part."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for images, labels in batches:
        own = [part.tensor_split(size)[rank] for part in (images, labels)]
        optimizer.zero_grad()
        losses = F.cross_entropy(model(own[0]), own[1], reduction="sum")
        # DDP averages over the processes: together, this is the mean over the global batch.
        (losses * size / len(images)).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, data: Batch) -> float:
    """Returns the part of the images that are classified correctly."""
    images, labels = (part.split(1000) for part in data)
    correct = sum(int((model(x).argmax(1) == y).sum()) for x, y in zip(images, labels, strict=True))
    return correct / len(data[0])


def work(rank: int, options: argparse.Namespace) -> None:
    """Trains as one of the processes."""
    store = dist.FileStore(options.rendezvous, options.processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.processes)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.processes))
    torch.manual_seed(0)
    model = DistributedDataParallel(LeNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate)
    if options.replay:
        steps = range(options.steps)
        batches = recorded_batches(options.replay, options.steps)
        settings = {"replay": options.replay, "permute": options.permute}
        with lockstep_torch.record(options.trace, model, optimizer, steps, **settings):
            train_epoch(model, optimizer, batches)
    else:
        train_all(model, optimizer, options)
    dist.destroy_process_group()


def train_all(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: argparse.Namespace
) -> None:
    """Trains all epochs; the first process prints the test accuracy after each."""
    train, test = load_images("train"), load_images("t10k")
    recording = contextlib.nullcontext()
    if options.trace:
        recording = lockstep_torch.record(options.trace, model, optimizer, options.steps)
    with recording:
        for epoch in range(options.epochs):
            begin = time.perf_counter()
            train_epoch(model, optimizer, epoch_of(train, epoch, options.global_batch_size))
            sec = time.perf_counter() - begin
            if dist.get_rank() == 0:
                print(
                    f"epoch {epoch + 1}: test acc {accuracy(model.module, test):.4f}, {sec:.1f} sec"
                )


def main(arguments: Sequence[str] | None = None) -> None:
    """Starts the processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--global_batch_size", type=int, default=256)
    parser.add_argument("--learning_rate", type=float, default=0.2)
    parser.add_argument("--steps", type=int, default=20, help="to record, from the first one on")
    parser.add_argument("--trace", help="file to write: a recording of the steps")
    parser.add_argument("--replay", help="recording whose states and batches are trained")
    parser.add_argument("--permute", type=int, help="seed: permute the examples of each batch")
    options = parser.parse_args(arguments)
    if options.replay and not options.trace:
        parser.error("--replay needs --trace=FILE, the recording to write")
    with tempfile.TemporaryDirectory() as folder:
        options.rendezvous = f"{folder}/store"
        mp.spawn(work, (options,), nprocs=options.processes)


if __name__ == "__main__":
    main()
