"""Bytes between devices: counted in the graph and by formula, on every pair of devices."""

import numpy as np
import pytest
import tensorflow as tf

from app.performance.traffic import traffic_of
from app.performance.traffic_count import UnknownTrafficError, count_traffic
from app.performance.traffic_formula import terms_of
from small_models import create, small_resnet
from strategies.observer import Observer

NUM_WEIGHTS = 3 * 25 + 3 + 108 * 10 + 10


def batch(num_examples):
    images = np.zeros((num_examples, 28, 28, 1), np.uint8)
    return images, np.zeros(num_examples, np.int32)


@pytest.mark.parametrize(
    ("name", "num_devices", "options"),
    [
        ("single", 1, {}),
        ("manual", 3, {}),
        ("manual", 3, {"all_reduce": "ring"}),
        ("manual", 4, {"all_reduce": "tree"}),
        pytest.param("manual", 3, {"all_reduce": "tree"}, marks=pytest.mark.slow),
        ("manual", 3, {"all_reduce": "direct", "bucket_mib": 0.001}),
        ("manual", 2, {"accumulate_steps": 2, "shard_weights": (3, 1)}),
        ("manual", 2, {"communication_dtype": "bfloat16"}),
        pytest.param("manual", 2, {"jit_compile": True}, marks=pytest.mark.slow),
        ("mirrored", 3, {"build": small_resnet}),
        ("sharded", 3, {"shard": "weights"}),
        ("sharded", 3, {"shard": "gradients"}),
        ("sharded", 3, {"shard": "optimizer"}),
        ("pipeline", 2, {"build": small_resnet}),
        ("pipeline", 2, {"recompute": True, "schedule": "gpipe"}),
        ("pipeline", 4, {"model_parallel": 2, "micro_batches": 2}),
        ("tensor", 2, {"build": small_resnet}),
        pytest.param("tensor", 3, {}, marks=pytest.mark.slow),
        ("tensor", 4, {"model_parallel": 2}),
    ],
)
def test_what_is_counted_is_what_the_formula_says(name, num_devices, options):
    found = traffic_of(create(name, num_devices, **options), batch(11))
    assert not found.note
    counted, by_formula = (sum(size for *_, size in sent) for sent in (found.links, found.terms))
    assert counted == by_formula
    assert bool(counted) == (num_devices > 1)


def test_numbers_worked_out_by_hand():
    size = 4 * NUM_WEIGHTS
    manual = count_traffic(create("manual", 3), batch(12))
    assert manual == {(1, 0): size, (2, 0): size, (0, 1): size, (0, 2): size}
    pipeline = create("pipeline", 2, pipeline_cuts=("conv",))
    assert count_traffic(pipeline, batch(5)) == {(0, 1): 5 * 4 * 108, (1, 0): 5 * 4 * 108}
    # Channels 2 + 1 of 36 positions; 5 + 5 of the logits, on the first device alone.
    tensor = count_traffic(create("tensor", 2), batch(5))
    assert tensor == {(0, 1): 5 * 4 * (72 + 36 + 5), (1, 0): 5 * 4 * (36 + 72 + 5)}


def test_what_the_step_does_not_need_does_not_count():
    """`sharded` gathers the sums for an observer: only for one that looks at them."""

    class Looks(Observer):
        def on_update(self, copy_id, summed_gradients):
            tf.debugging.assert_all_finite(summed_gradients[0], "")

    strategy = create("sharded", 2)
    counted = count_traffic(strategy, batch(4))
    strategy.observer = Looks()
    assert sum(count_traffic(strategy, batch(4)).values()) > sum(counted.values())


def test_what_cannot_be_known_is_said():
    with pytest.raises(UnknownTrafficError, match="ring of mirrored is a single operation"):
        count_traffic(create("mirrored", 2, all_reduce="ring"), batch(4))
    with pytest.raises(UnknownTrafficError, match="hierarchical sends is TensorFlow's choice"):
        terms_of(create("mirrored", 2, all_reduce="hierarchical"), 4)
    with pytest.raises(UnknownTrafficError, match="synchronised BatchNorm"):
        terms_of(create("mirrored", 2, small_resnet, batch_norm="sync"), 4)
