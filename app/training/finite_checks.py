"""Stops a training whose loss or weights are not finite."""

import math

import numpy as np

from app.runtime.errors import DivergedError
from strategies.base import StepTotals, Strategy
from strategies.copies import State


def check_finite_loss(
    totals: StepTotals, description: str, strategy: Strategy, where: str, saved_step: int
) -> None:
    """Checks the loss of steps or of an evaluation.

    Args:
        totals: totals over the examples.
        description: name of the loss, for example "training loss".
        strategy: its state names the tensor that is not finite.
        where: step and learning rate, for the message.
        saved_step: step of the last checkpoint; 0 without one.

    Raises:
        DivergedError: the loss is not finite.
    """
    if not math.isfinite(totals.loss_sum):
        name = _first_not_finite(strategy.state())
        cause = f"{name} is not finite" if name else "all weights are finite"
        raise _error(f"{description} {totals.loss}, {cause}", where, saved_step)


def check_finite_state(state: State, where: str, saved_step: int) -> None:
    """Checks the weights and the optimizer state before they are saved.

    Args:
        state: arrays by name.
        where: step and learning rate, for the message.
        saved_step: step of the last checkpoint; 0 without one.

    Raises:
        DivergedError: an array holds a number that is not finite.
    """
    if name := _first_not_finite(state):
        raise _error(f"{name} is not finite", where, saved_step)


def _error(problem: str, where: str, saved_step: int) -> DivergedError:
    kept = f"; the checkpoint of step {saved_step} is kept" if saved_step else ""
    return DivergedError(f"{problem} at {where}; use a smaller --learning_rate{kept}")


def _first_not_finite(state: State) -> str | None:
    """Returns the name of the first array that holds a number that is not finite."""
    names = (name for name, array in state.items() if not np.all(np.isfinite(array)))
    return next(names, None)
