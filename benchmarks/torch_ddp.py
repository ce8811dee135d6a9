"""PyTorch: `DistributedDataParallel` with gloo, a process for each device; one process without it.

What was chosen, and why:

- The images stay in memory as one tensor of bytes (47 MB), and each process gathers its share of a
  global batch from it. Workers of a `DataLoader` would take the cores from the training and send
  every batch through a pipe.
- Layout `channels_last`: a third less time for LeNet on a CPU, the same for ResNet-18.
- Each process computes with its share of the cores.
- Not compiled: `torch.compile` gave the same time on a CPU.

The first process listens to the requests, starts the others, and repeats every request to them, so
all do the same. They end when their standard input does, or when the first is gone.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import protocol

# What the first process tells those that it starts: {"rank": ..., "port": ..., "parent_pid": ...}.
_WORKER_VARIABLE = "TORCH_DDP_WORKER"
WORKER = json.loads(os.environ.get(_WORKER_VARIABLE, "{}"))

if __name__ == "__main__":
    if WORKER:
        protocol.end_with_parent(WORKER["parent_pid"])
    JOB = protocol.open_job(["lenet", "resnet18"])
    # The processes find each other on this machine, whatever its name stands for.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

_GRACE_SEC = 5


def build_lenet() -> nn.Module:
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


class Residual(nn.Module):
    """Two 3 × 3 convolutions beside a shortcut, which is a 1 × 1 convolution if sizes change.

    Args:
        in_channels: of the input.
        channels: of the output.
        stride: 2 halves height and width.
    """

    def __init__(self, in_channels: int, channels: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
        )
        self.shortcut = (
            nn.Conv2d(in_channels, channels, 1, stride=stride) if stride > 1 else nn.Identity()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the block's output."""
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def build_resnet18() -> nn.Module:
    """Builds ResNet-18 for float images `(n, 1, 28, 28)`: no pooling before the end."""
    modules = [nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    in_channels = 64
    for channels in (64, 128, 256, 512):
        modules.append(Residual(in_channels, channels, 1 if channels == in_channels else 2))
        modules.append(Residual(channels, channels, 1))
        in_channels = channels
    return nn.Sequential(*modules, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


BUILDERS = {"lenet": build_lenet, "resnet18": build_resnet18}


class Group:
    """The processes that train together, seen from one of them.

    The first one, of rank 0, starts the others with its own flags.

    Args:
        num_processes: how many.
    """

    def __init__(self, num_processes: int):
        self.num_processes = num_processes
        self.rank = WORKER.get("rank", 0)
        self._others: list[subprocess.Popen] = []
        if num_processes == 1:
            return
        store = dist.TCPStore(
            "127.0.0.1",
            WORKER.get("port", 0),  # 0: one that is free.
            is_master=self.rank == 0,
            wait_for_workers=False,
        )
        if self.rank == 0:
            self._others = [self._start(rank, store.port) for rank in range(1, num_processes)]
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=num_processes)

    def requests(self) -> Iterator[str]:
        """Yields the lines of standard input, after they were sent on to the other processes."""
        for line in sys.stdin:
            for other in self._others:
                other.stdin.write(line)
                other.stdin.flush()
            yield line

    def sum(self, *numbers: float) -> list[float]:
        """Adds numbers over the processes."""
        total = torch.tensor(numbers, dtype=torch.float64)
        if self.num_processes > 1:
            dist.all_reduce(total)
        return total.tolist()

    def close(self) -> None:
        """Ends the other processes and waits for their end."""
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
    """A model, its optimizer and this process's share of the data.

    Args:
        job: what to train.
        group: the processes that train.
    """

    def __init__(self, job: protocol.BenchmarkJob, group: Group):
        self._job, self._group = job, group
        torch.set_num_threads(max(1, protocol.num_cores() // group.num_processes))
        torch.manual_seed(0)
        self._model = BUILDERS[job.model]().to(memory_format=torch.channels_last)
        protocol.check_num_parameters(job, sum(p.numel() for p in self._model.parameters()))
        self._replica = self._model
        if group.num_processes > 1:
            self._replica = nn.parallel.DistributedDataParallel(
                self._model, gradient_as_bucket_view=True
            )
        self._optimizer = torch.optim.SGD(self._model.parameters(), job.learning_rate)
        data = job.data
        self._images = torch.tensor(data.train_images).permute(0, 3, 1, 2)
        self._labels = torch.tensor(data.train_labels).long()
        self._test_images = torch.tensor(data.test_images).permute(0, 3, 1, 2)
        self._test_labels = torch.tensor(data.test_labels).long()
        self._batches = job.index_batches()

    def warm_up(self) -> None:
        """Trains and tests a little, then takes everything back."""
        state = {name: value.clone() for name, value in self._model.state_dict().items()}
        self.train_steps(protocol.NUM_WARMUP_STEPS)
        self._num_correct(slice(self._job.per_replica_batch_size))
        self._model.load_state_dict(state)
        self._batches = self._job.index_batches()

    def train_steps(self, num_steps: int) -> tuple[int, float]:
        """Makes so many steps; returns the images of all processes, and their mean loss."""
        self._model.train()
        num_images, loss_sum = 0, torch.zeros(())
        for _ in range(num_steps):
            indices = next(self._batches)
            shard = torch.from_numpy(indices).chunk(self._group.num_processes)[self._group.rank]
            images = self._images[shard].float().div_(255)
            labels = self._labels[shard]
            self._optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(self._replica(images), labels)
            loss.backward()  # With several processes, the mean of their gradients.
            self._optimizer.step()
            loss_sum += loss.detach() * len(shard)
            num_images += len(indices)
        (total,) = self._group.sum(loss_sum.item())
        return num_images, total / num_images

    def evaluate(self) -> float:
        """Returns the part of the test images that is classified rightly, shared by the processes.

        Every process tests with the first one's averages of BatchNorm.
        """
        if self._group.num_processes > 1:
            for buffer in self._model.buffers():
                dist.broadcast(buffer, src=0)
        num_examples, num_processes = len(self._test_labels), self._group.num_processes
        step = self._job.per_replica_batch_size
        mine = range(self._group.rank * step, num_examples, num_processes * step)
        (num_correct,) = self._group.sum(sum(self._num_correct(slice(i, i + step)) for i in mine))
        return num_correct / num_examples

    @torch.inference_mode()
    def _num_correct(self, where: slice) -> int:
        self._model.eval()
        logits = self._model(self._test_images[where].float().div_(255))
        return int((logits.argmax(1) == self._test_labels[where]).sum())


def main(job: protocol.BenchmarkJob) -> None:
    """Joins the group, warms up and serves requests."""
    group = Group(job.num_devices)
    trainer = TorchTrainer(job, group)
    trainer.warm_up()
    protocol.serve(
        protocol.describe(job, torch=torch.__version__),
        protocol.training_handlers(trainer.train_steps, trainer.evaluate),
        requests=group.requests(),
    )
    group.close()


if __name__ == "__main__":
    main(JOB)
