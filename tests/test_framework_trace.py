"""Tests the conversion of other frameworks' recordings to traces of strategies, bitwise."""

import json

import keras
import numpy as np
import pytest

from app.data.input_pipeline import epoch_order, train_dataset
from app.records.script_trace import load_trace
from app.runtime.errors import DataError
from app.verification.frameworks import framework_recording
from app.verification.frameworks.framework_files import TrainingFiles
from app.verification.frameworks.framework_recording import FrameworkRecorder, findings_of
from app.verification.frameworks.framework_trace import convert_trace
from app.verification.frameworks.image_labels import ImageLabels
from app.verification.recorded import Recorded
from app.verification.recorder import Recorder
from app.verification.trace import Trace
from conftest import CPUS
from in_process import parse_here
from small_models import deep_norm_network, seeded
from strategies.manual import ManualStrategy

NUM_STEPS, SIZE = 2, 16
NAMES = {"kernel": "weight", "gamma": "weight", "bias": "bias", "beta": "bias"}
NAMES |= {"moving_mean": "running_mean", "moving_variance": "running_var"}


def torch_name(name):
    layer, _, leaf = name.rpartition("/")
    return f"{layer}.{NAMES[leaf]}"


def torch_array(array):
    axes = {4: (3, 2, 0, 1), 2: (1, 0)}.get(array.ndim)
    return array.transpose(axes) if axes else array


class Recording:
    """A trace of a strategy, in the form in which a recorder of PyTorch writes it."""

    def __init__(self, trace, batches):
        self.trace, self.members, self.about = trace, {}, {}
        weights, statistics = trace.tensors(0, "weights"), trace.tensors(0, "own statistics")
        layouts = {4: "OIHW", 2: "OI"}
        self.variables = [
            {
                "name": torch_name(name),
                "kind": kind,
                "layout": layouts.get(trace.read(0, own, 0, name).ndim, ""),
            }
            for names, kind, own in [
                (weights, "weight", "weights"),
                (statistics, "statistic", "own statistics"),
            ]
            for name in names
        ]
        for position, (images, _) in enumerate(batches):
            for replica, rows in enumerate(np.array_split(np.arange(len(images)), 2)):
                inputs = images[rows].transpose(0, 3, 1, 2) / np.float32(255)
                self.members[f"{position + 1}/data/{replica}/0"] = inputs
                for kind, step in ("before", position), ("after", position + 1):
                    self.add(position, kind, replica, step, weights, "weights")
                    self.add(
                        *(position, kind, replica, step, statistics, "own statistics"),
                        first=len(weights),
                    )
                self.add(position, "sums", replica, position + 1, weights, "sums")
                self.add(position, "raw", replica, position + 1, weights, "gradients", factor=2)
                loss = trace.read(position + 1, "loss", replica, "loss")
                self.members[f"{position + 1}/loss/{replica}/0"] = loss * np.float32(2)

    def add(self, position, kind, replica, step, names, own, *, first=0, factor=1):
        for index, name in enumerate(names, first):
            array = torch_array(self.trace.read(step, own, replica, name)) * np.float32(factor)
            self.members[f"{position + 1}/{kind}/{replica}/{index}"] = array

    def write(self, path, **settings):
        names = [torch_name(name) for name in self.trace.tensors(0, "weights")]
        groups = [{"learning_rate": 0.1, "momentum": 0.0, "weights": names, **settings}]
        about = {"format": "lockstep trace", "version": 1, "framework": "torch"}
        about |= {"num_replicas": 2, "replicas": [0, 1], "steps": list(range(NUM_STEPS))}
        about |= {"variables": self.variables, "settings": [groups] * NUM_STEPS}
        about |= {"gradients": [torch_name(n) for n in self.trace.tensors(0, "weights")]}
        about |= {"reduction": "mean", "data_layout": "NCHW", "optimizer": {"class": "SGD"}}
        np.savez(path, about=np.array(json.dumps(about | self.about)), **self.members)
        return load_trace(path)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A trace of two steps of a model with BatchNorm on two replicas, and their batches."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (40, 28, 28, 1), dtype=np.uint8)
    labels = (np.arange(40) % 10).astype(np.uint8)
    path = tmp_path_factory.mktemp("strategy") / "manual"
    strategy = ManualStrategy(CPUS[:2])
    strategy.build(seeded(deep_norm_network), lambda: keras.optimizers.SGD(0.1))
    dataset = train_dataset(images, labels, seed=3, global_batch_size=SIZE)
    Recorder(strategy).record(strategy.distribute(dataset), num_steps=NUM_STEPS, path=path)
    batches = list(dataset.take(NUM_STEPS).as_numpy_iterator())
    # The order of an epoch, which other frameworks get, is that of the batches.
    order = epoch_order(40, 3, 0)[0].numpy()[: NUM_STEPS * SIZE]
    np.testing.assert_array_equal(np.concatenate([batch[1] for batch in batches]), labels[order])
    return Trace(path), batches, ImageLabels(images, labels)


@pytest.fixture
def convert(recorded, tmp_path):
    """Converts a recording after a change of it; returns the sizes of the shards, and the trace."""
    trace, batches, labels = recorded
    names = [*trace.tensors(0, "weights"), *trace.tensors(0, "own statistics")]

    def converted(change=lambda recording: None):
        recording = Recording(trace, batches)
        change(recording)
        script = recording.write(tmp_path / "torch.npz")
        path = tmp_path / "converted"
        return convert_trace(script, names, batches, labels, path), Trace(path)

    return converted


def without(recording, kind):
    recording.members = {k: v for k, v in recording.members.items() if f"/{kind}/" not in k}


def test_every_array_is_that_of_the_strategy(recorded, convert):
    trace = recorded[0]
    sizes, converted = convert()
    assert sizes == [8, 8]
    assert converted.split == trace.split
    for step in range(NUM_STEPS + 1):
        for kind in (
            *("weights", "own statistics", "slots"),
            *("examples", "loss", "gradients", "sums")[: 4 * (step > 0)],
        ):
            assert converted.tensors(step, kind) == trace.tensors(step, kind), kind
            for name in trace.tensors(step, kind):
                for replica in (0, 1):
                    a, b = (t.read(step, kind, replica, name) for t in (trace, converted))
                    np.testing.assert_array_equal(a, b, err_msg=f"{step} {kind} {name}")


def test_examples_are_known_by_their_images(recorded, convert):
    trace = recorded[0]

    def change(recording):
        members = recording.members
        members["1/data/0/0"] = members["1/data/1/0"]  # Twice in the batch.
        members["1/data/1/0"] = members["2/data/1/0"]  # Of another batch.
        members["2/data/0/0"] = 1 - members["2/data/0/0"]  # Of no image.

    _, converted = convert(change)
    for (step, replica), (own_step, own_replica) in {(1, 0): (1, 1), (1, 1): (2, 1)}.items():
        found = converted.read(step, "examples", replica, "examples")
        own = trace.read(own_step, "examples", own_replica, "examples")
        np.testing.assert_array_equal(found, own)
    known = {
        int(h) for s in (1, 2) for r in (0, 1) for h in trace.read(s, "examples", r, "examples")
    }
    assert not known & set(converted.read(2, "examples", 0, "examples").tolist())


def test_without_an_all_reduce_a_replica_applies_its_own_gradients(recorded, convert):
    def change(recording):
        for name in [name for name in recording.members if "/raw/" in name]:
            recording.members[name.replace("raw", "clipped")] = recording.members[name]
        without(recording, "sums")

    _, converted = convert(change)
    for name in recorded[0].tensors(1, "sums"):
        own = recorded[0].read(1, "gradients", 1, name)
        np.testing.assert_array_equal(converted.read(1, "sums", 1, name), 2 * own)


def test_without_gradients_of_each_replica_the_batch_is_one_shard(recorded, convert):
    """As in a recording of `jax.jit` with shardings."""
    trace = recorded[0]
    sizes, converted = convert(lambda recording: without(recording, "raw"))
    assert sizes == [16] and converted.split.num_replicas == 1
    both = [trace.read(1, "examples", replica, "examples") for replica in (0, 1)]
    np.testing.assert_array_equal(
        converted.read(1, "examples", 0, "examples"), np.concatenate(both)
    )
    for name in trace.tensors(1, "sums"):
        expected = trace.read(1, "sums", 0, name)
        np.testing.assert_array_equal(converted.read(1, "gradients", 0, name), expected)


def moved(recording):
    recording.members["2/before/1/0"] = recording.members["2/before/1/0"] + np.float32(1)


def renamed(recording):
    recording.variables[0]["name"] = "other"
    weights = [v["name"] for v in recording.variables if v["kind"] == "weight"]
    recording.about.update(gradients=weights, settings=[[]] * NUM_STEPS)


def not_bytes(recording):
    recording.members["1/data/0/0"] = recording.members["1/data/0/0"] / 2


def two_rates(recording):
    recording.about["settings"] = [[{"learning_rate": 0.1}, {"learning_rate": 0.2}]] * NUM_STEPS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda recording: without(recording, "sums"), "no 'clipped' of replica 0 in step 0"),
        (lambda recording: without(recording, "before"), "'before'"),
        (moved, "of replica 1 changes before step 1"),
        (lambda recording: recording.about.update(steps=[0, 2]), "do not follow each other"),
        (renamed, "has no variable deep_norm/conv/kernel"),
        (not_bytes, "images that are not bytes divided by 255"),
        (two_rates, "has 2 learning rates"),
    ],
)
def test_what_cannot_be_converted_is_refused(convert, change, message):
    with pytest.raises(DataError, match=message):
        convert(change)


def test_a_recording_says_what_is_wrong_with_it(recorded, tmp_path):
    recording = Recording(*recorded[:2])
    clean = recording.write(tmp_path / "clean.npz")
    assert [found.cause for found in findings_of(clean)] == []
    other = findings_of(recording.write(tmp_path / "other.npz", momentum=0.9))
    assert other[0].cause == "other_optimizer" and "momentum=0.9" in other[0].text
    for name in [name for name in recording.members if "/sums/" in name]:
        recording.members[name] = recording.members[name.replace("/sums/", "/raw/")]
    causes = [found.cause for found in findings_of(recording.write(tmp_path / "raw.npz"))]
    assert causes[0] == "not_all_reduced"


def test_a_program_is_recorded_as_a_strategy_and_its_own_files_are_removed(
    recorded, tmp_path, monkeypatch
):
    trace, batches, _ = recorded
    start, arrays = tmp_path / "start.npz", tmp_path / "batches.npz"
    names = [*trace.tensors(0, "weights"), *trace.tensors(0, "own statistics")]
    np.savez(start, **dict.fromkeys(names, np.zeros(1)))
    images, labels = (np.concatenate(part) for part in zip(*batches, strict=True))
    order = np.arange(len(labels))[::-1]
    np.savez(arrays, images=images[::-1], labels=labels[::-1], order=order[None])
    split = (1, 1, 1, False, [1], False)
    common = Recorded(["CPU"], *split, "data", "", 0.1, 40, True, False, None, [], {})
    files = TrainingFiles(start, arrays, common, steps_per_epoch=2)
    given = []

    def run_program(name, python, config, rate, paths, *flags, num_replicas, on_line):
        given.extend([name, python, rate, num_replicas, *flags])
        on_line("step 1")
        on_line("a line")
        Recording(trace, batches).write(paths["trace"])

    monkeypatch.setattr(framework_recording, "call_in_child_process", lambda *a, **o: files)
    monkeypatch.setattr(framework_recording, "run_program", run_program)
    config = parse_here(
        *("verify", "--strategies=single,torch_ddp", "--steps=2", f"--global_batch_size={SIZE}"),
        *("--num_devices=2", "--device=cpu", "--model=resnet18"),
    )
    recorder, messages = FrameworkRecorder(config, {"torch_ddp": "py"}, tmp_path), []
    found = recorder.record("torch_ddp", tmp_path / "trace", messages.append)
    assert messages == [("step", 1)]
    steps = ["--epochs=1", "--num_steps=2", "--recorded_steps=2"]
    assert given == ["torch_ddp", "py", 0.1, 2, *steps]
    assert (found.num_replicas, found.num_copies, found.shard_weights) == (2, 2, [1, 1])
    assert found.own_findings == [] and found.simulated_devices and not found.syncs_batch_norm
    converted = Trace(tmp_path / "trace")
    for step in (1, 2):
        for replica in (0, 1):
            a, b = (t.read(step, "examples", replica, "examples") for t in (trace, converted))
            np.testing.assert_array_equal(a, b)
    recorder.remove_files()
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]
