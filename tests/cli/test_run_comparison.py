"""Tests the comparison of the final weights of runs."""

import dataclasses

import numpy as np
import pytest

from app.commands.compare import compare_weights
from app.errors import DataError
from app.records.checkpoint import Checkpoint
from app.report.page import pairs_verdict, results_table
from tests.training.test_checkpoint import RUN_METADATA, STATE, make_history
from tests.training.test_records import make_summary


def changed(name, index, value):
    array = STATE[name].copy()
    array.flat[index] = value
    return {**STATE, name: array}


OTHER = changed("model/conv/kernel", 5, 5.5)


def compare(**runs):
    """Compares runs, each given by its state and what differs in its metadata."""
    trained = {
        name: Checkpoint(dataclasses.replace(RUN_METADATA, **changes), make_history(4), state)
        for name, (state, changes) in runs.items()
    }
    return compare_weights(trained)


def difference(first, second):
    (pair,) = compare(a=(first, {}), b=(second, {}))
    return pair["where"], pair["absolute"], pair["relative"]


def test_the_largest_difference_is_named():
    name, absolute, _ = difference(STATE, {**OTHER, "model/conv/bias": np.zeros(3)})
    assert name in ("conv/kernel", "conv/bias") and absolute == 0.5
    assert difference(STATE, OTHER) == ("conv/kernel", 0.5, pytest.approx(0.5 / 5.5))
    assert difference(STATE, STATE) == ("", 0.0, 0.0)
    name, absolute, _ = difference(STATE, changed("model/conv/kernel", 0, np.nan))
    assert name == "conv/kernel" and np.isnan(absolute)
    zeros = np.zeros(3, np.float32)
    zero, minus = ({**STATE, "model/conv/bias": value} for value in (zeros, -zeros))
    assert difference(zero, minus) == ("conv/bias", 0.0, 0.0)


def test_verdicts():
    one = {"num_replicas": 1, "num_shards": 1}
    pairs = compare(single=(OTHER, one), manual=(STATE, {}), mirrored=(STATE, {}))
    assert pairs_verdict(pairs)[1] == (
        "manual and mirrored end with bitwise identical weights; the others differ, as expected."
    )
    assert pairs[0]["why"].startswith("A difference is expected: the summation order differs")
    unexpected = compare(manual=(STATE, {}), mirrored=(OTHER, {}))
    assert "should be identical" in unexpected[0]["why"]
    assert pairs_verdict(unexpected) == ("bad", "Weights differ that should be bitwise identical.")
    same = compare(manual=(STATE, {}), mirrored=(STATE, {}))
    assert pairs_verdict(same) == ("good", "All trainings end with bitwise identical weights.")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("norm/moving_mean", "normalised with its own statistics"),
        ("dropout/seed_generator/seed_generator_state", "random layers draw different numbers"),
    ],
)
def test_a_reason_to_differ_is_named(name, why):
    more = {f"model/{name}": np.zeros(2, np.int64)}
    (pair,) = compare(single=({**OTHER, **more}, {"num_shards": 1}), manual=({**STATE, **more}, {}))
    assert why in pair["why"]
    (pair,) = compare(a=(STATE, {}), b=(OTHER, {"all_reduce": "nccl"}))
    assert "the summation order differs" in pair["why"]


def test_the_table_shows_speed_up_over_single_on_real_devices():
    single = make_summary(make_history(4), {"strategy": "single"})
    manual = make_summary(make_history(4))
    single["epoch_sec"], single["devices"] = 10.0, ["/device:GPU:0"]
    manual["epoch_sec"] = 8.0
    _, rows = results_table({"single": single, "manual": manual})
    assert rows[1] == ["manual", "2 simulated", "0.7500", "8.00", "400"]
    for summary in (single, manual):
        summary["simulated_devices"] = False
    _, rows = results_table({"single": single, "manual": manual})
    assert [row[-1] for row in rows] == ["1.00x", "1.25x"]


def test_runs_on_different_images_are_not_compared():
    other = {"dataset_sha256": "2", "dataset": "fashion_mnist"}
    with pytest.raises(DataError, match="a on synthetic, b on fashion_mnist"):
        compare(a=(STATE, {}), b=(STATE, other))
