"""Verification that is on while a training runs (`--verify_every`)."""

import contextlib
import dataclasses
import functools
import json
import types
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from app.data.input_pipeline import batch_of_step, train_dataset
from app.data.synthetic import generate_synthetic
from app.devices.device_setup import Devices
from app.options import Config
from app.records.checkpoint import find_newest_checkpoint
from app.records.files import write_file
from app.records.history import load_history, load_summary
from app.records.run_metadata import Progress
from app.runtime.errors import ConfigError, MismatchError
from app.training.loop import Training
from app.training.resume import find_checkpoint
from app.training.training_spec import TrainingSpec
from app.verification.step_verifier import (
    MISMATCH_DIRECTORY,
    TRACE_FILE,
    StepVerifier,
    create_step_verifier,
    gather_trace,
)
from lockstep.data import file as trace_file
from lockstep.data.trace import About, Shard, Trace, Variable
from lockstep.numeric.arrays import same_bits
from models import MODELS
from strategies.base import Strategy
from strategies.manual import ManualStrategy
from strategies.workers import Workers
from tests.conftest import CPUS
from tests.training.failing_steps import InjectedError, after_step

NUM_STEPS = 5  # 300 images in batches of 64: the last has 44.


@functools.cache
def dataset():
    return generate_synthetic(num_train=300, num_test=70)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Trains small networks in place of LeNet and ResNet-18, and draws nothing."""
    monkeypatch.setitem(MODELS, "lenet", "tests.dense_network:build_three_dense_layers")
    monkeypatch.setitem(MODELS, "resnet18", "tests.dense_network:build_conv_norm_network")
    monkeypatch.setattr(
        "app.report.accuracy_plot.plot_accuracy",
        lambda runs, out_dir: write_file(out_dir / "accuracy.png", ""),
    )


def config_of(**options):
    usual = {"global_batch_size": 64, "recipe": "d2l", "learning_rate": 0.05, "epochs": 2}
    return Config.of("train", **(usual | options))


def make(run_dir, *, num_devices=2, **options):
    config = config_of(**options)
    num_devices = 1 if config.distribution.strategy == "single" else num_devices
    devices = Devices(CPUS[:num_devices], simulated=num_devices > 1)
    run_dir.mkdir(exist_ok=True)
    verifier = functools.partial(create_step_verifier, run_dir)
    loop = Training(config, devices, dataset(), run_dir, create_step_check=verifier)
    loop.start(find_checkpoint(run_dir))
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
    assert loop.strategy.steps.num_tracings == 1
    assert summary.verified_line() == "7 of 10 steps verified against one device, no mismatch"
    assert without.verified_line() == ""
    assert not (tmp_path / "with" / MISMATCH_DIRECTORY).exists()


def test_a_fault_that_begins_later_is_found_and_named(tmp_path):
    inject = "drop_gradient:replica=1,step=6"
    text = finding_of(tmp_path, verify_every=4, epochs=3, inject=inject)
    assert "manual has a mismatch: lost part (replica) in all-reduce, step 8; replica 1; " in text
    assert "the sum does not contain the gradient of replica 1" in text
    assert "the last verified step without a mismatch is 5" in text
    assert "the state after step 7 is saved" in text
    stopped = load_summary(tmp_path)
    assert (stopped.steps, stopped.verified_steps, stopped.mismatches) == (5, 4, 1)
    newest = find_newest_checkpoint(tmp_path)
    assert (newest.progress.step, newest.progress.epoch_step) == (7, 2)
    trace = trace_file.load(tmp_path / MISMATCH_DIRECTORY / TRACE_FILE)
    assert (trace.steps, len(trace.shards)) == ((6, 7), 2)  # The state before is kept, too.
    sums, sent = trace.named(1, "sums", 0), trace.named(1, "raw", 0)
    assert all(same_bits(sums[name], sent[name]) for name in sent)  # The fault itself can be seen.
    before, saved = trace.named(1, "before", 0), newest.state
    assert all(same_bits(before[name], saved[f"model/{name}"]) for name in sent)


@pytest.mark.parametrize(
    ("inject", "options", "said"),
    [
        ("stale_stage", {"strategy": "pipeline"}, "stale weights (of a stage) in forward, step 4;"),
        ("same_shard", {}, "batch not split (same examples) in examples, step 1"),
        ("perturb_weight:step=2", {}, "ranks disagree in start, step 4; replica 1; "),
        ("perturb_weight:step=2", {"verify_every": 1}, "changed on its own in update, step 2"),
    ],
)  # fmt: skip
def test_a_fault_is_found_where_it_shows(tmp_path, inject, options, said):
    """A second run does not have that of an earlier moment, such as a buffer of old weights."""
    text = finding_of(tmp_path, inject=inject, **{"verify_every": 4, **options})
    assert f" has a mismatch: {said}" in text
    if "update" not in said:
        assert "reproducible" not in text
    if "ranks disagree" in said:
        assert "no state is saved" in text  # No copy is known to be the right one.


def test_a_warning_lets_the_training_go_on(tmp_path, capsys):
    summary = train(tmp_path, on_mismatch="warn", verify_every=3, inject="drop_gradient:step=6")
    assert counts(tmp_path) == [(3, 0), (2, 2)]
    assert summary.verified_line() == "5 of 10 steps verified against one device, 2 mismatches"
    assert load_summary(tmp_path).mismatches == 2
    warned = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert len([line for line in warned if "lost part (replica)" in line]) == 2
    trace = trace_file.load(tmp_path / MISMATCH_DIRECTORY / TRACE_FILE)
    assert trace.steps[-1] == 5  # The first one is kept.


def test_a_resumed_training_verifies_the_same_steps(tmp_path):
    """And its records load where they were written before there were verified steps."""
    options = {"verify_every": 3, "checkpoint_every": 1}
    with after_step(7), pytest.raises(InjectedError):
        train(tmp_path, **options)
    assert train(tmp_path, **options).verified_steps == 5
    assert counts(tmp_path) == [(3, 0), (2, 0)]  # 1, 3, 5; 6, 9.
    assert all(record.verification_sec > 0 for record in load_history(tmp_path))
    new = ("verified_steps", "mismatches", "verification_sec")
    for name, in_lines in (("history.jsonl", True), ("summary.json", False)):
        text = (tmp_path / name).read_text()
        records = [json.loads(each) for each in (text.splitlines() if in_lines else [text])]
        old = [{k: v for k, v in record.items() if k not in new} for record in records]
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in old))
    assert counts(tmp_path) == [(0, 0), (0, 0)] and load_summary(tmp_path).verified_line() == ""
    progress = dataclasses.asdict(Progress(step=2, epoch_step=2, epoch_sec=1.0))
    old = {name: value for name, value in progress.items() if name not in new}
    assert Progress.parse(old).verified_steps == 0


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
    config = Config.of("train", verify_every=verify_every)
    spec = types.SimpleNamespace(config=config, steps_per_epoch=steps_per_epoch)
    verified = StepVerifier(spec, mock.Mock())
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


def test_random_layers_are_not_verified(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(MODELS, "lenet", "tests.dense_network:build_dropout_network")
    assert train(tmp_path, epochs=1).verified_steps == 0
    assert "No step is verified: model dropout draws random numbers" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--verify_every=5: model dropout draws random numbers"):
        make(tmp_path, verify_every=5)


def test_a_skipped_step_is_verified(tmp_path, monkeypatch):
    options = {"verify_every": 1, "precision": "mixed_float16"}
    monkeypatch.setattr("app.training.strategy_builder.INITIAL_LOSS_SCALE", 2.0**24)
    summary = train(tmp_path / "right", **options)
    assert (summary.verified_steps, summary.mismatches) == (10, 0)
    scales = find_newest_checkpoint(tmp_path / "right").state["optimizer/loss_scale"]
    assert 1024 <= scales < 2**24  # Some steps were skipped, and not all.
    # The second device skips no step.
    shared = "strategies.parts.share_overflow"
    monkeypatch.setattr(shared, lambda sums, devices: [sums[0], _without_overflow(sums[1])])
    monkeypatch.setattr(ManualStrategy, "apply_gradients", _apply_without_overflow)
    assert "overflow not skipped" in finding_of(tmp_path / "wrong", **options)


def _apply_without_overflow(self, replica, sums):
    if replica.replica_id == 1:
        sums = _without_overflow(sums)
    Strategy.apply_gradients(self, replica, sums)


def _without_overflow(sums):
    return [tf.where(tf.math.is_finite(each), each, 0.0) for each in sums]


@pytest.mark.slow
def test_a_slow_replica_is_reported_once(tmp_path, capsys):
    summary = train(tmp_path, verify_every=1, inject="slow_replica:replica=1,ms=300")
    assert summary.mismatches == 0
    assert capsys.readouterr().err.count("replica 1 is slow: it sends its gradients") == 1


def test_a_batch_is_that_of_the_data_set():
    spec = TrainingSpec(config_of(seed=3, recipe="fast"), dataset())
    assert spec.augmentation == "shift"
    batches = spec.batches().as_numpy_iterator()
    for step in range(7):
        for array, own in zip(next(batches), spec.batch(step), strict=True):
            assert same_bits(array, own)
    options = {"seed": 5, "global_batch_size": 64}
    arrays = dataset().train_images, dataset().train_labels
    plain = batch_of_step(*arrays, step=9, **options)[0]
    for augmentation in ("flip", "shift"):
        changed = {**options, "augmentation": augmentation}
        (images, _) = next(train_dataset(*arrays, start_step=9, **changed).as_numpy_iterator())
        assert same_bits(images, batch_of_step(*arrays, step=9, **changed)[0])
        assert not same_bits(images, plain)


# --- One step ------------------------------------------------------------------------------------


def test_a_fault_that_makes_the_training_diverge_is_named(tmp_path, monkeypatch):
    """Not only that a loss is not finite."""

    def apply(self, replica, sums):
        Strategy.apply_gradients(self, replica, [1e30 * each for each in sums])

    monkeypatch.setattr(ManualStrategy, "apply_gradients", apply)
    text = finding_of(tmp_path, verify_every=1, learning_rate=1e3)
    assert "scaled gradient in all-reduce, step 1" in text


def test_a_race_is_told_from_a_fault_by_a_second_run(tmp_path, monkeypatch):
    runs = []

    def factor():
        runs.append(None)
        return np.float32(2 if len(runs) == 1 else 1)

    def apply(self, replica, sums):
        if replica.replica_id == 1:
            scale = tf.numpy_function(factor, [], tf.float32)
            sums = [tf.reshape(scale * each, each.shape) for each in sums]
        Strategy.apply_gradients(self, replica, sums)

    monkeypatch.setattr(ManualStrategy, "apply_gradients", apply)
    text = finding_of(tmp_path, verify_every=4)
    assert "scaled gradient in all-reduce, step 1; replica 1; " in text
    said = "; not reproducible: a second run from the same states has 0 of these 1 faults; look"
    assert said in text
    assert len(runs) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"model": "resnet18", "inject": "drop_gradient:step=2"},
        {"strategy": "pipeline", "inject": "lost_micro_batch"},
        pytest.param(
            {"strategy": "sharded", "shard": "optimizer", "precision": "mixed_bfloat16"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"strategy": "mirrored", "batch_norm": "sync", "model": "resnet18"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_second_run_changes_no_bit_of_the_training(tmp_path, options, capsys):
    options = {"inject": "drop_gradient", "on_mismatch": "warn", **options}
    without = train(tmp_path / "without", verify_every=0, **options | {"on_mismatch": "stop"})
    loop = make(tmp_path / "with", verify_every=2, **options)
    summary = loop.run()
    assert summary.weights_sha256 == without.weights_sha256
    assert capsys.readouterr().err.count("; reproducible: ") == summary.mismatches > 0
    assert loop.strategy._observed_steps.num_tracings == 1


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
    weights = [np.ones(300, np.float32), np.arange(300, dtype=np.float32)]
    traces = []
    for worker in range(2):
        trace = Trace(
            About(
                "lockstep", 2, steps=(3,), variables=(Variable("w", "weight"),), gradients=("w",),
                replicas=(worker,), shards=(Shard(0), Shard(1)), num_copies=2,
            )
        )  # fmt: skip
        trace.put(0, "before", worker, [weights[0]])
        trace.put(0, "after", worker, [weights[worker]])
        trace.put(0, "data", worker, [np.array([worker, 7])])
        trace.put(0, "raw", worker, [np.full(300, worker + 1.0, np.float32)])
        traces.append(trace)
    boards = {}
    for worker in (0, 1):  # The second call of worker 0 sees all that worker 1 has sent.
        with contextlib.suppress(trace_file.TraceError):
            gather_trace(traces[worker], FakeWorkers(worker, boards))
    sent = boards[1][1]  # Equal weights are sent once.
    assert b"1/before/1/0" not in sent and b"1/after/1/0" in sent
    merged = gather_trace(traces[0], FakeWorkers(0, boards))
    for worker in range(2):
        assert same_bits(merged.named(0, "before", worker)["w"], weights[0])
        assert same_bits(merged.named(0, "after", worker)["w"], weights[worker])
    assert np.all(merged.named(0, "raw", 1)["w"] == 2)
    assert merged.arrays(0, "data", 1)[0].tolist() == [1, 7]
