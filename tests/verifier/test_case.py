"""`verify --case`: options, the file of a case, where it is looked at, and what a user sees."""

import itertools
import json
import pathlib
import sys
import textwrap
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from app.devices.device_setup import Devices
from app.options import Config
from app.runtime.errors import ConfigError, DataError, OutputError
from app.verification.case_data import CaseData
from app.verification.case_file import CaseFile
from app.verification.case_training import CaseTraining
from lockstep.data import file as trace_file
from lockstep.data.trace import About, Trace
from tests.conftest import CPUS
from tests.in_process import run_here
from tests.small_models import mirrored

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

MODEL = """
import keras

def model():
    network = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    network.compile(optimizer="sgd", loss="mse")
    return network
"""
DATA = """
import numpy as np
import tensorflow as tf

def data(global_batch_size):
    x = np.arange(30, dtype=np.float32).reshape(10, 3)
    return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(global_batch_size)
"""


@pytest.fixture
def write(tmp_path):
    def write(text, name="my_case.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write


def test_a_case_is_verified_for_a_few_steps_by_default(write):
    case = f"{write(MODEL + DATA)}:other"
    config = Config.of("verify", case=case)
    assert config.distribution.strategies == ("keras_fit",) and config.verification.steps == 3
    assert Config.of("verify", case=case, thorough=True).verification.steps == 20
    assert config.verification.case_function == "other"


# The file; tests/cli/messages.txt has more errors.


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("model", "def model(): return 3", r"model\(\) must return a compiled .*Model, got int"),
        ("data", "def data(n): return [n]", r"data\(\) must return a tf.data.Dataset, got list"),
        (
            "fit_arguments", "def fit_arguments(): return {'epochs': 3}",
            r"fit_arguments\(\) returns epochs, which the verification sets itself",
        ),
    ],
)  # fmt: skip
def test_what_a_function_must_not_return(write, name, text, message):
    case = CaseFile(write(f"{MODEL}{DATA}\n{text}\n"))
    calls = {"model": case.build_model, "data": lambda: case.create_data(4)}
    with pytest.raises(ConfigError, match=rf"my_case.py:\d+: {message}"):
        calls.get(name, case.fit_arguments)()


class Lazy(types.ModuleType):
    """A module that makes up its attributes."""

    def __getattr__(self, name):
        raise AssertionError(name)


def test_modules_beside_the_case_come_first_whatever_they_are_called(write, monkeypatch):
    import app.runtime.errors as own
    import models as own_models

    monkeypatch.setitem(sys.modules, "lazy_module_of_a_test", Lazy("lazy_module_of_a_test"))
    monkeypatch.setitem(sys.modules, "no_module_at_all", 3)
    write("WIDTH = 5\n", "models/__init__.py")
    write("def width():\n    from models import WIDTH\n    return WIDTH\n", "app.py")
    for name in ("lazy_module_of_a_test", "no_module_at_all"):
        write("", f"{name}.py")
    case = CaseFile(
        write(
            """
            import keras
            import app
            from models import WIDTH

            def model():
                from app import width
                network = keras.Sequential([keras.Input((3,)), keras.layers.Dense(width())])
                network.compile(loss="mse")
                return network

            def data(n):
                return None
            """
        )
    )
    assert case.build_model().output_shape == (None, 5)
    assert sys.modules["models"] is own_models and sys.modules["app.runtime.errors"] is own


# Where it is looked at


def case_data(write, body, *, size=4, steps=2):
    own = DATA.replace("def data(", "def given(")
    text = f"{MODEL}{own}\ndef data(n):\n    {body.replace('data(', 'given(')}\n"
    return CaseData(CaseFile(write(text)), size, steps)


def names_of(part):
    return [step.name for step in part.steps]


def test_the_steps_of_a_data_set_with_a_short_last_batch(write):
    data = case_data(write, "return data(n)")
    part = data.part(data.steps)
    assert names_of(part) == [
        "step 1", "step 2", "the last batch of an epoch (2 examples)",
        "the first step of the second epoch",
    ]  # fmt: skip
    assert part.wanted == [0, 1, 2, 3] and part.num_epochs == 2
    assert [len(batch[0]) for batch in part.dataset] == [4, 4, 2]
    last = data.part([step for step in data.steps if "last batch" in step.name])
    assert [len(batch[0]) for batch in last.dataset] == [4, 2] and last.wanted == [1]
    assert np.array_equal(last.passes[0][2][0][:, 0], [24, 27])


def fake_trace(*batches):
    trace = Trace(About("keras", 1, steps=tuple(range(len(batches)))))
    for position, batch in enumerate(batches):
        trace.put(position, "data", 0, batch)
    return trace


def test_the_batches_of_a_set_that_shuffles_are_those_of_a_later_pass_in_each_epoch(write):
    data = case_data(write, "return data(10).unbatch().shuffle(10, seed=1).batch(n)")
    part = data.part(data.steps)
    used = [part.passes[1][0], part.passes[1][1], part.passes[1][2], part.passes[3][0]]
    assert not np.array_equal(used[0][0], used[3][0])
    found = part.batches_of(fake_trace(*used))
    assert all(np.array_equal(x, y) for (x, _), (y, _) in zip(used, found, strict=True))
    again = part.batches_of(fake_trace(*used[:3], used[0]))  # Not shuffled again.
    assert np.array_equal(again[3][0], part.passes[2][0][0])


def test_a_case_that_distributes_its_data_trains_all_of_it(write):
    body = "return data(10).unbatch().shuffle(10, seed=1).batch(n)"
    data = case_data(write, body, size=4, steps=1)
    part = data.part(data.steps, is_distributed=True)
    assert part.wanted == [0, 2, 3] and part.num_epochs == 2 and part.dataset is None
    assert names_of(part) == [
        "step 1", "the last batch of an epoch (2 examples)", "the first step of the second epoch",
    ]  # fmt: skip


def test_batches_are_counted_where_they_end(write):
    endless = case_data(write, "return data(n).repeat()")
    assert endless.num_batches is None
    assert names_of(endless.part(endless.steps)) == ["step 1", "step 2"]
    generator = (
        "return tf.data.Dataset.from_generator(lambda: iter(data(n)), output_signature="
        "data(n).element_spec)"
    )
    assert case_data(write, generator).num_batches == 3


@pytest.mark.parametrize(
    "body, error, message",
    [
        ("data(n).take(0)", DataError, "has no batch"),
        ("data(10).unbatch().shuffle(10).batch(n)", DataError, "batch 1 differs .* give shuffle"),
        ("data(n).unbatch()", DataError, r"batch 1 has parts of shapes .*; call batch"),
        ("data(n).map(lambda x, y: (x, y[0, 0]))", DataError, "batch 1 has parts of shapes"),
        (
            "data(n).map(lambda x, y: (tf.RaggedTensor.from_tensor(x), y))", ConfigError,
            r"my_case.py:\d+: data\(\) returns a RaggedTensor in its batches",
        ),
        (
            "data(n).map(lambda x, y: (tf.debugging.check_numerics(x / 0.0, 'bad'), y))",
            ConfigError, "InvalidArgumentError",
        ),
    ],
)  # fmt: skip
def test_data_that_cannot_be_verified(write, body, error, message):
    tf.random.set_seed(None)
    with pytest.raises(error, match=message):
        case_data(write, f"return {body}")


def test_strings_and_none_are_data_too(write):
    data = case_data(
        write, "return data(n).map(lambda x, y: ({'text': tf.strings.as_string(x)}, y, None))"
    )
    x, y, weights = next(iter(data.to_evaluate()))
    assert x["text"].dtype == tf.string and x["text"].shape == (4, 3) and y.shape == (4, 1)
    assert float(x["text"][1, 2]) == 5 and weights is None
    first = data.part(data.steps)
    assert first.passes[0][0][0].dtype.kind == "S"


# What a user sees


def test_errors_of_a_resume_and_of_a_recording(write, monkeypatch, tmp_path):
    path = write(MODEL + DATA)
    case, config = CaseFile(path), Config.of("verify", case=str(path), global_batch_size=4)
    data = CaseData(case, 4, 2)
    training = CaseTraining(case, data, config, Devices(CPUS[:1], simulated=False), "single")
    part = data.part(data.steps)
    training.record(part, path.with_suffix(".npz"))
    assert not training.resume()
    with monkeypatch.context() as patch:
        patch.setattr(keras.Variable, "assign", lambda variable, value: value)
        names = {variable.name for variable in training.variables} - {"learning_rate"}
        assert {name.rpartition("/")[2] for name in training.resume()} == names
    with pytest.raises(OutputError, match="No such file or directory; choose another directory"):
        training.record(part, tmp_path / "missing" / "1.npz")


@pytest.fixture(autouse=True)
def _few_graphs():
    """Not counted here: `verify` records two trainings for each strategy."""


@pytest.fixture
def verify(monkeypatch, tmp_path):
    """Verifies a case in this process; returns the result, and what `verify.json` says."""
    strategies = {num: mirrored(num) for num in (1, 2, 3)}
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda names: strategies[len(names)])

    def verify(case, *arguments):
        options = f"--case={case}", f"--out={tmp_path / 'run'}", "--device=cpu", "--steps=2"
        result = run_here("verify", *options, "--num_devices=2", "--thorough", *arguments)
        record = tmp_path / "run/verify.json"
        return result, json.loads(record.read_text()) if record.exists() else None

    return verify


def test_faults_are_named_with_remedy_and_exit_code(write, verify, tmp_path):
    case = write(MODEL.replace('"sgd"', "keras.optimizers.SGD(clipnorm=0.1)") + DATA)
    arguments = "--keep_traces", "--global_batch_size=4", "--strategies=keras_fit"
    result, record = verify(case, *arguments)
    assert result.returncode == 9, result.stdout + result.stderr
    out = tmp_path / "run"
    assert result.stderr.splitlines()[-1] == f"error: mismatch in keras_fit; see {out}/report.html"
    verdict = (
        "keras_fit is not the training that my_case.py defines on one device: other clipping"
        " (before the sum)"
    )
    lines = result.stdout.splitlines()
    assert verdict in lines and lines[-1].startswith(f"open {out}/report.html ")
    assert verdict in (out / "report.html").read_text(encoding="utf-8")
    (finding,) = record["trainings"]["keras_fit"]["findings"]
    assert (finding["stage"], finding["cause"]) == ("clipping", "other_clipping")
    assert finding["detail"] == "clipped_before_the_sum"
    assert {*finding} == {
        "stage", "status", "cause", "detail", "title", "text", "remedy", "code", "steps", "module",
        "items", "tensors", "distance", "allowed",
    }  # fmt: skip
    assert "clipnorm=0.1" in finding["text"] and f"remedy      {finding['remedy'][:9]}" in str(
        lines
    )
    stages = record["trainings"]["keras_fit"]["stages"]
    assert stages["gradients"] == stages["update"] == stages["evaluation"] == "clean"
    traces = sorted((out / "traces/keras_fit").iterdir())
    assert [len(trace_file.load(trace).steps) for trace in traces] == [4, 1]


@pytest.mark.parametrize(
    "text, arguments, code, line",
    [
        (
            MODEL + DATA, ("--num_devices=3", "--strategies=keras_fit"), 2,
            "use --global_batch_size=3",
        ),
        (MODEL.replace("(3,)", "(5,)") + DATA, (), 2, "while the model was called"),
        (MODEL + DATA.replace(".batch(", ".take(0).batch("), (), 3, "data() has no batch"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(write, verify, text, arguments, code, line):
    result, _ = verify(write(text), "--global_batch_size=4", *arguments)
    assert result.returncode == code and "Traceback" not in result.stderr
    assert line in result.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_the_default_says_what_is_not_checked_and_replaces_a_verification(write, verify, tmp_path):
    """Of a case with class weights and callbacks."""
    model = MODEL.replace("Dense(1)", "Dense(2)").replace(
        'loss="mse"', "loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)"
    )
    arguments = """
    def fit_arguments():
        scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 / (epoch + 1))
        return {"class_weight": {0: 1.0, 1: 3.0}, "callbacks": [scheduler]}
    """
    data = DATA.replace("x[:, :1]", "np.arange(10) % 2")
    case, out = write(model + data + textwrap.dedent(arguments)), tmp_path / "run"
    shared = "--global_batch_size=2", "--strategies=keras_fit"
    steps = ["step 1", "step 2", "the last batch of an epoch (2 examples)"]
    more = ["the first step of the second epoch", "the step after a save and resume"]
    for seed, arguments, num_kept, expected in (
        (0, ["--keep_traces"], 2, [*steps, *more, "an evaluation"]), (1, ["--nothorough"], 0, steps)
    ):  # fmt: skip
        result, record = verify(case, *shared, f"--seed={seed}", *arguments)
        assert result.returncode == 0, result.stdout + result.stderr
        assert record["seed"] == seed and record["trainings"]["keras_fit"]["steps"] == expected
        assert len(list(out.glob("traces/keras_fit/*.npz"))) == num_kept
        assert not [path for path in out.iterdir() if "traces" in path.name] or num_kept
    note = (
        "keras_fit: not checked: 2 more steps, the second epoch, a save and resume and an"
        " evaluation; --thorough takes about "
    )
    assert note in result.stdout


@pytest.mark.slow
def test_a_case_may_distribute_a_data_set_without_end(write, verify):
    distribute = "\ndef distribute(strategy, n):\n    return data(n)\n"
    case = write(MODEL + DATA.replace(".batch(", ".repeat().batch(") + distribute)
    result, record = verify(case, "--strategies=keras_fit", "--global_batch_size=4")
    assert result.returncode == 0, result.stdout + result.stderr
    assert record["trainings"]["keras_fit"]["steps"] == ["step 1", "step 2", "an evaluation"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "file, arguments, causes",
    [
        ("case_fit.py", ["--nothorough"], {"same_random_numbers", "clipped_before_the_sum"}),
        ("case_train_step.py", ["--nothorough"], {"scalar_loss_not_divided"}),
        ("case_train_step.py:corrected", ["--nothorough"], set()),
        ("case_two_inputs.py", [], {"weighted_mean_of_means", "other_evaluation"}),
        ("case_two_inputs.py:corrected", [], set()),
        ("case_minimal.py", ["--strategies=single,keras_fit", "--nothorough"], set()),
    ],
)
def test_the_examples(verify, file, arguments, causes):
    result, record = verify(EXAMPLES / file, "--strategies=keras_fit", *arguments)
    assert result.returncode == (9 if causes else 0), result.stdout + result.stderr
    findings = (training["findings"] for training in record["trainings"].values())
    assert {each["detail"] for each in itertools.chain(*findings)} == causes


OWN_STEP = """
import keras
import numpy as np
import tensorflow as tf

class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(1)

    def call(self, x):
        return self.out(x)

    def train_step(self, data):
        x, y = data
        replicas = tf.cast(tf.distribute.get_strategy().num_replicas_in_sync, tf.float32)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            loss = {divided}
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {{"loss": loss}}

    def is_resumed(self):
        if not hasattr(self, "resumed"):
            with tf.init_scope():
                self.resumed = int(keras.ops.convert_to_numpy(self.optimizer.iterations)) > 0
        return self.resumed

def model():
    network = Own()
    network.compile(optimizer="sgd", loss="mse")
    return network

def data(global_batch_size):
    x = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
    return dataset.shuffle(100, seed=1).batch(global_batch_size)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "text, cause, steps",
    [
        (
            OWN_STEP.format(
                divided="loss / tf.where((tf.shape(x)[0] < 5) | self.is_resumed(), 1.0, replicas)"
            ),
            "scalar_loss_not_divided",
            ["the last batch of an epoch (4 examples)", "the step after a save and resume"],
        ),
        (
            OWN_STEP.format(divided="loss / replicas")
            + "\ndef distribute(strategy, size):\n    return data(size).cache()\n",
            "other_examples",
            ["the first step of the second epoch"],
        ),
    ],
)
def test_a_fault_of_one_place_is_found(write, verify, text, cause, steps):
    result, record = verify(write(text), "--global_batch_size=12", "--strategies=keras_fit")
    assert result.returncode == 9, result.stdout + result.stderr
    found = record["trainings"]["keras_fit"]["findings"]
    assert {finding["detail"] for finding in found} == {cause}
    assert [step for finding in found for step in finding["steps"]] == steps
