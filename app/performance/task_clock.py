"""Times the tasks of a pipeline, by an operation at the beginning and the end of each of them."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from app.performance.pipeline_timeline import TimedTask
from strategies.base import BatchIterator, Strategy
from strategies.observer import Observer
from strategies.schedules import Task

NO_PADDING = (0.0, 0.0)


class TaskClock(Observer):
    """Notes the time at which each task begins and ends.

    The operations that do it are stateless, as stateful ones would be run in the order in which
    they were traced, stage after stage. An operation without a result that somebody needs would be
    left out: so a tensor of the task passes through each of them.

    Attributes:
        padding_sec: for which a forward and a backward task sleep, besides what they compute.
            Padded stages take equally long, and do not compete for the cores of a processor.
    """

    def __init__(self) -> None:
        self.padding_sec = NO_PADDING
        self._times: dict[tuple[Task, bool], float] = {}

    def on_task(
        self, replica_id: int, task: Task, tensors: list[tf.Tensor], *, ends: bool
    ) -> list[tf.Tensor]:
        """Lets a tensor of the task pass through an operation that notes the time."""
        if replica_id:  # The first pipeline stands for all of them.
            return tensors
        sizes = [tensor.shape.num_elements() or np.inf for tensor in tensors]
        smallest = int(np.argmin(sizes))
        passed = range(len(tensors)) if not ends else [smallest]
        with tf.control_dependencies(tensors):  # Not before all of them are there.
            through = tf.numpy_function(
                self._note(task, ends),
                [tensors[i] for i in passed],
                [tensors[i].dtype for i in passed],
                stateful=False,
            )
        results = list(tensors)
        for i, tensor in zip(passed, through, strict=True):
            tensor.set_shape(tensors[i].shape)
            results[i] = tensor
        return results

    def _note(self, task: Task, ends: bool) -> Callable[..., Any]:
        def note(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
            self._times[task, ends] = time.perf_counter()
            if not ends:
                time.sleep(self.padding_sec[0 if task.is_forward else 1])
            return arrays

        return note

    def take(self) -> list[TimedTask]:
        """Returns the tasks of the last step, in the order of their beginnings, and forgets them.

        Raises:
            ValueError: no step was made.
        """
        starts = {task: sec for (task, ends), sec in self._times.items() if not ends}
        first = min(starts.values())
        timed = [
            TimedTask(*task, start - first, self._times[task, True] - first)
            for task, start in starts.items()
        ]
        self._times.clear()
        return sorted(timed, key=lambda task: task.start_sec)


def time_tasks(
    strategy: Strategy, iterator: BatchIterator, clock: TaskClock, num_steps: int
) -> list[list[TimedTask]]:
    """Trains some steps, after one that is not timed, and returns the tasks of each.

    Args:
        strategy: a pipeline whose observer is `clock`.
        iterator: over batches.
        clock: see above.
        num_steps: how many.
    """
    strategy.train_steps(iterator, 1)
    clock.take()
    steps = []
    for _ in range(num_steps):
        strategy.train_steps(iterator, 1)
        steps.append(clock.take())
    return steps
