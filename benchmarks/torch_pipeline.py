"""Trains LeNet with PyTorch's `torch.distributed.pipelining` over gloo, one process per stage.

`torch_training.py` lists the common choices. In addition:

- Weights have the layout `channels_last`, too.
- LeNet has no balanced cut: two stages are cut after the last pooling layer, where 3,200 bytes per
  image are sent in each direction and the first stage has 95 % of the arithmetic. A cut after the
  first pooling layer is as unbalanced, with four times the traffic; and gloo does not support the
  layout `channels_last`. Three stages are also cut before the last layer.
- A schedule supports only one micro-batch size, so that the short last batch of an epoch and the
test
  batches have their own schedules, with the same stage.
- The loss of a micro-batch is a mean, and PyTorch divides the gradients by the number of
  micro-batches: they have equal sizes, so that the gradient is that of the whole batch. A last
  batch that is not a multiple of `--micro_batches` is dropped; `images_per_epoch` in the first
  answer counts the rest.
- Testing is pipelined, too, without a backward pass.
"""

import argparse

import protocol
from peer_recipe import RECIPE_FLAG

# Number of stages → the modules of `build_lenet` before which the network is cut.
CUTS = {2: (7,), 3: (7, 9)}
FLAGS = {
    **RECIPE_FLAG,
    "micro_batches": {"type": int, "default": 4},
    "schedule": {"choices": ["gpipe", "1f1b"], "default": "1f1b"},
}


def check_flags(flags: argparse.Namespace) -> str | None:
    """Returns the error in a combination of flags, or None."""
    if flags.num_devices not in CUTS:
        return f"--num_devices={flags.num_devices} must be 2 or 3, a stage for each device"
    if flags.schedule == "1f1b" and flags.micro_batches < flags.num_devices:
        return (
            f"--micro_batches={flags.micro_batches}: PyTorch's 1F1B requires as many as the"
            f" --num_devices={flags.num_devices} stages; use more or --schedule=gpipe"
        )
    return None


if __name__ == "__main__":
    JOB = protocol.open_job(["lenet"], flags=FLAGS, check=check_flags, shards_flag="micro_batches")

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from torch_training import TorchTrainer, build_and_serve, build_lenet

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class PipelineTrainer(TorchTrainer):
    """Trains one stage of layers per process; sends activations and their gradients."""

    def _distribute(self, model: nn.Module) -> nn.Module:
        # (examples, whether for training) → schedule.
        self._schedules: dict[tuple[int, bool], PipelineScheduleSingle] = {}
        model = model.to(memory_format=torch.channels_last)
        bounds = (0, *CUTS[self._group.num_processes], len(model))
        return model[bounds[self._group.rank] : bounds[self._group.rank + 1]]

    def _backward(self, indices: torch.Tensor) -> torch.Tensor:
        schedule = self._schedule(len(indices), training=True)
        losses: list[torch.Tensor] = []
        if self._is_first:
            schedule.step(self._scaled(self._images[indices]), return_outputs=False)
        elif self._is_last:
            schedule.step(target=self._labels[indices], losses=losses, return_outputs=False)
        else:
            schedule.step(return_outputs=False)
        # Each is the mean of a micro-batch, known only to the last stage.
        examples_each = len(indices) // self._job.num_shards
        return sum((loss.detach() * examples_each for loss in losses), torch.zeros(()))

    @torch.no_grad()
    def evaluate(self) -> float:
        """Returns the test accuracy."""
        self._model.eval()
        num_examples, size = len(self._test_labels), self._job.global_batch_size
        num_correct = 0
        for start in range(0, num_examples, size):
            num_correct += self._num_correct(slice(start, min(start + size, num_examples)))
        return self._group.sum(num_correct)[0] / num_examples

    def _num_correct(self, where: slice) -> int:
        schedule = self._schedule(where.stop - where.start, training=False)
        if self._is_first:
            schedule.step(self._scaled(self._test_images[where]), return_outputs=False)
            return 0
        logits = schedule.step()
        if not self._is_last:
            return 0
        return int((logits.argmax(1) == self._test_labels[where]).sum())

    def _schedule(self, num_examples: int, *, training: bool) -> PipelineScheduleSingle:
        key = (num_examples, training)
        if key not in self._schedules:
            stage = PipelineStage(
                self._model, self._group.rank, self._group.num_processes, torch.device("cpu")
            )
            num_micro_batches = self._job.num_shards
            if training:
                self._schedules[key] = SCHEDULES[self._job.options["schedule"]](
                    stage, num_micro_batches, loss_fn=F.cross_entropy
                )
            else:
                if num_examples % num_micro_batches:
                    num_micro_batches = 1  # The end of the test: unequal sizes are not supported.
                self._schedules[key] = ScheduleGPipe(stage, num_micro_batches, scale_grads=False)
        return self._schedules[key]

    @property
    def _is_first(self) -> bool:
        return self._group.rank == 0

    @property
    def _is_last(self) -> bool:
        return self._group.rank == self._group.num_processes - 1


if __name__ == "__main__":
    build_and_serve(JOB, PipelineTrainer, {"lenet": build_lenet})
