"""Trains with PyTorch's FSDP2 (`fully_shard`) on a CPU device mesh over gloo.

`torch_training.py` lists the common choices. In addition:

- `--shard=weights`, ZeRO-3: each layer with weights is a unit. Its weights are gathered before its
  forward pass, released after it, and gathered again before its backward pass.
- `--shard=gradients`, ZeRO-2: the network is one unit. Its weights are gathered once per step and
  released after the backward pass; gradients and optimizer state stay sharded.
- FSDP2 does not support weights of the layout `channels_last`. The activations have it
nevertheless,
  from the images.
"""

import argparse

import protocol
from peer_recipe import RECIPE_FLAG

FLAGS = {**RECIPE_FLAG, "shard": {"choices": ["gradients", "weights"], "default": "weights"}}


def check_flags(flags: argparse.Namespace) -> str | None:
    """Returns the error in the flags, or None."""
    if flags.num_devices < 2:
        return f"--num_devices={flags.num_devices} must be at least 2 to shard"
    return None


if __name__ == "__main__":
    JOB = protocol.open_job(["lenet"], flags=FLAGS, check=check_flags)

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_training import TorchTrainer, build_and_serve, build_lenet


class FsdpTrainer(TorchTrainer):
    """Trains with the weights, gradients and optimizer state split over the processes."""

    def _distribute(self, model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (self._group.num_processes,))
        by_layer = self._job.options["shard"] == "weights"
        if by_layer:
            for layer in model:
                if next(layer.parameters(), None) is not None:
                    fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        return fully_shard(model, mesh=mesh, reshard_after_forward=by_layer)


if __name__ == "__main__":
    build_and_serve(JOB, FsdpTrainer, {"lenet": build_lenet})
