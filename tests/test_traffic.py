"""Bytes between devices: counted in the graph and by formula, on every pair of devices."""

from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

from app.performance import traffic_count, traffic_formula
from app.performance.traffic_count import NotCountableError, count_traffic
from app.performance.traffic_formula import NoFormulaError, terms_of
from small_models import create, small_network, small_resnet
from strategies.observer import Observer

NUM_WEIGHTS = 3 * 25 + 3 + 108 * 10 + 10


def batch(num_examples):
    images = np.zeros((num_examples, 28, 28, 1), np.uint8)
    return images, np.zeros(num_examples, np.int32)


def by_formula(strategy, num_examples):
    links = Counter()
    for term in terms_of(strategy, num_examples):
        links.update(term.links)
    return dict(+links)


@pytest.mark.parametrize(
    ("name", "num_devices", "options"),
    [
        ("single", 1, {}),
        ("manual", 3, {}),
        ("manual", 3, {"all_reduce": "ring"}),
        ("manual", 4, {"all_reduce": "tree"}),
        ("manual", 3, {"all_reduce": "tree"}),
        ("manual", 3, {"all_reduce": "direct", "bucket_mib": 0.001}),
        ("manual", 2, {"accumulate_steps": 2, "shard_weights": (3, 1)}),
        ("manual", 2, {"communication_dtype": "bfloat16"}),
        ("manual", 2, {"jit_compile": True}),
        ("mirrored", 3, {}),
        ("sharded", 3, {"shard": "weights"}),
        ("sharded", 3, {"shard": "gradients"}),
        ("sharded", 3, {"shard": "optimizer"}),
        ("pipeline", 2, {}),
        ("pipeline", 2, {"recompute": True, "schedule": "gpipe"}),
        ("pipeline", 4, {"model_parallel": 2, "micro_batches": 2}),
        ("tensor", 2, {}),
        ("tensor", 3, {}),
        ("tensor", 4, {"model_parallel": 2}),
    ],
)
def test_what_is_counted_is_what_the_formula_says(name, num_devices, options):
    strategy = create(name, num_devices, **options)
    counted = count_traffic(strategy, batch(11)).links
    assert counted == by_formula(strategy, 11)
    assert bool(counted) == (num_devices > 1)


@pytest.mark.parametrize(
    ("name", "options"),
    [("manual", {"batch_norm": "sync"}), ("pipeline", {}), ("tensor", {}), ("mirrored", {})],
)
def test_so_it_is_with_batch_norm_and_shortcuts(name, options):
    strategy = create(name, 2, small_resnet, **options)
    assert count_traffic(strategy, batch(7)).links == by_formula(strategy, 7)


def test_numbers_worked_out_by_hand():
    size = 4 * NUM_WEIGHTS
    manual = count_traffic(create("manual", 3), batch(12))
    assert manual.links == {(1, 0): size, (2, 0): size, (0, 1): size, (0, 2): size}
    # Four images and labels each, the size of the batch where the loss needs it, and its totals.
    assert 4 * (784 + 4) <= manual.inputs[0, 1] < 4 * (784 + 4) + 100
    pipeline = create("pipeline", 2, pipeline_cuts=("conv",))
    assert count_traffic(pipeline, batch(5)).links == {(0, 1): 5 * 4 * 108, (1, 0): 5 * 4 * 108}
    # Channels 2 + 1 of 36 positions; 5 + 5 of the logits, on the first device alone.
    tensor = count_traffic(create("tensor", 2), batch(5)).links
    assert tensor == {(0, 1): 5 * 4 * (72 + 36 + 5), (1, 0): 5 * 4 * (36 + 72 + 5)}


def test_what_the_step_does_not_need_does_not_count():
    """`sharded` gathers the sums for an observer: only for one that looks at them."""

    class Looks(Observer):
        def on_update(self, copy_id, summed_gradients):
            tf.debugging.assert_all_finite(summed_gradients[0], "")

    strategy = create("sharded", 2)
    counted = count_traffic(strategy, batch(4)).links
    strategy.observer = Looks()
    assert sum(count_traffic(strategy, batch(4)).links.values()) > sum(counted.values())


def test_what_cannot_be_known_is_said():
    with pytest.raises(NotCountableError, match="ring of mirrored is a single operation"):
        count_traffic(create("mirrored", 2, all_reduce="ring"), batch(4))
    with pytest.raises(NoFormulaError, match="hierarchical sends is TensorFlow's choice"):
        terms_of(create("mirrored", 2, all_reduce="hierarchical"), 4)
    with pytest.raises(NoFormulaError, match="Keras computes BatchNorm"):
        terms_of(create("mirrored", 2, small_resnet, batch_norm="sync"), 4)


def test_the_totals_are_those_of_the_textbook():
    """Whatever the algorithm, an all-reduce sends 2 (R − 1) S in all."""
    for algorithm in ("reduce_to_one", "tree", "ring", "direct"):
        for num in (2, 3, 4, 5, 8):
            term = traffic_formula.all_reduce_term([7, 1000], range(num), algorithm)
            assert term.size_bytes == 2 * (num - 1) * 4 * 1007, (algorithm, num)
    for shard, times in (("weights", 2), ("gradients", 2), ("optimizer", 3)):
        terms = traffic_formula.sharded_terms([7, 1000], 3, shard)
        assert sum(term.size_bytes for term in terms) == times * 2 * 4 * 1007


def test_rows_follow_the_shares_of_the_replicas():
    strategy = create("manual", 2, shard_weights=(3, 1), accumulate_steps=2)
    assert traffic_count.rows_of_devices(strategy, 16) == [12, 4]
    assert traffic_count.rows_of_devices(create("pipeline", 4, model_parallel=2), 9) == [5, 5, 4, 4]
    assert small_network().count_params() == NUM_WEIGHTS
