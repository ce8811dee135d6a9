"""Our strategies are verified by the one engine: right trainings are clean, each fault is named.

Each training is recorded once; most faults are made in the arrays of the recording.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from app.data.input_pipeline import train_dataset
from app.options.fault import FAULTS
from app.training.optimizers import ScaledSGD
from lockstep.data.trace import STATE, WEIGHT
from strategies import model_parallel, sync_batch_norm
from strategies.replica import Replica
from strategies.stages import Passes
from strategies.tf_private import learning_rate_schedule
from tests.conftest import CPUS
from tests.verifier import verification_samples
from tests.verifier.verification_samples import (
    GLOBAL_BATCH_SIZE,
    SPLITS,
    norm,
    plain,
    record,
    recorded,
    residual,
    sgd,
)

slow = pytest.mark.slow

# Manual, mirrored, single and pipeline compute as the oracle does; no tolerance is needed.
BITWISE = ("single", "manual", "mirrored", "pipeline", "weighted")
PLAIN = ("multi_worker", "tensor", "accumulation", "tensor 2 × 2", "pipeline 2 × 2")
QUICK = (*BITWISE, *PLAIN, "sharded", "sync manual", "sync mirrored")


@pytest.mark.parametrize(
    ("split", "build"),
    [
        *(pytest.param(split, norm, marks=pytest.mark.parity) for split in BITWISE),
        *((split, plain) for split in PLAIN),
        *((split, norm) for split in QUICK if split not in (*BITWISE, *PLAIN)),
        *(pytest.param(split, norm, marks=slow) for split in SPLITS if split not in QUICK),
        pytest.param("tensor", residual, marks=slow),
    ],
)
def test_right_trainings_are_clean(split, build):
    """Every stage of every step is measured, and within its tolerance."""
    training = recorded(split, build)
    verdict = training.check()
    assert verdict.status == "clean", str(verdict)
    stages = {"start", "examples", "forward", "loss", "gradients", "update"}
    stages |= {"statistics"} if build is not plain else set()
    assert stages <= set(verdict.checked)
    assert {m.step for m in verdict.measurements} == {0, 1, 2}
    assert all(m.allowed < 0.1 for m in verdict.measurements)
    assert split not in BITWISE or all(m.same_bits for m in verdict.measurements)
    shards = {m.item for m in verdict.measurements if m.stage == "gradients"}
    together = training.trace.about.syncs_batch_norm
    assert len(shards) == (1 if together else len(training.trace.shards))


def scaled():
    return ScaledSGD(0.1, momentum=0.9, initial_scale=2.0**10)


def overflowing():
    """Creates an optimizer that skips the first steps."""
    return ScaledSGD(0.1, momentum=0.9, weight_decay=1e-3, initial_scale=2.0**22)


@pytest.mark.parametrize(
    ("split", "precision", "optimizer"),
    [
        ("manual", "mixed_bfloat16", sgd),
        ("tensor", "mixed_float16", scaled),
        ("pipeline", "mixed_float16", overflowing),
        pytest.param("sync manual", "mixed_float16", overflowing, marks=slow),
        pytest.param("sharded", "mixed_float16", overflowing, marks=slow),
    ],
)
def test_other_precisions_are_clean(split, precision, optimizer):
    verdict = record(split, norm, precision=precision, optimizer=optimizer).check()
    assert verdict.status == "clean", str(verdict)


def test_the_reference_of_skipped_steps_is_not_the_optimizer_itself(monkeypatch):
    """The update without weight decay, with a loss scale that does not overflow."""

    def decaying():
        return ScaledSGD(0.1, momentum=0.9, weight_decay=1e-3, initial_scale=2.0**10)

    monkeypatch.setattr(ScaledSGD, "update_step", keras.optimizers.SGD.update_step)
    verdict = record("manual", norm, precision="mixed_float16", optimizer=decaying).check()
    assert causes(verdict) == {("update", "other_weight_decay")}, str(verdict)


def test_a_schedule_that_is_a_step_ahead_is_not_an_update_that_is_made_twice():
    """The first step of a warm-up, whose learning rate is 0, is then that of the second one."""

    def warming():
        schedule = keras.optimizers.schedules.CosineDecay(0.0, 5, warmup_target=0.1, warmup_steps=3)
        return keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True, weight_decay=1e-3)

    def one_ahead(strategy):
        optimizer = strategy.optimizer
        update_step, rate = optimizer.update_step, learning_rate_schedule(optimizer)

        def update_ahead(gradient, variable, learning_rate):
            update_step(gradient, variable, rate(optimizer.iterations + 1))

        optimizer.update_step = update_ahead

    verdict = record("single", plain, optimizer=warming, begin=one_ahead).check()
    assert causes(verdict) == {("update", "other_learning_rate")}, str(verdict)


def test_rounding_is_right_and_more_is_not():
    """As on another device: gradients that differ from those of one device by rounding alone."""

    def rounded(training, units):
        def edit(trace):
            for shard in trace.shards:
                change(trace, 0, "raw", shard, lambda a: a * (1 + units * np.float32(2.0**-23)))

        return training.edited(edit).check(1)

    verdict = rounded(recorded("tensor", norm), 2)
    assert "gradients" not in {finding.stage for finding in verdict.findings}, str(verdict)
    verdict = rounded(recorded("tensor", norm), 20_000)
    assert "gradients" in {finding.stage for finding in verdict.faults}


def test_an_all_reduce_in_bfloat16_is_right_where_it_was_asked_for():
    training = recorded("bfloat16")
    assert training.check().status == "clean"
    verdict = training.edited(lambda trace: None, reduced_in="").check()
    assert causes(verdict) == {("all-reduce", "reduced_precision")}


# --- Faults --------------------------------------------------------------------------------------


def causes(verdict):
    return {(finding.stage, finding.detail) for finding in verdict.faults}


INJECTED = [  # Fault, split, network, stage and cause.
    ("drop_gradient", "tensor 2 × 2", plain, "all-reduce", "lost_replica"),
    ("scale_gradient:factor=3", "manual", plain, "all-reduce", "scaled_gradient"),
    ("mean_of_means", "manual", norm, "all-reduce", "mean_of_means"),
    ("same_shard", "pipeline", plain, "examples", "same_examples"),
    ("shuffle_order", "manual", plain, "examples", "other_order"),
    ("perturb_weight:step=2", "manual", plain, "update", "changed_on_its_own"),
    ("local_batch_norm", "manual", norm, "statistics", "statistics_not_averaged"),
    ("bf16_all_reduce", "manual", plain, "all-reduce", "reduced_precision"),
    ("lost_micro_batch", "pipeline 2 × 2", plain, "all-reduce", "lost_micro_batch"),
    ("divided_twice", "pipeline", plain, "all-reduce", "mean_instead_of_sum"),
    ("stale_stage", "pipeline 2 × 2", plain, "forward", "stale_stage"),
    ("forgotten_backward_sum", "tensor 2 × 2", norm, "gradients", "forgotten_backward_sum"),
    ("repeated_bias", "tensor", plain, "forward", "repeated_bias"),
    ("wrong_shard", "sharded", plain, "forward", "swapped_parts"),
    ("wrong_shard", "sharded state", norm, "update", "swapped_parts"),
    ("unsynced_batch_norm", "sync manual", norm, "forward", "local_statistics"),
    ("unsynced_batch_norm", "sync mirrored", norm, "forward", "local_statistics"),
]
# Fault → steps, shards, and a part of the text of its finding.
PLACES = {
    "drop_gradient": ((0, 1), {"replica 1"}, "of replica 1"),
    "perturb_weight:step=2": ((1,), {"replica 1"}, "elements differs from the update"),
    "lost_micro_batch": (
        (0, 1), {"micro-batch 1 of replica 0", "micro-batch 1 of replica 1"},
        "the gradient of micro-batch 1 of replica 0",
    ),
    "stale_stage": (
        (1,), {f"micro-batch {m} of replica {r}" for m in (0, 1) for r in (0, 1)},
        "the previous step's weights of stage 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "split", "build", "stage", "cause"), INJECTED)
def test_injected_faults_are_named(fault, split, build, stage, cause):
    """What follows from a fault is right for a wrong sum, and not a fault."""
    verdict = record(split, build, fault=fault, num_steps=2).check()
    assert verdict.faults, str(verdict)
    first = verdict.faults[0]
    assert (first.stage, first.detail) == (stage, cause), str(verdict)
    assert {finding.detail for finding in verdict.faults} == {cause}, str(verdict)
    if fault in PLACES:
        steps, items, told = PLACES[fault]
        assert len(verdict.faults) == 1, str(verdict)
        assert (first.steps, {*first.items}) == (steps, items) and told in first.text


@pytest.mark.parametrize(
    ("split", "second_devices_only", "cause", "tensors"),
    [
        ("tensor 2 × 2", False, "not_all_reduced", 6),
        ("tensor 2 × 2", True, "own_gradient_only", 6),  # Of the channels of these devices.
        ("pipeline 2 × 2", True, "partly_all_reduced", 4),  # Of the second stage.
    ],
)
def test_gradients_that_are_not_summed_over_the_replicas_are_named(
    monkeypatch, split, second_devices_only, cause, tensors
):
    all_reduce = model_parallel._all_reduce

    def skipped(own, devices):
        is_first = devices == CPUS[:4:2]
        return all_reduce(own, devices) if is_first and second_devices_only else own

    monkeypatch.setattr(model_parallel, "_all_reduce", skipped)
    verdict = record(split, plain).check()
    (finding,) = verdict.faults
    assert (finding.stage, finding.detail) == ("all-reduce", cause), str(verdict)
    assert set(finding.items) == {"replica 0", "replica 1"} and len(finding.tensors) == tensors


def test_activations_that_stages_send_in_bfloat16_are_named(monkeypatch):
    forward, backward = Passes.forward, Passes.backward

    def sent(x):
        return tf.cast(tf.cast(x, tf.bfloat16), x.dtype) if x.dtype.is_floating else x

    def backward_of_sent(self, k, m, dy, loss_scale):
        return backward(self, k, m, sent(dy) if k == 0 else dy, loss_scale)

    monkeypatch.setattr(Passes, "forward", lambda self, k, m, x: forward(self, k, m, sent(x)))
    monkeypatch.setattr(Passes, "backward", backward_of_sent)
    verdict = record("pipeline", plain).check(1)
    assert causes(verdict) == {("forward", "reduced_precision")}, str(verdict)
    assert "with the outputs of" in verdict.faults[0].text


def test_another_momentum_of_synchronised_statistics_is_not_local(monkeypatch):
    def apply(layer, *arguments):
        momentum = layer.momentum
        layer.momentum = 1 - momentum
        try:
            return inner(layer, *arguments)
        finally:
            layer.momentum = momentum

    inner = sync_batch_norm._apply
    monkeypatch.setattr(sync_batch_norm, "_apply", apply)
    verdict = record("sync manual", norm).check(1)
    assert causes(verdict) == {("statistics", "other_batch_norm_momentum")}, str(verdict)


def test_statistics_that_all_micro_batches_update_are_named(monkeypatch):
    values = Replica.values
    monkeypatch.setattr(Replica, "values", lambda self, index: values(self, 0))
    first = record("accumulation 2 × 2", norm).check(1).faults[0]
    assert (first.stage, first.detail) == ("statistics", "doubled_average"), first


def test_every_fault_to_inject_is_tested():
    assert {fault.partition(":")[0] for fault, *_ in INJECTED} | {"slow_replica"} == set(FAULTS)


def change(trace, position, kind, item, function, only=None):
    """Changes the arrays of floating-point numbers of a kind, or only one of them."""
    arrays = [
        function(array).astype(array.dtype)
        if array is not None and array.dtype.kind == "f" and only in (None, index)
        else array
        for index, array in enumerate(trace.arrays(position, kind, item))
    ]
    trace.put(position, kind, item, arrays)


def other_start(kind):
    """All replicas start from another value of the last variable of a kind."""

    def edit(trace):
        last = [i for i, entry in enumerate(trace.about.variables) if entry.kind == kind][-1]
        for copy in trace.copies:
            change(trace, 0, "before", copy, lambda array: array + 0.01, only=last)

    return edit


def not_cleared(trace):
    for copy in trace.copies:
        pairs = zip(trace.arrays(0, "sums", copy), trace.arrays(1, "sums", copy), strict=True)
        trace.put(1, "sums", copy, [before + own for before, own in pairs])


def repeated(trace):
    trace.put(1, "raw", 1, trace.arrays(1, "raw", 0))


def unpacked(order, shift):
    """Returns an edit of sums that are put into a bucket, moved and taken out in an order."""

    def edit(trace):
        for copy in trace.copies:
            sums = trace.arrays(1, "sums", copy)
            bucket = np.roll(np.concatenate([np.ravel(a) for a in sums]), shift)
            ends = np.cumsum([a.size for a in sums[::order]])[:-1]
            pairs = zip(np.split(bucket, ends), sums[::order], strict=True)
            trace.put(1, "sums", copy, [part.reshape(a.shape) for part, a in pairs][::order])

    return edit


def clipped(trace):
    for shard in trace.shards:
        raw = trace.arrays(1, "raw", shard)
        trace.put(1, "raw", shard, [a * np.float32(1e-3 / norm_of(raw)) for a in raw])


def norm_of(arrays):
    return np.sqrt(sum(np.sum(np.square(a)) for a in arrays))


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (other_start(WEIGHT), ("start", "other_initial_weights")),
        (other_start(STATE), ("start", "other_initial_state")),
        (repeated, ("gradients", "repeated_gradient")),
        (clipped, ("gradients", "clipped_before_the_sum")),
        (not_cleared, ("all-reduce", "stale_gradient")),
        (unpacked(-1, 0), ("all-reduce", "swapped_parts")),
        (unpacked(1, 1), ("all-reduce", "swapped_parts")),
        (lambda trace: change(trace, 1, "sums", 1, lambda a: np.nextafter(a, 2 * a)),
         ("all-reduce", "unequal_sums")),
        (lambda trace: change(trace, 1, "own_after", 1, lambda a: 1.01 * a),
         ("statistics", "unexplained")),
    ],
)  # fmt: skip
def test_a_fault_in_a_stage_is_found_there(edit, found):
    verdict = recorded("manual", norm).edited(edit).check(2)
    assert verdict.faults, str(verdict)
    assert (verdict.faults[0].stage, verdict.faults[0].detail) == found, str(verdict)


def test_a_factor_of_one_devices_channels_is_named():
    def doubled(array):
        first, second, third = np.array_split(array, 3, axis=-1)
        return np.concatenate([first, 2 * second, third], axis=-1)

    training = recorded("tensor", plain)
    verdict = training.edited(lambda trace: change(trace, 1, "raw", 0, doubled, only=0)).check(2)
    first = verdict.faults[0]
    assert (first.stage, first.detail) == ("gradients", "scaled_gradient"), str(verdict)
    assert "the channels of device 1 of 3 are 2 times as large" in first.text


def test_a_loss_of_the_targets_of_another_micro_batch_is_named():
    def edit(trace):
        (logits,), (_, labels) = trace.arrays(1, "y_pred", 0), trace.arrays(1, "data", 1)
        of_targets = np.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
        loss = np.sum(np.log(np.sum(np.exp(logits), axis=1)) - of_targets) / GLOBAL_BATCH_SIZE
        trace.put(1, "loss", 0, [np.float32(loss), np.float32(0)])

    first = recorded("pipeline", norm).edited(edit).check(2).faults[0]
    assert (first.stage, first.detail) == ("loss", "other_targets")
    assert first.text == "the loss is that of the targets of micro-batch 1"


def test_a_full_batch_in_place_of_the_short_last_one_is_named(monkeypatch):
    dropped = functools.partial(train_dataset, last_batch="drop")
    monkeypatch.setattr(verification_samples, "train_dataset", dropped)
    first = record("manual", plain).check().faults[0]
    assert (first.stage, first.detail, first.steps) == ("examples", "last_batch_dropped", (2,))
    assert first.text.endswith("of 10 examples here, the training a batch of 15")
