"""Each publicly reported bug in `zoo/` is found and named, and its corrected twin is clean."""

import importlib.util
import inspect
import pathlib

import keras
import pytest

FOLDER = pathlib.Path(__file__).parent / "zoo"


def program(name):
    spec = importlib.util.spec_from_file_location(f"zoo_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


zoo, matrix = program("run"), program("optimizers")
QUICK = {  # One for each way into a training: its loss, step, optimizer, data and evaluation.
    "regulariser_repeated", "regulariser_in_own_step", "head_not_reduced", "learning_rate_by_rank",
    "same_data_everywhere", "metric_state",
}  # fmt: skip


EACH = pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in zoo.CASES]
)


@EACH
def test_a_reported_bug_is_found(name):
    case = zoo.CASES[name]
    found = zoo.search(case.wrong, case.num_replicas)
    assert not zoo.problems(case, found), "\n".join(map(str, found))


@EACH
def test_a_correction_is_clean(name):
    case = zoo.CASES[name]
    found = zoo.search(case.right, case.num_replicas)
    assert not found, "\n".join(map(str, found))


def test_the_zoo_has_enough_cases_with_links():
    links = {case.link for case in zoo.CASES.values()}
    assert len(links) == len(zoo.CASES) >= 29
    assert {case.thread.split("/")[2] for case in zoo.CASES.values()} == {"issues", "pull"}


def test_every_optimizer_of_keras_is_tried():
    with_others = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"}
    of_keras = {
        name
        for name, kind in inspect.getmembers(keras.optimizers, inspect.isclass)
        if issubclass(kind, keras.optimizers.Optimizer) and name not in with_others
    }
    tried = {type(create()).__name__ for create in matrix.OPTIMIZERS.values()}
    assert of_keras == tried and len(matrix.pairs_of([])) == 4 * 2 * len(tried)


@pytest.mark.slow
@pytest.mark.parametrize(("clipping", "is_clean"), [({}, True), ({"clipnorm": 0.01}, False)])
def test_a_right_pair_is_clean_and_a_wrong_one_is_not(monkeypatch, clipping, is_clean):
    monkeypatch.setattr(matrix, "NUM_STEPS", 1)
    monkeypatch.setattr(matrix, "NUM_REPLICAS", 2)
    monkeypatch.setattr(matrix, "GLOBAL_BATCH_SIZE", 10)
    monkeypatch.setitem(
        matrix.OPTIMIZERS, "nesterov", lambda: keras.optimizers.SGD(0.1, **clipping)
    )
    text = matrix.search("attention", "nesterov", "mixed_bfloat16", seed=1)
    assert (text == matrix.CLEAN) == is_clean == ("clipped before the sum" not in text)
    assert keras.config.dtype_policy().name == "float32"
