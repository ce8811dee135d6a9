"""Tests verification with different numbers of shards, copies of the weights and devices."""

import keras
import numpy as np
import pytest
from test_trace_checker import CAUSES, Case, reference

from app.options.fault import FAULTS, Fault
from app.runtime.errors import ConfigError
from app.verification.measurement import relative_error
from app.verification.split import Split
from app.verification.split_layers import without_backward_sums
from app.verification.trace import Trace
from app.verification.trace_comparison import compare_traces, first_sums_apart
from app.verification.verdict import BY_DESIGN, EQUAL, IDENTICAL, PairVerdict
from conftest import CPUS
from small_models import small_network, small_resnet
from strategies import load_strategy_class

SPLITS = {
    "pipeline": ("pipeline", 2, {"micro_batches": 4}),
    "pipeline 2 × 2": ("pipeline", 4, {"micro_batches": 2, "model_parallel": 2}),
    "tensor": ("tensor", 3, {}),
    "tensor 2 × 2": ("tensor", 4, {"model_parallel": 2}),
    "sharded": ("sharded", 3, {}),
    "sharded state": ("sharded", 3, {"shard": "optimizer"}),
    "accumulation": ("single", 1, {"accumulate_steps": 4}),
    "accumulation 2 × 2": ("manual", 2, {"accumulate_steps": 2}),
    "mirrored accumulation": ("mirrored", 2, {"accumulate_steps": 2}),
    "weighted": ("manual", 2, {"shard_weights": (3, 1)}),
}
SYNCED = {
    "manual": ("manual", 2),
    "mirrored": ("mirrored", 3),
    "sharded": ("sharded", 2),
}


def create(split):
    name, num_devices, options = SPLITS[split]
    return load_strategy_class(name)(CPUS[:num_devices], **options)


def create_synced(name):
    strategy, num_devices = SYNCED[name]
    return load_strategy_class(strategy)(CPUS[:num_devices], batch_norm="sync")


def two_layers():
    """A network whose backward pass goes through a gather of channels, and of flat channels."""
    layers = keras.layers
    x = images = keras.Input((28, 28, 1), dtype="uint8")
    for layer in (
        layers.Rescaling(1 / 255),
        layers.Conv2D(5, 5, strides=4, activation="relu", name="conv1"),
        layers.Conv2D(6, 3, strides=2, activation="relu", name="conv2"),
        layers.Flatten(),
        layers.Dense(12, activation="relu", name="hidden"),
        layers.Dense(10, name="logits"),
    ):
        x = layer(x)
    return keras.Model(images, x, name="two_layers")


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("build", [two_layers, pytest.param(small_resnet, marks=pytest.mark.slow)])
def test_clean_trainings_hold(images, tmp_path, split, build):
    case = Case(images, build)
    trace, send_sec = case.record(create(split), tmp_path / "t", num_steps=5)
    verdict = case.check(trace, send_sec=send_sec)
    assert verdict.passed, verdict.findings()


@pytest.mark.parametrize("name", SYNCED)
def test_synchronized_batch_norm_holds(images, tmp_path, name):
    case = Case(images, small_resnet)
    trace, _ = case.record(create_synced(name), tmp_path / "t")
    verdict = case.check(trace)
    assert verdict.passed, verdict.findings()
    single, _ = case.record(load_strategy_class("single")(CPUS[:1]), tmp_path / "single")
    pair = PairVerdict.of(case.check(single), verdict, compare_traces(single, trace))
    assert pair.outcome == EQUAL
    assert first_sums_apart(single, trace) < 1e-4


@pytest.mark.parametrize(
    ("split", "other"),
    [
        ("pipeline", ("manual", 4, {})),
        ("sharded", ("manual", 3, {})),
        ("pipeline 2 × 2", ("manual", 4, {})),
    ],
)
def test_shards_that_are_the_same_are_bit_identical(images, tmp_path, split, other):
    case = Case(images, small_resnet)
    name, num_devices, options = other
    strategies = create(split), load_strategy_class(name)(CPUS[:num_devices], **options)
    traces = [case.record(s, tmp_path / str(i))[0] for i, s in enumerate(strategies)]
    verdicts = [case.check(trace) for trace in traces]
    pair = PairVerdict.of(*verdicts, compare_traces(*traces))
    expected = EQUAL if split == "pipeline 2 × 2" else IDENTICAL  # It adds in another order.
    assert pair.outcome == expected


def test_other_shards_with_batch_norm_are_another_training(images, tmp_path):
    case = Case(images, small_resnet)
    traces = [case.record(create(split), tmp_path / split)[0] for split in ("pipeline", "sharded")]
    apart = first_sums_apart(*traces)
    assert apart > 0.01
    verdicts = [case.check(trace) for trace in traces]
    pair = PairVerdict.of(*verdicts, compare_traces(*traces), by_design=apart)
    assert pair.outcome == BY_DESIGN and pair.by_design == apart


NEW_CAUSES = [
    ("lost_micro_batch", "pipeline", "gradient of micro-batch 1"),
    ("lost_micro_batch", "pipeline 2 × 2", "gradient of micro-batch 1 of every replica"),
    ("lost_micro_batch", "accumulation", "gradient of micro-batch 1"),
    ("lost_micro_batch:micro_batch=0", "accumulation 2 × 2", "micro-batch 0 of every replica"),
    ("lost_micro_batch", "mirrored accumulation", "micro-batch 1 of every replica"),
    ("divided_twice", "accumulation", "4 is the number of micro-batches"),
    ("divided_twice", "accumulation 2 × 2", "2 is the number of micro-batches"),
    ("divided_twice", "pipeline", "4 is the number of micro-batches"),
    ("stale_stage", "pipeline", "stage 1"),
    ("stale_stage:stage=0", "pipeline", "stage 0"),
    ("stale_stage", "pipeline 2 × 2", "stage 1"),
    ("forgotten_backward_sum", "tensor", "each of 3 devices"),
    ("forgotten_backward_sum", "tensor 2 × 2", "each of 2 devices"),
    ("repeated_bias", "tensor", "added 3 times"),
    ("repeated_bias", "tensor 2 × 2", "added 2 times"),
    ("wrong_shard", "sharded", "device 0 and device 1"),
    ("wrong_shard", "sharded state", "device 0 and device 1"),
]


@pytest.mark.parametrize(("fault", "split", "said"), NEW_CAUSES)
@pytest.mark.parametrize("build", [two_layers, pytest.param(small_resnet, marks=pytest.mark.slow)])
def test_faults_are_caught_and_named(images, tmp_path, fault, split, said, build):
    case = Case(images, build)
    fault = Fault.parse(fault)
    trace, _ = case.record(create(split), tmp_path / "t", fault=fault)
    verdict = case.check(trace)
    assert verdict.diagnosis.cause == fault.name, verdict.findings()
    assert said in verdict.diagnosis.text
    late = fault.name in ("stale_stage", "repeated_bias")  # Until biases, or weights, have moved.
    assert verdict.first_mismatch.step == (2 if late else 1)
    assert verdict.first_mismatch.kind == {
        "lost_micro_batch": "sums",
        "divided_twice": "sums",
        "forgotten_backward_sum": "gradients",
    }.get(fault.name, "updates" if split == "sharded state" else "loss")


@pytest.mark.parametrize("name", SYNCED)
def test_statistics_of_one_s_own_shard_are_named(images, tmp_path, name):
    case, fault = Case(images, small_resnet), Fault.parse("unsynced_batch_norm")
    trace, _ = case.record(create_synced(name), tmp_path / "t", fault=fault)
    verdict = case.check(trace)
    assert verdict.diagnosis.cause == "unsynced_batch_norm"
    assert "asks for all 15 of the batch" in verdict.diagnosis.text
    assert verdict.first_mismatch.step == 1
    assert "every replica" in verdict.findings()[0].where


@pytest.mark.parametrize(
    ("fault", "split", "said"),
    [
        ("scale_gradient", "tensor", "2 times"),
        ("scale_gradient", "pipeline", "2 times"),
        ("scale_gradient", "accumulation", "2 times"),
        ("drop_gradient", "pipeline 2 × 2", "gradient of replica 1"),
        ("drop_gradient", "tensor 2 × 2", "gradient of replica 1"),
        ("drop_gradient", "accumulation 2 × 2", "gradient of replica 1"),
        ("drop_gradient", "weighted", "gradient of replica 1"),
        ("mean_of_means", "pipeline", "micro-batches' means"),
        ("mean_of_means", "accumulation", "micro-batches' means"),
        ("mean_of_means", "weighted", "replicas' means"),
        ("mean_of_means", "tensor 2 × 2", "replicas' means"),
        ("same_shard", "pipeline", "micro-batch 1 and micro-batch 0"),
        ("same_shard", "weighted", "replica 1 and replica 0"),
        ("shuffle_order", "accumulation 2 × 2", "of replica 1 has another order of examples"),
        ("shuffle_order", "tensor 2 × 2", "replica 1 has another order of examples"),
        ("shuffle_order", "weighted", "replica 1 has another order of examples"),
        ("perturb_weight", "tensor 2 × 2", "replica 1"),
        ("perturb_weight", "pipeline 2 × 2", "replica 1"),
        ("bf16_all_reduce", "pipeline", "bfloat16"),
    ],
)
def test_faults_of_data_parallelism_are_named_in_other_splits(images, tmp_path, fault, split, said):
    case = Case(images, small_network)
    trace, _ = case.record(create(split), tmp_path / "t", fault=Fault.parse(fault))
    verdict = case.check(trace)
    assert verdict.diagnosis.cause == CAUSES[fault]
    assert said in str(verdict.findings()[0])


@pytest.mark.parametrize("split", ["pipeline", "accumulation 2 × 2"])
def test_statistics_of_the_first_micro_batch_are_named(images, tmp_path, split):
    case, fault = Case(images, small_resnet), Fault.parse("local_batch_norm")
    trace, _ = case.record(create(split), tmp_path / "t", fault=fault)
    diagnosis = case.check(trace).diagnosis
    assert diagnosis.cause == "local_batch_norm" and "every micro-batch" in diagnosis.text


def test_every_fault_is_in_these_tests():
    tested = {Fault.parse(fault).name for fault, *_ in NEW_CAUSES}
    assert set(FAULTS) == {*CAUSES, "slow_replica", *tested, "unsynced_batch_norm"}


@pytest.mark.parametrize(
    ("fault", "split", "said"),
    [
        ("lost_micro_batch", "sharded", "micro-batches"),
        ("stale_stage", "tensor", "only in pipeline"),
        ("stale_stage:stage=2", "pipeline", "at least 3 devices of a replica"),
        ("wrong_shard", "tensor", "only in sharded"),
        ("unsynced_batch_norm", "sharded", "needs statistics of the whole batch"),
        ("local_batch_norm", "tensor", "at least 2 shards"),
        ("drop_gradient", "pipeline", "at least 2 replicas"),
        ("perturb_weight", "sharded", "at least 2 copies"),
    ],
)
def test_a_fault_that_cannot_happen_is_refused(images, tmp_path, fault, split, said):
    with pytest.raises(ConfigError, match=said) as caught:
        Case(images, small_resnet).record(create(split), tmp_path / "t", fault=Fault.parse(fault))
    assert str(caught.value).startswith(f"--inject={fault}")
    assert "\n" not in str(caught.value)


def test_statistics_that_are_all_the_same_cannot_be_local(images, tmp_path):
    with pytest.raises(ConfigError, match="batch_norm=average"):
        Case(images, small_resnet).record(
            create_synced("manual"), tmp_path / "t", fault=Fault.parse("local_batch_norm")
        )


def test_parts_are_in_the_trace(images, tmp_path):
    trace, _ = Case(images, two_layers).record(create("tensor"), tmp_path / "t", num_steps=1)
    assert [part["conv1/bias"] for part in trace.parts()] == [(2,), (2,), (1,)]
    trace, _ = Case(images, two_layers).record(create("pipeline"), tmp_path / "p", num_steps=1)
    first, second = trace.parts()
    assert not set(first) & set(second)
    assert trace.split == Split(1, 4, 1) == Trace(tmp_path / "p").split


@pytest.mark.parametrize("build", [two_layers, small_resnet])
def test_a_forgotten_sum_spares_the_last_layer(images, build):
    """What the hypothesis computes, against what is known of it."""
    exact = reference(build, Case(images).functions[1], "float64")
    batch = Case(images).batch(1)
    rows = [np.arange(len(batch[1]))]
    (right,) = exact.gradients(exact.initial_state, *batch, rows)
    paths = list(right.gradients)

    def forgotten(num_devices):
        sizes = {
            path: [len(part) for part in np.array_split(np.arange(g.shape[-1]), num_devices)]
            for path, g in right.gradients.items()
        }
        forward = without_backward_sums(sizes)
        (result,) = exact.gradients(exact.initial_state, *batch, rows, forward=forward)
        return result

    one, two = forgotten(1), forgotten(2)
    np.testing.assert_allclose(two.loss, right.loss, rtol=1e-12)
    for path in paths:
        np.testing.assert_allclose(one.gradients[path], right.gradients[path], atol=1e-12)
    apart = {path: relative_error(two.gradients[path], right.gradients[path]) for path in paths}
    assert max(apart["logits/kernel"], apart["logits/bias"]) < 1e-12
    kernels = [path for path in paths if path.endswith("kernel") and path != "logits/kernel"]
    assert min(apart[path] for path in kernels) > 0.1


@pytest.mark.parametrize(
    ("split", "shards", "said"),
    [
        (Split(2, 2, 2), [1], "replica 1"),
        (Split(2, 2, 2), [0, 1], "every replica"),
        (Split(1, 1, 1), [0], "the one replica"),
        (Split(1, 4, 1), [2], "micro-batch 2"),
        (Split(1, 4, 1), [0, 1, 2, 3], "every micro-batch"),
        (Split(2, 4, 2), [1, 2], "micro-batch 1 of replica 0, micro-batch 0 of replica 1"),
        (Split(3, 3, 3, syncs_batch_norm=True), [0], "every replica"),
    ],
)
def test_shards_have_names(split, shards, said):
    assert split.name_items("gradients", shards) == said
