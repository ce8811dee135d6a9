"""The proof itself: clean trainings hold, and every false one is caught and its cause named.

In one process and on tiny models, so that all strategies, replica counts and faults fit in seconds.
"""

import functools
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from app.data.input_pipeline import train_dataset
from app.options.fault import Fault
from app.runtime.errors import ConfigError
from app.training.fault_injection import inject_data_fault, inject_fault
from app.training.optimizers import ScaledSGD
from app.verification.diagnosis import explain
from app.verification.measurement import first_mismatch
from app.verification.recorder import Recorder
from app.verification.reference import Reference
from app.verification.shard_by_shard import effect_of_shards, train_shard_by_shard
from app.verification.split import Split
from app.verification.step_context import StepContext
from app.verification.straggler import find_straggler
from app.verification.trace import Trace, hash_examples
from app.verification.trace_checker import TraceChecker
from app.verification.trace_comparison import compare_traces
from app.verification.verdict import DIFFERENT, EQUAL, IDENTICAL, PairVerdict, StrategyVerdict
from conftest import CPUS, ROOT
from small_models import deep_network, seeded, small_network, small_resnet
from strategies import STRATEGIES, load_strategy_class
from strategies.manual import ManualStrategy
from strategies.observer import Observer

NUM_STEPS = 3
GLOBAL_BATCH_SIZE = 15  # Uneven shards for 2 and 4 replicas; 40 examples leave 10 in step 3.
PARALLEL = [name for name in STRATEGIES if name != "single"]
DATA_PARALLEL = ["manual", "mirrored", "multi_worker", "sharded"]


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)


@functools.cache  # It keeps nothing of one step for the next, and takes a second to compile.
def reference(build, optimizer_fn, dtype, *, mean_of_squares=False):
    return Reference(seeded(build), optimizer_fn, dtype, mean_of_squares=mean_of_squares)


class Case:
    """A training of one small model, and all that its proof needs."""

    def __init__(self, images, build=small_network, optimizer_fn=sgd):
        self.images, self.functions = images, (seeded(build), optimizer_fn)
        self.reference = functools.partial(reference, build, optimizer_fn)

    def batches(self, seed=3, start_step=0):
        return train_dataset(
            *self.images, seed=seed, global_batch_size=GLOBAL_BATCH_SIZE, start_step=start_step
        )

    def batch(self, step):
        return next(self.batches(start_step=step - 1).as_numpy_iterator())

    def record(self, strategy, path, *, fault=None, functions=None, num_steps=NUM_STEPS):
        """Trains and returns the trace, and when replicas sent their gradients."""
        syncs_batch_norm = strategy.syncs_batch_norm
        strategy.build(*(functions or self.functions))
        dataset, observer = self.batches(), None
        if fault:
            observer = inject_fault(
                fault, strategy, batch_sizes={GLOBAL_BATCH_SIZE, 10}, num_steps=num_steps
            )
            observer.begin()
            dataset = inject_data_fault(fault, self.batches, strategy, seed=3)
        recorder = Recorder(strategy, observer)
        send_sec = recorder.record(strategy.distribute(dataset), num_steps=num_steps, path=path)
        return Trace(path, syncs_batch_norm=syncs_batch_norm), send_sec

    def check(self, trace, name="manual", send_sec=()):
        reference64, reference32 = self.reference("float64"), self.reference("float32")
        synchronized = None
        if trace.split.syncs_batch_norm:
            synchronized = self.reference("float32", mean_of_squares=True)
        checker = TraceChecker(reference64, reference32, mean_of_squares=synchronized)
        measurements = checker.check(trace, self.batches().as_numpy_iterator())
        mismatch = first_mismatch(measurements)
        context = StepContext(
            trace, measurements, self.batch, lambda: hash_examples(*self.images), reference64
        )
        diagnosis = mismatch and explain(context, mismatch)
        straggler = find_straggler(send_sec)
        return StrategyVerdict(name, measurements, mismatch, diagnosis, straggler, trace.split)


@pytest.fixture
def case(images):
    return Case(images)


@pytest.mark.parametrize(
    ("num_replicas", "build"),
    [
        *((n, small_network) for n in (1, 2, 3)),
        pytest.param(4, deep_network, marks=pytest.mark.slow),
        pytest.param(1, small_resnet, marks=pytest.mark.slow),
        (3, small_resnet),
    ],
)
def test_clean_trainings_hold(images, tmp_path, num_replicas, build):
    case, strategy_verdicts, traces = Case(images, build), {}, {}
    for name in STRATEGIES:
        if name == "single" and build is small_resnet and num_replicas > 1:
            continue  # Another training: BatchNorm over the whole batch.
        strategy = load_strategy_class(name)(CPUS[: 1 if name == "single" else num_replicas])
        traces[name], _ = case.record(strategy, tmp_path / f"{name}")
        strategy_verdicts[name] = case.check(traces[name], name)
        assert strategy_verdicts[name].first_mismatch is None
        assert traces[name].num_shards == strategy.num_shards
        assert traces[name].split == Split.of(strategy)
    pair = compare_traces(traces["manual"], traces["mirrored"])
    assert (
        PairVerdict.of(strategy_verdicts["manual"], strategy_verdicts["mirrored"], pair).outcome
        == IDENTICAL
    )
    if "single" in traces:
        pair = compare_traces(traces["single"], traces["manual"])
        outcome = PairVerdict.of(
            strategy_verdicts["single"], strategy_verdicts["manual"], pair
        ).outcome
        assert outcome == (IDENTICAL if num_replicas == 1 else EQUAL)


@pytest.mark.e2e
def test_a_training_whose_kernels_round_otherwise_holds(images, tmp_path):
    """As on another device: recorded without oneDNN, checked with it. No bit needs to agree."""
    script = (
        "import sys; sys.path[:0] = sys.argv[2:4]\n"
        "import numpy as np, pathlib, small_models, test_trace_checker\n"
        "data = np.load(sys.argv[1] + '/data.npz')\n"
        "for name in sys.argv[4:]:\n"
        "    build = getattr(small_models, name)\n"
        "    case = test_trace_checker.Case((data['pixels'], data['labels']), build)\n"
        "    strategy = test_trace_checker.ManualStrategy(test_trace_checker.CPUS[:2])\n"
        "    case.record(strategy, pathlib.Path(sys.argv[1]) / name)\n"
    )
    builds = small_network, small_resnet
    np.savez(tmp_path / "data.npz", pixels=images[0], labels=images[1])
    names = [build.__name__ for build in builds]
    subprocess.run(
        [sys.executable, "-c", script, tmp_path, ROOT, ROOT / "tests", *names],
        env=os.environ | {"TF_ENABLE_ONEDNN_OPTS": "0"}, check=True, capture_output=True,
    )  # fmt: skip
    for build in builds:
        strategy_verdict = Case(images, build).check(Trace(tmp_path / build.__name__))
        assert strategy_verdict.first_mismatch is None
        computed = [m for m in strategy_verdict.measurements if m.kind == "gradients"]
        assert sum(m.absolute32 > 0 for m in computed) > len(computed) / 4
        assert max(m.error / m.limit for m in computed) < 0.9


def test_every_kind_is_measured(images, tmp_path):
    """What is not measured cannot be false: each stage has its tolerance, and is within it."""
    case = Case(images, small_resnet)
    trace, _ = case.record(ManualStrategy(CPUS[:2]), tmp_path / "manual")
    measured = case.check(trace).measurements
    kinds = {"examples", "loss", "gradients", "sums", "slots", "updates", "weights"}
    assert {m.kind for m in measured} == kinds | {"own statistics", "statistics"}
    for m in measured:
        if m.kind in kinds - {"examples"} and m.step > 0:
            assert m.limit == 1 or 0 < m.limit < 0.1 or m.kind == "gradients", m
    assert {m.step for m in measured} == {0, 1, 2, 3}
    assert {m.replica_id for m in measured if m.kind == "gradients"} == {0, 1}


# Faults of data parallelism; those of other splits are in test_split_verification.py.
CAUSES = {
    "drop_gradient": "lost_gradient",
    "scale_gradient": "scaled_gradient",
    "mean_of_means": "mean_of_means",
    "same_shard": "repeated_shard",
    "shuffle_order": "other_order",
    "perturb_weight": "changed_outside_update",
    "local_batch_norm": "local_batch_norm",
    "bf16_all_reduce": "reduced_precision",
}


@pytest.mark.parametrize(
    ("strategy", "num_replicas"),
    [
        # A third replica is to a fault what the second one is, whatever the strategy.
        pytest.param(name, n, marks=[pytest.mark.slow] if n > 2 and name != "manual" else [])
        for name in DATA_PARALLEL
        for n in (2, 3)
    ],
)
@pytest.mark.parametrize("fault", CAUSES)
def test_faults_are_caught_and_named(images, tmp_path, fault, strategy, num_replicas):
    if fault == "mean_of_means" and num_replicas == 3:
        num_replicas = 4  # 15 divides by 3.
    case = Case(images, small_resnet if fault == "local_batch_norm" else small_network)
    # A copy of the weights must be there to differ.
    has_parts = strategy == "sharded" and fault == "perturb_weight"
    options = {"shard": "gradients"} if has_parts else {}
    trace, _ = case.record(
        load_strategy_class(strategy)(CPUS[:num_replicas], **options),
        tmp_path / "t",
        fault=Fault.parse(fault),
    )
    strategy_verdict = case.check(trace)
    assert strategy_verdict.diagnosis.cause == CAUSES[fault]
    assert strategy_verdict.first_mismatch.step == (3 if fault == "perturb_weight" else 1)
    if "replica" in Fault.parse(fault).parameters:
        assert "replica 1" in str(strategy_verdict.findings()[0])
    assert strategy_verdict.outcome == DIFFERENT


@pytest.mark.parametrize("strategy", DATA_PARALLEL)
def test_a_slow_replica_is_caught_and_named(case, tmp_path, strategy):
    fault = Fault.parse("slow_replica:replica=1,ms=100")
    trace, send_sec = case.record(
        load_strategy_class(strategy)(CPUS[:2]), tmp_path / "t", fault=fault, num_steps=6
    )
    strategy_verdict = case.check(trace, send_sec=send_sec)
    assert strategy_verdict.first_mismatch is None and not strategy_verdict.passed
    (finding,) = strategy_verdict.findings()
    assert finding.cause == "slow_replica" and "replica 1" in finding.where


def test_factors_are_named(case, tmp_path):
    trace, _ = case.record(
        ManualStrategy(CPUS[:3]), tmp_path / "t", fault=Fault.parse("scale_gradient:factor=3")
    )
    assert "3 is the number of replicas" in case.check(trace).diagnosis.text
    trace, _ = case.record(
        ManualStrategy(CPUS[:3]), tmp_path / "t", fault=Fault.parse("scale_gradient:factor=1.7")
    )
    assert "1.7 times" in case.check(trace).diagnosis.text


# --- Faults of strategies of other authors -------------------------------------------------------


class NoAllReduce(ManualStrategy):
    """Every replica goes its own way."""

    def all_reduce(self, per_replica_tensors):
        return per_replica_tensors


class CountsTwice(ManualStrategy):
    """Replica 1 is in the sum twice."""

    def all_reduce(self, per_replica_tensors):
        return super().all_reduce(
            [*per_replica_tensors[:-1], [2 * g for g in per_replica_tensors[-1]]]
        )


class TakesMeans(ManualStrategy):
    """The mean over the replicas where the loss is divided by all examples already."""

    def all_reduce(self, per_replica_tensors):
        totals = super().all_reduce(per_replica_tensors)
        return [[t / self.num_shards for t in tensors] for tensors in totals]


class Half(ManualStrategy):
    """Adds up in float16."""

    def all_reduce(self, per_replica_tensors):
        halves = [[tf.cast(t, tf.float16) for t in tensors] for tensors in per_replica_tensors]
        totals = super().all_reduce(halves)
        return [[tf.cast(t, tf.float32) for t in tensors] for tensors in totals]


class Clips(ManualStrategy):
    """Clips what it has summed: no sum of the gradients at all."""

    def all_reduce(self, per_replica_tensors):
        totals = super().all_reduce(per_replica_tensors)
        return [[tf.clip_by_value(t, -1e-3, 1e-3) for t in tensors] for tensors in totals]


class AppliesTwice(ManualStrategy):
    """Makes each update twice."""

    def build(self, model_fn, optimizer_fn):
        super().build(model_fn, optimizer_fn)
        for replica in self.replicas:
            replica.optimizer.apply = twice(replica.optimizer.apply)


def twice(apply):
    def apply_twice(gradients, variables):
        apply(gradients, variables)
        apply(gradients, variables)

    return apply_twice


class Misreports(Observer):
    """Changes what a replica computes before anybody sees it."""

    def __init__(self, inner, change):
        self._inner, self._change = inner, change

    def on_shard(self, shard_id, shard, loss, gradients):
        gradients = self._change(shard, gradients)
        return self._inner.on_shard(shard_id, shard, loss, gradients)

    def on_update(self, copy_id, summed_gradients):
        self._inner.on_update(copy_id, summed_gradients)


def plain_sgd():
    return keras.optimizers.SGD(0.1)


@pytest.mark.parametrize(
    ("strategy", "cause"),
    [
        (NoAllReduce, "lost_gradient"),
        (CountsTwice, "repeated_gradient"),
        (TakesMeans, "scaled_gradient"),
        (Half, "reduced_precision"),
        (Clips, "unexplained"),
        (AppliesTwice, "scaled_update"),
    ],
)
def test_one_s_own_strategy_is_diagnosed(images, tmp_path, strategy, cause):
    case = Case(images, optimizer_fn=plain_sgd)
    trace, _ = case.record(strategy(CPUS[:2]), tmp_path / "t")
    assert case.check(trace).diagnosis.cause == cause


@pytest.mark.parametrize(
    ("change", "cause", "said"),
    [
        (
            lambda shard, gradients: [
                g * tf.cast(shard.num_global_examples / tf.size(shard.labels), g.dtype)
                for g in gradients
            ],
            "scaled_gradient",
            "divided by the 8 and 7 examples of a shard",
        ),
        (lambda shard, gradients: [g * 15.0 for g in gradients], "scaled_gradient", "not divided"),
        (lambda shard, gradients: [g * 1.3 for g in gradients], "scaled_gradient", "1.3 times"),
        (
            lambda shard, gradients: [tf.cast(tf.cast(g, tf.bfloat16), g.dtype) for g in gradients],
            "reduced_precision",
            "bfloat16",
        ),
        (
            lambda shard, gradients: [tf.square(g) for g in gradients],
            "unexplained",
            "no known cause",
        ),
    ],
)
def test_wrong_gradients_are_diagnosed(case, tmp_path, change, cause, said):
    strategy_verdict = case.check(misreport(case, tmp_path / "t", change))
    assert strategy_verdict.first_mismatch.kind == "gradients"
    assert strategy_verdict.diagnosis.cause == cause
    assert said in strategy_verdict.diagnosis.text


def misreport(case, path, change):
    """Records two replicas whose gradients are changed before anybody sees them."""
    strategy = ManualStrategy(CPUS[:2])
    strategy.build(*case.functions)
    recorder = Recorder(strategy)
    strategy.observer = Misreports(recorder, change)
    recorder.record(strategy.distribute(case.batches()), num_steps=NUM_STEPS, path=path)
    return Trace(path)


@pytest.mark.parametrize(
    ("build", "factor"), [(small_network, 1.01), (small_resnet, 2.0), (small_resnet, 1.3)]
)
def test_the_tolerance_of_gradients_is_no_blank_cheque(images, tmp_path, build, factor):
    """A ReLU that rounding tips over must not make room for what is wrong as a whole."""
    case = Case(images, build)
    trace = misreport(case, tmp_path / "t", lambda shard, gs: [g * factor for g in gs])
    strategy_verdict = case.check(trace)
    assert strategy_verdict.diagnosis.cause == "scaled_gradient"
    assert f"{factor:g}" in strategy_verdict.diagnosis.text
    assert strategy_verdict.first_mismatch.step == 1


def test_a_loss_that_is_merely_reported_wrong_is_named(case, tmp_path):
    class Doubles(Misreports):
        def on_shard(self, shard_id, shard, loss, gradients):
            return self._inner.on_shard(shard_id, shard, 2 * loss, gradients)

    strategy = ManualStrategy(CPUS[:2])
    strategy.build(*case.functions)
    recorder = Recorder(strategy)
    strategy.observer = Doubles(recorder, None)
    recorder.record(strategy.distribute(case.batches()), num_steps=1, path=tmp_path / "t")
    strategy_verdict = case.check(Trace(tmp_path / "t"))
    assert strategy_verdict.diagnosis.cause == "wrong_loss"
    assert "reports 2 times" in strategy_verdict.diagnosis.text


def test_another_learning_rate_is_found_at_the_start(images, tmp_path):
    case = Case(images, optimizer_fn=plain_sgd)
    trace, _ = case.record(
        ManualStrategy(CPUS[:2]), tmp_path / "t",
        functions=(case.functions[0], lambda: keras.optimizers.SGD(0.2)),
    )  # fmt: skip
    strategy_verdict = case.check(trace)
    assert strategy_verdict.diagnosis.cause == "initial_state"
    assert (
        "optimizer state" in strategy_verdict.diagnosis.text
        and "learning_rate" in strategy_verdict.diagnosis.text
    )


class AddsInAnotherOrder(ManualStrategy):
    """Replica 1 adds from the last to the first."""

    def all_reduce(self, per_replica_tensors):
        totals = super().all_reduce(per_replica_tensors)
        copies = zip(*per_replica_tensors[::-1], strict=True)
        totals[1] = [functools.reduce(tf.add, tensors) for tensors in copies]
        return totals


def test_sums_that_only_rounding_sets_apart_are_named(case, tmp_path):
    trace, _ = case.record(AddsInAnotherOrder(CPUS[:3]), tmp_path / "t")
    strategy_verdict = case.check(trace)
    assert strategy_verdict.diagnosis.cause == "unequal_sums"
    assert "replica 1" in strategy_verdict.findings()[0].where


def test_examples_that_nobody_was_given_are_counted(case, tmp_path):
    """The remainder of an uneven batch, dropped: a classic."""
    strategy = ManualStrategy(CPUS[:2])
    strategy.build(*case.functions)
    batches = case.batches().map(lambda images, labels: (images[:14], labels[:14]))
    Recorder(strategy).record(strategy.distribute(batches), num_steps=2, path=tmp_path / "t")
    strategy_verdict = case.check(Trace(tmp_path / "t"))
    assert strategy_verdict.diagnosis.cause == "left_out"
    assert "1 of the batch's 15 examples" in strategy_verdict.diagnosis.text


def test_updates_that_are_made_twice_are_counted(case, tmp_path):
    """With momentum, too."""
    trace, _ = case.record(AppliesTwice(CPUS[:2]), tmp_path / "t")
    strategy_verdict = case.check(trace)
    assert strategy_verdict.diagnosis.cause == "scaled_update"
    assert "applied 2 times" in strategy_verdict.diagnosis.text


def test_other_initial_weights_are_named(case, tmp_path):
    keras.utils.set_random_seed(8)
    trace, _ = case.record(ManualStrategy(CPUS[:2]), tmp_path / "t", functions=(small_network, sgd))
    strategy_verdict = case.check(trace)
    assert strategy_verdict.first_mismatch.step == 0
    assert strategy_verdict.diagnosis.cause == "initial_weights"
    assert "every replica starts" in strategy_verdict.diagnosis.text


def test_one_replica_that_starts_elsewhere_is_named(case, tmp_path):
    trace, _ = case.record(
        ManualStrategy(CPUS[:3]), tmp_path / "t",
        fault=Fault.parse("perturb_weight:replica=2,step=0"),
    )  # fmt: skip
    strategy_verdict = case.check(trace)
    assert strategy_verdict.diagnosis.cause == "initial_weights"
    assert strategy_verdict.diagnosis.text.startswith("replica 2 starts")


def test_an_all_reduce_in_bfloat16_that_was_asked_for_is_right(case, tmp_path):
    trace, _ = case.record(ManualStrategy(CPUS[:2], communication_dtype="bfloat16"), tmp_path / "t")
    references = [Reference(*case.functions, dtype) for dtype in ("float64", "float32")]
    for asked, right in (("bfloat16", True), ("float32", False)):
        checker = TraceChecker(*references, communication_dtype=asked)
        measurements = checker.check(trace, case.batches().as_numpy_iterator())
        assert (first_mismatch(measurements) is None) == right


@pytest.mark.parametrize("name", ["manual", "mirrored"])
def test_the_one_replica_that_changes_is_named(case, tmp_path, name):
    strategy = load_strategy_class(name)(CPUS[:3])
    fault = Fault.parse("perturb_weight:replica=2,step=2")
    trace, _ = case.record(strategy, tmp_path / "t", fault=fault)
    strategy_verdict = case.check(trace)
    first = strategy_verdict.first_mismatch
    assert (first.step, first.replica_id) == (2, 2)
    assert strategy_verdict.diagnosis.cause == "changed_outside_update"


def test_the_effect_of_shards_is_known_where_their_gradients_overflow(images, tmp_path):
    case = Case(images, small_resnet)
    reference = Reference(
        case.functions[0],
        lambda: ScaledSGD(0.1, initial_scale=2.0**40),
        "float32",
        precision="mixed_float16",
    )
    batches = list(case.batches().take(1).as_numpy_iterator())
    skipped = train_shard_by_shard(reference, batches, shard_weights=[1, 1], path=tmp_path / "one")
    assert skipped == [1]
    with Trace(tmp_path / "one") as trace:
        sums = [trace.read(1, "sums", 0, tensor) for tensor in trace.tensors(1, "sums")]
        assert not all(np.isfinite(array).all() for array in sums)
        assert 0.01 < effect_of_shards(reference, *batches[0], trace, [1, 1]) < 2


def test_one_device_shard_by_shard_is_the_training_of_two(images, tmp_path):
    """Why a two-GPU run with BatchNorm does not match the one-GPU run, and what does match it."""
    case = Case(images, small_resnet)
    reference = case.reference("float32")
    batches = list(case.batches().take(NUM_STEPS).as_numpy_iterator())
    train_shard_by_shard(reference, batches[:1], shard_weights=[1], path=tmp_path / "whole")
    train_shard_by_shard(reference, batches, shard_weights=[1, 1], path=tmp_path / "one")
    whole, one = Trace(tmp_path / "whole"), Trace(tmp_path / "one")
    assert effect_of_shards(reference, *batches[0], whole, [1]) == 0
    assert effect_of_shards(reference, *batches[0], one, [1, 1]) > 0.01
    two, _ = case.record(ManualStrategy(CPUS[:2]), tmp_path / "two")
    strategy_verdicts = case.check(one, "single"), case.check(two, "manual")
    assert [strategy_verdict.first_mismatch for strategy_verdict in strategy_verdicts] == [
        None,
        None,
    ]
    assert PairVerdict.of(*strategy_verdicts, compare_traces(one, two)).outcome in (
        IDENTICAL,
        EQUAL,
    )
    whole, _ = case.record(load_strategy_class("single")(CPUS[:1]), tmp_path / "whole")
    apart = [d.relative for d in compare_traces(whole, two) if (d.step, d.kind) == (1, "sums")]
    assert max(apart) > 0.01


class SynchronisedStatistics(Observer):
    """Passes off a share of the whole batch's gradient as each replica's own."""

    def __init__(self, inner, whole):
        self._inner, self._whole = inner, whole

    def on_shard(self, shard_id, shard, loss, gradients):
        gradients = [tf.constant(g / 2) for g in self._whole.values()]
        return self._inner.on_shard(shard_id, shard, loss, gradients)

    def on_update(self, copy_id, summed_gradients):
        self._inner.on_update(copy_id, summed_gradients)


def test_batch_norm_over_the_whole_batch_is_named(images, tmp_path):
    case = Case(images, small_resnet)
    reference = case.reference("float32")
    rows, batch = np.arange(GLOBAL_BATCH_SIZE), case.batch(1)
    (whole,) = reference.gradients(reference.initial_state, *batch, [rows])
    strategy = ManualStrategy(CPUS[:2])
    strategy.build(*case.functions)
    recorder = Recorder(strategy)
    strategy.observer = SynchronisedStatistics(recorder, whole.gradients)
    recorder.record(strategy.distribute(case.batches()), num_steps=1, path=tmp_path / "t")
    assert case.check(Trace(tmp_path / "t")).diagnosis.cause == "whole_batch_norm"


def test_recording_changes_nothing(case, tmp_path):
    watched, alone = (ManualStrategy(CPUS[:2]) for _ in range(2))
    case.record(watched, tmp_path / "t")
    alone.build(*case.functions)
    alone.train_steps(alone.distribute(case.batches()), NUM_STEPS)
    for name, array in alone.state().items():
        np.testing.assert_array_equal(watched.state()[name], array, err_msg=name)


def test_a_strategy_that_keeps_its_steps_to_itself_is_told(case, tmp_path):
    strategy = ManualStrategy(CPUS[:2])
    strategy.build(*case.functions)
    recorder = Recorder(strategy)
    strategy.observer = Observer()
    with pytest.raises(ConfigError, match=r"shards none instead of 0, 1; .* self\.local_gradients"):
        recorder.record(strategy.distribute(case.batches()), num_steps=1, path=tmp_path / "t")


def test_a_model_that_draws_random_numbers_is_refused(images, tmp_path):
    """Its steps are no function of weights and examples, and each device draws other numbers."""

    def build():
        network = small_network()
        return keras.Sequential(
            [*network.layers[:-1], keras.layers.Dropout(0.5), network.layers[-1]]
        )

    case = Case(images, build)
    with pytest.raises(ConfigError, match="draws random numbers"):
        case.record(ManualStrategy(CPUS[:2]), tmp_path / "t")
