"""The proof itself: right trainings of every split are clean, and each cause is found and named.

Each training is recorded once; most faults are made in the arrays of the recording.
"""

import inspect
import os
import pickle
import re
import subprocess
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from app.options.fault import FAULTS, Fault
from app.runtime.errors import ConfigError
from app.training.fault_injection import inject_fault
from app.training.optimizers import ScaledSGD
from app.verification import (
    arithmetic,
    diagnosis,
    replica_hypotheses,
    split_hypotheses,
    step_context,
)
from app.verification.recorder import Recorder
from app.verification.reference import Reference
from app.verification.shard_by_shard import effect_of_shards, train_shard_by_shard
from app.verification.split import Split
from app.verification.split_hypotheses import channels_of
from app.verification.split_layers import without_backward_sums
from app.verification.trace import Trace, hash_examples
from app.verification.trace_comparison import compare_traces, first_sums_apart
from app.verification.verdict import BY_DESIGN, DIFFERENT, EQUAL, IDENTICAL, PairVerdict
from conftest import CPUS, ROOT
from small_models import seeded
from strategies.manual import ManualStrategy
from strategies.observer import Observer
from verification_samples import (
    NUM_STEPS,
    SPLITS,
    Training,
    batch,
    batches,
    create,
    norm,
    plain,
    read_all,
    record,
    recorded,
    reference,
    residual,
    sgd,
)

slow = pytest.mark.slow

PLAIN = [
    "single", "manual", "mirrored", "multi_worker", "sharded state", "tensor", "accumulation",
    "accumulation 2 × 2", "weighted",
]  # fmt: skip
NORMALISED = ["manual", "sharded", "pipeline", "sync manual", "sync mirrored"]
OTHERS = [split for split in SPLITS if split not in ("bfloat16", "single", *PLAIN[3:], *NORMALISED)]

# --- Right trainings -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "build"),
    [
        *((split, plain) for split in PLAIN),
        *((split, norm) for split in NORMALISED),
        *(pytest.param(split, norm, marks=slow) for split in OTHERS),
    ],
)
def test_right_trainings_are_clean(split, build):
    """What is not measured cannot be false: each stage has its tolerance, and is within it."""
    training = recorded(split, build)
    verdict = training.check()
    assert verdict.passed, verdict.findings()
    kinds = {"examples", "loss", "gradients", "sums", "slots", "updates", "weights"}
    if build is norm:
        kinds |= {"own statistics", "statistics"}
    assert {m.kind for m in verdict.measurements} == kinds  # "agreement" only of unequal copies.
    assert {m.step for m in verdict.measurements} == {0, 1, 2, 3}
    gradients = [m for m in verdict.measurements if m.kind == "gradients"]
    assert {m.replica_id for m in gradients} == set(range(len(training.split.units)))
    for m in verdict.measurements:
        if m.kind != "examples" and m.step:
            assert m.limit == 1 or 0 < m.limit < 0.1, m


def test_another_order_of_summation_is_within_tolerance():
    """As on another device: arrays that differ from the reference's by rounding alone."""
    permuted = np.random.default_rng(0).permutation
    for build in (plain, norm):
        training = recorded("manual", build)
        rows = [permuted(rows) for rows in training.shards(1)]
        measurements = training.edited(computed(1, rows=rows)).check(last_step=1).measurements
        first = [m for m in measurements if m.step == 1 and m.kind in ("loss", "gradients")]
        assert sum(m.absolute32 > 0 for m in first) > len(first) / 4
        assert 0.02 < max(m.error / m.limit for m in first) < 0.9  # And not much wider.


def test_an_all_reduce_in_bfloat16_is_right_where_it_was_asked_for():
    training = recorded("bfloat16")
    assert training.check(communication_dtype="bfloat16").passed
    assert training.check().diagnosis.cause == "reduced_precision"


def test_pairs_are_identical_or_equal_or_different_by_design():
    def outcome(*trainings, **options):
        verdicts = [training.check(last_step=1) for training in trainings]
        differences = compare_traces(*(training.trace() for training in trainings))
        return PairVerdict.of(*verdicts, differences, **options).outcome

    single, manual, normalised = recorded("single"), recorded("manual"), recorded("manual", norm)
    assert outcome(manual, recorded("multi_worker")) == IDENTICAL
    assert outcome(single, manual) == EQUAL
    assert outcome(manual, manual.edited(sums(lambda a, b: a))) == DIFFERENT
    synchronized = recorded("sync manual", norm)
    apart = first_sums_apart(normalised.trace(), synchronized.trace())
    assert apart > 0.01
    assert outcome(normalised, synchronized, by_design=apart) == BY_DESIGN
    assert first_sums_apart(single.trace(), manual.trace()) < 1e-4


def test_one_device_shard_by_shard_is_the_training_of_two(tmp_path):
    """Why a two-GPU run with BatchNorm does not match the one-GPU run, and what does match it."""
    reference32, steps = reference(norm, "float32"), [batch(step) for step in (1, 2, 3)]
    for name, num_shards in (("whole", 1), ("one", 2)):
        train_shard_by_shard(
            reference32, steps, shard_weights=[1] * num_shards, path=tmp_path / name
        )
    whole, one = Trace(tmp_path / "whole"), Trace(tmp_path / "one")
    assert effect_of_shards(reference32, *steps[0], whole, [1]) == 0
    assert effect_of_shards(reference32, *steps[0], one, [1, 1]) > 0.01
    alone, two = Training(norm, one.split, read_all(one), []), recorded("manual", norm)
    assert alone.check().passed
    for difference in compare_traces(one, two.trace()):
        assert difference.identical or difference.relative < 1e-3, difference
    assert first_sums_apart(whole, two.trace()) > 0.01


# --- Wrong arrays --------------------------------------------------------------------------------


def sums(of, *, copies=(0, 1, 2)):
    """Gives copies another sum in step 1, of the gradients that were sent."""

    def edit(training):
        sent = training.arrays[1, "gradients"]
        for copy_id, held in enumerate(training.arrays[1, "sums"]):
            for name in held if copy_id in copies else ():
                held[name] = np.float32(of(*(arrays[name] for arrays in sent)))

    return edit


def gradients(of):
    """Changes the gradients of step 1, given the number of the shard."""

    def edit(training):
        for shard_id, held in enumerate(training.arrays[1, "gradients"]):
            training.arrays[1, "gradients"][shard_id] = {
                name: np.float32(of(shard_id, array)) for name, array in held.items()
            }

    return edit


def computed(step, *, state=lambda training: {}, forward=lambda training: None, **options):
    """Computes loss and gradients of a step otherwise."""

    def edit(training):
        results = training.compute(
            step, state=state(training), forward=forward(training), **options
        )
        training.arrays[step, "loss"] = [{"loss": result.loss} for result in results]
        training.arrays[step, "gradients"] = [result.gradients for result in results]

    return edit


def item(step, kind, number, change):
    """Replaces the arrays of one shard or copy; `change` is given the training and the arrays."""

    def edit(training):
        held = training.arrays[step, kind]
        held[number] = held[number] | change(training, held[number])

    return edit


def both(*edits):
    def edit(training):
        for each in edits:
            each(training)

    return edit


def reduced(array, dtype=tf.bfloat16):
    return tf.cast(tf.cast(array, dtype), tf.float32).numpy()


def plus(training, arrays, name="plain/conv1/kernel"):
    """Changes the first element of an array."""
    changed = arrays[name].copy()
    changed.flat[0] += 1e-3
    return {name: changed}


def whole_batch(training):
    """Returns what one device computes of the whole batch in step 1."""
    return training.compute(1, rows=[np.arange(15)])[0]


def normalised_over_whole_batch(training):
    whole = whole_batch(training).gradients
    for held in training.arrays[1, "gradients"]:
        held.update({name: array / 2 for name, array in whole.items()})


def updated_twice(training):
    reference32, before = reference(training.build, "float32"), training.state_before(1)
    once = reference32.update(before, training.arrays[1, "sums"][0])
    twice = reference32.update(once, training.arrays[1, "sums"][0])
    for kind in ("slots", "weights"):
        for held in training.arrays[1, kind]:
            held.update({name: twice[name] for name in held})


def updated_by_half(training):
    before = training.arrays[0, "weights"][0]
    for held in training.arrays[1, "weights"]:
        held.update({name: (before[name] + held[name]) / 2 for name in held})


def examples_of(step, shard_id, select):
    """Gives a shard of step 1 examples of another step or shard."""

    def edit(training):
        arrays = training.arrays[1, "examples"]
        given = np.concatenate([held["examples"] for held in training.arrays[step, "examples"]])
        arrays[shard_id] = {"examples": select(given, arrays[shard_id]["examples"])}

    return edit


def older(names):
    """Returns a state in which some weights are those before the step before."""
    return lambda training: {
        name: training.arrays[0, "weights"][0][name] for name in names(training)
    }


def repeated_biases(training):
    before = training.state_before(2)
    return {name: 3 * before[name] for name in before if name.endswith("bias")}


def exchanged(training):
    """Returns weights in which the parts of devices 0 and 2 are swapped."""
    before, swapped = training.state_before(1), {}
    for name in training.arrays[0, "weights"][0]:
        first, second, third = np.array_split(before[name].ravel(), 3)
        swapped[name] = np.concatenate([third, second, first]).reshape(before[name].shape)
    return swapped


def no_backward_sums(training):
    return without_backward_sums(channels_of(training.parts, training.split.num_replicas))


def split_and_network(training):
    """Returns the split and the network of "norm manual", "residual tensor" or "manual"."""
    first, _, rest = training.partition(" ")
    network = {"norm": norm, "residual": residual}.get(first)
    return (rest, network) if network else (training, plain)


# Training, what is changed → cause, stage and step that are named, and what is said.
WRONG = [
    # Two replicas with 8 and 7 examples.
    ("manual", sums(lambda a, b: a), "lost_gradient sums 1", "gradient of replica 1"),
    ("manual", sums(lambda a, b: a, copies=[0]), "lost_gradient sums 1", "on replica 0"),
    ("manual", sums(lambda a, b: a + 2 * b), "repeated_gradient sums 1", "replica 1 twice"),
    ("manual", sums(lambda a, b: 2 * (a + b)), "scaled_gradient sums 1", "number of replicas"),
    ("manual", sums(lambda a, b: 1.7 * (a + b)), "scaled_gradient sums 1", "1.7 times"),
    ("manual", sums(lambda a, b: (a + b) / 15), "scaled_gradient sums 1",
     "divided twice by the 15"),
    ("manual", sums(lambda a, b: 15 / 16 * a + 15 / 14 * b), "mean_of_means sums 1",
     "replicas' means, not the mean of the batch: shards of 8 and 7"),
    ("manual", sums(lambda a, b: reduced(a) + reduced(b)), "reduced_precision sums 1", "bfloat16"),
    ("manual", sums(lambda a, b: reduced(a + b, tf.float16)), "reduced_precision sums 1",
     "float16"),
    ("manual", sums(lambda a, b: 0.5 * a + 0.9 * b), "weighted_sum sums 1", "0.5 × replica 0"),
    ("manual", sums(lambda a, b: np.clip(a + b, -1e-3, 1e-3)), "unexplained sums 1",
     "on every replica, by"),
    ("mirrored", sums(lambda a, b, c: c + b + a, copies=[1]), "unequal_sums agreement 1",
     "replica 1"),
    ("weighted", sums(lambda a, b: 15 / 24 * a + 15 / 6 * b), "mean_of_means sums 1", "12 and 3"),
    # Four micro-batches: of one replica; of two.
    ("accumulation", sums(lambda a, b, c, d: a + c + d), "lost_micro_batch sums 1",
     "gradient of micro-batch 1"),
    ("accumulation", sums(lambda a, b, c, d: (a + b + c + d) / 4), "divided_twice sums 1",
     "4 is the number of micro-batches"),
    ("accumulation", sums(lambda a, b, c, d: 15 / 16 * (a + b + c) + 15 / 12 * d),
     "mean_of_means sums 1", "micro-batches' means"),
    ("accumulation 2 × 2", sums(lambda a, b, c, d: a + b), "lost_gradient sums 1",
     "gradient of replica 1"),
    ("accumulation 2 × 2", sums(lambda a, b, c, d: b + d), "lost_micro_batch sums 1",
     "micro-batch 0 of every replica"),
    ("accumulation 2 × 2", sums(lambda a, b, c, d: a + b + c), "lost_micro_batch sums 1",
     "micro-batch 1 of replica 1"),
    ("accumulation 2 × 2", sums(lambda a, b, c, d: a + 2 * b + c + d), "repeated_gradient sums 1",
     "micro-batch 1 of replica 0 twice"),
    # What a replica computes.
    ("manual", gradients(lambda shard, g: 15 * g), "scaled_gradient gradients 1",
     "not divided by the 15"),
    ("manual", gradients(lambda shard, g: 15 / (8, 7)[shard] * g), "scaled_gradient gradients 1",
     "divided by the 8 and 7 examples of a shard"),
    ("manual", gradients(lambda shard, g: 1.01 * g), "scaled_gradient gradients 1", "1.01 times"),
    ("norm pipeline", gradients(lambda shard, g: g / 4), "divided_twice gradients 1",
     "4 is the number"),
    ("manual", gradients(lambda shard, g: reduced(g)), "reduced_precision gradients 1",
     "every replica computes its gradient in bfloat16"),
    ("manual", gradients(lambda shard, g: g * g), "unexplained gradients 1", "no known cause"),
    ("manual", item(1, "gradients", 1, lambda training, _: training.arrays[1, "gradients"][0]),
     "repeated_shard gradients 1", "replica 1 computes the gradient of replica 0"),
    ("manual", item(1, "loss", 1, lambda _, held: {"loss": 2 * held["loss"]}), "wrong_loss loss 1",
     "replica 1 reports 2 times"),
    ("manual", computed(2, state=older(lambda t: t.arrays[0, "weights"][0])),
     "stale_weights loss 2", "every replica computes with the weights of the step before"),
    ("norm pipeline", computed(2, state=older(lambda t: t.parts[0])), "stale_stage loss 2",
     "stage 0"),
    ("tensor", computed(2, state=repeated_biases), "repeated_bias loss 2", "added 3 times"),
    ("tensor", computed(1, forward=no_backward_sums), "forgotten_backward_sum gradients 1",
     "each of 3 devices"),
    ("norm sharded", computed(1, state=exchanged), "wrong_shard loss 1", "device 0 and device 2"),
    ("norm manual", normalised_over_whole_batch, "whole_batch_norm gradients 1",
     "whole global batch"),
    ("norm sync manual", computed(1), "unsynced_batch_norm loss 1", "of 8 or 7 examples"),
    # Which examples it is given.
    ("manual", examples_of(1, 1, lambda given, own: given[:7]), "repeated_shard examples 1",
     "replica 1 and replica 0 received the same shard of 7"),
    ("manual", examples_of(1, 1, lambda given, own: own[:-1]), "left_out examples 1",
     "1 of the batch's 15 examples"),
    ("manual", examples_of(2, 1, lambda given, own: given[:7]), "other_order examples 1",
     "replica 1 has another order of examples: of its 7 examples, 7"),
    ("accumulation 2 × 2", examples_of(2, 2, lambda given, own: given[:4]),
     "other_order examples 1", "micro-batch 0 of replica 1 has another order"),
    ("manual", examples_of(1, 1, lambda given, own: own + 1), "other_examples examples 1",
     "replica 1 received examples that are not in the training set"),
    ("manual", both(*(examples_of(1, s, lambda *_: hash_examples(*batch(1))) for s in (0, 1))),
     "whole_batch examples 1", "received the whole global batch"),
    # The state that it starts from, and the one after a step.
    ("manual", item(0, "weights", 1, plus), "initial_weights weights 0", "replica 1 starts"),
    ("manual", both(item(0, "weights", 0, plus), item(0, "weights", 1, plus)),
     "initial_weights weights 0", "every replica starts"),
    ("manual", item(0, "slots", 0, lambda *_: {"learning_rate": np.float32(0.2)}),
     "initial_state slots 0", "learning_rate"),
    ("mirrored", item(2, "weights", 2, plus), "changed_outside_update updates 2",
     "replica 2 changed outside of the update: 1 of"),
    ("manual", updated_twice, "scaled_update slots 1", "applied 2 times"),
    ("manual", updated_by_half, "scaled_update updates 1", "0.5 times"),
    ("norm manual", item(1, "own statistics", 1, lambda t, _: t.arrays[0, "own statistics"][1]),
     "frozen_batch_norm own statistics 1", "inference mode"),
    ("norm manual", item(1, "own statistics", 0, lambda t, _: whole_batch(t).statistics),
     "whole_batch_norm own statistics 1", "whole global batch"),
    ("norm sync manual", item(1, "own statistics", 0, lambda t, _: t.compute(1)[0].statistics),
     "unsynced_batch_norm own statistics 1", "its own 8 examples, not of all 15"),
    ("norm manual", item(1, "statistics", 0, lambda t, _: t.arrays[1, "own statistics"][1]),
     "local_batch_norm statistics 1", "those of replica 1"),
]  # fmt: skip


@pytest.mark.parametrize(("training", "edit", "expected", "said"), WRONG)
def test_what_is_wrong_is_found_at_its_stage_and_its_cause_named(training, edit, expected, said):
    changed = recorded(*split_and_network(training)).edited(edit)
    verdict = changed.check(last_step=max(1, int(expected[-1])))
    first, (finding,) = verdict.first_mismatch, verdict.findings()
    assert f"{finding.cause} {first.kind} {first.step}" == expected, str(finding)
    assert said in str(finding)
    assert verdict.outcome == DIFFERENT and not verdict.passed


def test_a_gradient_that_rounding_may_tip_over_is_no_blank_cheque():
    """A ReLU that rounding tips over must not make room for what is wrong as a whole."""
    training = recorded("manual", residual)
    assert training.check().passed
    wrong = training.edited(gradients(lambda shard, g: 1.3 * g)).check()
    assert wrong.diagnosis.cause == "scaled_gradient" and "1.3 times" in wrong.diagnosis.text


def test_an_overflow_that_is_not_skipped_is_named(tmp_path):
    """Where gradients overflow in float16, weights stay as they are."""

    def scaled():
        return ScaledSGD(0.1, initial_scale=2.0**40)

    model_fn = seeded(norm)
    reference32 = Reference(model_fn, scaled, "float32", precision="mixed_float16")
    skipped = train_shard_by_shard(
        reference32, [batch(1)], shard_weights=[1, 1], path=tmp_path / "one"
    )
    assert skipped == [1]
    with Trace(tmp_path / "one") as trace:
        right = Training(norm, trace.split, read_all(trace), [])
        assert 0.01 < effect_of_shards(reference32, *batch(1), trace, [1, 1]) < 2
    assert not all(np.isfinite(array).all() for array in right.arrays[1, "sums"][0].values())
    reference64 = Reference(model_fn, scaled, "float64")
    assert right.check(references=(reference64, reference32)).first_mismatch is None
    finite = sums(lambda a, b: np.nan_to_num(a + b, posinf=0, neginf=0))
    updated = item(1, "weights", 0, lambda t, held: plus(t, held, "norm/logits/kernel"))
    for edit, said in ((finite, "the sum is finite"), (updated, "every device must skip")):
        diagnosis = right.edited(edit).check(references=(reference64, reference32)).diagnosis
        assert diagnosis.cause == "overflow_not_skipped" and said in diagnosis.text


# --- Faults that are injected --------------------------------------------------------------------

# Fault, training → stage and step of the first mismatch, and what is said. Each fault once where
# it can happen, and each strategy with faults that it reads in a way of its own.
INJECTED = [
    ("drop_gradient", "mirrored", "sums 1", "gradient of replica 1"),
    ("scale_gradient:factor=3", "sharded", "sums 1", "3 is the number of replicas"),
    ("mean_of_means", "weighted", "sums 1", "replicas' means"),
    ("same_shard", "multi_worker", "examples 1", "replica 1 and replica 0"),
    ("shuffle_order", "accumulation 2 × 2", "examples 1", "of replica 1 has another order"),
    ("perturb_weight:replica=2,step=2", "mirrored", "updates 2", "replica 2 changed"),
    ("perturb_weight:step=0", "manual", "weights 0", "replica 1 starts"),
    ("local_batch_norm", "norm pipeline", "statistics 1", "those of micro-batch 0"),
    ("bf16_all_reduce", "manual", "sums 1", "bfloat16"),
    ("lost_micro_batch", "mirrored accumulation", "sums 1", "micro-batch 1 of every replica"),
    ("divided_twice", "accumulation", "sums 1", "4 is the number of micro-batches"),
    ("stale_stage", "pipeline", "loss 2", "stage 1"),
    ("forgotten_backward_sum", "tensor", "gradients 1", "each of 3 devices"),
    ("repeated_bias", "tensor 2 × 2", "loss 2", "added 2 times"),
    ("wrong_shard", "sharded state", "updates 1", "device 0 and device 1"),
    ("unsynced_batch_norm", "norm sync mirrored", "loss 1", "asks for all 15 of the batch"),
]  # fmt: skip
WRONG_PLACES = [
    ("drop_gradient", "tensor 2 × 2", "sums 1", "gradient of replica 1"),
    ("drop_gradient", "pipeline 2 × 2", "sums 1", "gradient of replica 1"),
    ("drop_gradient", "multi_worker", "sums 1", "gradient of replica 1"),
    ("mean_of_means", "mirrored accumulation", "sums 1", "micro-batches' means"),
    ("mean_of_means", "tensor 2 × 2", "sums 1", "replicas' means"),
    ("shuffle_order", "weighted", "examples 1", "replica 1 has another order"),
    ("perturb_weight", "sharded gradients", "updates 3", "replica 1 changed"),
    ("perturb_weight", "tensor 2 × 2", "updates 3", "replica 1 changed"),
    ("perturb_weight", "pipeline 2 × 2", "updates 3", "replica 1 changed"),
    ("local_batch_norm", "norm manual", "statistics 1", "every replica"),
    ("bf16_all_reduce", "sharded", "sums 1", "bfloat16"),
    ("lost_micro_batch:micro_batch=0", "accumulation 2 × 2", "sums 1", "micro-batch 0 of every"),
    ("divided_twice", "pipeline", "sums 1", "4 is the number of micro-batches"),
    ("stale_stage:stage=0", "pipeline 2 × 2", "loss 2", "stage 0"),
    ("forgotten_backward_sum", "residual tensor 2 × 2", "gradients 1", "each of 2 devices"),
    ("wrong_shard", "sharded", "loss 1", "device 0 and device 1"),
    ("unsynced_batch_norm", "norm sync manual", "loss 1", "asks for all 15 of the batch"),
    ("unsynced_batch_norm", "norm sync sharded", "loss 1", "asks for all 15 of the batch"),
]  # fmt: skip
CAUSES = {
    "drop_gradient": "lost_gradient",
    "scale_gradient": "scaled_gradient",
    "same_shard": "repeated_shard",
    "shuffle_order": "other_order",
    "perturb_weight": "changed_outside_update",
    "perturb_weight:step=0": "initial_weights",
    "bf16_all_reduce": "reduced_precision",
}


@pytest.mark.parametrize(
    ("fault", "training", "where", "said"),
    [*INJECTED, *(pytest.param(*case, marks=slow) for case in WRONG_PLACES)],
)
def test_injected_faults_are_found_and_named(fault, training, where, said):
    faulty = record(*split_and_network(training), fault=fault)
    verdict = faulty.check(last_step=max(1, int(where[-1])))
    first, (finding,) = verdict.first_mismatch, verdict.findings()
    assert f"{first.kind} {first.step}" == where, str(finding)
    name = Fault.parse(fault).name
    assert finding.cause == CAUSES.get(fault, CAUSES.get(name, name))
    assert said in str(finding)


@pytest.mark.parametrize("split", ["manual", pytest.param("mirrored accumulation", marks=slow)])
def test_a_slow_replica_is_found_and_named(split):
    verdict = record(split, plain, fault="slow_replica:replica=1,ms=200", num_steps=6).check()
    assert verdict.first_mismatch is None and not verdict.passed
    (finding,) = verdict.findings()
    assert finding.cause == "slow_replica" and "replica 1" in finding.where


def test_every_fault_and_every_cause_is_in_these_tests():
    assert set(FAULTS) == {"slow_replica", *(Fault.parse(fault).name for fault, *_ in INJECTED)}
    named = {expected.split()[0] for *_, expected, _ in WRONG}
    named |= {"overflow_not_skipped", "wrong_shard", "unexplained"}
    modules = diagnosis, replica_hypotheses, split_hypotheses, step_context, arithmetic
    known = re.findall(r'"([a-z0-9]+(?:_[a-z0-9]+)+)"', "".join(map(inspect.getsource, modules)))
    assert {*known, "unexplained"} == named


@pytest.mark.parametrize(
    ("fault", "changes", "said"),
    [
        ("stale_stage", {}, "only in pipeline"),
        ("mean_of_means", {}, "global_batch_size=17"),
        ("perturb_weight:step=9", {}, "step=3 or less"),
        ("local_batch_norm", {"statistics_names": []}, "needs a model with BatchNorm"),
        ("local_batch_norm", {"syncs_batch_norm": True}, "batch_norm=average"),
        ("unsynced_batch_norm", {}, "needs statistics of the whole batch"),
    ],
)
def test_a_fault_that_cannot_happen_is_refused(fault, changes, said):
    strategy = {
        "name": "manual", "num_replicas": 2, "num_shards": 2, "num_copies": 2,
        "shards_per_replica": 1, "devices_per_replica": 1, "statistics_names": ["mean"],
        "syncs_batch_norm": False, "shard_bounds": lambda size, shard: (0, size // 2),
    }  # fmt: skip
    with pytest.raises(ConfigError, match=said) as caught:
        inject_fault(
            Fault.parse(fault),
            types.SimpleNamespace(**(strategy | changes)),
            batch_sizes={16},
            num_steps=3,
        )
    assert str(caught.value).startswith(f"--inject={Fault.parse(fault).name}")


# --- Recordings ----------------------------------------------------------------------------------


def test_recording_changes_nothing():
    alone = create("manual")
    alone.build(seeded(plain), sgd)
    alone.train_steps(alone.distribute(batches()), NUM_STEPS)
    watched, state = recorded("manual").trace(), alone.state()
    for name in watched.tensors(NUM_STEPS, "weights"):
        array = watched.read(NUM_STEPS, "weights", 0, name)
        np.testing.assert_array_equal(array, state[f"model/{name}"], err_msg=name)


def test_a_strategy_that_keeps_its_steps_to_itself_is_told(tmp_path):
    strategy = ManualStrategy(CPUS[:2])
    strategy.build(seeded(plain), sgd)
    recorder = Recorder(strategy)
    strategy.observer = Observer()
    with pytest.raises(ConfigError, match=r"shards none instead of 0, 1; .* self\.local_gradients"):
        recorder.record(strategy.distribute(batches()), num_steps=1, path=tmp_path / "t")


def test_a_model_that_draws_random_numbers_is_refused():
    """Its steps are no function of weights and examples, and each device draws other numbers."""

    def build():
        *layers, last = plain().layers
        return keras.Sequential([*layers, keras.layers.Dropout(0.5), last])

    with pytest.raises(ConfigError, match="draws random numbers"):
        record("manual", build)


def test_parts_are_in_the_trace():
    biases = [part["plain/conv1/bias"] for part in recorded("tensor").parts]
    assert biases == [(2,), (1,), (1,)]
    first, second = recorded("pipeline", norm).parts
    assert first and second and not set(first) & set(second)
    assert recorded("manual").parts == []


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


@slow
def test_a_training_whose_kernels_round_otherwise_holds(tmp_path):
    """As on another device: recorded without oneDNN, checked with it. No bit needs to agree."""
    script = (
        "import pickle, sys; sys.path[:0] = sys.argv[2:]\n"
        "import verification_samples as samples\n"
        "training = samples.recorded('manual', samples.residual)\n"
        "pickle.dump((training.split, training.arrays), open(sys.argv[1], 'wb'))\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, tmp_path / "arrays", ROOT, ROOT / "tests"],
        env=os.environ | {"TF_ENABLE_ONEDNN_OPTS": "0"}, check=True, capture_output=True,
    )  # fmt: skip
    split, arrays = pickle.loads((tmp_path / "arrays").read_bytes())
    verdict = Training(residual, split, arrays, []).check()
    computed = [m for m in verdict.measurements if m.kind == "gradients"]
    if all(m.absolute32 == 0 for m in computed):
        pytest.skip("this processor computes bitwise identical values without oneDNN")
    assert verdict.first_mismatch is None
    assert max(m.error / m.limit for m in computed) < 0.9
