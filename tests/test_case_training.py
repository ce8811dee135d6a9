"""`train --case` and `compare --case`: the user's own model and data in our loop and records."""

import dataclasses
import json
import textwrap

import keras
import numpy as np
import pytest

from app.config import Config, TrainConfig
from app.devices.device_setup import Devices
from app.records.checkpoint import checkpoint_paths, find_newest_checkpoint
from app.records.history import EpochRecord, checked_record, load_history, load_summary
from app.records.run_directory import load_run_config
from app.records.run_metadata import Progress
from app.report.page import write_report
from app.runtime import fault_points
from app.runtime.errors import (
    ConfigError,
    DataError,
    DivergedError,
    OutputError,
)
from app.runtime.run_context import RunContext
from app.training.case_dataset import CaseDataset
from app.training.epoch_progress import find_accuracy
from app.training.loop import Training
from app.training.run_reader import SavedRun
from app.training.training_definition import check_shards
from app.verification.run_comparison import compare_weights
from conftest import CPUS
from in_process import run_here, run_here_ok

MODEL = """
    import keras
    import numpy as np
    import tensorflow as tf

    def model():
        network = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(4, activation="tanh", kernel_regularizer="l2"),
                keras.layers.Dense(2),
            ],
            name="two_layers",
        )
        network.compile(keras.optimizers.Adam(1e-2, clipnorm=0.5), loss="mse", metrics=["mae"])
        return network

    def examples(number, seed):
        x = np.random.default_rng(seed).normal(size=(number, 3)).astype(np.float32)
        return tf.data.Dataset.from_tensor_slices((x, np.sin(2 * x[:, :2])))
"""
DATA = """
    def data(global_batch_size):
        return examples(50, 1).shuffle(50, seed=3).batch(global_batch_size)
"""
TEST_DATA = """
    def test_data(global_batch_size):
        return examples(21, 2).batch(global_batch_size)
"""
WHOLE = MODEL + DATA + TEST_DATA
IN_ORDER = WHOLE.replace(".shuffle(50, seed=3)", "")  # Keras draws from it before it trains.
CLASSES = """
    import keras
    import numpy as np
    import tensorflow as tf

    def model():
        network = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        network.compile("sgd", loss=loss, metrics=["accuracy"])
        return network

    def data(global_batch_size):
        x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
        return tf.data.Dataset.from_tensor_slices((x, np.argmax(x, 1))).batch(global_batch_size)
"""


@pytest.fixture
def write(tmp_path):
    def write(text, name="my_case.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write


def make(case, run_dir, *, strategy="manual", num_replicas=2, **options):
    config = Config.of(
        **{"case": str(case), "strategy": strategy, "global_batch_size": 16, "epochs": 2, **options}
    )
    num_replicas = 1 if strategy == "single" else num_replicas
    data = CaseDataset(config)
    check_shards(config, num_replicas, data)
    run_dir.mkdir(exist_ok=True)
    devices = Devices(CPUS[:num_replicas], simulated=num_replicas > 1)
    training = Training(config, devices, data, run_dir)
    training.start(from_scratch=False)
    assert training.strategy.num_replicas == num_replicas
    return training


def train(case, run_dir, **options):
    training = make(case, run_dir, **options)
    return training.run()


def weights(run_dir):
    state = find_newest_checkpoint(run_dir).checkpoint.state
    return [array for name, array in state.items() if name.startswith("model/")]


def without_times(run_dir):
    return [
        dataclasses.replace(record, epoch_sec=0.0, images_per_sec=0.0, evaluation_sec=0.0)
        for record in load_history(run_dir)
    ]


# Options


def test_a_case_is_part_of_what_is_trained(write):
    case = write(WHOLE)
    fields = Config.of("train", case=f"{case}:other", data_fn="batches").result_fields()
    assert fields["case"] == str(case) and len(fields["case_sha256"]) == 64
    assert (fields["model_fn"], fields["data_fn"]) == ("other", "batches")
    assert not {"model", "recipe", "learning_rate", "precision", "dataset"} & fields.keys()
    assert not {"case", "case_sha256", "model_fn"} & Config.of("train").result_fields().keys()


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize(
    "option",
    [
        *({"model": "resnet18"}, {"recipe": "fast"}, {"dataset": "synthetic"}, {"data_dir": "x"}),
        *({"learning_rate": 0.1}, {"precision": "mixed_bfloat16"}, {"batch_norm": "sync"}),
        *({"accumulate_steps": 2}, {"jit_compile": True}, {"num_train_examples": 100}),
        *({"last_batch": "drop"}, {"shard_weights": (1, 3)}),
    ],
)
def test_what_a_case_defines_itself_is_no_option(write, command, option):
    with pytest.raises(ConfigError, match=f"--{next(iter(option))} has no part in --case"):
        Config.of(command, case=str(write(WHOLE)), **option)


@pytest.mark.parametrize(
    "command, options, message",
    [
        ("train", {"inject": "same_shard"}, "--inject has no part in --case"),
        ("train", {"strategy": "sharded"}, "--strategy=sharded does not run a case; use one of"),
        ("compare", {"strategies": ("single", "tensor")}, "=tensor does not run a case; use --str"),
        ("train", {"global_batch_size": 1, "num_devices": 2}, "at least the number of replicas, 2"),
        ("train", {"case": "nowhere.py"}, "there is no file nowhere.py"),
        ("train", {"case": None, "test_data_fn": "x"}, "--test_data_fn needs --case=FILE"),
    ],
)
def test_options_that_do_not_fit(write, command, options, message):
    with pytest.raises(ConfigError, match=message):
        Config.of(command, **{"case": str(write(WHOLE)), **options})


def test_every_training_of_a_comparison_gets_the_case(write):
    case = str(write(WHOLE))
    config = Config.of("compare", case=case, test_data_fn="x", strategies=("single", "manual"))
    assert f"--case={case}" in config.for_training("single").flags_for(TrainConfig)
    assert "--test_data_fn=x" in config.for_training("manual").flags_for(TrainConfig)
    assert config.for_training("multi_worker").case == case


# Training


@pytest.fixture(scope="module")
def keras_weights():
    """The weights of Keras' own `fit`, on one device."""
    names = {}
    exec(textwrap.dedent(IN_ORDER), names)
    keras.utils.set_random_seed(0)
    model = names["model"]()
    keras.utils.set_random_seed(0)
    model.fit(names["data"](16), epochs=2, verbose=0, shuffle=False)
    return model.get_weights(), model.evaluate(names["test_data"](16), verbose=0, return_dict=True)


@pytest.mark.parametrize("strategy", ["single", "manual", "mirrored", "multi_worker"])
def test_every_strategy_makes_the_training_of_keras(write, tmp_path, strategy, keras_weights):
    summary = train(write(IN_ORDER), tmp_path / "run", strategy=strategy)
    expected, logs = keras_weights
    for array, same in zip(weights(tmp_path / "run"), expected, strict=True):
        np.testing.assert_allclose(array, same, rtol=1e-4, atol=1e-6)
    assert summary.test_loss == pytest.approx(logs["loss"], rel=1e-5)
    assert summary.test_metrics == {"mae": pytest.approx(logs["mae"], rel=1e-5)}
    assert (summary.status, summary.steps) == ("finished", 8)


def test_two_strategies_hold_the_same_bits(write, tmp_path):
    case = write(WHOLE)
    runs = [tmp_path / name for name in ("single", "manual", "mirrored")]
    hashes = [train(case, path, strategy=path.name).weights_sha256 for path in runs]
    assert hashes[1] == hashes[2] != hashes[0]
    verdicts = compare_weights(runs)
    assert [v.difference.identical for v in verdicts] == [False, False, True]


def test_a_run_leaves_its_records(write, tmp_path):
    summary = train(write(WHOLE), tmp_path / "run")
    assert load_summary(tmp_path / "run") == summary
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {
        "accuracy.png", "accuracy.svg", "checkpoints", "history.jsonl", "summary.json",
    }  # fmt: skip
    assert (summary.case, summary.model, summary.dataset) == (
        "my_case.py",
        "two_layers",
        "my_case.py:data",
    )
    assert (summary.num_train_examples, summary.num_test_examples) == (50, 21)
    assert (summary.recipe, summary.precision, summary.num_parameters) == ("", "float32", 26)
    assert summary.learning_rate == pytest.approx(0.01) and not summary.evaluates_training_data
    assert summary.test_accuracy is None and summary.best_test_accuracy is None
    assert summary.last_line().startswith(f"test loss: {summary.test_loss:.4f}, ")
    first, last = load_history(tmp_path / "run")
    assert first.train_accuracy is None and last.test_metrics == summary.test_metrics
    assert (first.step, last.step) == (4, 8) and last.train_loss < first.train_loss
    svg = (tmp_path / "run" / "accuracy.svg").read_text()
    for text in ("test loss after the epoch", "loss in the epoch", "test mae", "manual: "):
        assert f"<!-- {text}" in svg


def test_a_metric_may_be_the_accuracy(write, tmp_path):
    summary = train(write(CLASSES), tmp_path / "run", strategy="mirrored", epochs=3)
    assert summary.test_accuracy == summary.test_metrics["accuracy"]
    assert summary.best_test_accuracy == max(
        r.test_accuracy for r in load_history(tmp_path / "run")
    )
    assert summary.last_line().startswith("test acc: ")
    assert summary.evaluates_training_data and summary.num_test_examples == 40


@pytest.mark.parametrize(
    "metrics, expected",
    [
        ({"mae": 0.5}, None),
        ({"binary_accuracy": 0.5, "accuracy": 0.25}, 0.25),
        ({"loss2": 1.0, "out_acc": 0.5}, 0.5),
        ({"sparse_top_k_categorical_accuracy": 0.9}, None),
        ({"accuracy": float("nan")}, None),
    ],
)
def test_which_metric_is_the_accuracy(metrics, expected):
    assert find_accuracy(metrics) == expected


@pytest.mark.parametrize("strategy", ["manual", "mirrored"])
def test_a_run_cut_off_in_mid_epoch_equals_an_uninterrupted_one(write, tmp_path, strategy):
    dropout = 'keras.layers.Dense(4, activation="tanh", kernel_regularizer="l2"),'
    text = WHOLE.replace(dropout, f"{dropout} keras.layers.BatchNormalization(),"
                         " keras.layers.Dropout(0.5, seed=1),")  # fmt: skip
    options = {"strategy": strategy, "steps_per_call": 1, "checkpoint_every": 3}
    case = write(text)
    whole = train(case, tmp_path / "whole", **options)
    with RunContext(), pytest.raises(RuntimeError):
        fault_points.arm({fault_points.VARIABLE: "step:7:raise"})
        train(case, tmp_path / "cut", **options)
    assert [path.name for path in checkpoint_paths(tmp_path / "cut")][
        -1
    ] == "step-00000006-epoch-0001"
    resumed = train(case, tmp_path / "cut", **options)
    assert resumed.weights_sha256 == whole.weights_sha256
    assert without_times(tmp_path / "cut") == without_times(tmp_path / "whole")


def test_more_epochs_are_more_of_the_same(write, tmp_path):
    case = write(WHOLE)
    train(case, tmp_path / "run", epochs=1)
    more = train(case, tmp_path / "run", epochs=2)
    assert more.weights_sha256 == train(case, tmp_path / "whole", epochs=2).weights_sha256


# Data


@pytest.mark.parametrize(
    "data, message",
    [
        ("examples(50, 1).batch(16).repeat()", r"data\(\) has no end, .* return a finite data set"),
        ("examples(0, 1).batch(16)", r"data\(\) has no batch"),
        ("examples(50, 1)", r"batch 1 has parts of shapes \(3,\), \(2,\), .* call batch\("),
        ("examples(50, np.random.randint(10**9)).batch(16)", "batch 1 is another one when the"),
        ("examples(50, 1).shuffle(50).batch(16)", "batch 1 is another one when the data set is"),
    ],
)
def test_data_that_cannot_be_trained_on(write, tmp_path, data, message):
    case = write(f"{MODEL}\n    def data(global_batch_size):\n        return {data}\n")
    with pytest.raises(DataError, match=message):
        make(case, tmp_path / "run")


def test_test_data_have_the_parts_of_the_training_data(write, tmp_path):
    text = TEST_DATA.replace("examples(21, 2)", "examples(21, 2).map(lambda x, y: (x, y, y[0]))")
    with pytest.raises(DataError, match=r"float32.* and float32.* and float32.*return the same"):
        make(write(MODEL + DATA + text), tmp_path / "run")


def test_test_data_that_are_named_have_to_be_there(write, tmp_path):
    with pytest.raises(ConfigError, match=r"my_case\.py has no function held_out"):
        make(write(WHOLE), tmp_path / "run", test_data_fn="held_out")


def test_a_shard_without_examples_is_refused(write, tmp_path):
    with pytest.raises(ConfigError, match="a batch of 1 example, too few for 2 replicas"):
        make(write(WHOLE), tmp_path / "run", global_batch_size=7)
    make(write(WHOLE), tmp_path / "run", global_batch_size=7, strategy="single")


def test_the_position_in_shuffled_data_is_that_of_a_training_from_the_start(write, tmp_path):
    data = make(write(WHOLE), tmp_path / "run").dataset
    whole = list(data.train_batches(start_step=0).take(12).as_numpy_iterator())
    late = list(data.train_batches(start_step=7).take(5).as_numpy_iterator())
    for batch, same in zip(late, whole[7:], strict=True):
        for array, expected in zip(batch, same, strict=True):
            np.testing.assert_array_equal(array, expected)
    assert not np.array_equal(whole[0][0], whole[4][0])  # Each epoch has an order of its own.


def test_what_is_read_tells_data_sets_apart(write, tmp_path):
    one = make(write(WHOLE), tmp_path / "run").dataset
    other = make(write(WHOLE.replace("seed=3", "seed=4")), tmp_path / "run").dataset
    assert one.train.sizes == other.train.sizes == [16, 16, 16, 2]
    assert one.sha256() != other.sha256()
    assert one.sha256_of_test_part() == other.sha256_of_test_part()


# Errors of the user's code


@pytest.mark.parametrize(
    "old, new, message",
    [
        (
            'loss="mse"',
            "loss=lambda y, p: tf.matmul(y, p)",
            r"^my_case.py:15: while the model was built on its data: ValueError: Dimensions must",
        ),
        ("keras.layers.Dense(2)", "keras.layers.Dense(5)", r"^my_case.py.*: ValueError: "),
        ("keras.Input((3,))", "keras.Input((4,))", r"^my_case.py.*: ValueError: Input 0"),
        ("return network", "return 1 / 0", r"^my_case.py:\d+: in model\(\): ZeroDivisionError"),
        ('name="two_layers"', "trainable=False", "the model has no weight to train"),
    ],
)
def test_errors_of_the_case_are_told_in_one_line(write, tmp_path, old, new, message):
    assert old in WHOLE
    with pytest.raises(ConfigError, match=message):
        train(write(WHOLE.replace(old, new)), tmp_path / "run")


def test_a_label_out_of_range_is_told_with_the_line(write, tmp_path):
    case = write(CLASSES.replace("np.argmax(x, 1)", "np.argmax(x, 1) + 3"))
    with pytest.raises(
        ConfigError, match=r"in a training step: .* label value of [45] which is out"
    ):
        train(case, tmp_path / "run", strategy="single")


OWN_STEP = (
    WHOLE.replace("network = keras.Sequential(", "network = Own(")
    + """

    class Own(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            self.optimizer.apply(
                tape.gradient(loss, self.trainable_variables), self.trainable_variables
            )
            return {"loss": loss}
"""
)


def test_a_training_step_of_its_own_has_to_report_its_loss(write, tmp_path):
    summary = train(write(OWN_STEP), tmp_path / "run")
    first, last = load_history(tmp_path / "run")
    assert last.train_loss < first.train_loss and summary.steps == 8
    case = write(OWN_STEP.replace('{"loss": loss}', "{}"))
    with pytest.raises(DivergedError, match=r"a train_step must return its loss as \{"):
        train(case, tmp_path / "silent")


def test_a_training_that_diverges_names_the_rate_in_the_file(write, tmp_path):
    case = write(
        WHOLE.replace("keras.optimizers.Adam(1e-2, clipnorm=0.5)", "keras.optimizers.SGD(1e30)")
    )
    with pytest.raises(DivergedError, match="use a smaller learning rate in the file of the case"):
        train(case, tmp_path / "run", strategy="single")


def test_an_error_of_this_program_is_none_of_the_case(write, tmp_path, monkeypatch):
    def fail(*arguments, **options):
        raise TypeError("a bug")

    monkeypatch.setattr("app.records.history.write_history", fail)
    with pytest.raises(TypeError, match="a bug"):
        train(write(WHOLE), tmp_path / "run", strategy="single")


# Commands


def test_train_tells_what_it_trains_and_prints_the_result_again(write, tmp_path):
    flags = ["train", f"--case={write(MODEL + DATA)}", "--strategy=manual", "--device=cpu"]
    flags += ["--num_devices=2", "--epochs=1", "--batch_size=16", f"--out={tmp_path / 'run'}"]
    result = run_here_ok(*flags)
    lines = result.stdout.splitlines()
    assert "manual: two_layers on my_case.py:data, 50 training examples" in lines
    assert "the case has no test_data(): the training data are evaluated" in lines
    assert lines[-1].startswith("test loss: ")
    assert "evaluated on the TRAINING data" in result.stderr
    again = run_here_ok(*flags)
    assert "is already finished" in again.stdout and again.stdout.splitlines()[-1] == lines[-1]
    for command in ("evaluate", "predict"):
        refused = run_here(command, f"--run={tmp_path / 'run'}", "--device=cpu")
        assert refused.returncode == 5
        assert f"is a training of a case, whose model is code that {command}" in refused.stderr


def test_compare_sets_strategies_side_by_side(write, tmp_path):
    out = tmp_path / "compared"
    result = run_here_ok(
        *("compare", f"--case={write(WHOLE)}", "--device=cpu", "--num_devices=2", "--epochs=2"),
        *("--batch_size=16", f"--out={out}"),
    )
    assert "two_layers on my_case.py:data, batch 16, 2 epochs" in result.stdout
    assert "test loss" in result.stdout and "test acc" not in result.stdout.split("examples/s")[-1]
    assert "manual and mirrored: bit-identical weights after 8 steps" in result.stdout
    runs = json.loads((out / "compare.json").read_text())["runs"]
    assert [run["strategy"] for run in runs] == ["single", "manual", "mirrored"]
    assert len({run["dataset_sha256"] for run in runs}) == 1
    page = (out / "report.html").read_text()
    assert "test mae" in page and "test accuracy</" not in page.split("Accuracy and loss")[-1]
    assert load_run_config(out)["case_sha256"] == load_run_config(out / "manual")["case_sha256"]


def test_a_report_shows_the_losses_and_metrics(write, tmp_path):
    train(write(CLASSES), tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(json.dumps({"written_by": "lockstep"}))
    write_report([tmp_path / "run"], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "evaluated on the TRAINING data" in page and "my_case.py:data" in page
    (record,) = load_history(tmp_path / "run")[-1:]
    assert f"{record.test_accuracy:.4f}" in page and f"{record.test_loss:.4f}" in page


def test_a_run_of_a_case_is_not_opened(write, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"written_by": "lockstep", "case": "/tmp/evil.py", "strategy": "manual"})
    )
    with pytest.raises(OutputError, match="is a training of a case"):
        SavedRun.open(Config.of("evaluate", run=str(tmp_path)))


# Records


RECORD = {
    "epoch": 1, "step": 3, "train_loss": -2.5, "train_accuracy": None, "test_loss": -1.0,
    "test_accuracy": None, "epoch_sec": 1.0, "images_per_sec": 2.0,
}  # fmt: skip


def test_a_record_of_a_case_may_have_negative_losses_and_metrics_and_no_accuracy():
    values = {**RECORD, "test_metrics": {"r2": -3.0, "auc": float("nan")}}
    progress = Progress.parse(
        {**dataclasses.asdict(Progress(step=3)), "history": [values]}, steps_per_epoch=3
    )
    assert progress.history[0].test_metrics["r2"] == -3.0


@pytest.mark.parametrize(
    "change",
    [
        {"test_metrics": {"mae": "low"}},
        {"test_metrics": {"mae": 10**400}},
        {"test_metrics": [1.0]},
        {"test_accuracy": "high"},
        {"test_loss": None},
    ],
)
def test_a_damaged_record_is_refused(change):
    with pytest.raises(TypeError):
        checked_record(EpochRecord, {**RECORD, **change})
