"""Defines what the training loop asks of a verifier of steps; `app.verification` has it."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from app.records.run_metadata import Progress
from app.training.training_spec import TrainingSpec
from strategies.copies import State
from strategies.step_totals import StepTotals


class StepFinding(NamedTuple):
    """Describes what is wrong with a step.

    Attributes:
        text: cause, step, kind, tensor, replica and size of the mismatch, in one line.
        before: state before the step, as in a checkpoint; None if copies of the weights differed
            before the step, or on a worker other than the chief.
        per_shard_statistics: BatchNorm statistics before the step.
    """

    text: str
    before: State | None
    per_shard_statistics: list[list[np.ndarray]]


class StepCheck(Protocol):
    """Chooses the steps to verify, records them, and checks each."""

    def compile(self, iterator: Any) -> None:
        """Compiles the function of the recorded step, and the computations on one device."""

    def num_steps_before_next(self, progress: Progress) -> int:
        """Returns how many steps fit into one call; 1 if the next one is verified."""

    def is_due(self, progress: Progress) -> bool:
        """Returns whether the step after `progress` is to be verified."""

    def train_steps(
        self, iterator: Any, num_steps: int, progress: Progress
    ) -> tuple[StepTotals, float]:
        """Runs steps, and records one that is due; returns the totals and the seconds."""

    def check(self, before: Progress) -> StepFinding | None:
        """Checks the recorded step after `before`; None if it is right."""


CreateStepCheck = Callable[[TrainingSpec, Any], StepCheck | None]  # Of a built strategy.
