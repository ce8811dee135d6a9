"""The cost of a step over devices: fits to made-up times, and what `plan` says of them."""

import itertools

import numpy as np
import pytest

from app.commands import plan as command
from app.config import Config
from app.performance.all_reduce_model import least_squares
from app.performance.plan_output import print_probe
from app.performance.scaling_model import ScalingModel, is_pairwise
from app.performance.training_plan import TrainingPlan
from performance_samples import make_sample

COUNTS = [2, 4, 8, 12]


@pytest.mark.parametrize("pairwise", [False, True])
@pytest.mark.parametrize(
    "numbers", [n for n in itertools.product([0.0, 0.003], [0.0, 0.01], [0.0, 0.002]) if any(n)]
)
def test_the_numbers_of_made_up_times_are_found(numbers, pairwise):
    made_up = ScalingModel(*numbers, pairwise)
    fitted = ScalingModel.fit(COUNTS, [made_up.sec(r) for r in COUNTS], pairwise=pairwise)
    found = fitted.fixed_sec, fitted.each_sec, fitted.more_sec
    assert found == pytest.approx(numbers, abs=1e-9)
    assert fitted.sec(64) == pytest.approx(made_up.sec(64))


def test_the_terms_are_those_of_the_formula():
    assert ScalingModel(1.0, 10.0, 100.0).sec(8) == pytest.approx(1 + 80 + 300)
    assert ScalingModel(1.0, 10.0, 100.0, pairwise=True).sec(8) == pytest.approx(1 + 80 + 5600)
    assert ScalingModel(1.0, 10.0, 100.0).sec(1) == pytest.approx(11)


def test_no_number_is_negative_and_relative_errors_count():
    falling = ScalingModel.fit(COUNTS, [4.0, 3.0, 2.0, 1.0])
    assert (falling.each_sec, falling.more_sec) == (0.0, 0.0)
    # The constant for which the relative errors are least: Σ 1/t over Σ 1/t².
    inverse = 1 / np.array([4.0, 3.0, 2.0, 1.0])
    assert falling.fixed_sec == pytest.approx(inverse.sum() / (inverse**2).sum())
    # An ordinary fit has a constant below 0; the best one without is the straight line alone.
    steep = ScalingModel.fit([2, 4, 8], [1.0, 4.0, 16.0])
    assert steep.fixed_sec == 0 and steep.each_sec > 0


def test_the_best_fit_without_negative_numbers_beats_a_grid_of_others():
    rows = np.array([[1.0, 2.0, 1.0], [1.0, 4.0, 2.0], [1.0, 8.0, 3.0], [1.0, 12.0, 3.6]])
    targets = np.array([1.0, 3.0, 4.0, 9.0])

    def error(numbers):
        return np.sum((rows @ numbers - targets) ** 2)

    best = error(least_squares(rows, targets))
    grid = np.linspace(0, 2, 21)
    assert all(best <= error(numbers) for numbers in itertools.product(grid, repeat=3))


def test_the_largest_count_is_held_out():
    # A straight line through 2, 4 and 6; 8 devices took twice as long as it says.
    held_out = ScalingModel.hold_out([8, 2, 4, 6], [0.16, 0.02, 0.04, 0.06])
    assert (held_out.num_replicas, held_out.held_out) == (8, True)
    assert held_out.predicted_sec == pytest.approx(0.08)
    assert held_out.error == pytest.approx(-0.5)


def test_too_few_counts_are_refused():
    with pytest.raises(ValueError, match="two different numbers of devices"):
        ScalingModel.fit([2, 2], [1.0, 1.0])
    with pytest.raises(ValueError, match="3 different numbers of devices"):
        ScalingModel.hold_out([2, 4], [1.0, 2.0])


def test_rings_are_pairwise_on_shared_cores_alone():
    shared = {name: is_pairwise(name, shared=True) for name in ("ring", "direct", "tree")}
    assert shared == {"ring": True, "direct": True, "tree": False}
    assert not is_pairwise("reduce_to_one", shared=True)
    assert not is_pairwise("ring", shared=False)


def test_a_model_prints_the_terms_that_it_has():
    assert str(ScalingModel(0.001, 0.0, 0.02)) == "1 ms + 20 ms · log₂ R"
    assert str(ScalingModel(0.0, 0.0123, 0.02, True)) == "12.3 ms · R + 20 ms · R (R − 1)"


@pytest.mark.parametrize(
    ("num_devices", "num_gpus", "counts"),
    [
        (2, 0, [2]),
        (8, 0, [8]),
        (9, 0, [2, 4, 6, 8]),
        (64, 0, [2, 4, 6, 8]),
        (4, 4, [4]),
        (16, 4, [2, 3, 4]),
        (16, 6, [2, 3, 5, 6]),
        (16, 32, [2, 4, 6, 8]),
        (16, 2, [16]),  # Too few to fit anything to: refused by the measurement.
    ],
)
def test_counts_to_probe(num_devices, num_gpus, counts):
    assert command.counts_to_probe(num_devices, num_gpus) == counts


@pytest.fixture
def measured(monkeypatch):
    """The cases that a probe measures, which takes no process."""
    cases = []
    monkeypatch.setattr(command, "_measure", lambda own, repeats: cases.extend(own) or [])
    return cases


def test_a_probe_of_many_devices_keeps_the_shard(measured):
    command._probe(
        Config.of("plan", probe=True, device="cpu", num_devices=16, global_batch_size=500)
    )
    assert [case.num_devices for case in measured] == [2, 4, 6, 8]
    assert [case.config.global_batch_size for case in measured] == [64, 128, 192, 256]
    assert {case.config.strategy for case in measured} == {"manual"}


def test_a_probe_of_some_devices_measures_them(measured):
    command._probe(
        Config.of("plan", probe=True, device="cpu", num_devices=4, global_batch_size=500)
    )
    command._probe(Config.of("plan", probe=True, device="cpu", num_devices=1))
    assert [case.name.split(",")[0] for case in measured] == ["manual × 4", "single × 1"]


def test_an_extrapolation_says_from_what_and_how_far_off_it_was(capsys):
    plan = TrainingPlan.of(
        Config.of("plan", device="cpu", num_devices=16, global_batch_size=512, last_batch="drop")
    )
    # 1 ms and 10 ms for each device; 8 devices take 10 % longer.
    secs = {2: 0.021, 4: 0.041, 6: 0.061, 8: 0.081 * 1.1}
    samples = [
        make_sample("manual", n, [sec] * 5, simulated=True, global_batch_size=32 * n)
        for n, sec in secs.items()
    ]
    print_probe(plan, samples)
    shown = capsys.readouterr().out
    assert "2, 4, 6 and 8 devices with 32 images each: 21.0, 41.0, 61.0, 89.1 ms a step" in shown
    assert "extrapolated from 2, 4, 6 and 8: " in shown
    assert "fitted without 8, it was off by -9.1% there" in shown
    model = ScalingModel.fit(list(secs), list(secs.values()))
    assert f"predicted for 16 devices: {1e3 * model.sec(16):,.1f} ms a step" in shown
    assert f"an epoch  {117 * model.sec(16):,.1f} s" in shown
    assert "estimated" not in shown  # Memory was measured on other numbers of devices.
