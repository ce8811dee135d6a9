"""Tests the comparison of two runs."""

import dataclasses

import numpy as np
import pytest

from app.report.training_result import results_table
from app.runtime.errors import DataError
from app.verification.comparison import compare_weights, largest_difference, pair_lines
from tests.training.test_checkpoint import STATE
from tests.training.test_records import make_summary


def changed(name, index, value):
    array = STATE[name].copy()
    array.flat[index] = value
    return {**STATE, name: array}


def test_the_largest_difference_is_named():
    first = changed("model/conv/kernel", 5, 5.5)
    name, absolute, _ = largest_difference(STATE, {**first, "model/conv/bias": np.zeros(3)})
    assert name in ("model/conv/kernel", "model/conv/bias") and absolute == 0.5
    found = largest_difference(STATE, first)
    assert found == ("model/conv/kernel", 0.5, pytest.approx(0.5 / 5.5))
    assert largest_difference(STATE, STATE) == ("", 0.0, 0.0)
    name, absolute, _ = largest_difference(STATE, changed("model/conv/kernel", 0, np.nan))
    assert name == "model/conv/kernel" and np.isnan(absolute)
    zeros = np.zeros(3, np.float32)
    zero, minus = ({**STATE, "model/conv/bias": value} for value in (zeros, -zeros))
    assert largest_difference(zero, minus) == ("model/conv/bias", 0.0, 0.0)
    with pytest.raises(ValueError, match="different models"):
        largest_difference(STATE, {"model/other": zeros})


def compare(*runs):
    """Compares runs, each given by its state and what differs in its summary."""
    summaries = [make_summary(steps=10, **changes) for _, changes in runs]
    return compare_weights(summaries, [state for state, _ in runs])


def test_verdicts():
    other = changed("model/conv/kernel", 5, 5.5)
    norm = {**other, "model/norm/moving_mean": np.zeros(1)}
    one = {"strategy": "single", "num_replicas": 1, "num_shards": 1}
    runs = [(other, one), (STATE, {}), (STATE, {"strategy": "mirrored"})]
    verdict, apart, also_apart, explanation = pair_lines(compare(*runs), 10)
    assert verdict == (
        "manual and mirrored end with bitwise identical weights; the others differ, as expected."
    )
    assert apart.startswith("single and manual: weights after 10 steps differ by at most 0.5")
    assert also_apart.startswith("single and mirrored")
    assert explanation.startswith("A difference is expected: the summation order differs")
    (unexpected,) = compare(runs[1], (other, {}))
    assert "should be bitwise identical" in unexpected.why
    verdict, *_ = pair_lines([unexpected], 10)
    assert verdict == "Weights differ that should be bitwise identical."
    (same,) = compare(runs[1], runs[2])
    assert pair_lines([same], 10) == ["All trainings end with bitwise identical weights."]
    verdict, *_ = pair_lines(compare(*runs, (STATE, {"strategy": "sharded"})), 10)
    assert verdict.startswith("manual, mirrored and sharded end with bitwise identical weights;")
    normalised = {**STATE, "model/norm/moving_mean": np.zeros(1)}
    (expected,) = compare((norm, one), (normalised, {}))
    assert "its own statistics" in expected.why


def test_the_table_shows_speed_up_over_single_on_real_devices():
    single = make_summary(
        strategy="single", simulated_devices=False, num_replicas=1, epoch_sec=10.0,
        devices=["/device:GPU:0"],
    )  # fmt: skip
    manual = make_summary(epoch_sec=8.0, images_per_sec=7500.0)
    table = results_table("", {"single": single, "manual": manual})
    assert table.rows[1] == ["manual", "2 simulated", "0.8449", "8.00", "7,500"]
    real = dataclasses.replace(manual, simulated_devices=False)
    table = results_table("", {"single": single, "manual": real})
    assert [row[-1] for row in table.rows] == ["1.00x", "1.25x"]


def test_runs_on_different_images_are_not_compared():
    other = {"dataset_sha256": "2", "dataset": "fashion_mnist"}
    with pytest.raises(DataError, match="manual on synthetic, manual on fashion_mnist"):
        compare((STATE, {}), (STATE, other))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"versions": {}}, "(oneDNN on AVX2; not recorded)"),
        ({"versions": {"cpu_kernels": "Eigen on AVX2"}}, "(oneDNN on AVX2; Eigen on AVX2)"),
        ({"changes": ["step 3: kernels of the CPU: a → oneDNN on AVX2"]}, "; step 3: kernels of"),
        ({"changes": ["step 3: epochs 2 → 3"]}, ""),
    ],
)
def test_runs_of_other_kernels_may_differ(changes, expected):
    """Also if one of them resumed with others."""
    kernels = {"versions": {"cpu_kernels": "oneDNN on AVX2"}}
    other = changed("model/conv/kernel", 5, 5.5)
    (pair,) = compare((STATE, kernels), (other, kernels | changes))
    verdict, *_, why = pair_lines([pair], 10)
    if expected:
        assert verdict == "The trainings end with different weights, as expected."
        assert "the kernels of the CPU, which round differently" in why and expected in why
    else:
        assert verdict == "Weights differ that should be bitwise identical."


def test_a_reason_to_differ_is_named():
    other = changed("model/conv/kernel", 5, 5.5)
    (pair,) = compare((STATE, {}), (other, {"all_reduce": "nccl"}))
    assert "the summation order differs" in pair.why
    seed = {"model/dropout/seed_generator/seed_generator_state": np.zeros(2, np.int64)}
    runs = ({**STATE, **seed}, {"num_shards": 1}), ({**other, **seed}, {"num_shards": 2})
    assert "random layers draw different numbers" in compare(*runs)[0].why
