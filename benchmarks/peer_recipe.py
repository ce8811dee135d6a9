"""Defines the recipes of the PyTorch programs: those of the project for LeNet.

Needs no framework. A test compares the values and the learning rates with `app/training`.
"""

import argparse
import dataclasses
import math

_REFERENCE_GLOBAL_BATCH_SIZE = 256
_MIN_WARMUP_STEPS = 100


@dataclasses.dataclass(frozen=True)
class PeerRecipe:
    """Input scaling, optimizer and schedule.

    Attributes:
        pixel_mean: subtracted from pixels of 0 to 255.
        pixel_std: divides the pixels after the subtraction.
        momentum: Nesterov momentum of stochastic gradient descent; 0 for none.
        weight_decay: fraction of a weight, times the learning rate, subtracted in each step.
        warmup: fraction of the steps in which the learning rate rises to its peak, before a cosine
            decay to 0; None for a constant learning rate and PyTorch's initial weights.
    """

    pixel_mean: float = 0.0
    pixel_std: float = 255.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    warmup: float | None = None

    def learning_rates(self, base: float, *, global_batch_size: int, num_steps: int) -> list[float]:
        """Returns the learning rate of each step of a training of `num_steps` steps.

        Args:
            base: peak learning rate at a global batch of 256; the learning rate itself if constant.
            global_batch_size: examples per step.
            num_steps: steps of the whole training.
        """
        if self.warmup is None:
            return [base] * num_steps
        growth = global_batch_size / _REFERENCE_GLOBAL_BATCH_SIZE
        rise = max(1.0, math.sqrt(growth))
        peak = base * min(growth, rise) * min(1.0, num_steps / (2 * _MIN_WARMUP_STEPS * rise))
        least = max(_MIN_WARMUP_STEPS, round(_MIN_WARMUP_STEPS * peak / base))
        num_warmup = max(round(self.warmup * num_steps), min(least, num_steps // 2))
        num_decay = max(1, num_steps - num_warmup)
        return [
            peak * step / num_warmup
            if step < num_warmup
            else peak * (1 + math.cos(math.pi * (step - num_warmup) / num_decay)) / 2
            for step in range(num_steps)
        ]


PEER_RECIPES = {
    "d2l": PeerRecipe(),
    "fast": PeerRecipe(
        pixel_mean=72.94, pixel_std=90.02, momentum=0.9, weight_decay=5e-4, warmup=0.2
    ),
}
RECIPE_FLAG = {"recipe": {"choices": list(PEER_RECIPES), "default": "d2l"}}


def check_recipe(flags: argparse.Namespace) -> str | None:
    """Returns why the recipe does not fit the model, or None."""
    if flags.recipe == "fast" and flags.model != "lenet":
        return f"--recipe=fast: not available for --model={flags.model}; use --recipe=d2l"
    return None
