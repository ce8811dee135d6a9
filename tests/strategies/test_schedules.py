"""Tests pipeline schedules: complete, valid, of theoretical length and memory."""

import itertools

import pytest

from strategies.schedules import SCHEDULES, Task, gpipe, in_order, in_time_slots


@pytest.mark.parametrize("num_micro_batches", [1, 3, 4, 9])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_complete_valid_and_as_long_as_theory_says(
    name, num_stages, num_micro_batches
):
    sizes = num_stages, num_micro_batches
    tasks = in_order(SCHEDULES[name], *sizes)
    every = itertools.product(range(num_stages), (True, False), range(num_micro_batches))
    assert sorted(tasks) == sorted(Task(*numbers) for numbers in every)
    position = {task: i for i, task in enumerate(tasks)}
    for task in tasks:
        if not task.is_forward:  # The activations of its own stage,
            assert position[task._replace(is_forward=True)] < position[task]
        neighbour = task._replace(stage=task.stage + (-1 if task.is_forward else 1))
        if neighbour in position:  # and what a neighbour hands on.
            assert position[neighbour] < position[task]
    most = {"gpipe": lambda k: num_micro_batches, "1f1b": lambda k: min(sizes[1], num_stages - k)}
    for k in range(num_stages):
        own = SCHEDULES[name](k, *sizes)
        assert [task for task in tasks if task.stage == k] == own
        # Gradients are added in the order of the micro-batches.
        backward = [task.micro_batch for task in own if not task.is_forward]
        assert backward == list(range(num_micro_batches))
        steps = [1 if task.is_forward else -1 for task in own]
        assert max(itertools.accumulate(steps)) == most[name](k)  # What a stage remembers.
    slots = in_time_slots(SCHEDULES[name], *sizes)
    # Forward and backward take a slot each: M + K - 1 slots of either kind.
    assert len(slots) == 2 * (num_micro_batches + num_stages - 1)
    assert all(len({task.stage for task in slot}) == len(slot) for slot in slots)
    assert sum(map(len, slots)) == 2 * num_stages * num_micro_batches


def test_a_schedule_in_which_all_wait_is_refused():
    def backward_first(stage, *sizes):
        return gpipe(stage, *sizes)[:: -1 if stage == 0 else 1]

    for sizes in [(2, 2), (1, 1)]:
        with pytest.raises(ValueError, match="every stage of this schedule waits"):
            in_time_slots(backward_first, *sizes)
