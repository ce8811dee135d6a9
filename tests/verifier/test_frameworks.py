"""LeNet in PyTorch and JAX, where interpreters have them; their options and files."""

import dataclasses
import importlib
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from lockstep import compare, record_keras
from lockstep.data import file as trace_file
from models.lenet import build_lenet
from tests.conftest import ROOT
from tests.verifier.recorder_scripts import needs, run_script

PROGRAMS = {
    "torch": ("torch", ["torch_lenet.py", "--processes=2"]),
    "jit": ("jax", ["jax_lenet.py", "--mode=jit"]),
    "pmap": ("jax", ["jax_lenet.py", "--mode=pmap"]),
}
LEARNING_RATE = 0.2


def run(name, *options):
    """Runs a program and returns the lines that it prints."""
    package, (file, *flags) = PROGRAMS[name]
    result = run_script(package, ROOT / "frameworks" / file, *flags, *options, timeout=300)
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
    arrays = arrays_of_batches()
    np.savez(folder / "batches.npz", **arrays)
    images, labels, order, *test = arrays.values()
    model = keras.Sequential([keras.layers.Rescaling(1 / 255), network])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(LEARNING_RATE)
    model.compile(optimizer, loss=loss, metrics=["accuracy"])
    epochs = []
    with record_keras.record(str(folder / "keras.npz"), model, steps=2):
        for rows in order:
            data = tf.data.Dataset.from_tensor_slices((images[rows], labels[rows])).batch(16)
            history = model.fit(data, verbose=0).history
            test_loss, test_accuracy = model.evaluate(*test, verbose=0)
            result = {"train_loss": history["loss"][0], "train_accuracy": history["accuracy"][0]}
            epochs.append(result | {"test_loss": test_loss, "test_accuracy": test_accuracy})
    weights = {v.path: v.numpy() for v in network.variables}
    files = [str(folder / name) for name in ("start.npz", "batches.npz")]
    return Training(*files, folder / "keras.npz", weights, epochs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs(package)) for name, (package, _) in PROGRAMS.items()]
)
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
    assert trace_file.load(files["npz"]).about.num_replicas == 2
    verdict = compare(lenet.trace, files["npz"])
    assert verdict.findings == () and {"examples", "gradients"} <= {*verdict.checked}


# --- Options and files ---------------------------------------------------------------------------


def arrays_of_batches():
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (60, 28, 28, 1)).astype(np.uint8)
    labels = generator.integers(0, 10, 60)
    order = np.stack([generator.permutation(40) for _ in range(2)])
    arrays = {"images": images[:40], "labels": labels[:40], "order": order}
    return arrays | {"test_images": images[40:], "test_labels": labels[40:]}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Weights and batches, right and wrong ones."""
    folder, arrays = tmp_path_factory.mktemp("files"), arrays_of_batches()
    changed = {
        "batches": {}, "floats": {"images": arrays["images"] / 255},
        "rows": {"order": arrays["order"] + 1}, "classes": {"labels": arrays["labels"] + 5},
    }  # fmt: skip
    for name, change in changed.items():
        np.savez(folder / f"{name}.npz", **arrays | change)
    np.savez(folder / "start.npz", **WEIGHTS)
    np.savez(folder / "shape.npz", **WEIGHTS | {"conv1/bias": np.zeros(5)})
    np.savez(folder / "more.npz", **WEIGHTS, other=np.zeros(5))
    (folder / "damaged.npz").write_bytes((folder / "batches.npz").read_bytes()[:-40])
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epochs=0"], "--epochs: must be a whole number from 1, got 0"),
        (["--trace=o.npz"], "--trace and --recorded_steps: one is missing"),
        (["--num_steps=2", "--results=r.json"], "--results: has whole epochs"),
        (["--weights=missing/w.npz"], "--weights=missing/w.npz: must be a .npz file in a folder"),
        (["--batches=missing.npz"], "--batches=missing.npz: no such file"),
        (["--batches=damaged.npz"], "--batches=damaged.npz: cannot be read as .npz"),
        (["--batches=batches.npz", "--epochs=3"], "--epochs=3: "),
        (["--batches=batches.npz", "--num_steps=2"], "--num_steps=2: there are 1 steps"),
        (["--batches=batches.npz", "--trace=o.npz", "--recorded_steps=2"], "there are 1 steps"),
        (["--batches=batches.npz", "--global_batch_size=41", "--last_batch=drop"], "are 0 steps"),
        (["--batches=start.npz"], "has no images"),
        (["--batches=floats.npz"], "images are float64 (40, 28, 28, 1), not uint8"),
        (["--batches=rows.npz"], "order must be from 0 to 39"),
        (["--batches=classes.npz"], "labels must be from 0 to 9"),
        (["--start=missing.npz"], "--start=missing.npz: no such file"),
        (["--start=batches.npz"], "conv1/kernel of shape () is not the model's (3, 3, 1, 2)"),
        (["--start=shape.npz"], "conv1/bias of shape (5,) is not the model's (2,)"),
        (["--start=more.npz"], "other of shape (5,) is not the model's ()"),
    ],
)
def test_an_error_is_one_line(parse, capsys, options, message):
    module, parsed = parse
    with pytest.raises(SystemExit) as error:
        given = parsed(*options)
        if given.batches:
            module.load_data(given)
        assert module.load_start("start.npz", WEIGHTS)["conv1/bias"].dtype == np.float32
        module.load_start(given.start, WEIGHTS)
    assert error.value.code == 2
    output = capsys.readouterr()
    assert message in output.err and output.err.startswith("error: ")
    assert output.err.count("\n") == 1 and not output.out
