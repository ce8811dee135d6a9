"""Tests the tables of models and strategies: their entries, and the cost of importing them."""

import pytest

from app.options import names
from conftest import CPUS
from models import MODELS, load_model_builder
from strategies import ALL_REDUCE_ALGORITHMS, STRATEGIES, load_strategy_class
from strategies.collective_cluster import IMPLEMENTATIONS
from strategies.collectives import ALL_REDUCE_FUNCTIONS
from strategies.mirrored import CROSS_DEVICE_OPS


def test_the_options_offer_what_the_tables_hold():
    assert tuple(MODELS) == names.MODEL_NAMES
    assert tuple(STRATEGIES) == names.STRATEGY_NAMES
    assert {*names.ONE_MACHINE_STRATEGIES, names.MULTI_WORKER} == set(STRATEGIES)
    assert set(names.ALL_REDUCE_NAMES) == set().union(*ALL_REDUCE_ALGORITHMS.values())


def test_each_algorithm_of_the_table_is_implemented_and_no_other():
    assert set(ALL_REDUCE_ALGORITHMS) <= set(STRATEGIES)
    assert ALL_REDUCE_ALGORITHMS["manual"] == ("reduce_to_one", *ALL_REDUCE_FUNCTIONS)
    assert ALL_REDUCE_ALGORITHMS["mirrored"] == tuple(CROSS_DEVICE_OPS)
    assert ALL_REDUCE_ALGORITHMS["multi_worker"] == tuple(IMPLEMENTATIONS)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_has_the_algorithms_of_the_table(name):
    strategy = load_strategy_class(name)(CPUS[:1])
    assert strategy.all_reduce_algorithms == ALL_REDUCE_ALGORITHMS.get(name, ())
    assert strategy.algorithm in (strategy.all_reduce_algorithms or ("none",))


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("models.nowhere:build", "No module named 'models.nowhere'"),
        ("models.lenet:build_nothing", "no attribute 'build_nothing'"),
        ("models lenet", "invalid format"),
        ("models.lenet", "must be"),
    ],
)
def test_a_wrong_entry_is_named(monkeypatch, target, reason):
    monkeypatch.setitem(MODELS, "lenet", target)
    with pytest.raises(ImportError) as refusal:
        load_model_builder("lenet")
    assert str(refusal.value).startswith(f'MODELS["lenet"] = "{target}": ')
    assert reason in str(refusal.value)

    target = target.replace("models", "strategies")
    monkeypatch.setitem(STRATEGIES, "manual", target)
    with pytest.raises(ImportError) as refusal:
        load_strategy_class("manual")
    assert str(refusal.value).startswith(f'STRATEGIES["manual"] = "{target}": ')
