"""Tests pipeline schedules: complete, valid, of theoretical length and memory."""

import itertools

import pytest

from strategies.schedules import SCHEDULES, Task, gpipe, in_order, in_time_slots

SIZES = list(itertools.product([1, 2, 3, 4, 6], [1, 2, 3, 4, 8, 9]))
each_schedule = pytest.mark.parametrize("name", SCHEDULES)
each_size = pytest.mark.parametrize(("num_stages", "num_micro_batches"), SIZES)


@each_size
@each_schedule
def test_every_pass_is_made_once(name, num_stages, num_micro_batches):
    tasks = in_order(SCHEDULES[name], num_stages, num_micro_batches)
    every = itertools.product(range(num_stages), (True, False), range(num_micro_batches))
    assert sorted(tasks) == sorted(Task(*numbers) for numbers in every)


@each_size
@each_schedule
def test_a_pass_comes_after_what_it_needs(name, num_stages, num_micro_batches):
    position = {
        task: i for i, task in enumerate(in_order(SCHEDULES[name], num_stages, num_micro_batches))
    }
    for task in position:
        if not task.is_forward:  # The activations of its own stage,
            assert position[task._replace(is_forward=True)] < position[task]
        neighbour = task._replace(stage=task.stage + (-1 if task.is_forward else 1))
        if neighbour in position:  # and what a neighbour hands on.
            assert position[neighbour] < position[task]


@each_size
@each_schedule
def test_stages_do_their_lists_in_order(name, num_stages, num_micro_batches):
    tasks = in_order(SCHEDULES[name], num_stages, num_micro_batches)
    for k in range(num_stages):
        own = SCHEDULES[name](k, num_stages, num_micro_batches)
        assert [task for task in tasks if task.stage == k] == own
        # Gradients are added in the order of the micro-batches.
        backward = [task.micro_batch for task in own if not task.is_forward]
        assert backward == list(range(num_micro_batches))


@each_size
@each_schedule
def test_a_stage_remembers_what_its_schedule_promises(name, num_stages, num_micro_batches):
    for k in range(num_stages):
        steps = [
            1 if task.is_forward else -1
            for task in SCHEDULES[name](k, num_stages, num_micro_batches)
        ]
        most = max(itertools.accumulate(steps))
        promised = {"gpipe": num_micro_batches, "1f1b": min(num_micro_batches, num_stages - k)}
        assert most == promised[name]


@each_size
@each_schedule
def test_idle_slots_are_those_of_theory(name, num_stages, num_micro_batches):
    slots = in_time_slots(SCHEDULES[name], num_stages, num_micro_batches)
    # Forward and backward take a slot each: M + K - 1 slots of either kind.
    assert len(slots) == 2 * (num_micro_batches + num_stages - 1)
    for slot in slots:
        assert len({task.stage for task in slot}) == len(slot)
    num_tasks = sum(map(len, slots))
    idle = 1 - num_tasks / (len(slots) * num_stages)
    assert idle == pytest.approx((num_stages - 1) / (num_micro_batches + num_stages - 1))


def test_one_by_one_on_paper():
    """K = 3, M = 4, as the figures of the papers have it."""

    def short(task):
        return f"{'F' if task.is_forward else 'B'}{task.micro_batch}"

    assert [" ".join(map(short, SCHEDULES["1f1b"](k, 3, 4))) for k in range(3)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert " ".join(map(short, gpipe(1, 3, 2))) == "F0 F1 B0 B1"


def test_a_schedule_in_which_all_wait_is_refused():
    def backward_first(stage, num_stages, num_micro_batches):
        return (
            gpipe(stage, num_stages, num_micro_batches)[::-1]
            if stage == 0
            else gpipe(stage, num_stages, num_micro_batches)
        )

    with pytest.raises(ValueError, match="every stage of this schedule waits"):
        in_time_slots(backward_first, 2, 2)


def test_a_schedule_in_which_a_stage_goes_back_before_it_has_gone_forward_is_refused():
    def back_at_once(stage, num_stages, num_micro_batches):
        return gpipe(stage, num_stages, num_micro_batches)[::-1]

    with pytest.raises(ValueError, match="waits"):
        in_time_slots(back_at_once, 2, 1)
    with pytest.raises(ValueError, match="waits"):
        in_time_slots(back_at_once, 1, 1)
