"""Verification that is on while a training runs (`--verify_every`)."""

import dataclasses
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
from app.records.history import Summary, load_history, load_summary
from app.records.run_metadata import Progress
from app.runtime.errors import ConfigError, MismatchError
from app.training.loop import Training
from app.training.training_spec import TrainingSpec
from app.training.verified_steps import MISMATCH_DIRECTORY, VerifiedSteps
from app.verification.memory_trace import MemoryTrace, same_bits
from app.verification.parallel_reference import ParallelReference
from app.verification.reference import Reference
from app.verification.split import Split
from app.verification.step_verifier import StepVerifier, create_step_verifier
from app.verification.trace import Trace
from app.verification.trace_gather import gather_trace
from conftest import CPUS
from failing_steps import InjectedError, after_step
from models import MODELS
from strategies import STRATEGIES
from strategies.manual import ManualStrategy
from strategies.shard_step import ShardStep
from strategies.workers import Workers

STEPS_PER_EPOCH = 5  # 300 images in batches of 64: the last has 44.


@pytest.fixture(scope="module")
def dataset():
    return generate_synthetic(num_train=300, num_test=70)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Trains dense layers in place of LeNet, and draws nothing."""
    use(monkeypatch, "build_three_dense_layers")
    monkeypatch.setattr(
        "app.report.accuracy_plot.plot_accuracy",
        lambda run_dirs, out_dir: write_file(out_dir / "accuracy.png", ""),
    )


def use(monkeypatch, builder):
    monkeypatch.setitem(MODELS, "lenet", f"dense_network:{builder}")


def make(dataset, run_dir, *, num_devices=2, **options):
    config = Config.of(
        "train", **{"global_batch_size": 64, "recipe": "fast", "epochs": 2, **options}
    )
    num_devices = 1 if config.distribution.strategy == "single" else num_devices
    devices = Devices(CPUS[:num_devices], simulated=num_devices > 1)
    run_dir.mkdir(exist_ok=True)
    loop = Training(config, devices, dataset, run_dir, lambda: None, create_step_verifier)
    loop.start(from_scratch=False)
    assert loop.strategy.num_devices == num_devices
    return loop


def train(dataset, run_dir, **options):
    loop = make(dataset, run_dir, **options)
    return loop.run()


def counts(run_dir):
    return [(r.verified_steps, r.mismatches) for r in load_history(run_dir)]


def finding_of(dataset, run_dir, **options):
    with pytest.raises(MismatchError) as caught:
        train(dataset, run_dir, **options)
    assert caught.value.exit_code == 9
    return str(caught.value)


SPLITS = {
    "micro-batches": {"accumulate_steps": 2},
    "three": {"num_devices": 3},
    "sync": {"batch_norm": "sync"},
    "bfloat16": {"precision": "mixed_bfloat16"},
    "float16": {"precision": "mixed_float16"},
    "ring": {"all_reduce": "ring", "num_devices": 4},
    "xla": {"jit_compile": True},
    "optimizer": {"strategy": "sharded", "shard": "optimizer"},
    "no smoothing": {"recipe": "d2l", "learning_rate": 0.01},
}


@pytest.mark.parametrize("options", [{"strategy": s} for s in STRATEGIES] + list(SPLITS.values()))
def test_verified_steps_change_no_bit_and_find_nothing(dataset, tmp_path, monkeypatch, options):
    if options.keys() & {"strategy", "batch_norm", "accumulate_steps"}:
        use(monkeypatch, "build_conv_norm_network")
    without = train(dataset, tmp_path / "without", verify_every=0, **options)
    loop = make(dataset, tmp_path / "with", verify_every=2, **options)
    summary = loop.run()
    assert summary.weights_sha256 == without.weights_sha256
    assert counts(tmp_path / "with") == [(4, 0), (3, 0)]  # 1, 2, 4, 5; 6, 8, 10.
    assert counts(tmp_path / "without") == [(0, 0), (0, 0)]
    assert loop.strategy.num_tracings == 1
    assert summary.verified_line() == "10 steps, 7 verified, 0 mismatches"
    assert without.verified_line() == ""
    assert not (tmp_path / "with" / MISMATCH_DIRECTORY).exists()


@pytest.mark.parametrize("strategy", ["manual", "mirrored", "sharded"])
def test_a_fault_that_begins_later_is_found_and_named(dataset, tmp_path, strategy):
    text = finding_of(
        dataset, tmp_path, strategy=strategy, verify_every=4, epochs=3,
        inject="drop_gradient:replica=1,step=6",
    )  # fmt: skip
    assert f"{strategy} has a mismatch: lost gradient, step 8, sums of " in text
    assert "the sum does not contain the gradient of replica 1" in text
    assert "the last verified step without a mismatch is 5" in text
    assert "the state after step 7 is saved" in text
    newest = find_newest_checkpoint(tmp_path)
    assert (newest.checkpoint.progress.step, newest.checkpoint.progress.epoch_step) == (7, 2)
    with Trace(tmp_path / MISMATCH_DIRECTORY) as trace:
        assert (trace.first_step, trace.num_steps, trace.num_shards) == (8, 8, 2)
        names = trace.tensors(8, "sums")
        for name in names:  # The fault itself can be seen in what is kept.
            sent = trace.read(8, "gradients", 0, name)
            assert same_bits(trace.read(8, "sums", 0, name), sent)
        weights = trace.tensors(7, "weights")
        saved = newest.checkpoint.state
        assert weights == names
        for name in names:
            assert same_bits(trace.read(7, "weights", 0, name), saved[f"model/{name}"])


@pytest.mark.parametrize(
    ("cause", "options"),
    [
        ("lost gradient, step 1,", {"inject": "drop_gradient"}),
        ("scaled gradient, step 1,", {"inject": "scale_gradient"}),
        ("mean of means, step 1,", {"inject": "mean_of_means", "num_devices": 3}),
        ("repeated shard, step 1,", {"inject": "same_shard"}),
        ("other order, step 1,", {"inject": "shuffle_order"}),
        ("reduced precision, step 1,", {"inject": "bf16_all_reduce"}),
        ("local batch norm, step 1,", {"inject": "local_batch_norm"}),
        ("lost micro batch, step 1,", {"inject": "lost_micro_batch", "accumulate_steps": 2}),
        ("divided twice, step 1,", {"inject": "divided_twice", "accumulate_steps": 2}),
        ("unsynced batch norm, step 1,", {"inject": "unsynced_batch_norm", "batch_norm": "sync"}),
        ("forgotten backward sum, step 1,", {"inject": "forgotten_backward_sum",
                                             "strategy": "tensor"}),
        ("repeated bias, step 4,", {"inject": "repeated_bias", "strategy": "tensor"}),
        ("stale stage, step 4,", {"inject": "stale_stage", "strategy": "pipeline"}),
        ("wrong shard, step 1,", {"inject": "wrong_shard", "strategy": "sharded"}),
        ("initial weights, step 0,", {"inject": "perturb_weight:replica=1,step=0"}),
    ],
)  # fmt: skip
def test_faults_from_the_first_step_on_are_found_and_named(
    dataset, tmp_path, monkeypatch, cause, options
):
    if "batch_norm" in options["inject"]:
        use(monkeypatch, "build_conv_norm_network")
    text = finding_of(dataset, tmp_path, verify_every=4, **options)
    assert f" has a mismatch: {cause}" in text


def test_a_mismatch_stays_in_the_records(dataset, tmp_path):
    options = {"verify_every": 4, "epochs": 2}
    with pytest.raises(MismatchError):
        train(dataset, tmp_path, **options, inject="drop_gradient:step=6")
    stopped = load_summary(tmp_path)
    assert (stopped.steps, stopped.verified_steps, stopped.mismatches) == (5, 4, 1)


def test_a_weight_that_changed_between_verified_steps_is_found(dataset, tmp_path):
    text = finding_of(dataset, tmp_path, verify_every=4, inject="perturb_weight:replica=1,step=2")
    assert "changed outside update, step 3, weights of first/kernel on replica 1, by 0.001" in text
    assert "in a step that was not recorded" in text
    assert "no state is saved" in text  # No copy is known to be the right one.


def test_a_warning_lets_the_training_go_on(dataset, tmp_path, capsys):
    options = {"verify_every": 3, "inject": "drop_gradient:step=6"}
    summary = train(dataset, tmp_path / "warned", on_mismatch="warn", **options)
    assert counts(tmp_path / "warned") == [(3, 0), (2, 2)]
    assert summary.verified_line() == "10 steps, 5 verified, 2 mismatches"
    assert load_summary(tmp_path / "warned").mismatches == 2
    warned = [line for line in capsys.readouterr().err.splitlines() if "WARNING" in line]
    assert len([line for line in warned if "lost gradient" in line]) == 2
    without = train(dataset, tmp_path / "off", **(options | {"verify_every": 0}))
    assert summary.weights_sha256 == without.weights_sha256
    with Trace(tmp_path / "warned" / MISMATCH_DIRECTORY) as trace:
        assert trace.first_step == 6  # The first one is kept.


def test_a_resumed_training_verifies_the_same_steps(dataset, tmp_path):
    options = {"verify_every": 3, "epochs": 2, "checkpoint_every": 1}
    with after_step(7), pytest.raises(InjectedError):
        train(dataset, tmp_path / "cut", **options)
    cut = train(dataset, tmp_path / "cut", **options)
    whole = train(dataset, tmp_path / "whole", **options)
    assert counts(tmp_path / "cut") == counts(tmp_path / "whole") == [(3, 0), (2, 0)]
    assert cut.weights_sha256 == whole.weights_sha256
    assert cut.verified_steps == whole.verified_steps == 5


def test_the_default_verifies_the_first_step_and_the_ends_of_epochs(dataset, tmp_path):
    assert train(dataset, tmp_path, epochs=3).verified_steps == 2  # Short epochs: the first end.


def test_the_steps_follow_from_their_numbers(dataset):
    verified = VerifiedSteps(Config.of("train", verify_every=10), FakeVerifier(), None, 25)
    assert recorded_steps(verified, 25, 90) == [1, 10, 20, 25, 30, 40, 50, 60, 70, 80, 90]
    verified = VerifiedSteps(Config.of(), FakeVerifier(), None, 235)
    assert recorded_steps(verified, 235, 1200) == [1, 235, 470, 705, 940, 1175]
    verified = VerifiedSteps(Config.of(), FakeVerifier(), None, 938)
    assert recorded_steps(verified, 938, 1900) == [1, 500, 938, 1438, 1876]
    verified = VerifiedSteps(Config.of(), FakeVerifier(), None, 80)
    assert recorded_steps(verified, 80, 700) == [1, 80, 240, 400, 640]


class FakeVerifier:
    """Stands for one that verifies steps: only that it is there matters."""


def recorded_steps(verified, steps_per_epoch, num_steps):
    """Goes through a training in the largest calls that are allowed."""
    progress, found = Progress(), []
    while progress.step < num_steps:
        count = verified.num_steps_before_next(progress)
        due = [n for n in range(1, count + 1) if verified.is_due(progress, steps_ahead=n)]
        assert not due or (due, count) == ([1], 1)
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


def test_random_layers_are_not_verified(dataset, tmp_path, monkeypatch, capsys):
    use(monkeypatch, "build_dropout_network")
    assert train(dataset, tmp_path, epochs=1).verified_steps == 0
    assert "No step is verified: model dropout draws random numbers" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--verify_every=5: model dropout draws random numbers"):
        make(dataset, tmp_path / "asked", verify_every=5)


def test_steps_in_mixed_float16_are_verified_with_their_loss_scale(dataset, tmp_path, monkeypatch):
    options = {"epochs": 1, "verify_every": 1, "precision": "mixed_float16"}
    summary = train(dataset, tmp_path / "right", **options)
    assert (summary.verified_steps, summary.mismatches) == (5, 0)
    monkeypatch.setattr("strategies.shard_step.loss_scale_of", lambda optimizer: tf.constant(1e-6))
    text = finding_of(dataset, tmp_path / "wrong", **options)  # Small gradients are rounded to 0.
    assert "gradients of" in text
    monkeypatch.setattr("strategies.shard_step.loss_scale_of", lambda optimizer: tf.constant(1e9))
    finding_of(dataset, tmp_path / "large", **options)


@pytest.mark.parametrize("strategy", ["manual", "sharded"])
def test_a_skipped_step_is_verified(dataset, tmp_path, monkeypatch, strategy):
    options = {"epochs": 2, "verify_every": 1, "precision": "mixed_float16", "strategy": strategy}
    monkeypatch.setattr("app.training.optimizers.INITIAL_LOSS_SCALE", 2.0**24)
    summary = train(dataset, tmp_path / "right", **options)
    assert (summary.verified_steps, summary.mismatches) == (10, 0)
    scales = find_newest_checkpoint(tmp_path / "right").checkpoint.state["optimizer/loss_scale"]
    assert 1024 <= scales < 2**24  # Some steps were skipped, and not all.
    # The second device skips no step.
    shared = "strategies.sharded.share_overflow"
    monkeypatch.setattr(shared, lambda sums, devices: [sums[0], _without_overflow(sums[1])])
    monkeypatch.setattr(ManualStrategy, "apply_gradients", _apply_without_overflow)
    assert "overflow not skipped" in finding_of(dataset, tmp_path / "wrong", **options)


def _apply_without_overflow(self, replica, sums):
    if replica.replica_id == 1:
        sums = _without_overflow(sums)
    ShardStep.apply_gradients(self, replica, sums)


def _without_overflow(sums):
    return [tf.where(tf.math.is_finite(each), each, 0.0) for each in sums]


def test_a_slow_replica_is_reported_once(dataset, tmp_path, capsys):
    summary = train(
        dataset, tmp_path, epochs=3, verify_every=1, inject="slow_replica:replica=1,ms=300"
    )
    assert summary.mismatches == 0
    assert capsys.readouterr().err.count("replica 1 is slow: it sends its gradients") == 1


def test_records_of_earlier_versions_load(dataset, tmp_path):
    train(dataset, tmp_path, epochs=1)
    new = ("verified_steps", "mismatches", "verification_sec", "crc32")
    for name in ("history.jsonl", "summary.json"):
        old = {k: v for k, v in json.loads((tmp_path / name).read_text()).items() if k not in new}
        (tmp_path / name).write_text(json.dumps(old) + "\n")
    assert counts(tmp_path) == [(0, 0)]
    summary = load_summary(tmp_path)
    assert isinstance(summary, Summary) and summary.verified_line() == ""
    progress = dataclasses.asdict(Progress(step=2, epoch_step=2, examples=9, epoch_sec=1.0))
    old = {name: value for name, value in progress.items() if name not in new}
    assert Progress.parse(old, 5).verified_steps == 0


@pytest.mark.parametrize("recipe", ["d2l", "fast"])
def test_a_batch_is_that_of_the_data_set(dataset, recipe):
    spec = TrainingSpec(Config.of(recipe=recipe, global_batch_size=64, seed=3), dataset)
    batches = spec.batches().as_numpy_iterator()
    for step in range(7):
        images, labels = next(batches)
        own_images, own_labels = spec.batch(step)
        assert same_bits(images, own_images) and same_bits(labels, own_labels)
    options = {"seed": 5, "global_batch_size": 64, "flip": True}
    arrays = dataset.train_images, dataset.train_labels
    (images, _) = next(train_dataset(*arrays, start_step=9, **options).as_numpy_iterator())
    assert same_bits(images, train_batch(*arrays, step=9, **options)[0])
    assert not same_bits(images, train_batch(*arrays, step=9, **options | {"flip": False})[0])


@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16"])
def test_shards_side_by_side_are_those_one_after_another(dataset, monkeypatch, precision):
    use(monkeypatch, "build_conv_norm_network")
    spec = TrainingSpec(Config.of(recipe="fast", global_batch_size=50), dataset)
    arguments = spec.build_model, spec.create_optimizer, "float32"
    options = {"precision": precision}
    images, labels = spec.batch(0)
    rows = np.array_split(np.arange(50), 3)
    one_by_one = Reference(*arguments, **options)
    before = one_by_one.initial_state
    others = ParallelReference(*arguments, num_threads=2, **options)
    for a, b in zip(
        one_by_one.gradients(before, images, labels, rows),
        others.gradients(before, images, labels, rows),
        strict=True,
    ):
        assert same_bits(a.loss, b.loss)
        assert set(b.statistics) == {"norm/moving_mean", "norm/moving_variance"}
        for mine, theirs in ((a.gradients, b.gradients), (a.statistics, b.statistics)):
            assert mine.keys() == theirs.keys()
            assert all(same_bits(mine[name], theirs[name]) for name in mine)


def test_the_smoothed_loss_is_that_of_the_reference(dataset):
    spec = TrainingSpec(Config.of(recipe="fast", global_batch_size=50), dataset)
    arguments = spec.build_model, spec.create_optimizer, "float64"
    images, labels = spec.batch(0)
    plain, a, b = (
        reference_class(*arguments, label_smoothing=smoothing)
        for reference_class, smoothing in (
            (ParallelReference, 0.0), (Reference, 0.1), (ParallelReference, 0.1),
        )
    )  # fmt: skip
    before, rows = a.initial_state, [np.arange(50)]
    results = [r.gradients(before, images, labels, rows)[0] for r in (plain, a, b)]
    unsmoothed, expected, actual = (result.loss for result in results)
    assert abs(actual - expected) < 1e-12 < 1e-6 < abs(unsmoothed - expected)
    for name, gradient in results[1].gradients.items():
        np.testing.assert_allclose(results[2].gradients[name], gradient, rtol=0, atol=1e-12)


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


def test_a_wrong_first_step_does_not_widen_what_is_allowed(dataset, tmp_path):
    """Limits come from the reference alone: a step that is wrong teaches nothing."""
    loop = make(dataset, tmp_path, verify_every=1, inject="scale_gradient:factor=1.001")
    verifier = StepVerifier(loop._config, loop._spec, loop.strategy)
    loop._faulty_observer.begin()
    iterator = loop.strategy.distribute(loop._spec.batches())
    verifier.compile(iterator)
    for position in range(3):
        verifier.train_step(iterator, position + 1)
        assert "scaled gradient" in verifier.check(position).text
    assert verifier._checker._samples == [] and verifier._checker._limits == {}
