"""Predictions of clusters, on numbers worked out by hand."""

import dataclasses
import math

import pytest

from app.config import Config
from app.performance.all_reduce_model import LinearCost
from app.performance.cluster_plan import Links, hierarchical, numbers_of_workers, predict, ring
from app.runtime.errors import ConfigError

# 1 GB/s and 1 ms between machines, 10 GB/s between the devices of one.
LINKS = Links(1e9, 1e-3, 1e10)
SIZE_BYTES = 8e6


def test_one_device_has_no_all_reduce():
    assert ring(1, 1, SIZE_BYTES, LINKS) == 0
    assert hierarchical(1, 1, SIZE_BYTES, LINKS) == 0


def test_ring_between_two_machines():
    # Two messages of half the gradients: 2 · (1 ms + 4 MB / 1 GB/s).
    assert ring(2, 1, SIZE_BYTES, LINKS) == pytest.approx(0.010)
    assert hierarchical(2, 1, SIZE_BYTES, LINKS) == pytest.approx(0.010)


def test_devices_of_a_machine_do_not_use_the_network():
    # Two messages of half the gradients: 2 · (5 µs + 4 MB / 10 GB/s).
    assert ring(1, 2, SIZE_BYTES, LINKS) == pytest.approx(0.00081)
    assert hierarchical(1, 2, SIZE_BYTES, LINKS) == pytest.approx(0.00081)


def test_hierarchical_saves_messages():
    # Ring of 8: 14 · (1 ms + 1 MB / 1 GB/s). Hierarchical: 6 · (5 µs + 2 MB / 10 GB/s) within and
    # 2 · (1 ms + 4 MB / 1 GB/s) between.
    assert ring(2, 4, SIZE_BYTES, LINKS) == pytest.approx(0.028)
    assert hierarchical(2, 4, SIZE_BYTES, LINKS) == pytest.approx(0.00123 + 0.010)


def test_a_step_is_compute_and_the_faster_all_reduce():
    step = predict(
        LinearCost(0.002, 0.0001),
        LINKS,
        num_workers=2,
        devices_per_worker=4,
        global_batch_size=800,
        size_bytes=SIZE_BYTES,
    )
    assert step.num_replicas == 8
    assert step.compute_sec == pytest.approx(0.012)  # 2 ms and 100 images of 0.1 ms.
    assert step.all_reduce_sec == step.hierarchical_sec < step.ring_sec
    # After each call of 21 steps, half a second, 14 messages without content.
    assert step.message_sec == pytest.approx(0.014)
    step_sec = 0.02323 + 0.014 / 21
    assert step.step_sec == pytest.approx(step_sec)
    assert step.efficiency == pytest.approx(0.012 / step_sec)
    # 8 ms of the backward pass can hide as much of the exchange.
    assert step.best_efficiency == pytest.approx(0.012 / (step_sec - 0.008))
    assert step.images_per_sec == pytest.approx(800 / step_sec)
    assert step.speed_up == pytest.approx(0.082 / step_sec)


def test_over_grpc_each_message_is_requested_and_there_is_one_ring():
    links = dataclasses.replace(LINKS, is_grpc=True)
    assert ring(2, 1, SIZE_BYTES, links) == pytest.approx(2 * (0.002 + 0.004))
    assert hierarchical(2, 4, SIZE_BYTES, links) == math.inf
    step = predict(
        LinearCost(0.002, 0.0001),
        dataclasses.replace(links, latency_sec=0.1),
        num_workers=2,
        devices_per_worker=1,
        global_batch_size=20,
        size_bytes=SIZE_BYTES,
    )
    # 3 ms, and 2 · (200 ms + 4 ms); synchronising takes 400 ms, so a call takes ten times as long.
    assert step.message_sec == pytest.approx(0.4)
    assert step.step_sec == pytest.approx(0.411 + 0.4 / 9)


@pytest.mark.parametrize(
    ("number", "numbers"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])]
)
def test_numbers_of_workers(number, numbers):
    assert numbers_of_workers(number) == numbers


def test_the_batch_of_a_plan():
    plan = Config.of("plan", num_workers=64, devices_per_worker=8)
    assert plan.planned_batch_size == 64 * 8 * 32
    assert Config.of("plan", num_workers=2).planned_batch_size == 256
    with pytest.raises(ConfigError, match="at least the number of devices, 64, got 32"):
        Config.of("plan", num_workers=64, global_batch_size=32)
