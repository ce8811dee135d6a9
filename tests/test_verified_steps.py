"""Verification that is on while a training runs (`--verify_every`)."""

import dataclasses
import functools
import json

import numpy as np
import pytest
import tensorflow as tf

from app.data.input_pipeline import train_batch, train_dataset
from app.data.synthetic import generate_synthetic
from app.devices.device_setup import Devices
from app.options import Config
from app.records.checkpoint import find_newest_checkpoint
from app.records.files import write_file
from app.records.history import load_history, load_summary
from app.records.run_metadata import Progress
from app.runtime.errors import ConfigError, MismatchError
from app.training.loop import Training
from app.training.training_spec import TrainingSpec
from app.training.verified_steps import MISMATCH_DIRECTORY, VerifiedSteps
from app.verification.memory_trace import MemoryTrace, same_bits
from app.verification.parallel_reference import ParallelReference
from app.verification.reference import Reference
from app.verification.shard_by_shard import train_shard_by_shard
from app.verification.split import Split
from app.verification.step_checker import StepChecker
from app.verification.step_verifier import create_step_verifier
from app.verification.trace import Trace
from app.verification.trace_checker import TraceChecker
from app.verification.trace_gather import gather_trace
from conftest import CPUS
from failing_steps import InjectedError, after_step
from models import MODELS
from strategies.manual import ManualStrategy
from strategies.shard_step import ShardStep
from strategies.workers import Workers
from verification_samples import read_all

NUM_STEPS = 5  # 300 images in batches of 64: the last has 44.


@functools.cache
def dataset():
    return generate_synthetic(num_train=300, num_test=70)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Trains small networks in place of LeNet and ResNet-18, and draws nothing."""
    monkeypatch.setitem(MODELS, "lenet", "dense_network:build_three_dense_layers")
    monkeypatch.setitem(MODELS, "resnet18", "dense_network:build_conv_norm_network")
    monkeypatch.setattr(
        "app.report.accuracy_plot.plot_accuracy",
        lambda run_dirs, out_dir: write_file(out_dir / "accuracy.png", ""),
    )


def config_of(**options):
    usual = {"global_batch_size": 64, "recipe": "d2l", "learning_rate": 0.05, "epochs": 2}
    return Config.of("train", **(usual | options))


def make(run_dir, *, num_devices=2, **options):
    config = config_of(**options)
    num_devices = 1 if config.distribution.strategy == "single" else num_devices
    devices = Devices(CPUS[:num_devices], simulated=num_devices > 1)
    run_dir.mkdir(exist_ok=True)
    loop = Training(config, devices, dataset(), run_dir, lambda: None, create_step_verifier)
    loop.start(from_scratch=False)
    assert loop.strategy.num_devices == num_devices
    return loop


def train(run_dir, **options):
    return make(run_dir, **options).run()


def counts(run_dir):
    return [(r.verified_steps, r.mismatches) for r in load_history(run_dir)]


def finding_of(run_dir, **options):
    with pytest.raises(MismatchError) as caught:
        train(run_dir, **options)
    assert caught.value.exit_code == 9
    return str(caught.value)


@pytest.mark.parity
@pytest.mark.parametrize(
    "options",
    [
        {"all_reduce": "ring", "num_devices": 3, "model": "resnet18"},
        pytest.param(
            {"strategy": "mirrored", "batch_norm": "sync", "model": "resnet18"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"strategy": "sharded", "shard": "optimizer", "precision": "mixed_bfloat16"},
            marks=pytest.mark.slow,
        ),
        pytest.param({"strategy": "pipeline", "recipe": "fast"}, marks=pytest.mark.slow),
        pytest.param({"strategy": "single", "jit_compile": True}, marks=pytest.mark.slow),
    ],
)
def test_verified_steps_change_no_bit_and_find_nothing(tmp_path, options):
    without = train(tmp_path / "without", verify_every=0, **options)
    loop = make(tmp_path / "with", verify_every=2, **options)
    summary = loop.run()
    assert summary.weights_sha256 == without.weights_sha256
    assert counts(tmp_path / "with") == [(4, 0), (3, 0)]  # 1, 2, 4, 5; 6, 8, 10.
    assert counts(tmp_path / "without") == [(0, 0), (0, 0)]
    assert loop.strategy.num_tracings == 1
    assert summary.verified_line() == "10 steps, 7 verified, 0 mismatches"
    assert without.verified_line() == ""
    assert not (tmp_path / "with" / MISMATCH_DIRECTORY).exists()


def test_a_fault_that_begins_later_is_found_and_named(tmp_path):
    text = finding_of(
        tmp_path, strategy="mirrored", verify_every=4, epochs=3,
        inject="drop_gradient:replica=1,step=6",
    )  # fmt: skip
    assert "mirrored has a mismatch: lost gradient, step 8, sums of " in text
    assert "the sum does not contain the gradient of replica 1" in text
    assert "the last verified step without a mismatch is 5" in text
    assert "the state after step 7 is saved" in text
    stopped = load_summary(tmp_path)
    assert (stopped.steps, stopped.verified_steps, stopped.mismatches) == (5, 4, 1)
    newest = find_newest_checkpoint(tmp_path)
    assert (newest.checkpoint.progress.step, newest.checkpoint.progress.epoch_step) == (7, 2)
    with Trace(tmp_path / MISMATCH_DIRECTORY) as trace:
        assert (trace.first_step, trace.num_steps, trace.num_shards) == (8, 8, 2)
        names = trace.tensors(8, "sums")
        for name in names:  # The fault itself can be seen in what is kept.
            sent = trace.read(8, "gradients", 0, name)
            assert same_bits(trace.read(8, "sums", 0, name), sent)
        saved = newest.checkpoint.state
        assert trace.tensors(7, "weights") == names
        for name in names:
            assert same_bits(trace.read(7, "weights", 0, name), saved[f"model/{name}"])


@pytest.mark.parametrize(
    ("inject", "options", "said"),
    [
        ("stale_stage", {"strategy": "pipeline"}, "stale stage, step 4,"),
        ("perturb_weight:step=2", {}, "changed outside update, step 3, weights of first/kernel on"
         " replica 1, by 0.001"),
    ],
)  # fmt: skip
def test_a_fault_is_found_where_it_shows(tmp_path, inject, options, said):
    text = finding_of(tmp_path, inject=inject, verify_every=4, **options)
    assert f" has a mismatch: {said}" in text
    if inject.startswith("perturb"):
        assert "in a step that was not recorded" in text
        assert "no state is saved" in text  # No copy is known to be the right one.


def test_a_warning_lets_the_training_go_on(tmp_path, capsys):
    summary = train(tmp_path, on_mismatch="warn", verify_every=3, inject="drop_gradient:step=6")
    assert counts(tmp_path) == [(3, 0), (2, 2)]
    assert summary.verified_line() == "10 steps, 5 verified, 2 mismatches"
    assert load_summary(tmp_path).mismatches == 2
    warned = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert len([line for line in warned if "lost gradient" in line]) == 2
    with Trace(tmp_path / MISMATCH_DIRECTORY) as trace:
        assert trace.first_step == 6  # The first one is kept.


def test_a_resumed_training_verifies_the_same_steps(tmp_path):
    """And its records load where they were written before there were verified steps."""
    options = {"verify_every": 3, "checkpoint_every": 1}
    with after_step(7), pytest.raises(InjectedError):
        train(tmp_path, **options)
    assert train(tmp_path, **options).verified_steps == 5
    assert counts(tmp_path) == [(3, 0), (2, 0)]  # 1, 3, 5; 6, 9.
    new = ("verified_steps", "mismatches", "verification_sec", "crc32")
    for name, in_lines in (("history.jsonl", True), ("summary.json", False)):
        text = (tmp_path / name).read_text()
        records = [json.loads(each) for each in (text.splitlines() if in_lines else [text])]
        old = [{k: v for k, v in record.items() if k not in new} for record in records]
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in old))
    assert counts(tmp_path) == [(0, 0), (0, 0)] and load_summary(tmp_path).verified_line() == ""
    progress = dataclasses.asdict(Progress(step=2, epoch_step=2, examples=9, epoch_sec=1.0))
    old = {name: value for name, value in progress.items() if name not in new}
    assert Progress.parse(old, 5).verified_steps == 0


@pytest.mark.parametrize(
    ("verify_every", "steps_per_epoch", "num_steps", "found"),
    [
        (10, 25, 90, [1, 10, 20, 25, 30, 40, 50, 60, 70, 80, 90]),
        (None, 235, 1200, [1, 235, 470, 705, 940, 1175]),
        (None, 938, 1900, [1, 500, 938, 1438, 1876]),
        (None, 80, 700, [1, 80, 240, 400, 640]),
    ],
)
def test_the_steps_follow_from_their_numbers(verify_every, steps_per_epoch, num_steps, found):
    verifier = object()  # Only matters that it is there.
    config = Config.of("train", verify_every=verify_every)
    verified = VerifiedSteps(config, verifier, None, steps_per_epoch)
    assert recorded_steps(verified, steps_per_epoch, num_steps) == found


def recorded_steps(verified, steps_per_epoch, num_steps):
    """Goes through a training in the largest calls that are allowed."""
    progress, found = Progress(), []
    while progress.step < num_steps:
        count = verified.num_steps_before_next(progress)
        due = [n for n in range(1, count + 1) if verified.is_due(progress, steps_ahead=n)]
        assert not due or (due, count) == ([1], 1)
        # The step before is a call of its own, too: the state before it is kept.
        ahead = [n for n in range(1, count + 1) if verified.is_due(progress, steps_ahead=n + 1)]
        assert not ahead or count == 1
        found += [progress.step + n for n in due]
        step = progress.step + count
        progress = dataclasses.replace(
            progress,
            step=step,
            epoch_step=step % steps_per_epoch,
            history=[None] * (step // steps_per_epoch),
        )
    return found


def test_a_reaction_to_a_mismatch_needs_verified_steps():
    with pytest.raises(ConfigError, match="--on_mismatch=warn has no effect"):
        Config.of("train", verify_every=0, on_mismatch="warn")


def test_random_layers_are_not_verified(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(MODELS, "lenet", "dense_network:build_dropout_network")
    assert train(tmp_path, epochs=1).verified_steps == 0
    assert "No step is verified: model dropout draws random numbers" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--verify_every=5: model dropout draws random numbers"):
        make(tmp_path, verify_every=5)


@pytest.mark.parametrize("strategy", ["manual", pytest.param("sharded", marks=pytest.mark.slow)])
def test_a_skipped_step_is_verified(tmp_path, monkeypatch, strategy):
    options = {"verify_every": 1, "precision": "mixed_float16", "strategy": strategy}
    monkeypatch.setattr("app.training.optimizers.INITIAL_LOSS_SCALE", 2.0**24)
    summary = train(tmp_path / "right", **options)
    assert (summary.verified_steps, summary.mismatches) == (10, 0)
    scales = find_newest_checkpoint(tmp_path / "right").checkpoint.state["optimizer/loss_scale"]
    assert 1024 <= scales < 2**24  # Some steps were skipped, and not all.
    # The second device skips no step.
    shared = "strategies.sharded.share_overflow"
    monkeypatch.setattr(shared, lambda sums, devices: [sums[0], _without_overflow(sums[1])])
    monkeypatch.setattr(ManualStrategy, "apply_gradients", _apply_without_overflow)
    assert "overflow not skipped" in finding_of(tmp_path / "wrong", **options)


def _apply_without_overflow(self, replica, sums):
    if replica.replica_id == 1:
        sums = _without_overflow(sums)
    ShardStep.apply_gradients(self, replica, sums)


def _without_overflow(sums):
    return [tf.where(tf.math.is_finite(each), each, 0.0) for each in sums]


@pytest.mark.slow
def test_a_slow_replica_is_reported_once(tmp_path, capsys):
    summary = train(tmp_path, verify_every=1, inject="slow_replica:replica=1,ms=300")
    assert summary.mismatches == 0
    assert capsys.readouterr().err.count("replica 1 is slow: it sends its gradients") == 1


def test_a_batch_is_that_of_the_data_set():
    spec = TrainingSpec(config_of(seed=3), dataset())
    batches = spec.batches().as_numpy_iterator()
    for step in range(7):
        for array, own in zip(next(batches), spec.batch(step), strict=True):
            assert same_bits(array, own)
    options = {"seed": 5, "global_batch_size": 64, "flip": True}
    arrays = dataset().train_images, dataset().train_labels
    (images, _) = next(train_dataset(*arrays, start_step=9, **options).as_numpy_iterator())
    assert same_bits(images, train_batch(*arrays, step=9, **options)[0])
    assert not same_bits(images, train_batch(*arrays, step=9, **options | {"flip": False})[0])


# --- One step against the reference --------------------------------------------------------------


def test_shards_side_by_side_are_those_one_after_another():
    spec = TrainingSpec(config_of(precision="mixed_bfloat16", model="resnet18"), dataset())
    one_by_one = Reference.of(spec, "float32")
    others = ParallelReference.of(spec, "float32", num_threads=2)
    rows = np.array_split(np.arange(64), 3)
    arguments = one_by_one.initial_state, *spec.batch(0), rows
    for a, b in zip(one_by_one.gradients(*arguments), others.gradients(*arguments), strict=True):
        assert same_bits(a.loss, b.loss)
        assert set(b.statistics) == {"norm/moving_mean", "norm/moving_variance"}
        for mine, theirs in ((a.gradients, b.gradients), (a.statistics, b.statistics)):
            assert mine.keys() == theirs.keys()
            assert all(same_bits(mine[name], theirs[name]) for name in mine)


def test_the_smoothed_loss_is_that_of_the_reference():
    spec = TrainingSpec(config_of(), dataset())
    arguments = spec.build_model, spec.create_optimizer, "float64"
    plain, a, b = (
        reference_class(*arguments, label_smoothing=smoothing)
        for reference_class, smoothing in (
            (ParallelReference, 0.0), (Reference, 0.1), (ParallelReference, 0.1),
        )
    )  # fmt: skip
    before, rows = a.initial_state, [np.arange(64)]
    results = [r.gradients(before, *spec.batch(0), rows)[0] for r in (plain, a, b)]
    unsmoothed, expected, actual = (result.loss for result in results)
    assert abs(actual - expected) < 1e-12 < 1e-6 < abs(unsmoothed - expected)
    for name, gradient in results[1].gradients.items():
        np.testing.assert_allclose(results[2].gradients[name], gradient, rtol=0, atol=1e-12)


class Steps:
    """Three right steps of three replicas with BatchNorm, and the checker of such steps."""

    def __init__(self, folder):
        self.spec = TrainingSpec(config_of(model="resnet18"), dataset())
        self.reference = Reference.of(self.spec, "float32")
        self.arrays = self.record(folder)
        self.checker = StepChecker(self.spec, "manual", 2)

    def record(self, folder):
        """Trains three steps; returns their arrays, and those of three copies of the weights."""
        batches = [self.spec.batch(position) for position in range(3)]
        train_shard_by_shard(self.reference, batches, shard_weights=[1, 1, 1], path=folder / "t")
        with Trace(folder / "t") as trace:
            arrays = read_all(trace)
        shared = ("sums", "slots", "weights")
        return {key: 3 * held if key[1] in shared else held for key, held in arrays.items()}

    def find(self, step, *, checker=None, arrays=None, **changes):
        """Returns what a checker finds in a step with some of its arrays changed."""
        trace = MemoryTrace(step, Split(3, 3, 3))
        for (at, kind), per_item in (arrays or self.arrays).items():
            if at in (step - 1, step):
                change = changes.get(f"{kind}_{at}", lambda items: items)
                trace.write(at, kind, change([dict(item) for item in per_item]))
        return (checker or self.checker).find(trace, step - 1)

    def before(self, step):
        """Returns the state before a step."""
        kinds = ("weights", "slots", "statistics")
        return {n: a for kind in kinds for n, a in self.arrays[step - 1, kind][0].items()}

    def updated(self, step, total):
        """Returns changes to the sums of a step, and to the weights that follow from them."""
        after = self.reference.update(self.before(step), total)
        return {
            f"sums_{step}": lambda _: [total] * 3,
            f"weights_{step}": lambda held: [{name: after[name] for name in held[0]}] * 3,
        }

    def gradients(self, step):
        """Computes the gradients of a step from its examples in another order."""
        permuted = np.random.default_rng(0).permutation
        rows = [permuted(shard) for shard in np.array_split(np.arange(64), 3)]
        results = self.reference.gradients(self.before(step), *self.spec.batch(step - 1), rows)
        return [result.gradients for result in results]


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "resnet18", "dense_network:build_conv_norm_network")
        return Steps(tmp_path_factory.mktemp("steps"))


def times(factor, item_id):
    """Multiplies the arrays of one shard or copy."""

    def change(items):
        items[item_id] = {name: np.float32(factor * a) for name, a in items[item_id].items()}
        return items

    return change


def shared(change):
    """Changes the arrays of all copies in the same way."""
    return lambda items: change(items[:1]) * 3


@pytest.mark.parametrize(
    ("step", "changes", "found"),
    [
        (1, {"weights_0": times(1.01, 2)}, "initial weights, step 0,"),
        (1, {"weights_0": shared(times(1.01, 0))}, "initial weights, step 0,"),
        (2, {"weights_1": times(1.01, 2)}, "changed outside update, step 1,"),
        (2, {"examples_2": lambda all: [all[0], all[0], all[2]]}, "repeated shard, step 2,"),
        (2, {"gradients_2": times(1.001, 1)}, "scaled gradient, step 2, gradients of"),
        (2, {"loss_2": times(1.001, 1)}, "wrong loss, step 2, loss on replica 1"),
        (2, {"sums_2": shared(times(2, 0))}, "scaled gradient, step 2, sums of"),
        (2, {"sums_2": times(2, 1)}, "scaled gradient, step 2, sums of"),
        (2, {"weights_2": times(1.01, 1)}, "changed outside update, step 2, updates of"),
        (2, {"weights_2": shared(times(1.01, 0))}, "unexplained, step 2, updates of"),
        (2, {"slots_2": shared(times(2, 0))}, "scaled update, step 2, optimizer state of"),
        (2, {"own statistics_2": times(1.01, 1)}, "unexplained, step 2, own statistics of"),
        (2, {"statistics_2": times(1.01, 0)}, "unexplained, step 2, statistics of"),
    ],
)
def test_what_is_wrong_in_a_step_is_found_however_often_it_comes(steps, step, changes, found):
    for _ in range(2):  # A step that is wrong teaches nothing.
        assert str(steps.find(step, **changes)).startswith(found)
    assert steps.find(step) is None


def test_what_is_wrong_is_found_where_all_else_follows_from_it(steps, tmp_path, monkeypatch):
    double = {name: 2 * array for name, array in steps.arrays[2, "sums"][0].items()}
    found = steps.find(2, **steps.updated(2, double))
    assert str(found).startswith("scaled gradient, step 2, sums of")
    start = steps.reference.initial_state
    changed = {"conv/kernel": np.float32(1.01) * start["conv/kernel"]}
    monkeypatch.setattr(steps.reference, "initial_state", {**start, **changed})
    found = steps.find(1, arrays=steps.record(tmp_path))
    assert str(found).startswith("initial weights, step 0, weights of conv/kernel")


def test_what_rounding_sets_apart_in_a_step_is_right(steps, monkeypatch):
    """First measured against float64, then by the limits that this has shown."""
    checker, measured, check_step = (
        StepChecker(steps.spec, "manual", 2),
        [],
        TraceChecker.check_step,
    )
    monkeypatch.setattr(
        TraceChecker, "check_step", lambda *args: measured.append(args[2]) or check_step(*args)
    )
    for step in (1, 2, 3):
        sent = steps.gradients(step)
        total = {name: sum(arrays[name] for arrays in sent[::-1]) for name in sent[0]}
        changes = {f"gradients_{step}": lambda _, sent=sent: sent, **steps.updated(step, total)}
        assert steps.find(step, checker=checker, **changes) is None
    assert measured[0] == 1 and len(measured) < 3
    wrong = [{name: np.float32(1.01 * a) for name, a in arrays.items()} for arrays in sent]
    total = {name: sum(arrays[name] for arrays in wrong) for name in wrong[0]}
    found = steps.find(3, checker=checker, gradients_3=lambda _: wrong, **steps.updated(3, total))
    assert str(found).startswith("scaled gradient, step 3, gradients of")


def test_a_step_that_is_not_finite_is_left_to_the_training(steps):
    assert steps.find(2, loss_2=times(np.nan, 0)) is None


class FakeWorkers(Workers):
    """One of two workers whose messages were all sent before."""

    count = 2

    def __init__(self, index, boards):
        self.index, self._boards, self._calls = index, boards, 0

    def gather(self, message):
        board = self._boards.setdefault(self._calls, {})
        board[self.index], self._calls = message, self._calls + 1
        return [board.get(index, message) for index in range(2)]

    def broadcast(self, message=b""):
        return self.gather(message)[0]


def test_recordings_of_workers_are_put_together():
    split = Split(num_replicas=2, num_shards=2, num_copies=2)
    weights = [np.ones(3, np.float32), np.array([1, 2, 1], np.float32)]
    traces = []
    for worker in range(2):
        trace = MemoryTrace(4, Split(1, 1, 1))
        for step in (3, 4):
            trace.write(step, "weights", [{"w": weights[0] if step == 3 else weights[worker]}])
            trace.write(step, "statistics", [{}])
        trace.write(4, "examples", [{"examples": np.array([worker, 7])}])
        trace.write(4, "gradients", [{"w": np.full(3, worker + 1.0, np.float32)}])
        traces.append(trace)
    boards = {}
    for worker in (0, 1):  # The second call of worker 0 sees all that worker 1 has sent.
        gather_trace(traces[worker], split, FakeWorkers(worker, boards))
    assert len(boards[1][1]) < len(boards[1][0])  # Equal weights were sent once.
    merged = gather_trace(traces[0], split, FakeWorkers(0, boards))
    assert merged.replicas(3, "weights", "w") == [0]
    assert merged.replicas(4, "weights", "w") == [0, 1]
    assert same_bits(merged.read(4, "weights", 1, "w"), weights[1])
    assert merged.read(4, "gradients", 1, "w").tolist() == [2, 2, 2]
    assert merged.read(4, "examples", 1, "examples").tolist() == [1, 7]
