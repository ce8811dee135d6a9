"""Each publicly reported bug in `zoo/` is found and named, and its corrected twin is clean."""

import inspect

import keras
import pytest

from tests.campaigns import optimizers, zoo
from tests.verifier import check
from tests.verifier.zoo import CASES

QUICK = {  # One for each way into a training: its loss, step, optimizer, data and evaluation.
    "regulariser_repeated", "regulariser_in_own_step", "head_not_reduced", "learning_rate_by_rank",
    "same_data_everywhere", "metric_state",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
@pytest.mark.parametrize("number", [0, 1])
def test_a_reported_bug_is_found_and_its_correction_is_clean(name, number):
    check(zoo.rows_of(name)[number])


def test_the_zoo_has_enough_cases_with_links():
    links = {case.link for case in CASES.values()}
    assert len(links) == len(CASES) >= 29
    assert {case.thread.split("/")[2] for case in CASES.values()} == {"issues", "pull"}


def test_every_optimizer_of_keras_is_tried():
    with_others = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer"}
    of_keras = {
        name
        for name, kind in inspect.getmembers(keras.optimizers, inspect.isclass)
        if issubclass(kind, keras.optimizers.Optimizer) and name not in with_others
    }
    tried = {type(create()).__name__ for create in optimizers.OPTIMIZERS.values()}
    assert of_keras == tried and len(optimizers.PAIRS) == 4 * 2 * len(tried)


@pytest.mark.slow
@pytest.mark.parametrize(("clipping", "is_clean"), [({}, True), ({"clipnorm": 0.01}, False)])
def test_a_right_pair_is_clean_and_a_wrong_one_is_not(monkeypatch, clipping, is_clean):
    for name, value in {"NUM_STEPS": 1, "NUM_REPLICAS": 2, "GLOBAL_BATCH_SIZE": 10}.items():
        monkeypatch.setattr(optimizers, name, value)
    clipped = {"nesterov": lambda: keras.optimizers.SGD(0.1, **clipping)}
    monkeypatch.setattr(optimizers, "OPTIMIZERS", clipped)
    text = optimizers.search("attention/nesterov/mixed_bfloat16", seed=1)
    assert (text == "") == is_clean == ("other clipping (before the sum)" not in text)
    assert keras.config.dtype_policy().name == "float32"
