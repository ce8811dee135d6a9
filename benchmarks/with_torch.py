"""Trains with PyTorch over gloo, one process for each device: DDP or FSDP2.

Choices and reasons:

- The images stay in memory as one tensor of bytes (47 MB), from which each process gathers its part
  of a global batch. Workers of a `DataLoader` would use the cores of the training and send every
  batch through a pipe.
- Layout `channels_last`: a third less time for LeNet on a CPU, the same for ResNet-18. FSDP2 does
  not support weights of it; the activations have it nevertheless, from the images.
- Each process computes with its share of the cores. `torch.compile` is off: LeNet takes as long.
- bfloat16 is `torch.autocast`, with weights and updates in float32.
- DDP: gradients are views of the communication buckets, which saves a copy.
- FSDP2 (`fully_shard`, ZeRO-3): each layer is a unit, whose weights are gathered before its forward
  pass, released after it, and gathered again before its backward pass.
- `--recipe=fast` shifts half of the images by a pixel: nine versions of a batch are stacked, and
  one is gathered for each image, as in this project.
- PyTorch multiplies the momentum by the current learning rate, Keras each gradient in it by the
  learning rate of its step: otherwise `--recipe=fast` is the project's recipe.
"""

import math
import os
import sys
import tempfile
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
import torch_models
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from program import NUM_WARMUP_STEPS, Job, num_threads

# Recipe `fast` of the project, for an epoch of LeNet.
PIXEL_MEAN, PIXEL_STD, MOMENTUM, WEIGHT_DECAY, RISING_STEPS = 72.94, 90.02, 0.9, 5e-4, 100


def fast_rates(peak: float, num_steps: int) -> list[float]:
    """Returns the learning rate of each step: it rises linearly, and falls by a cosine to 0."""
    rising = [peak * step / RISING_STEPS for step in range(RISING_STEPS)]
    num_falling = num_steps - RISING_STEPS
    return rising + [
        peak * (1 + math.cos(math.pi * step / num_falling)) / 2 for step in range(num_falling)
    ]


class Training:
    """A training that is warmed up: this process is the first one and forwards the requests."""

    def __init__(self, job: Job) -> None:
        self.versions = {"torch": str(torch.__version__)}
        context, self._queues = mp.get_context("spawn"), []
        # The processes connect on this machine, whatever its host name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(1, job.num_devices):
                self._queues.append(context.SimpleQueue())
                arguments = job, rank, f"{folder}/store", self._queues[-1]
                context.Process(target=work, args=arguments, daemon=True).start()
            self._own = build(job, 0, f"{folder}/store")

    def train_steps(self, num_steps: int) -> int:
        """Trains; returns the number of images of all processes."""
        return self._ask("train_steps", num_steps)

    def evaluate(self) -> float:
        """Returns the test accuracy."""
        return self._ask("evaluate")

    def _ask(self, name: str, *arguments: Any) -> Any:
        for queue in self._queues:
            queue.put((name, *arguments))
        return getattr(self._own, name)(*arguments)


def work(job: Job, rank: int, store: str, queue: Any) -> None:
    """Trains in a process that ends with the first one."""
    own = build(job, rank, store)
    while True:
        name, *arguments = queue.get()
        getattr(own, name)(*arguments)


def build(job: Job, rank: int, store: str) -> "Trainer":
    """Joins the group, builds the model and warms up."""
    file = dist.FileStore(store, job.num_devices)
    dist.init_process_group("gloo", store=file, rank=rank, world_size=job.num_devices)
    torch.set_num_threads(num_threads(job))
    torch.manual_seed(0)
    model = torch_models.LeNet()
    if job.model == "resnet18":
        model = torch_models.ResNet18(nn.BatchNorm2d)  # PyTorch's own is the faster one.
    job.check_parameters(sum(p.numel() for p in model.parameters()))
    if job.recipe == "fast":
        initialize_he_normal(model)
    return Trainer(job, rank, model)


def initialize_he_normal(model: nn.Module) -> None:
    """Draws weights like Keras' `he_normal`: normal, truncated at 2 standard deviations.

    Biases are 0. Reference: K. He et al., "Delving Deep into Rectifiers", 2015.
    """
    for layer in model.children():
        # Truncation reduces the standard deviation by 12 %.
        std = (2 / layer.weight[0].numel()) ** 0.5 / 0.87962566103423978
        nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
        nn.init.zeros_(layer.bias)


class Trainer:
    """The model, its optimizer and the data in one process."""

    def __init__(self, job: Job, rank: int, model: nn.Module) -> None:
        self.job, self.rank, self.is_fast = job, rank, job.recipe == "fast"
        self.generator = torch.Generator().manual_seed(rank)  # Of the shifts.
        is_mixed = job.precision == "bfloat16"
        self.autocast = torch.autocast("cpu", torch.bfloat16, enabled=is_mixed)
        self.model = self.distribute(model)
        self.train_data, self.test_data = (
            (torch.tensor(images).permute(0, 3, 1, 2), torch.tensor(labels))
            for images, labels in job.data
        )
        self.restart()
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        for size in {where.stop - where.start for where in job.epoch_slices()}:
            for _ in range(NUM_WARMUP_STEPS):
                self.make_step(np.arange(size))
        self.model.load_state_dict(state)
        self.restart()

    def distribute(self, model: nn.Module) -> nn.Module:
        """Returns the module that this process trains."""
        if self.job.framework == "torch_ddp":
            model = model.to(memory_format=torch.channels_last)
            return DistributedDataParallel(model, gradient_as_bucket_view=True)
        mesh = init_device_mesh("cpu", (self.job.num_devices,))
        for layer in model.children():
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        return fully_shard(model, mesh=mesh, reshard_after_forward=True)

    def restart(self) -> None:
        """Starts an epoch with a new optimizer."""
        self.batches, self.num_steps = self.job.index_batches(), 0
        self.rates = [self.job.learning_rate]
        if self.is_fast:
            self.rates = fast_rates(self.job.learning_rate, len(self.job.epoch_slices()))
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), self.rates[0], momentum=MOMENTUM if self.is_fast else 0.0,
            nesterov=self.is_fast, foreach=True,
        )  # fmt: skip

    def train_steps(self, num_steps: int) -> int:
        """Trains; returns the number of images of all processes."""
        self.model.train()
        return self.job.train(self.batches, num_steps, self.make_step)

    def make_step(self, rows: np.ndarray) -> None:
        """Updates the weights once."""
        self.optimizer.zero_grad(set_to_none=True)
        self.backward(torch.from_numpy(rows))
        # After the last step of the recipe, its last learning rate.
        rate = self.rates[min(self.num_steps, len(self.rates) - 1)]
        (parameters,) = self.optimizer.param_groups
        parameters["lr"] = rate
        if self.is_fast:
            with torch.no_grad():
                torch._foreach_mul_(parameters["params"], 1 - rate * WEIGHT_DECAY)
        self.optimizer.step()
        self.num_steps += 1

    def backward(self, rows: Tensor) -> None:
        """Computes the gradient of a global batch: the mean of the processes' gradients."""
        images, labels = self.train_data
        own = rows.chunk(self.job.num_devices)[self.rank]
        with self.autocast:
            logits = self.model(self.scaled(self.augmented(images[own])))
        F.cross_entropy(logits.float(), labels[own]).backward()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Returns the test accuracy, which every process computes: FSDP2 needs all of them."""
        self.model.eval()
        num_correct, size = 0, self.job.global_batch_size
        for images, labels in zip(*(data.split(size) for data in self.test_data), strict=True):
            with self.autocast:
                logits = self.model(self.scaled(images))
            num_correct += int((logits.argmax(1) == labels).sum())
        return num_correct / len(self.test_data[1])

    def augmented(self, images: Tensor) -> Tensor:
        """Returns the images, half of them shifted by a pixel in one of eight directions."""
        if not self.is_fast:
            return images
        height, width = images.shape[2:]
        padded = F.pad(images, (1, 1, 1, 1))
        starts = [(1, 1), *((y, x) for y in range(3) for x in range(3) if (y, x) != (1, 1))]
        versions = torch.stack([padded[:, :, y : y + height, x : x + width] for y, x in starts])
        drawn = torch.randint(16, (len(images),), generator=self.generator)
        chosen = torch.where(drawn < 8, drawn + 1, 0)  # The first version is unchanged.
        return versions[chosen, torch.arange(len(images))]

    def scaled(self, images: Tensor) -> Tensor:
        """Returns the pixels as the recipe scales them."""
        mean, std = (PIXEL_MEAN, PIXEL_STD) if self.is_fast else (0.0, 255.0)
        return images.float().sub_(mean).div_(std)
