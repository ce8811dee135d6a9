"""Trains with PyTorch's `DistributedDataParallel` over gloo, one process per device.

`torch_training.py` lists the common choices. In addition:

- Weights have the layout `channels_last`, too.
- Gradients are views of the communication buckets, which saves a copy.
- `torch.compile` is off: on a CPU, LeNet takes as long or slightly longer with it.
"""

import protocol
from peer_recipe import RECIPE_FLAG, check_recipe

if __name__ == "__main__":
    FLAGS = {**RECIPE_FLAG, **protocol.PRECISION_FLAG}
    JOB = protocol.open_job(["lenet", "resnet18"], flags=FLAGS, check=check_recipe)

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from torch_training import Group, TorchTrainer, build_and_serve, build_lenet


class Residual(nn.Module):
    """Two 3 × 3 convolutions beside a shortcut, a 1 × 1 convolution if the shape changes.

    Args:
        in_channels: channels of the input.
        channels: channels of the output.
        stride: 2 to halve height and width.
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


class DdpTrainer(TorchTrainer):
    """Trains with all weights in each process; gradients are averaged during the backward pass.

    Args:
        job: the training.
        group: the processes of the training.
        model: the model, with equal weights in every process.
    """

    settings = "DistributedDataParallel, gloo, channels last, gradients as views of the buckets"

    def __init__(self, job: protocol.BenchmarkJob, group: Group, model: nn.Module):
        super().__init__(job, group, model.to(memory_format=torch.channels_last))
        if group.num_processes > 1:
            self._replica = nn.parallel.DistributedDataParallel(
                self._model, gradient_as_bucket_view=True
            )

    def evaluate(self) -> float:
        """Evaluates as `TorchTrainer`, with the first process' BatchNorm averages everywhere."""
        if self._group.num_processes > 1:
            for buffer in self._model.buffers():
                dist.broadcast(buffer, src=0)
        return super().evaluate()


if __name__ == "__main__":
    build_and_serve(JOB, DdpTrainer, {"lenet": build_lenet, "resnet18": build_resnet18})
