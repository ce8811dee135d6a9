"""Tests the step-time breakdown with measurements generated from a known model."""

import pytest

from app.config import Config
from app.performance.all_reduce_model import AllReduceModel, AllReduceTime, LinearCost
from app.performance.rounds import Measured
from app.performance.step_time_breakdown import Design, break_down_step
from performance_samples import make_sample

FIXED, EACH, INPUT, LATENCY, PER_BYTE = 2e-3, 1e-4, 1e-3, 5e-5, 1e-9
SIZE, BATCH = 1_000_000, 240


def all_reduce_sec(n, size):
    return 2 * LATENCY + 2 * (n - 1) * size * PER_BYTE


def alone_sec(n):
    return FIXED + EACH * BATCH / n


def step_sec(n):
    return alone_sec(n) + all_reduce_sec(n, SIZE) + INPUT


@pytest.fixture
def breakdown():
    config = Config.of("explain", num_devices=(2, 3, 4), global_batch_size=BATCH)
    design = Design.of(config, simulated=False)
    full = {"global_batch_size": BATCH, "gradient_bytes": SIZE}
    cases = [
        *(make_sample("manual", n, [step_sec(n)] * 3, **full) for n in (2, 3, 4)),
        make_sample("manual", 2, [step_sec(2) - all_reduce_sec(2, SIZE)] * 3, **full),
        make_sample("manual", 2, [step_sec(2) - INPUT] * 3, **full),
        *(
            make_sample("single", 1, [alone_sec(n)] * 3, global_batch_size=BATCH // n)
            for n in (1, 2, 3)
        ),
    ]
    assert len(cases) == len(design.cases)
    times = [
        AllReduceTime(n, size, all_reduce_sec(n, size))
        for n in (2, 3, 4)
        for size in (SIZE // 64, SIZE)
    ]
    return break_down_step(design, Measured(cases, {}, times))


def test_the_parts_are_what_was_put_in_and_add_up(breakdown):
    found = {part.name: part.sec.value for part in breakdown.parts}
    assert found["compute"] == pytest.approx(alone_sec(2))
    assert found["all-reduce"] == pytest.approx(all_reduce_sec(2, SIZE))
    assert found["input"] == pytest.approx(INPUT)
    assert found["everything else"] == pytest.approx(0, abs=1e-9)
    assert sum(found.values()) == pytest.approx(breakdown.step_sec.value)


def test_the_fits_find_the_law(breakdown):
    assert breakdown.all_reduce_model.latency_sec == pytest.approx(LATENCY)
    assert breakdown.all_reduce_model.sec_per_byte == pytest.approx(PER_BYTE)
    assert breakdown.compute.fixed_sec == pytest.approx(FIXED)
    assert breakdown.compute.example_sec == pytest.approx(EACH)


def test_the_largest_count_is_held_out_and_its_error_told(breakdown):
    held_out = [p for p in breakdown.predictions if p.held_out]
    assert [p.num_replicas for p in held_out] == [4]
    assert held_out[0].measured_sec == pytest.approx(step_sec(4))
    assert 0 < abs(held_out[0].error) < 0.02  # The input's share changes with the step.
    assert [p.num_replicas for p in breakdown.predictions] == [2, 3, 4, 8, 16]
    assert breakdown.predictions[-1].measured_sec is None


def test_the_break_even_batch_is_where_half_of_it_takes_as_long_as_the_all_reduce(breakdown):
    batch = breakdown.break_even_batch
    one, two = FIXED + EACH * batch, FIXED + EACH * batch / 2 + all_reduce_sec(2, SIZE)
    assert one == pytest.approx((1 + breakdown.overhead) * two)


def test_bus_bandwidth_is_that_of_nccl_s_tests():
    assert AllReduceTime(4, 8000, 1e-3).bus_bytes_per_sec == pytest.approx(8000 * 1.5 / 1e-3)


@pytest.mark.parametrize("algorithm", ["reduce_to_one", "ring", "tree", "direct"])
def test_no_fitted_cost_is_negative(algorithm):
    times = [AllReduceTime(2, 1000, 2e-3), AllReduceTime(2, 100_000, 1e-3)]
    model = AllReduceModel.fit(algorithm, times)
    assert model.latency_sec >= 0 and model.sec_per_byte >= 0
    cost = LinearCost.fit([10, 20], [2.0, 1.0])
    assert cost.fixed_sec >= 0 and cost.example_sec >= 0


def test_a_ring_beats_one_device_where_there_are_many_and_the_tree_where_tensors_are_small():
    cost = {
        name: AllReduceModel(name, False, LATENCY, PER_BYTE)
        for name in ("reduce_to_one", "ring", "tree", "direct")
    }
    assert (
        cost["ring"].sec(16, 1e9) < cost["tree"].sec(16, 1e9) < cost["reduce_to_one"].sec(16, 1e9)
    )
    assert cost["tree"].sec(16, 10) < cost["ring"].sec(16, 10)


def test_where_all_share_one_memory_a_ring_moves_no_fewer_bytes():
    ring, one = (AllReduceModel(name, True, 0.0, PER_BYTE) for name in ("ring", "reduce_to_one"))
    assert ring.sec(8, SIZE) == one.sec(8, SIZE)


def test_a_replica_by_itself_has_its_own_cores_and_no_input(monkeypatch):
    monkeypatch.setattr("app.performance.step_time_breakdown.num_cores", lambda: 8)
    config = Config.of("explain")
    for simulated, cores in ((True, 4), (False, None)):
        alone = Design.of(config, simulated=simulated).alone
        assert list(alone) == [1, 2, 3]
        assert {(p.cores, p.reads_input) for p in alone.values()} == {(cores, False)}


@pytest.mark.parametrize("counts", [(2,), (2, 3)])
def test_with_fewer_than_three_numbers_of_devices_nothing_is_held_out(counts):
    config = Config.of("explain", num_devices=counts, global_batch_size=BATCH)
    design = Design.of(config, simulated=False)
    cases = [make_sample(p.config.strategy, p.config.num_devices or 1) for p in design.cases]
    times = [AllReduceTime(2, size, all_reduce_sec(2, size)) for size in (SIZE // 64, SIZE)]
    breakdown = break_down_step(design, Measured(cases, {}, times))
    assert not any(p.held_out for p in breakdown.predictions)
    assert [p.num_replicas for p in breakdown.predictions][: len(counts)] == list(counts)
