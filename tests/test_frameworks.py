"""LeNet and ResNet-18 in PyTorch and JAX; most tests need interpreters that have them."""

import dataclasses
import importlib
import json
import os
import subprocess

import keras
import numpy as np
import pytest
import tensorflow as tf

from app.records.script_trace import load_trace
from app.verification.recordings.trace_verification import given_tolerance, verify_against
from conftest import ROOT
from models.lenet import build_lenet
from models.resnet import build_resnet18
from recorders import lockstep_keras

PROGRAMS = {
    "torch": ("LOCKSTEP_TORCH_PYTHON", ["torch_lenet.py", "--processes=2"]),
    "jit": ("LOCKSTEP_JAX_PYTHON", ["jax_lenet.py", "--mode=jit"]),
    "pmap": ("LOCKSTEP_JAX_PYTHON", ["jax_lenet.py", "--mode=pmap"]),
}
LEARNING_RATE = 0.2


def run(name, *options):
    """Runs a program and returns the lines that it prints; skips the test without interpreter."""
    variable, program = PROGRAMS[name]
    if not (python := os.environ.get(variable)):
        pytest.skip(f"{variable} names no interpreter")
    command = [python, str(ROOT / "frameworks" / program[0]), *program[1:], *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def scaled(network):
    return keras.Sequential([keras.layers.Rescaling(1 / 255), network])


@dataclasses.dataclass
class Training:
    """Files to start from, and what Keras made of them."""

    start: str
    batches: str
    trace: object
    weights: dict
    epochs: list


@pytest.fixture(scope="module")
def lenet(tmp_path_factory):
    """Trains LeNet with Keras: 2 epochs with different orders, of 16, 16 and 8 images."""
    folder = tmp_path_factory.mktemp("lenet")
    keras.utils.set_random_seed(1)
    network = build_lenet(image_shape=(28, 28, 1), num_classes=10)
    np.savez(folder / "start.npz", **{v.path: v.numpy() for v in network.variables})
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (60, 28, 28, 1)).astype(np.uint8)
    labels = generator.integers(0, 10, 60)
    order = np.stack([generator.permutation(40) for _ in range(2)])
    arrays = {"images": images[:40], "labels": labels[:40], "order": order}
    test = {"test_images": images[40:], "test_labels": labels[40:]}
    np.savez(folder / "batches.npz", **arrays, **test)
    model = scaled(network)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(LEARNING_RATE)
    model.compile(optimizer, loss=loss, metrics=["accuracy"])
    epochs = []
    with lockstep_keras.record(str(folder / "keras.npz"), model, steps=2):
        for rows in order:
            data = tf.data.Dataset.from_tensor_slices((images[rows], labels[rows])).batch(16)
            history = model.fit(data, verbose=0).history
            test_loss, test_accuracy = model.evaluate(images[40:], labels[40:], verbose=0)
            result = {"train_loss": history["loss"][0], "train_accuracy": history["accuracy"][0]}
            epochs.append(result | {"test_loss": test_loss, "test_accuracy": test_accuracy})
    weights = {v.path: v.numpy() for v in network.variables}
    files = [str(folder / name) for name in ("start.npz", "batches.npz")]
    return Training(*files, folder / "keras.npz", weights, epochs)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_training_from_given_weights_and_batches(lenet, tmp_path, name):
    files = {kind: tmp_path / f"o.{kind}" for kind in ("json", "npz")} | {"w": tmp_path / "w.npz"}
    options = [f"--start={lenet.start}", f"--batches={lenet.batches}", "--global_batch_size=16"]
    options += [f"--learning_rate={LEARNING_RATE}", "--epochs=2", f"--weights={files['w']}"]
    options += [f"--results={files['json']}", f"--trace={files['npz']}", "--recorded_steps=1"]
    lines = run(name, *options)
    assert [line.split(":")[0] for line in lines] == ["epoch 1", "epoch 2"]
    start, final = dict(np.load(lenet.start)), dict(np.load(files["w"]))
    assert final.keys() == lenet.weights.keys()
    for variable, expected in lenet.weights.items():
        error = np.linalg.norm(final[variable] - expected)
        assert error < 1e-4 * np.linalg.norm(expected - start[variable]), variable
    results = json.loads(files["json"].read_text())
    assert results["num_parameters"] == 129_068
    for found, expected in zip(results["epochs"], lenet.epochs, strict=True):
        assert found.pop("epoch_sec") > 0 < found.pop("evaluation_sec")
        assert found == pytest.approx(expected, rel=1e-5)
    first, other = load_trace(lenet.trace), load_trace(files["npz"])
    assert other.num_replicas == 2
    report = verify_against(first, other, {}, given_tolerance(None))
    assert report.findings == []
    assert report.stages["examples"] == report.stages["gradients"] == "clean"


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_lenet_from_each_recorded_state(lenet, tmp_path, name):
    run(name, "--recorded_steps=2", f"--replay={lenet.trace}", f"--trace={tmp_path / 'o.npz'}")
    first, other = load_trace(lenet.trace), load_trace(tmp_path / "o.npz")
    report = verify_against(first, other, {}, given_tolerance(None))
    assert report.findings == [] and report.skipped == ()
    assert report.stages["gradients"] == report.stages["update"] == "clean"
    assert other.num_replicas == 2


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    """Trains a step of ResNet-18 by hand on 1 and 2 replicas, whose statistics are averaged."""
    folder = tmp_path_factory.mktemp("resnet")
    generator = np.random.default_rng(0)
    # Coarse images: the network has to see where in the image something is.
    images = np.kron(generator.integers(0, 256, (10, 4, 4, 1)), np.ones((1, 7, 7, 1)))
    images, labels = images.astype(np.uint8), generator.integers(0, 10, 10)
    arrays = {"images": images, "labels": labels, "order": np.arange(8)[None, ::-1]}
    np.savez(folder / "batches.npz", **arrays, test_images=images, test_labels=labels)
    replicas = [build_resnet18(image_shape=(28, 28, 1), num_classes=10) for _ in range(2)]
    start = {v.path: v.numpy() for v in replicas[0].variables}
    for path, value in start.items():
        if not path.endswith("kernel"):
            spread = (0.5, 1.5) if path.endswith(("gamma", "variance")) else (-0.1, 0.1)
            start[path] = generator.uniform(*spread, value.shape).astype(np.float32)
    np.savez(folder / "start.npz", **start)
    expected = {}
    for num_replicas in (1, 2):
        own, total = replicas[:num_replicas], None
        for replica, rows in zip(own, np.split(np.arange(8)[::-1], num_replicas), strict=True):
            for variable in replica.variables:
                variable.assign(start[variable.path])
            with tf.GradientTape() as tape:
                logits = replica(images[rows] / np.float32(255), training=True)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels[rows], logits)
                loss = tf.reduce_sum(losses) / 8
            gradients = tape.gradient(loss, replica.trainable_variables)
            total = [a + b for a, b in zip(total, gradients, strict=True)] if total else gradients
        means = [np.mean(v, axis=0) for v in zip(*(r.get_weights() for r in own), strict=True)]
        final = {v.path: mean for v, mean in zip(own[0].variables, means, strict=True)}
        for variable, gradient in zip(own[0].trainable_variables, total, strict=True):
            final[variable.path] = final[variable.path] - LEARNING_RATE * gradient.numpy()
        expected[num_replicas] = final
    expected["statistics"] = moved_statistics(replicas, start, images)
    return Training(str(folder / "start.npz"), str(folder / "batches.npz"), None, expected, [])


def moved_statistics(replicas, start, images):
    """Returns the mean of the replicas' statistics after two batches of 4, with equal weights."""
    for replica in replicas:
        for variable in replica.variables:
            variable.assign(start[variable.path])
    for batch in np.split(np.arange(8)[::-1], 2):
        for replica, rows in zip(replicas, np.split(batch, 2), strict=True):
            replica(images[rows] / np.float32(255), training=True)
    pairs = zip(*(replica.variables for replica in replicas), strict=True)
    return {a.path: (a.numpy() + b.numpy()) / 2 for a, b in pairs}


@pytest.mark.parametrize("name", ["torch", "pmap"])
def test_each_replica_keeps_its_statistics(resnet, tmp_path, name):
    options = ["--model=resnet18", f"--start={resnet.start}", f"--batches={resnet.batches}"]
    options += ["--global_batch_size=4", "--learning_rate=0", "--num_steps=2"]
    assert run(name, *options, f"--weights={tmp_path / 'w.npz'}") == ["step 1", "step 2"]
    start, final = dict(np.load(resnet.start)), dict(np.load(tmp_path / "w.npz"))
    for variable, value in resnet.weights["statistics"].items():
        error, change = np.linalg.norm(final[variable] - value), value - start[variable]
        assert error <= 1e-4 * np.linalg.norm(change), variable


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_step_of_resnet18(resnet, tmp_path, name):
    options = ["--model=resnet18", f"--start={resnet.start}", f"--batches={resnet.batches}"]
    options += ["--global_batch_size=8", f"--learning_rate={LEARNING_RATE}", "--num_steps=1"]
    lines = run(name, *options, f"--weights={tmp_path / 'w.npz'}")
    assert lines == ["step 1"]
    start, final = dict(np.load(resnet.start)), dict(np.load(tmp_path / "w.npz"))
    expected = resnet.weights[1 if name == "jit" else 2]  # With jit, a batch is normalised as one.
    assert final.keys() == expected.keys()
    for variable, value in expected.items():
        if variable.endswith("bias") and "logits" not in variable:
            continue  # Before BatchNorm, its gradient is pure rounding.
        # A rounded activation at ReLU's 0 changes gradients by up to 1e-2, but no statistic.
        tolerance = 1e-4 if "moving" in variable else 0.05
        error, change = np.linalg.norm(final[variable] - value), value - start[variable]
        assert error < tolerance * np.linalg.norm(change), variable


@pytest.fixture
def training_files(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "frameworks")
    return importlib.import_module("training_files")


def parse(module, monkeypatch, *options):
    monkeypatch.setattr("sys.argv", ["program", *options])
    return module.Parser("Trains.").parse()


def test_a_short_last_batch_is_kept_or_dropped(lenet, training_files, monkeypatch):
    common = [f"--batches={lenet.batches}", "--global_batch_size=16", "--epochs=2"]
    arrays = np.load(lenet.batches)
    for last_batch, expected in (("keep", [16, 16, 8]), ("drop", [16, 16])):
        options = parse(training_files, monkeypatch, *common, f"--last_batch={last_batch}")
        data = training_files.load_data(options)
        batches = [*training_files.batches_of(options, data, 1)]
        assert [len(labels) for _, labels in batches] == expected
        rows = arrays["order"][1][: sum(expected)]
        for part, name in ((0, "images"), (1, "labels")):
            joined = np.concatenate([batch[part] for batch in batches])
            np.testing.assert_array_equal(joined, arrays[name][rows])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epochs=0"], "--epochs: must be a whole number from 1, got 0"),
        (["--trace=o.npz"], "--trace and --recorded_steps: one is missing"),
        (["--replay=one.npz"], "--replay: needs --trace"),
        (["--num_steps=2", "--results=r.json"], "--results: has whole epochs"),
        (["--weights=missing/w.npz"], "--weights=missing/w.npz: must be a .npz file in a folder"),
        (["--batches=missing.npz"], "--batches=missing.npz: no such file"),
        (["--batches=BATCHES", "--epochs=3"], "--epochs=3: "),
        (["--batches=BATCHES", "--num_steps=2"], "--num_steps=2: there are 1 steps"),
        (
            ["--batches=BATCHES", "--global_batch_size=41", "--last_batch=drop"],
            "an epoch has fewer",
        ),
        (["--batches=START"], "has no images"),
        (["--batches=BATCHES", "--start=BATCHES"], "has no conv1/kernel"),
        (["--start=missing.npz"], "--start=missing.npz: no such file"),
        (["--replay=START", "--trace=o.npz", "--recorded_steps=1"], "is not a recording"),
        (
            [
                *("--replay=TRACE", "--batches=BATCHES", "--global_batch_size=10"),
                *("--trace=o.npz", "--recorded_steps=3"),
            ],
            "has no step 2",
        ),
    ],
)
def test_an_error_is_one_line(lenet, training_files, monkeypatch, capsys, options, message):
    files = {"BATCHES": lenet.batches, "START": lenet.start, "TRACE": str(lenet.trace)}
    for name, path in files.items():
        options = [option.replace(name, path) for option in options]
    with pytest.raises(SystemExit) as error:
        parsed = parse(training_files, monkeypatch, *options)
        if parsed.batches or parsed.replay:
            training_files.load_data(parsed)
        training_files.load_start(parsed.start, lenet.weights)
    assert error.value.code == 2
    output = capsys.readouterr()
    assert message in output.err and output.err.startswith("error: ")
    assert output.err.count("\n") == 1 and not output.out
