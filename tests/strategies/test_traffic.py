"""Bytes between devices, on every pair of devices."""

import numpy as np
import pytest
import tensorflow as tf

from app.performance.traffic import count_traffic
from strategies.observer import Observer
from tests.small_models import create

NUM_WEIGHTS = 3 * 25 + 3 + 108 * 10 + 10


def batch(num_examples):
    images = np.zeros((num_examples, 28, 28, 1), np.uint8)
    return images, np.zeros(num_examples, np.int32)


def links(*arguments):
    counted = count_traffic(*arguments)
    assert not counted.note
    return {(sender, receiver): size for sender, receiver, size in counted.links}


@pytest.mark.parametrize(
    ("name", "num_devices", "options", "bytes_of_a_number"),
    [
        ("single", 1, {}, 4),
        ("manual", 3, {"all_reduce": "ring"}, 4),
        ("manual", 4, {"all_reduce": "tree"}, 4),
        ("manual", 3, {"all_reduce": "direct", "communication_dtype": "bfloat16"}, 2),
        ("mirrored", 3, {"accumulate_steps": 2, "shard_weights": (3, 1, 1)}, 4),
        ("sharded", 3, {"shard": "gradients"}, 4),
    ],
)
def test_an_all_reduce_sends_every_gradient_twice(name, num_devices, options, bytes_of_a_number):
    """2 (R - 1) S bytes, whatever the algorithm."""
    size = bytes_of_a_number * NUM_WEIGHTS
    counted = links(create(name, num_devices, **options), batch(11))
    assert sum(counted.values()) == 2 * (num_devices - 1) * size


def test_numbers_worked_out_by_hand():
    size = 4 * NUM_WEIGHTS
    manual = links(create("manual", 3), batch(12))
    assert manual == {(1, 0): size, (2, 0): size, (0, 1): size, (0, 2): size}
    pipeline = create("pipeline", 2, pipeline_cuts=("conv",))
    assert links(pipeline, batch(5)) == {(0, 1): 5 * 4 * 108, (1, 0): 5 * 4 * 108}
    # Channels 2 + 1 of 36 positions; 5 + 5 of the logits, on the first device alone.
    tensor = links(create("tensor", 2), batch(5))
    assert tensor == {(0, 1): 5 * 4 * (72 + 36 + 5), (1, 0): 5 * 4 * (36 + 72 + 5)}


def test_what_the_step_does_not_need_does_not_count():
    """`sharded` gathers the sums for an observer: only for one that looks at them."""

    class Looks(Observer):
        def on_update(self, copy_id, summed_gradients):
            tf.debugging.assert_all_finite(summed_gradients[0], "")

    strategy = create("sharded", 2)
    counted = links(strategy, batch(4))
    strategy.observer = Looks()
    assert sum(links(strategy, batch(4)).values()) > sum(counted.values())


def test_what_cannot_be_known_is_said():
    counted = count_traffic(create("mirrored", 2, all_reduce="ring"), batch(4))
    assert "ring of mirrored is a single operation" in counted.note and not counted.links
