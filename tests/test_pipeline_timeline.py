"""When tasks of a pipeline run: theory against a simulation, and what is read from times."""

import itertools

import pytest
import tensorflow as tf
from test_traffic import batch

from app.performance.pipeline_timeline import (
    TimedTask,
    bubble,
    idle_share,
    mean_task_secs,
    most_in_flight,
    simulate,
    theoretical_in_flight,
)
from app.performance.split_records import TimedSteps
from app.performance.task_clock import TaskClock, time_tasks
from small_models import create
from strategies.schedules import SCHEDULES, in_order


def simulated(schedule, num_stages, number, task_secs):
    return simulate(in_order(SCHEDULES[schedule], num_stages, number), num_stages, task_secs)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("num_stages", "number"), [(1, 3), (2, 1), (3, 2), (4, 1), (4, 4), (4, 8)])
def test_stages_that_take_equally_long_are_idle_as_the_formula_says(schedule, num_stages, number):
    secs = {(k, forward): 1.0 if forward else 2.0 for k in range(num_stages) for forward in (0, 1)}
    tasks = simulated(schedule, num_stages, number, secs)
    assert idle_share(tasks) == pytest.approx(bubble(num_stages, number))
    assert most_in_flight(tasks) == theoretical_in_flight(schedule, num_stages, number)
    assert mean_task_secs(tasks) == pytest.approx(secs)


def test_theory_in_numbers():
    assert [round(bubble(4, number), 3) for number in (1, 4, 8)] == [0.75, 0.429, 0.273]
    assert theoretical_in_flight("gpipe", 4, 8) == [8, 8, 8, 8]
    assert theoretical_in_flight("1f1b", 4, 8) == [4, 3, 2, 1]
    assert theoretical_in_flight("1f1b", 4, 2) == [2, 2, 2, 1]


def test_a_slow_stage_makes_the_others_wait():
    secs = {(0, True): 1.0, (0, False): 1.0, (1, True): 3.0, (1, False): 3.0}
    tasks = simulated("gpipe", 2, 2, secs)
    # 1 + 2 · 3 + 2 · 3 + 1 on the clock; the second stage works 12 of it, the first one 4.
    assert idle_share(tasks) == pytest.approx(1 - (12 + 4) / (2 * 14))


def test_a_micro_batch_that_ends_makes_room_at_once():
    tasks = [
        TimedTask(0, True, 0, 0.0, 1.0), TimedTask(0, False, 0, 1.0, 2.0),
        TimedTask(0, True, 1, 2.0, 3.0), TimedTask(0, False, 1, 3.0, 4.0),
    ]  # fmt: skip
    assert most_in_flight(tasks) == [1] and idle_share(tasks) == 0


@pytest.mark.parametrize("options", [{}, {"schedule": "gpipe"}, {"recompute": True}])
def test_the_clock_sees_every_task_and_changes_no_bit(options):
    dataset = tf.data.Dataset.from_tensors(batch(7)).repeat()
    states = []
    for clock in (None, TaskClock()):
        strategy = create("pipeline", 2, micro_batches=3, pipeline_cuts=("conv",), **options)
        if clock:
            strategy.observer = clock
            steps = time_tasks(strategy, strategy.distribute(dataset), clock, 2)
        else:
            strategy.train_steps(strategy.distribute(dataset), 3)
        states.append(strategy.state())
    first, second = states
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)
    order = {task: position for position, task in enumerate(strategy.tasks)}
    for tasks in steps:
        assert {task[:3] for task in tasks} == set(order)
        assert all(task.start_sec <= task.end_sec for task in tasks)
        times = {task[:3]: task for task in tasks}
        for m in range(3):
            assert times[0, True, m].end_sec <= times[1, True, m].start_sec
            # The gradient by the activations is there before those by all weights are.
            assert times[1, False, m].start_sec <= times[0, False, m].start_sec
        for stage in range(2):  # One after another, as the schedule has them.
            own = sorted((t for t in tasks if t.stage == stage), key=lambda t: order[t[:3]])
            pairs = itertools.pairwise(own)
            assert all(a.end_sec <= b.start_sec for a, b in pairs)


def test_steps_are_summed_up_by_the_one_in_the_middle():
    def step(pause):
        return [TimedTask(0, True, 0, 0.0, 1.0), TimedTask(0, False, 0, 1.0 + pause, 2.0 + pause)]

    timed = TimedSteps.of([step(2.0), step(0.0), step(1.0)])
    assert timed.idle == pytest.approx(1 / 3) and timed.in_flight == [1]
    assert timed.idle_shares == pytest.approx([0.5, 0.0, 1 / 3])
