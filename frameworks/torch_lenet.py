"""Trains LeNet or ResNet-18 on Fashion-MNIST with PyTorch and DDP, in one process or several.

    python frameworks/torch_lenet.py --processes=2 --epochs=1

This is the training of "Dive into Deep Learning", section "Training on Multiple GPUs", with
`DistributedDataParallel` over gloo: weights N(0, 0.01²), plain SGD. It needs PyTorch and NumPy, and
the four files of Fashion-MNIST in `$FASHION_MNIST_DIR`.

With `--start` and `--batches` it repeats the training of another framework, with the same initial
weights and the same examples. `--trace` records the first steps for `python -m lockstep`.
"""

import argparse
import contextlib
import os
import pathlib
import sys
import tempfile
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import torch_models
import training_files
from training_files import Data, Step

from lockstep import record_torch


class Classifier(nn.Module):
    """A network with its loss, so that a recording has images and labels."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum of the losses, and the number of correct predictions.

        Args:
            images: bytes `(n, 1, 28, 28)`.
            labels: `(n,)`.
        """
        logits = self.network(images / 255)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return loss, (logits.argmax(1) == labels).sum()


def part_of_process(images: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
    """Returns images `(n, 1, 28, 28)` and labels: the examples of this process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    images, labels = (np.array_split(array, size)[rank] for array in (images, labels))
    # With a single channel, the pixels (n, 28, 28, 1) and (n, 1, 28, 28) have the same order.
    return torch.tensor(images.reshape(-1, 1, 28, 28)), torch.tensor(labels)


def averaged_model(model: nn.Module, name: str) -> Classifier:
    """Returns a copy of the model with the mean of all processes' moving statistics."""
    averaged = Classifier(torch_models.create_model(name))
    averaged.load_state_dict(model.state_dict())
    for statistic in averaged.buffers():
        dist.all_reduce(statistic)
        statistic /= dist.get_world_size()
    return averaged


def train(
    model: DistributedDataParallel, options: argparse.Namespace, data: Data
) -> list[dict[str, float]]:
    """Trains, and records the first steps if requested; returns the results of the epochs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate)
    recording: Any = contextlib.nullcontext()
    if options.trace:
        steps = options.recorded_steps
        recording = record_torch.record(options.trace, model, optimizer, steps)

    def train_step(images: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
        optimizer.zero_grad()
        loss, correct = model(*part_of_process(images, labels))
        # DDP averages over the processes; together, this is the mean over the global batch.
        (loss * dist.get_world_size() / len(images)).backward()
        optimizer.step()
        return loss.item(), correct.item()

    def create_test() -> Step:
        averaged = averaged_model(model.module, options.model).eval()

        @torch.no_grad()
        def test(images: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
            loss, correct = averaged(*part_of_process(images, labels))
            return loss.item(), correct.item()

        return test

    def add_processes(sums: np.ndarray) -> np.ndarray:
        total = torch.tensor(sums)
        dist.all_reduce(total)
        return total.numpy()

    def say(line: str) -> None:
        if dist.get_rank() == 0:
            print(line, flush=True)

    with recording:
        return training_files.train(options, data, train_step, create_test, add_processes, say)


def work(
    rank: int,
    options: argparse.Namespace,
    data: Data,
    start: Mapping[str, np.ndarray],
) -> None:
    """Trains as one of the processes; the first one writes the files."""
    store = dist.FileStore(options.rendezvous, options.processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.processes)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.processes))
    torch.manual_seed(0)
    network = torch_models.create_model(options.model)
    for name, variable in torch_models.keras_variables(network):
        variable.copy_(torch.tensor(start[name]))
    # PyTorch 2.13 announces another name for this option; earlier versions know only this one.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    # Each process uses the statistics of its own part of the batches.
    model = DistributedDataParallel(Classifier(network), broadcast_buffers=False)
    epochs = train(model, options, data)
    final = torch_models.keras_variables(averaged_model(model.module, options.model).network)
    arrays = {name: variable.contiguous().numpy() for name, variable in final}
    if rank == 0:
        training_files.write_files(options, arrays, {"torch": str(torch.__version__)}, epochs)
    dist.destroy_process_group()


def main() -> None:
    """Reads the options and files, and starts the processes."""
    parser = training_files.Parser(__doc__.splitlines()[0])
    parser.add_argument("--processes", type=training_files.at_least_1, default=1)
    options = parser.parse()
    data = training_files.load_data(options)
    if (smallest := min(training_files.batch_sizes(options, data))) < options.processes:
        training_files.fail(f"--processes={options.processes}: a batch has {smallest} examples")
    torch.manual_seed(0)
    model = torch_models.create_model(options.model)
    start = {name: variable.numpy() for name, variable in torch_models.keras_variables(model)}
    if options.start:
        start = training_files.load_start(options.start, start)
    with tempfile.TemporaryDirectory() as folder:
        options.rendezvous = f"{folder}/store"
        mp.spawn(work, (options, data, start), nprocs=options.processes)


if __name__ == "__main__":
    main()
