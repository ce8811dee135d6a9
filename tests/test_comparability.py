"""Unfair comparisons are refused or marked, and fair ones are not."""

import pytest

from app.performance.case_comparison import all_comparisons, compare
from performance_samples import make_sample


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"jit_compile": True}, "XLA on one side only"),
        ({"tracings": 1}, "traced 5 times while it was timed"),
        ({"dataset": "synthetic"}, "other images"),
    ],
)
def test_unfair_comparisons_are_refused(change, text):
    comparison = compare("strategy", make_sample("mirrored", **change), make_sample())
    assert comparison.speed_up is None and comparison.verdict == "refused"
    assert comparison.caveats[0].startswith("refused: ") and text in comparison.caveats[0]


def test_shared_processors_and_rounded_float32_are_marked_not_refused():
    simulated = compare("strong scaling", make_sample(num_devices=2, simulated=True), make_sample())
    assert "2 share 2 cores" in simulated.caveats[0] and simulated.speed_up is not None
    tf32 = compare(
        "precision",
        make_sample(precision="mixed_bfloat16", tensor_float_32=True),
        make_sample(tensor_float_32=True),
    )
    assert tf32.caveats == ["float32 products are rounded to TF32"] and tf32.speed_up is not None


def test_from_few_rounds_there_is_no_verdict():
    few = make_sample(step_secs=(1.0, 1.0)), make_sample("mirrored", step_secs=(2.0, 2.0))
    comparison = compare("strategy", *few)
    assert comparison.verdict == "refused" and "fewer than 5 rounds" in comparison.caveats[0]


def test_another_all_reduce_is_marked_but_one_device_has_none():
    nccl, own = make_sample("mirrored", 2, all_reduce="nccl"), make_sample("manual", 2)
    assert compare("strategy", nccl, own).caveats == ["another all-reduce: reduce_to_one and nccl"]
    assert compare("strategy", make_sample("manual"), make_sample(all_reduce="none")).caveats == []


def test_verdicts():
    base = make_sample(step_secs=(1.0, 1.1, 0.9, 1.05, 0.95))
    same = make_sample("mirrored", step_secs=(1.01, 1.0, 0.98, 1.06, 0.94))
    faster = make_sample("mirrored", step_secs=(0.5, 0.55, 0.45, 0.52, 0.48))
    assert compare("strategy", same, base).verdict == "no difference found"
    found = compare("strategy", faster, base)
    assert found.verdict == "faster" and found.speed_up.value == pytest.approx(2.0)
    assert compare("strategy", base, faster).verdict == "slower"


def test_every_comparison_that_the_cases_allow_is_made_once():
    cases = [
        make_sample("single"),
        make_sample("manual", 1),
        make_sample("manual", 2),
        make_sample("manual", 4),
        make_sample("manual", 2, global_batch_size=512),
        make_sample("mirrored", 2),
        make_sample("mirrored", 2, precision="mixed_bfloat16"),
    ]
    found = [(c.axis, c.case[:12], c.base[:12], c.ideal) for c in all_comparisons(cases)]
    assert found == [
        ("strong scaling", "manual × 2, ", "single × 1, ", 2),
        ("strong scaling", "manual × 4, ", "single × 1, ", 4),
        ("strong scaling", "mirrored × 2", "single × 1, ", 2),
        ("weak scaling", "manual × 2, ", "single × 1, ", 2),
        ("strategy", "manual × 1, ", "single × 1, ", None),
        ("strategy", "mirrored × 2", "manual × 2, ", None),
        ("precision", "mirrored × 2", "mirrored × 2", None),
    ]
