"""Times the tasks of a pipeline with an operation at the start and the end of each task."""

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
    """Records the time at which each task starts and ends.

    The timing operations are stateless: stateful operations would run in the order of tracing,
    stage after stage. TensorFlow prunes operations whose result is not used, so that a tensor of
    the task passes through each timing operation.

    Attributes:
        padding_sec: seconds that a forward and a backward task sleep in addition to computing.
            Padded stages take equally long and do not compete for the cores of a processor.
    """

    def __init__(self) -> None:
        self.padding_sec = NO_PADDING
        self._times: dict[tuple[Task, bool], float] = {}

    def on_task(
        self, replica_id: int, task: Task, tensors: list[tf.Tensor], *, ends: bool
    ) -> list[tf.Tensor]:
        """Passes a tensor of the task through an operation that records the time."""
        if replica_id:  # The first pipeline represents all.
            return tensors
        sizes = [tensor.shape.num_elements() or np.inf for tensor in tensors]
        smallest = int(np.argmin(sizes))
        passed = range(len(tensors)) if not ends else [smallest]
        with tf.control_dependencies(tensors):  # Not before all inputs are ready.
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
        """Returns the tasks of the last step, ordered by start, and clears the record.

        Raises:
            ValueError: no step was run.
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
        iterator: iterator over batches.
        clock: the clock.
        num_steps: number of steps.
    """
    strategy.train_steps(iterator, 1)
    clock.take()
    steps = []
    for _ in range(num_steps):
        strategy.train_steps(iterator, 1)
        steps.append(clock.take())
    return steps
