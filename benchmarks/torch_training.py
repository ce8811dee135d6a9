"""Shared code of the PyTorch programs: LeNet, the process group, and the training loop.

Choices and reasons:

- The images stay in memory as one tensor of bytes (47 MB), from which each process gathers its part
of
  a global batch. Workers of a `DataLoader` would use the cores of the training and send every batch
  through a pipe.
- Layout `channels_last`: a third less time for LeNet on a CPU, the same for ResNet-18. The images
have
  it, and therefore the activations.
- Each process computes with its share of the cores.
- `--precision=bfloat16` uses `torch.autocast`, with weights and updates in float32.
- PyTorch multiplies the momentum by the current learning rate, Keras each gradient in it by the
  learning rate of its step: otherwise `--recipe=fast` is the project's recipe.

The first process reads the requests, starts the others, and forwards every request to them. They
end when their standard input or the first process ends.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import protocol
from peer_recipe import PEER_RECIPES

# Message of the first process to those that it starts: {"rank": ..., "port": ..., "parent_pid":
# ...}.
_WORKER_VARIABLE = "TORCH_WORKER"
_GRACE_SEC = 5


def build_lenet() -> nn.Sequential:
    """Builds LeNet for float images `(n, 1, 28, 28)`."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 3),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 128),
        nn.ReLU(inplace=True),
        nn.Linear(128, 10),
    )


def initialize_he_normal(model: nn.Module) -> None:
    """Draws weights like Keras' `he_normal`: normal, truncated at 2 standard deviations.

    Biases are 0. Reference: K. He et al., "Delving Deep into Rectifiers", 2015.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            fan_in = module.weight[0].numel()
            # Truncation reduces the standard deviation by 12 %.
            std = (2 / fan_in) ** 0.5 / 0.87962566103423978
            nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
            nn.init.zeros_(module.bias)


class Group:
    """The process group of the training, as seen from one process.

    The first process, rank 0, starts the others with its own flags.

    Args:
        num_processes: number of processes.
    """

    def __init__(self, num_processes: int):
        worker = json.loads(os.environ.get(_WORKER_VARIABLE, "{}"))
        if worker:
            protocol.end_with_parent(worker["parent_pid"])
        self.num_processes = num_processes
        self.rank = worker.get("rank", 0)
        self._others: list[subprocess.Popen] = []
        if num_processes == 1:
            return
        # The processes connect on this machine, whatever its host name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        store = dist.TCPStore(
            "127.0.0.1",
            worker.get("port", 0),  # 0: a free port.
            is_master=self.rank == 0,
            wait_for_workers=False,
        )
        if self.rank == 0:
            self._others = [self._start(rank, store.port) for rank in range(1, num_processes)]
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=num_processes)

    def requests(self) -> Iterator[str]:
        """Yields the lines of standard input, after forwarding them to the other processes."""
        for line in sys.stdin:
            for other in self._others:
                other.stdin.write(line)
                other.stdin.flush()
            yield line

    def sum(self, *numbers: float) -> list[float]:
        """Sums numbers over the processes."""
        total = torch.tensor(numbers, dtype=torch.float64)
        if self.num_processes > 1:
            dist.all_reduce(total)
        return total.tolist()

    def close(self) -> None:
        """Ends the other processes and waits for them."""
        for other in self._others:
            other.stdin.close()
        for other in self._others:
            try:
                other.wait(_GRACE_SEC)
            except subprocess.TimeoutExpired:
                other.kill()
                other.wait()

    @staticmethod
    def _start(rank: int, port: int) -> subprocess.Popen:
        worker = {"rank": rank, "port": port, "parent_pid": os.getpid()}
        return subprocess.Popen(
            [sys.executable, *sys.argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**os.environ, _WORKER_VARIABLE: json.dumps(worker)},
            text=True,
        )


class TorchTrainer:
    """A model, its optimizer and the data, with separate examples for each process.

    A subclass defines how the model is distributed (`_distribute`) and other differences.

    Args:
        job: the training.
        group: the processes of the training.
        model: the whole model, with equal weights in every process.
    """

    settings = "gloo, images channels last"

    def __init__(self, job: protocol.BenchmarkJob, group: Group, model: nn.Module):
        self._job, self._group = job, group
        self._recipe = PEER_RECIPES[job.options["recipe"]]
        is_mixed = job.options.get("precision") == "bfloat16"
        self._autocast = torch.autocast("cpu", torch.bfloat16, enabled=is_mixed)
        protocol.check_num_parameters(job, sum(p.numel() for p in model.parameters()))
        self._model = self._distribute(model)
        self._replica = self._model  # Called by a training step.
        data = job.data
        self._images = torch.tensor(data.train_images).permute(0, 3, 1, 2)
        self._labels = torch.tensor(data.train_labels).long()
        self._test_images = torch.tensor(data.test_images).permute(0, 3, 1, 2)
        self._test_labels = torch.tensor(data.test_labels).long()
        self._restart()

    def warm_up(self) -> None:
        """Trains with each batch size and tests briefly, then restores the state."""
        state = {name: value.clone() for name, value in self._model.state_dict().items()}
        for size in {where.stop - where.start for where in self._job.epoch_slices}:
            for _ in range(protocol.NUM_WARMUP_STEPS):
                self._make_step(np.arange(size))
        with torch.no_grad():
            self._num_correct(slice(0, self._job.per_replica_batch_size))
        self._model.load_state_dict(state)
        self._restart()

    def train_steps(self, num_steps: int) -> tuple[int, float]:
        """Runs `num_steps` steps; returns the images of all processes, and their mean loss."""
        self._model.train()
        num_images, loss_sum = 0, torch.zeros(())
        for _ in range(num_steps):
            indices = next(self._batches)
            loss_sum += self._make_step(indices)
            num_images += len(indices)
        (total,) = self._group.sum(loss_sum.item())
        return num_images, total / num_images

    @torch.no_grad()
    def evaluate(self) -> float:
        """Returns the test accuracy, computed by all processes together.

        Every process calls its model equally often, in the end with no images: a call may wait for
        the other processes.
        """
        self._model.eval()
        num_examples, size = len(self._test_labels), self._job.per_replica_batch_size
        num_correct = 0
        for start in range(0, num_examples, size * self._group.num_processes):
            first = start + self._group.rank * size
            num_correct += self._num_correct(slice(first, first + size))
        return self._group.sum(num_correct)[0] / num_examples

    def _distribute(self, model: nn.Module) -> nn.Module:
        """Returns the module whose parameters this process updates."""
        return model

    def _backward(self, indices: torch.Tensor) -> torch.Tensor:
        """Computes the gradient of a global batch; returns the sum of this process' losses."""
        shard = indices.chunk(self._group.num_processes)[self._group.rank]
        with self._autocast:
            logits = self._replica(self._scaled(self._images[shard]))
        loss = F.cross_entropy(logits.float(), self._labels[shard])
        loss.backward()  # With several processes, the mean of their gradients.
        return loss.detach() * len(shard)

    def _num_correct(self, where: slice) -> int:
        with self._autocast:
            logits = self._model(self._scaled(self._test_images[where]))
        return int((logits.argmax(1) == self._test_labels[where]).sum())

    def _scaled(self, images: torch.Tensor) -> torch.Tensor:
        scaled = images.float()
        if self._recipe.pixel_mean:
            scaled.sub_(self._recipe.pixel_mean)
        return scaled.div_(self._recipe.pixel_std)

    def _make_step(self, indices: np.ndarray) -> torch.Tensor:
        """Updates the weights once; returns the sum of this process' losses."""
        self._optimizer.zero_grad(set_to_none=True)
        loss_sum = self._backward(torch.from_numpy(indices))
        # After the last step of the recipe, its last learning rate.
        rate = self._rates[min(self._num_steps, len(self._rates) - 1)]
        (parameters,) = self._optimizer.param_groups
        parameters["lr"] = rate
        if self._recipe.weight_decay:
            with torch.no_grad():
                torch._foreach_mul_(parameters["params"], 1 - rate * self._recipe.weight_decay)
        self._optimizer.step()
        self._num_steps += 1
        return loss_sum

    def _restart(self) -> None:
        """Starts an epoch with a new optimizer."""
        self._batches, self._num_steps = self._job.index_batches(), 0
        self._rates = self._recipe.learning_rates(
            self._job.learning_rate,
            global_batch_size=self._job.global_batch_size,
            num_steps=len(self._job.epoch_slices),
        )
        momentum = self._recipe.momentum
        self._optimizer = torch.optim.SGD(
            self._model.parameters(), self._rates[0], momentum=momentum, nesterov=momentum > 0,
            foreach=True,
        )  # fmt: skip


def build_and_serve(job: protocol.BenchmarkJob, trainer_class, builders) -> None:
    """Joins the group, builds the model, warms up and serves requests.

    Args:
        job: the training.
        trainer_class: `TorchTrainer` or a subclass.
        builders: name of a model → function that builds it.
    """
    group = Group(job.num_devices)
    torch.set_num_threads(max(1, protocol.num_cores() // group.num_processes))
    torch.manual_seed(0)
    model = builders[job.model]()
    if job.options["recipe"] == "fast":
        initialize_he_normal(model)
    trainer = trainer_class(job, group, model)
    trainer.warm_up()
    protocol.serve(
        protocol.describe(job, trainer.settings, torch=torch.__version__),
        protocol.training_handlers(trainer.train_steps, trainer.evaluate),
        requests=group.requests(),
    )
    group.close()
