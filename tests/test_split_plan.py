"""Tests `plan` and `explain` for split trainings, with numbers computed by hand."""

import dataclasses
import itertools

import keras
import pytest
from test_traffic import NUM_WEIGHTS, batch

from app.commands import plan as command
from app.config import Config
from app.performance.plan_output import print_training_plan
from app.performance.rounds import Measured
from app.performance.split_breakdown import SplitDesign, break_down_split
from app.performance.split_output import (
    print_pipeline,
    print_split_breakdown,
    print_traffic,
    schedule_lines,
    verdict_of,
)
from app.performance.split_profile import held_state, traffic_of
from app.performance.training_plan import TrainingPlan
from app.report.record_finder import find_records
from app.report.schedule_plot import plot_schedule
from app.report.speed_part import explain_part
from app.runtime.errors import ConfigError
from performance_samples import make_sample
from report_samples import TRAFFIC, write_explained_pipeline
from small_models import create
from strategies.collectives import shard_sizes


def plan_of(**options):
    return TrainingPlan.of(Config.of("plan", device="cpu", **options))


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9)


@pytest.mark.parametrize("num_devices", [2, 3])
def test_each_device_of_sharded_holds_its_part_exactly(num_devices):
    strategy = create("sharded", num_devices, optimizer_fn=momentum)
    sizes = [75, 3, 1080, 10]
    parts = [sum(shard_sizes(s, num_devices)[r] for s in sizes) for r in range(num_devices)]
    held = held_state(strategy)
    assert [state.weights_bytes for state in held] == [4 * part for part in parts]
    for state, part in zip(held, parts, strict=True):  # And numbers: step, learning rate.
        assert 4 * part <= state.optimizer_bytes <= 4 * part + 12 * num_devices
    assert sum(state.weights_bytes for state in held) == 4 * NUM_WEIGHTS
    whole = held_state(create("manual", num_devices, optimizer_fn=momentum))
    assert [state.weights_bytes for state in whole] == [4 * NUM_WEIGHTS] * num_devices


def test_zero_1_holds_all_weights_and_the_part_that_it_updates():
    strategy = create("sharded", 2, optimizer_fn=momentum, shard="optimizer")
    (first, _) = held_state(strategy)
    part = sum(shard_sizes(size, 2)[0] for size in (75, 3, 1080, 10))
    assert first.weights_bytes == 4 * (NUM_WEIGHTS + part)
    assert first.optimizer_bytes <= 4 * part + 2 * 12


@pytest.mark.parametrize(
    ("name", "parts"), [("pipeline", [78, 1090]), ("tensor", [52 + 545, 26 + 545])]
)
def test_stages_and_channels_are_held_once(name, parts):
    options = {"pipeline_cuts": ("conv",)} if name == "pipeline" else {}
    held = held_state(create(name, 2, optimizer_fn=momentum, **options))
    assert [state.weights_bytes for state in held] == [4 * part for part in parts]


def test_a_plan_of_sharded_has_a_part_on_each_device():
    plan = plan_of(strategy="sharded", num_devices=3, recipe="fast", global_batch_size=99)
    devices = plan.split.devices
    assert sum(device.weights for device in devices) == 4 * 129_068
    for device in devices:  # Whole numbers of elements of each of eight tensors.
        assert abs(device.weights - 4 * 129_068 / 3) <= 4 * 8
        assert device.weights <= device.optimizer <= device.weights + 100
    assert plan.split.size_bytes == 2 * 2 * 4 * 129_068
    assert devices[0].activations == pytest.approx(33 * plan.memory.image_bytes)
    assert plan.split.bubble is None and plan.num_replicas == 3


def test_a_plan_of_a_pipeline():
    gpipe, early, again = (
        plan_of(strategy="pipeline", num_devices=2, micro_batches=4, **options).split
        for options in ({"schedule": "gpipe"}, {}, {"schedule": "gpipe", "recompute": True})
    )
    assert gpipe.in_flight == [4, 4] and early.in_flight == [2, 1]
    assert gpipe.bubble == early.bubble == pytest.approx(1 / 5)
    first, second = gpipe.devices
    assert first.weights + second.weights == 4 * 129_068
    assert early.devices[0].activations == pytest.approx(first.activations / 2)
    assert again.devices[0].activations < first.activations / 2
    there, back = gpipe.terms
    assert there.size_bytes == back.size_bytes and there.size_bytes % (256 * 4) == 0
    assert gpipe.total_bytes == sum(device.total for device in gpipe.devices)


def test_a_plan_of_tensor_with_two_replicas(capsys):
    plan = plan_of(strategy="tensor", num_devices=4, model_parallel=2)
    assert plan.num_replicas == 2 and len(plan.split.devices) == 2
    assert sum(device.weights for device in plan.split.devices) == 4 * 129_068
    assert plan.split.total_bytes == 2 * sum(device.total for device in plan.split.devices)
    assert plan.split.terms[-1].size_bytes == 2 * 4 * 129_068
    # 17,252 bytes an image each way between two devices: forward and back, gathers and logits.
    activations = plan.split.terms[0].size_bytes + plan.split.terms[1].size_bytes
    assert activations == 2 * 17_252 * 256
    print_training_plan(plan)
    shown = capsys.readouterr().out
    assert "on 4 devices, tensor" in shown and "128 on each replica" in shown
    assert "of each of 2 replicas" in shown and "messages in a row" not in shown


def test_what_cannot_be_planned():
    with pytest.raises(ConfigError, match="9 stages need 8 cuts"):
        plan_of(strategy="pipeline", num_devices=9)
    with pytest.raises(ConfigError, match="too few for 11 devices"):
        plan_of(strategy="tensor", num_devices=11)


def test_a_probe_trains_with_the_strategy_that_is_planned(monkeypatch):
    cases = []
    monkeypatch.setattr(command, "_measure", lambda found, repeats: cases.extend(found))
    options = {"strategy": "pipeline", "num_devices": 2, "micro_batches": 8, "probe": True}
    command._probe(Config.of("plan", **options))
    (case,) = cases
    assert (case.config.strategy, case.config.micro_batches) == ("pipeline", 8)


def test_a_step_is_taken_apart_and_its_parts_add_up(capsys):
    config = Config.of("explain", strategy="tensor", num_devices=(2, 4))
    design = SplitDesign.of(config)
    assert [case.name.partition(",")[0] for case in design.cases] == [
        "tensor × 2", "tensor × 4", "tensor × 2", "single × 1",
    ]  # fmt: skip
    secs = {"full": 10.0, "four": 12.0, "no_input": 9.0, "alone": 6.0}
    for simulated, compute in ((True, 6.0), (False, 3.0)):
        facts = {"simulated": simulated, "num_replicas": 1}
        samples = [
            make_sample("tensor", 4 if name == "four" else 2, [sec] * 3, **facts)
            for name, sec in secs.items()
        ]
        breakdown = break_down_split(design, Measured(samples, {}, []))
        found = {part.name: part.sec.value for part in breakdown.parts}
        assert found == pytest.approx(
            {"compute": compute, "input": 1.0, "everything else": 9.0 - compute}
        )
        assert sum(part.share.value for part in breakdown.parts) == pytest.approx(1)
        assert breakdown.speed_up.value == pytest.approx(0.6)
    print_split_breakdown(config, breakdown, samples[0].facts)
    shown = capsys.readouterr().out
    assert "tensor on 2 devices" in shown and "1 (single)" in shown


def test_traffic_is_printed_with_its_verdict(capsys):
    print_traffic(TRAFFIC)
    assert "equal on each of 2 connections" in capsys.readouterr().out
    wrong = dataclasses.replace(TRAFFIC, links=[(0, 1, 1000, 1000), (1, 0, 1000, 1500)])
    assert "DIFFER on 1 connection: device 1 sends device 0 1,500" in verdict_of(wrong)
    ring = traffic_of(create("mirrored", 2, all_reduce="ring"), batch(4))
    assert ring.counted_bytes is None and ring.note.startswith("not counted: the all-reduce ring")
    print_traffic(ring)
    shown = capsys.readouterr().out
    assert ring.note in shown and "equal" not in shown


def test_a_schedule_is_drawn_and_told(tmp_path, capsys):
    pipeline = write_explained_pipeline(tmp_path)
    assert schedule_lines(pipeline) == [
        "stage 0  F0 F1 .  B0 F2 B1 .  B2",
        "stage 1  .  F0 B0 F1 B1 F2 B2 .",
    ]
    print_pipeline(pipeline)
    shown = capsys.readouterr().out
    assert "M = 3 micro-batches, schedule 1f1b" in shown and "0.250" in shown
    assert plot_schedule(tmp_path / "explain.json", tmp_path) == ["schedule.png", "schedule.svg"]
    assert (tmp_path / "schedule.svg").read_text().rstrip().endswith("</svg>")
    (record,) = find_records([tmp_path])
    figures = [block for block in explain_part(record).blocks if block.kind == "figure"]
    charts = list(itertools.chain(*(figure.charts for figure in figures)))
    drawn = {chart.title: chart for chart in charts}
    assert {"by the schedule", "measured, padded alike", "measured"} <= set(drawn)
    by_schedule = drawn["by the schedule"]
    assert "stage 0: F0 F1 B0 F2 B1 B2; stage 1: F0 B0 F1 B1 F2 B2" in by_schedule.description
    # A box for each of twelve passes, in the colours of the page.
    assert by_schedule.drawing.count("fill: var(--c0)") == 6
    assert by_schedule.drawing.count("fill: var(--c1)") == 6
