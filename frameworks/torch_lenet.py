"""Trains LeNet or ResNet-18 on Fashion-MNIST with PyTorch and DDP, in one process or several.

    python frameworks/torch_lenet.py --processes=2 --epochs=1

This is the training of "Dive into Deep Learning", section "Training on Multiple GPUs", with
`DistributedDataParallel` over gloo: weights N(0, 0.01²), plain SGD. It needs PyTorch and NumPy, and
the four files of Fashion-MNIST in `$FASHION_MNIST_DIR`.

With `--start` and `--batches` it repeats the training of another framework, with the same initial
weights and the same examples. `--trace` records the first steps for `main.py verify --traces`.
"""

import argparse
import contextlib
import os
import pathlib
import sys
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
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
from training_files import Batch, Data

from lockstep import record_torch


def part_of_process(images: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
    """Returns images `(n, 1, 28, 28)` in [0, 1] and labels: the examples of this process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pixels = training_files.scaled(np.array_split(images, size)[rank])
    labels = np.array_split(labels, size)[rank]
    # With a single channel, the pixels (n, 28, 28, 1) and (n, 1, 28, 28) have the same order.
    return torch.tensor(pixels.reshape(-1, 1, 28, 28)), torch.tensor(labels)


def train_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Batch]
) -> tuple[float, float]:
    """Trains one step for each global batch; returns the mean loss and the accuracy."""
    model.train()
    totals = torch.zeros(3, dtype=torch.float64)  # Sum of losses, correct predictions, examples.
    for images, labels in batches:
        x, y = part_of_process(images, labels)
        optimizer.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits, y, reduction="sum")
        # DDP averages over the processes; together, this is the mean over the global batch.
        (loss * dist.get_world_size() / len(images)).backward()
        optimizer.step()
        totals += torch.stack([loss.detach(), (logits.argmax(1) == y).sum(), torch.tensor(len(y))])
    return mean_of_processes(totals)


@torch.no_grad()
def evaluate(model: nn.Module, images: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Returns the mean loss and the accuracy; each process computes a part of the images."""
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    for begin in range(0, len(images), 1000):
        x, y = part_of_process(images[begin : begin + 1000], labels[begin : begin + 1000])
        logits = model(x)
        loss = F.cross_entropy(logits, y, reduction="sum")
        totals += torch.stack([loss, (logits.argmax(1) == y).sum(), torch.tensor(len(y))])
    return mean_of_processes(totals)


def mean_of_processes(totals: Tensor) -> tuple[float, float]:
    """Returns loss and accuracy from each process' sums."""
    dist.all_reduce(totals)
    loss, correct, examples = totals.tolist()
    return loss / examples, correct / examples


def averaged_model(model: nn.Module, name: str) -> nn.Module:
    """Returns a copy of the model with the mean of all processes' moving statistics."""
    averaged = torch_models.create_model(name)
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

    def test() -> tuple[float, float]:
        averaged = averaged_model(model.module, options.model)
        return evaluate(averaged, data.test_images, data.test_labels)

    def say(line: str) -> None:
        if dist.get_rank() == 0:
            print(line, flush=True)

    with recording:
        step = partial(train_steps, model, optimizer)
        return training_files.train(options, data, step, test, say)


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
    model = torch_models.create_model(options.model)
    for name, variable in torch_models.keras_variables(model):
        variable.copy_(torch.tensor(start[name]))
    # PyTorch 2.13 announces another name for this option; earlier versions know only this one.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
    # Each process uses the statistics of its own part of the batches.
    epochs = train(DistributedDataParallel(model, broadcast_buffers=False), options, data)
    final = dict(torch_models.keras_variables(averaged_model(model, options.model)))
    if rank == 0:
        arrays = {name: variable.contiguous().numpy() for name, variable in final.items()}
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
