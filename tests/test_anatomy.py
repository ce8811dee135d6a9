"""A step taken apart: from measurements made up by a law, the law comes out again."""

import pytest

from app.config import Config
from app.speed.anatomy import Design, dissect
from app.speed.exchange_model import ExchangeModel, ExchangeTime, LinearCost
from app.speed.rounds import Measured
from speed_samples import sampled

FIXED, EACH, INPUT, LATENCY, PER_BYTE = 2e-3, 1e-4, 1e-3, 5e-5, 1e-9
SIZE, BATCH = 1_000_000, 240


def exchange_sec(n, size):
    return 2 * LATENCY + 2 * (n - 1) * size * PER_BYTE


def alone_sec(n):
    return FIXED + EACH * BATCH / n


def step_sec(n):
    return alone_sec(n) + exchange_sec(n, SIZE) + INPUT


@pytest.fixture
def anatomy():
    config = Config(command="explain", device_counts=(2, 3, 4), global_batch_size=BATCH)
    design = Design.of(config, simulated=False)
    full = {"global_batch_size": BATCH, "gradient_bytes": SIZE}
    points = [
        *(sampled("manual", n, [step_sec(n)] * 3, **full) for n in (2, 3, 4)),
        sampled("manual", 2, [step_sec(2) - exchange_sec(2, SIZE)] * 3, **full),
        sampled("manual", 2, [step_sec(2) - INPUT] * 3, **full),
        *(
            sampled("single", 1, [alone_sec(n)] * 3, global_batch_size=BATCH // n)
            for n in (1, 2, 3)
        ),
    ]
    assert len(points) == len(design.points)
    times = [
        ExchangeTime(n, size, exchange_sec(n, size))
        for n in (2, 3, 4)
        for size in (SIZE // 64, SIZE)
    ]
    return dissect(design, Measured(points, {}, times))


def test_the_parts_are_what_was_put_in_and_add_up(anatomy):
    found = {part.name: part.sec.value for part in anatomy.parts}
    assert found["compute"] == pytest.approx(alone_sec(2))
    assert found["all-reduce"] == pytest.approx(exchange_sec(2, SIZE))
    assert found["input"] == pytest.approx(INPUT)
    assert found["everything else"] == pytest.approx(0, abs=1e-9)
    assert sum(found.values()) == pytest.approx(anatomy.step_sec.value)


def test_the_fits_find_the_law(anatomy):
    assert anatomy.exchange.latency_sec == pytest.approx(LATENCY)
    assert anatomy.exchange.sec_per_byte == pytest.approx(PER_BYTE)
    assert anatomy.compute.fixed_sec == pytest.approx(FIXED)
    assert anatomy.compute.example_sec == pytest.approx(EACH)


def test_the_largest_count_is_held_out_and_its_error_told(anatomy):
    held_out = [p for p in anatomy.predictions if p.held_out]
    assert [p.num_replicas for p in held_out] == [4]
    assert held_out[0].measured_sec == pytest.approx(step_sec(4))
    assert 0 < abs(held_out[0].error) < 0.02  # The input's share changes with the step.
    assert [p.num_replicas for p in anatomy.predictions] == [2, 3, 4, 8, 16]
    assert anatomy.predictions[-1].measured_sec is None


def test_the_break_even_batch_is_where_half_of_it_takes_as_long_as_the_exchange(anatomy):
    batch = anatomy.break_even_batch
    one, two = FIXED + EACH * batch, FIXED + EACH * batch / 2 + exchange_sec(2, SIZE)
    assert one == pytest.approx((1 + anatomy.overhead) * two)


def test_bus_bandwidth_is_that_of_nccl_s_tests():
    assert ExchangeTime(4, 8000, 1e-3).bus_bytes_per_sec == pytest.approx(8000 * 1.5 / 1e-3)


@pytest.mark.parametrize("algorithm", ["sum_on_one", "ring", "tree", "all_to_all"])
def test_no_fitted_cost_is_negative(algorithm):
    times = [ExchangeTime(2, 1000, 2e-3), ExchangeTime(2, 100_000, 1e-3)]
    model = ExchangeModel.fit(algorithm, times)
    assert model.latency_sec >= 0 and model.sec_per_byte >= 0
    cost = LinearCost.fit([10, 20], [2.0, 1.0])
    assert cost.fixed_sec >= 0 and cost.example_sec >= 0


def test_a_ring_beats_one_device_where_there_are_many_and_the_tree_where_tensors_are_small():
    cost = {
        name: ExchangeModel(name, False, LATENCY, PER_BYTE)
        for name in ("sum_on_one", "ring", "tree", "all_to_all")
    }
    assert cost["ring"].sec(16, 1e9) < cost["tree"].sec(16, 1e9) < cost["sum_on_one"].sec(16, 1e9)
    assert cost["tree"].sec(16, 10) < cost["ring"].sec(16, 10)


def test_where_all_share_one_memory_a_ring_moves_no_fewer_bytes():
    ring, one = (ExchangeModel(name, True, 0.0, PER_BYTE) for name in ("ring", "sum_on_one"))
    assert ring.sec(8, SIZE) == one.sec(8, SIZE)


def test_a_replica_by_itself_has_its_own_cores_and_no_input(monkeypatch):
    monkeypatch.setattr("app.speed.anatomy.num_cores", lambda: 8)
    config = Config(command="explain")
    for simulated, cores in ((True, 4), (False, None)):
        alone = Design.of(config, simulated=simulated).alone
        assert list(alone) == [1, 2, 3]
        assert {(p.cores, p.reads_input) for p in alone.values()} == {(cores, False)}


@pytest.mark.parametrize("counts", [(2,), (2, 3)])
def test_with_fewer_than_three_numbers_of_devices_nothing_is_held_out(counts):
    config = Config(command="explain", device_counts=counts, global_batch_size=BATCH)
    design = Design.of(config, simulated=False)
    points = [sampled(p.config.strategy, p.config.num_devices or 1) for p in design.points]
    times = [ExchangeTime(2, size, exchange_sec(2, size)) for size in (SIZE // 64, SIZE)]
    anatomy = dissect(design, Measured(points, {}, times))
    assert not any(p.held_out for p in anatomy.predictions)
    assert [p.num_replicas for p in anatomy.predictions][: len(counts)] == list(counts)
