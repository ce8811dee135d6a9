"""LeNet in PyTorch and JAX, where interpreters have them; their options and files."""

import dataclasses
import importlib
import json
import os
import subprocess

import keras
import numpy as np
import pytest
import tensorflow as tf

from conftest import ROOT
from lockstep import compare, record_keras, trace_file
from models.lenet import build_lenet
from trace_samples import about, write_trace

PROGRAMS = {
    "torch": ("LOCKSTEP_TORCH_PYTHON", ["torch_lenet.py", "--processes=2"]),
    "jit": ("LOCKSTEP_JAX_PYTHON", ["jax_lenet.py", "--mode=jit"]),
    "pmap": ("LOCKSTEP_JAX_PYTHON", ["jax_lenet.py", "--mode=pmap"]),
}
LEARNING_RATE = 0.2


def run(name, *options):
    """Runs a program and returns the lines that it prints."""
    variable, program = PROGRAMS[name]
    command = [os.environ[variable], str(ROOT / "frameworks" / program[0]), *program[1:], *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


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
    model = keras.Sequential([keras.layers.Rescaling(1 / 255), network])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(LEARNING_RATE)
    model.compile(optimizer, loss=loss, metrics=["accuracy"])
    epochs = []
    with record_keras.record(str(folder / "keras.npz"), model, steps=2):
        for rows in order:
            data = tf.data.Dataset.from_tensor_slices((images[rows], labels[rows])).batch(16)
            history = model.fit(data, verbose=0).history
            test_loss, test_accuracy = model.evaluate(images[40:], labels[40:], verbose=0)
            result = {"train_loss": history["loss"][0], "train_accuracy": history["accuracy"][0]}
            epochs.append(result | {"test_loss": test_loss, "test_accuracy": test_accuracy})
    weights = {v.path: v.numpy() for v in network.variables}
    files = [str(folder / name) for name in ("start.npz", "batches.npz")]
    return Training(*files, folder / "keras.npz", weights, epochs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.skipif(not os.environ.get(variable), reason=variable))
        for name, (variable, _) in PROGRAMS.items()
    ],
)
def test_the_same_training_from_given_weights_and_batches(lenet, tmp_path, name):
    """Then the same LeNet from each recorded state."""
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
    assert trace_file.load(files["npz"]).about.num_replicas == 2
    verdict = compare(lenet.trace, files["npz"])
    assert verdict.findings == () and {"examples", "gradients"} <= {*verdict.checked}
    run(name, "--recorded_steps=2", f"--replay={lenet.trace}", f"--trace={files['npz']}")
    verdict = compare(lenet.trace, files["npz"])
    assert verdict.findings == () and {"gradients", "update"} <= {*verdict.checked}


# --- Options and files ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Weights, batches and recordings, written with NumPy."""
    folder, generator = tmp_path_factory.mktemp("files"), np.random.default_rng(0)
    images = generator.integers(0, 256, (60, 28, 28, 1)).astype(np.uint8)
    labels = generator.integers(0, 10, 60)
    order = np.stack([generator.permutation(40) for _ in range(2)])
    arrays = {"images": images[:40], "labels": labels[:40], "order": order}
    arrays |= {"test_images": images[40:], "test_labels": labels[40:]}
    changed = {
        "batches": {}, "floats": {"images": arrays["images"] / 255}, "rows": {"order": order + 1},
        "classes": {"labels": labels[:40] + 5},
    }  # fmt: skip
    for name, change in changed.items():
        np.savez(folder / f"{name}.npz", **arrays | change)
    np.savez(folder / "start.npz", **WEIGHTS)
    np.savez(folder / "shape.npz", **WEIGHTS | {"conv1/bias": np.zeros(5)})
    np.savez(folder / "more.npz", **WEIGHTS, other=np.zeros(5))
    names = ("conv1.weight", "norm.running_mean")
    description = about(variables=[{"name": n, "kind": "weight"} for n in names], steps=[0, 1])
    description |= {"gradients": [], "settings": [[]] * 2}
    data = {"two": [16, 16], "sizes": [16, 8], "unlabelled": [0, 0]}
    for name, sizes in data.items():
        members = {}
        for position, size in enumerate(sizes, start=1):
            for r in (0, 1):
                members[f"{position}/data/{r}/0"] = images[r : max(size, 2) : 2]
                if size:
                    members[f"{position}/data/{r}/1"] = labels[r:size:2]
        write_trace(folder / f"{name}.npz", description, members)
    np.savez(folder / "two.rank0.npz", x=np.ones(1))
    (folder / "damaged.npz").write_bytes((folder / "two.npz").read_bytes()[:-40])
    return folder


WEIGHTS = {"conv1/kernel": np.zeros((3, 3, 1, 2)), "conv1/bias": np.zeros(2)}


@pytest.fixture
def parse(monkeypatch, files):
    """Returns the module, and what its parser makes of options, in the folder of the files."""
    monkeypatch.syspath_prepend(ROOT / "frameworks")
    monkeypatch.chdir(files)
    module = importlib.import_module("training_files")

    def parsed(*options):
        monkeypatch.setattr("sys.argv", ["program", *options])
        return module.Parser("Trains.").parse()

    return module, parsed


def test_a_short_last_batch_is_kept_or_dropped(parse):
    module, parsed = parse
    common = ["--batches=batches.npz", "--global_batch_size=16", "--epochs=2"]
    arrays = np.load("batches.npz")
    for last_batch, expected in (("keep", [16, 16, 8]), ("drop", [16, 16])):
        options = parsed(*common, f"--last_batch={last_batch}")
        data = module.load_data(options)
        batches = [*module.batches_of(options, data, 1)]
        assert [len(labels) for _, labels in batches] == expected
        assert module.batch_sizes(options, data) == set(expected)
        rows = arrays["order"][1][: sum(expected)]
        for part, name in ((0, "images"), (1, "labels")):
            joined = np.concatenate([batch[part] for batch in batches])
            np.testing.assert_array_equal(joined, arrays[name][rows])


def test_batches_and_names_are_those_of_the_recording_that_is_replayed(parse):
    module, parsed = parse
    options = parsed("--replay=two.npz", "--trace=o.npz", "--recorded_steps=2")
    data = module.load_data(options)
    assert (options.global_batch_size, options.num_steps, options.learning_rate) == (16, 2, 0.2)
    for images, labels in module.batches_of(options, data, 0):
        rows = [*range(0, 16, 2), *range(1, 16, 2)]
        np.testing.assert_array_equal(images, np.load("batches.npz")["images"][rows])
        np.testing.assert_array_equal(labels, np.load("batches.npz")["labels"][rows])
    names = module.names_in_replay("two.npz", "jax", ["conv1/kernel", "norm/moving_mean", "a/bias"])
    assert names == {"conv1/kernel": "conv1.weight", "state/norm/moving_mean": "norm.running_mean"}
    start = module.load_start("start.npz", WEIGHTS)
    assert start.keys() == WEIGHTS.keys() and start["conv1/bias"].dtype == np.float32


REPLAY = ["--trace=o.npz", "--recorded_steps=1"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epochs=0"], "--epochs: must be a whole number from 1, got 0"),
        (["--trace=o.npz"], "--trace and --recorded_steps: one is missing"),
        (["--replay=one.npz"], "--replay: needs --trace"),
        (["--replay=two.npz", "--num_steps=2", *REPLAY], "--num_steps: cannot be used with the"),
        (["--num_steps=2", "--results=r.json"], "--results: has whole epochs"),
        (["--weights=missing/w.npz"], "--weights=missing/w.npz: must be a .npz file in a folder"),
        (["--batches=missing.npz"], "--batches=missing.npz: no such file"),
        (["--batches=damaged.npz"], "--batches=damaged.npz: cannot be read as .npz"),
        (["--batches=batches.npz", "--epochs=3"], "--epochs=3: "),
        (["--batches=batches.npz", "--num_steps=2"], "--num_steps=2: there are 1 steps"),
        (["--batches=batches.npz", "--trace=o.npz", "--recorded_steps=2"], "the training has 1 st"),
        (["--batches=batches.npz", "--global_batch_size=41", "--last_batch=drop"], "has fewer"),
        (["--batches=start.npz"], "has no images"),
        (["--batches=floats.npz"], "images are float64 (40, 28, 28, 1), not uint8"),
        (["--batches=rows.npz"], "order must be (epochs, n), with rows of 40 images"),
        (["--batches=classes.npz"], "labels must be 40 numbers from 0 to 9"),
        (["--batches=batches.npz", "--start=two.npz"], "has no conv1/kernel"),
        (["--start=missing.npz"], "--start=missing.npz: no such file"),
        (["--start=shape.npz"], "conv1/bias is (5,), not (2,)"),
        (["--start=more.npz"], "has other, which is not in the model"),
        (["--replay=start.npz", *REPLAY], "is not a recording"),
        (["--replay=unlabelled.npz", *REPLAY], "has no images and labels of step 1"),
        (["--replay=sizes.npz", "--trace=o.npz", "--recorded_steps=2"], "have different sizes"),
        (["--replay=two.npz", "--batches=batches.npz", "--global_batch_size=10", "--trace=o.npz",
          "--recorded_steps=3"], "has no step 2"),
    ],
)  # fmt: skip
def test_an_error_is_one_line(parse, capsys, options, message):
    module, parsed = parse
    with pytest.raises(SystemExit) as error:
        given = parsed(*options)
        if given.batches or given.replay:
            module.load_data(given)
        module.load_start(given.start, WEIGHTS)
    assert error.value.code == 2
    output = capsys.readouterr()
    assert message in output.err and output.err.startswith("error: ")
    assert output.err.count("\n") == 1 and not output.out
