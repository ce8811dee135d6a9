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


@pytest.mark.parametrize("name", zoo.case_names())
def test_a_reported_bug_is_found_and_its_correction_is_clean(name):
    row = zoo.examine(name)
    assert not row.problems, "\n".join([*row.problems, *map(str, [*row.found, *row.twin])])


def test_the_zoo_has_enough_cases_with_links():
    cases = [zoo.load_case(name) for name in zoo.case_names()]
    assert len(cases) >= 20
    assert all(case.LINK.startswith("https://github.com/") for case in cases)
    assert len({case.LINK for case in cases}) == len(cases)
    assert all(case.BUG.replace("#", "/").split("/")[-1] in case.LINK for case in cases)


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
def test_a_right_pair_is_clean_and_a_wrong_one_is_not(monkeypatch):
    monkeypatch.setattr(matrix, "NUM_STEPS", 2)
    assert matrix.search("lstm", "nesterov", "float32", seed=1) == matrix.CLEAN
    clipped = lambda: keras.optimizers.SGD(0.1, clipnorm=0.01)  # noqa: E731
    monkeypatch.setitem(matrix.OPTIMIZERS, "nesterov", clipped)
    report = matrix.search("lstm", "nesterov", "mixed_bfloat16", seed=1)
    assert "clipped before the sum" in report.splitlines()[0]  # The verdict.
    assert keras.config.dtype_policy().name == "float32"
