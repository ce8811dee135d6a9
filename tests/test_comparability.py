"""Unfair comparisons are refused or marked, and fair ones are not."""

import pytest

from app.performance.comparability import find_caveats, setup_caveats
from app.performance.speed_comparison import all_comparisons, compare
from performance_samples import make_sample


@pytest.mark.parametrize(
    ("axis", "change", "text"),
    [
        ("strategy", {"jit_compile": True}, "XLA on one side only"),
        ("strong scaling", {"global_batch_size": 512}, "another global batch: 256 and 512"),
        ("weak scaling", {"global_batch_size": 512}, "another batch for each device: 256 and 512"),
        ("strategy", {"tracings": 1}, "traced 5 times while it was timed"),
        ("strategy", {"precision": "mixed_bfloat16"}, "another precision: float32 and bfloat16"),
        ("precision", {"tensor_float_32": True}, "TF32 on one side only"),
        ("strategy", {"dataset": "synthetic"}, "other images"),
        ("strategy", {"model": "resnet18"}, "another model"),
        ("strategy", {"step_secs": (1.0, 1.0)}, "other rounds"),
    ],
)
def test_unfair_comparisons_are_refused(axis, change, text):
    first, second = make_sample(), make_sample("mirrored", **change)
    comparison = compare(axis, second, first)
    assert comparison.speed_up is None and comparison.verdict == "refused"
    assert any(text in caveat.text for caveat in comparison.caveats if caveat.refuses)


def test_the_same_global_batch_is_not_asked_of_weak_scaling():
    assert (
        find_caveats(
            make_sample(), make_sample(num_devices=2, global_batch_size=512), "weak scaling"
        )
        == []
    )


def test_shared_processors_and_rounded_float32_are_marked_not_refused():
    simulated = compare("strong scaling", make_sample(num_devices=2, simulated=True), make_sample())
    assert "2 share 2 cores" in simulated.caveats[0].text
    assert simulated.speed_up is not None
    tf32 = compare(
        "precision",
        make_sample(precision="mixed_bfloat16", tensor_float_32=True),
        make_sample(tensor_float_32=True),
    )
    assert [r.refuses for r in tf32.caveats] == [False] and "TF32" in tf32.caveats[0].text


def test_from_few_rounds_there_is_no_verdict():
    few = make_sample(step_secs=(1.0, 1.0)), make_sample("mirrored", step_secs=(2.0, 2.0))
    comparison = compare("strategy", *few)
    assert comparison.verdict == "refused" and "fewer than 5 rounds" in comparison.caveats[0].text
    assert "fewer than 5 rounds" in setup_caveats(few)[0]


def test_another_all_reduce_is_marked_but_one_device_has_none():
    nccl, own = make_sample("mirrored", 2, all_reduce="nccl"), make_sample("manual", 2)
    assert [r.text for r in find_caveats(own, nccl, "strategy")] == [
        "another all-reduce: reduce_to_one and nccl"
    ]
    assert (
        find_caveats(make_sample("single", all_reduce="none"), make_sample("manual"), "strategy")
        == []
    )


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


def test_strategies_are_compared_on_as_many_devices_however_many_replicas_they_make():
    pipeline = make_sample("pipeline", 2, num_replicas=1)
    cases = [make_sample("single"), make_sample("manual", 2), pipeline]
    found = [(c.axis, c.case[:12], c.base[:12], c.ideal) for c in all_comparisons(cases)]
    assert found == [
        ("strong scaling", "manual × 2, ", "single × 1, ", 2),
        ("strong scaling", "pipeline × 2", "single × 1, ", 2),
        ("strategy", "pipeline × 2", "manual × 2, ", None),
    ]


def test_what_concerns_everything_is_said_once():
    lines = setup_caveats([make_sample(num_devices=2, simulated=True, dataset="synthetic")] * 2)
    assert len(lines) == 2
    assert "share 2 cores" in lines[0] and "generated" in lines[1]
    assert setup_caveats([make_sample()]) == []
