"""`verify --case`: options, the file of a case, where it is looked at, and what a user sees."""

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
from tests.conftest import CPUS, run_main
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


# Options


def test_options_of_a_case(write):
    path = write(MODEL + DATA)
    config = Config.of("verify", case=f"{path}:other")
    assert config.distribution.strategies == ("keras_fit",) and config.verification.steps == 3
    assert Config.of("verify", case=str(path), thorough=True).verification.steps == 20
    assert config.verification.case_path == path and config.verification.case_function == "other"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"recipe": "fast"}, "--recipe has no part in --case"),
        ({"inject": "same_shard"}, "--inject has no part in --case"),
        ({"strategies": ("manual",)}, "--strategies=manual does not run a case"),
        ({"case": "/nonexistent/case.py"}, "there is no file /nonexistent/case.py"),
    ],
)
def test_options_that_a_case_refuses(options, message):
    with pytest.raises(ConfigError, match=message):
        Config.of("verify", **{"case": __file__, **options})


def test_fit_needs_a_case():
    with pytest.raises(ConfigError, match="needs verify --case=FILE"):
        Config.of("verify", strategies=("keras_fit",))
    with pytest.raises(ConfigError, match="--thorough needs --case=FILE"):
        Config.of("verify", thorough=True)


# The file


@pytest.mark.parametrize(
    "text, message",
    [
        ("import keras\nx = unknown\n", "my_case.py:2: while it was imported: NameError"),
        ("def model(:\n", "my_case.py:1: while it was imported: SyntaxError"),
        ("import sys\nsys.exit(1)\n", "the file ends the process"),
        ("def data(n):\n    return 1\n", "my_case.py has no function model, it has data; define"),
        (MODEL, "my_case.py has no function data"),
    ],
)
def test_a_file_that_is_no_case(write, text, message):
    with pytest.raises(ConfigError, match=message):
        CaseFile(write(text))


@pytest.mark.parametrize(
    "body, message",
    [
        ("return 3", r"my_case.py:\d+: model\(\) must return a compiled keras.Model, got int"),
        ("import keras; return keras.Sequential()", "returns a model that is not compiled"),
        ("return 1 / 0", r"my_case.py:\d+: in model\(\): ZeroDivisionError: division by zero"),
        ("return MemoryError() + {}", "TypeError"),
    ],
)
def test_a_function_that_returns_no_model(write, body, message):
    case = CaseFile(write(DATA + f"\ndef model():\n    {body}\n"))
    with pytest.raises(ConfigError, match=message):
        case.build_model()


def test_a_data_function_has_to_return_a_data_set(write):
    case = CaseFile(write(MODEL + "\ndef data(n):\n    return [n]\n"))
    with pytest.raises(ConfigError, match=r"data\(\) must return a tf.data.Dataset, got list"):
        case.create_data(4)


def test_modules_beside_the_case_come_first_whatever_they_are_called(write):
    import app.runtime.errors as own
    import models as own_models

    write("WIDTH = 5\n", "models/__init__.py")
    write("def width():\n    from models import WIDTH\n    return WIDTH\n", "app.py")
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


def test_modules_that_make_up_their_attributes_are_left_alone(write, monkeypatch):
    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            raise AssertionError(name)

    monkeypatch.setitem(sys.modules, "lazy_module_of_a_test", Lazy("lazy_module_of_a_test"))
    monkeypatch.setitem(sys.modules, "no_module_at_all", 3)
    assert CaseFile(write(MODEL + DATA)).build_model().built


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


def test_a_set_without_end_has_no_last_batch(write):
    data = case_data(write, "return data(n).repeat()")
    assert data.num_batches is None
    assert names_of(data.part(data.steps)) == ["step 1", "step 2"]


def test_a_generator_s_batches_are_counted(write):
    body = (
        "return tf.data.Dataset.from_generator(lambda: iter(data(n)), output_signature="
        "data(n).element_spec)"
    )
    assert case_data(write, body).num_batches == 3


@pytest.mark.parametrize(
    "body, error, message",
    [
        ("data(n).take(0)", DataError, "has no batch"),
        ("data(n).map(lambda x, y: (x + tf.random.uniform([]), y))", DataError, "batch 1 differs"),
        ("data(10).unbatch().shuffle(10).batch(n)", DataError, "give shuffle"),
        ("data(n).unbatch()", DataError, r"batch 1 has parts of shapes .*; call batch"),
        ("data(n).map(lambda x, y: (x, y[0, 0]))", DataError, "batch 1 has parts of shapes"),
        (
            "data(n).map(lambda x, y: (tf.RaggedTensor.from_tensor(x), y))", ConfigError,
            r"my_case.py:\d+: data\(\) returns a RaggedTensor in its batches",
        ),
        ("data(n).map(lambda x, y: (tf.sparse.from_dense(x), y))", ConfigError, "a SparseTensor"),
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


@pytest.mark.parametrize("is_restored", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_state_that_is_not_restored_is_named(write, monkeypatch, is_restored):
    path = write(MODEL + DATA)
    case, config = CaseFile(path), Config.of("verify", case=str(path), global_batch_size=4)
    data = CaseData(case, 4, 2)
    training = CaseTraining(case, data, config, Devices(CPUS[:1], simulated=False), "single")
    training.record(data.part(data.steps), path.with_suffix(".npz"))
    if not is_restored:
        monkeypatch.setattr(keras.Variable, "assign", lambda variable, value: value)
    names = {variable.name for variable in training.variables} - {"learning_rate"}
    differing = training.resume()
    assert {name.rpartition("/")[2] for name in differing} == (set() if is_restored else names)


def test_a_recording_that_cannot_be_written_is_one_line(write, tmp_path):
    path = write(MODEL + DATA)
    case, config = CaseFile(path), Config.of("verify", case=str(path), global_batch_size=4)
    data = CaseData(case, 4, 1)
    training = CaseTraining(case, data, config, Devices(CPUS[:1], simulated=False), "single")
    with pytest.raises(OutputError, match="No such file or directory; choose another directory"):
        training.record(data.part(data.steps), tmp_path / "missing" / "1.npz")


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
        (MODEL + "\nraise ValueError('no')\n" + DATA, (), 2, "my_case.py:9: while it was imported"),
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
    case = write(MODEL + DATA)
    for kept in (0, 1):
        arguments = "--nothorough", "--global_batch_size=2", f"--seed={kept}"
        result, record = verify(case, *arguments)
        assert result.returncode == 0, result.stdout + result.stderr
    assert record["seed"] == 1
    steps = ["step 1", "step 2", "the last batch of an epoch (2 examples)"]
    assert record["trainings"]["keras_fit"]["steps"] == steps
    note = (
        "keras_fit: not checked: 2 more steps, the second epoch, a save and resume and an"
        " evaluation; --thorough takes about "
    )
    assert note in result.stdout


@pytest.mark.slow
def test_kept_recordings_are_those_of_the_last_run(write, verify, tmp_path):
    case, out = write(MODEL + DATA), tmp_path / "run"
    for kept in (2, 0):  # Before and after a resume.
        keeps = ["--keep_traces"] if kept else []
        one = "--strategies=single", "--num_devices=1"
        result, _ = verify(case, *one, *keeps)
        assert result.returncode == 0, result.stdout + result.stderr
        assert len(list(out.glob("traces/single/*.npz"))) == kept
        assert not [path for path in out.iterdir() if "traces" in path.name] or kept


@pytest.mark.slow
def test_class_weights_and_callbacks_are_arguments_of_fit(write, verify):
    model = MODEL.replace("Dense(1)", "Dense(2)").replace(
        'loss="mse"', "loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)"
    )
    arguments = """
    def fit_arguments():
        scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 / (epoch + 1))
        return {"class_weight": {0: 1.0, 1: 3.0}, "callbacks": [scheduler]}
    """
    case = write(model + DATA.replace("x[:, :1]", "np.arange(10) % 2") + textwrap.dedent(arguments))
    result, record = verify(case, "--global_batch_size=4")
    assert result.returncode == 0, result.stdout + result.stderr
    assert not record["trainings"]["keras_fit"]["findings"]


def test_other_arguments_of_fit_are_refused(write):
    case = CaseFile(write(MODEL + DATA + "\ndef fit_arguments():\n    return {'epochs': 3}\n"))
    message = (
        r"my_case.py:\d+: fit_arguments\(\) returns epochs, which the verification sets itself"
    )
    with pytest.raises(ConfigError, match=message):
        case.fit_arguments()


@pytest.mark.slow
def test_a_case_may_distribute_a_data_set_without_end(write, verify):
    distribute = "\ndef distribute(strategy, n):\n    return data(n)\n"
    case = write(MODEL + DATA.replace(".batch(", ".repeat().batch(") + distribute)
    result, record = verify(case, "--strategies=keras_fit", "--global_batch_size=4")
    assert result.returncode == 0, result.stdout + result.stderr
    assert record["trainings"]["keras_fit"]["steps"] == ["step 1", "step 2", "an evaluation"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "file, causes",
    [
        ("case_train_step.py", {"scalar_loss_not_divided"}),
        ("case_train_step.py:corrected", set()),
        ("case_two_inputs.py", {"weighted_mean_of_means", "other_evaluation"}),
        ("case_two_inputs.py:corrected", set()),
        ("case_minimal.py", set()),
    ],
)
def test_the_examples(verify, file, causes):
    both = "single,keras_fit" if file == "case_minimal.py" else "keras_fit"
    result, record = verify(EXAMPLES / file, f"--strategies={both}")
    assert result.returncode == (9 if causes else 0), result.stdout + result.stderr
    found = record["trainings"]["keras_fit"]["findings"]
    assert {finding["detail"] for finding in found} == causes


@pytest.mark.slow
def test_a_process_ends_with_the_verdict_and_its_code(tmp_path):
    out = tmp_path / "run"
    result = run_main(
        "verify", f"--case={EXAMPLES / 'case_fit.py'}", "--device=cpu", "--num_devices=2",
        "--steps=2", f"--out={out}", "--strategies=keras_fit",
    )  # fmt: skip
    assert result.returncode == 9, result.stdout + result.stderr
    causes = "same random numbers, other clipping (before the sum)"
    verdict = f"keras_fit is not the training that case_fit.py defines on one device: {causes}"
    assert result.stdout.count(verdict) == 1
    assert result.stderr.splitlines()[-1] == f"error: mismatch in keras_fit; see {out}/report.html"


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
    "text, cause, step",
    [
        (
            OWN_STEP.format(divided="loss / tf.where(tf.shape(x)[0] < 5, 1.0, replicas)"),
            "scalar_loss_not_divided",
            "the last batch of an epoch (4 examples)",
        ),
        (
            OWN_STEP.format(divided="loss / (1.0 if self.is_resumed() else replicas)"),
            "scalar_loss_not_divided",
            "the step after a save and resume",
        ),
        (
            OWN_STEP.format(divided="loss / replicas")
            + "\ndef distribute(strategy, size):\n    return data(size).cache()\n",
            "other_examples",
            "the first step of the second epoch",
        ),
    ],
)
def test_a_fault_of_one_place_is_found(write, verify, text, cause, step):
    result, record = verify(write(text), "--global_batch_size=12", "--strategies=keras_fit")
    assert result.returncode == 9, result.stdout + result.stderr
    (finding,) = record["trainings"]["keras_fit"]["findings"]
    assert (finding["detail"], finding["steps"]) == (cause, [step])
