"""The arithmetic of a training that is not made, against numbers worked out by hand."""

import re

import pytest

from app.commands import plan as command
from app.config import Config
from app.performance.plan_output import print_probe, print_training_plan
from app.performance.training_plan import TrainingPlan
from app.training.memory_estimate import StepSize
from conftest import run_ok
from performance_samples import make_sample


def plan_of(**options):
    options.setdefault("num_devices", 3)
    return TrainingPlan.of(Config.of("plan", device="cpu", **options))


@pytest.fixture(scope="module")
def lenet():
    return plan_of(global_batch_size=100, num_train_examples=1030, epochs=4)


def test_steps_and_shards(lenet):
    assert (lenet.num_replicas, lenet.steps_per_epoch, lenet.last_batch) == (3, 11, 30)
    assert lenet.shards(100) == {34: 1, 33: 2}
    assert lenet.shards(4) == {2: 1, 1: 2}
    assert lenet.largest_shard == 34
    dropping = plan_of(global_batch_size=100, num_train_examples=1030, last_batch="drop")
    assert (dropping.steps_per_epoch, dropping.last_batch) == (10, 0)


def test_gradient_bytes(lenet):
    size = 4 * 129_068
    assert lenet.num_parameters == 129_068 and lenet.gradient_bytes == size
    assert lenet.all_reduces() == {
        "reduce_to_one": (2, 4 * size),
        "tree": (4, 4 * size),
        "ring": (4, pytest.approx(4 / 3 * size)),
        "direct": (2, pytest.approx(4 / 3 * size)),
    }
    halved = plan_of(communication_dtype="bfloat16")
    assert halved.gradient_bytes == size / 2
    assert set(plan_of(num_devices=1).all_reduces().values()) == {(0, 0.0)}


def test_memory_is_that_of_the_largest_shard_with_the_optimizer_s(lenet):
    memory = lenet.memory
    assert lenet.memory_bytes == pytest.approx(
        memory.fixed_bytes(StepSize(1, 1, 34)) + 34 * memory.image_bytes
    )
    assert memory.optimizer_state_bytes < 100
    assert plan_of(recipe="fast").memory.optimizer_state_bytes >= memory.weights_bytes


def test_the_learning_rate_follows_the_batch():
    assert plan_of(global_batch_size=512).learning_rate == pytest.approx(0.4)
    own = plan_of(global_batch_size=512, learning_rate=1.0)
    assert (own.learning_rate, own.recipe_learning_rate) == (1.0, pytest.approx(0.4))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"global_batch_size": 300, "num_train_examples": 601}, "refuse this: --global"),
        ({"global_batch_size": 6000}, "leaves 10 steps an epoch"),
        ({"global_batch_size": 12}, "4 images on each device"),
        ({"num_train_examples": 2570}, "the last batch of each epoch has 10 of 256"),
        ({"learning_rate": 1.0}, "--learning_rate=1 is 5 times what the rule says"),
        (
            {"global_batch_size": 10_000},
            "the linear rule for the learning rate was seen to hold up to 8,192",
        ),
        ({"global_batch_size": 1024}, "recipe d2l has no warm-up"),
        (
            {"global_batch_size": 5000, "recipe": "fast"},
            "the square-root rule for the learning rate was seen to hold up to 4,096",
        ),
        (
            {"global_batch_size": 4096, "recipe": "fast", "epochs": 100},
            "a learning rate of 0.8 is more than 2 times the recipe's for 256 images, which was not"
            " seen to hold; use --learning_rate=0.4",
        ),
        (
            {"global_batch_size": 2048, "recipe": "fast", "epochs": 4},
            "120 steps in all: with fewer than 566 the learning rate rises less high",
        ),
    ],
)
def test_warnings(options, told):
    assert any(told in warning for warning in plan_of(**options).warnings(on_cpu=True))


def test_nothing_to_warn_of():
    assert list(plan_of(num_devices=2).warnings(on_cpu=True)) == []
    fast = plan_of(num_devices=2, recipe="fast", global_batch_size=1024)
    assert list(fast.warnings(on_cpu=True)) == []


def test_the_rule_of_the_learning_rate_is_told(capsys):
    for options, told in [
        ({"global_batch_size": 1024}, "0.8: the recipe's 0.2 for 256 images, in proportion to"),
        (
            {"global_batch_size": 1024, "recipe": "fast"},
            "0.4, risen to in 200 steps: the recipe's 0.2 for 256 images, growing with the"
            " square root of the batch",
        ),
        (
            {"global_batch_size": 1024, "recipe": "fast", "epochs": 4},
            "0.236, risen to in 118 steps: the recipe's 0.2 for 256 images, growing with the square"
            " root of the batch, and lower for so few steps",
        ),
        (
            {"global_batch_size": 128, "recipe": "fast"},
            "for 256 images, in proportion to the batch",
        ),
    ]:
        print_training_plan(plan_of(**options))
        assert told in capsys.readouterr().out


def test_too_little_memory_is_told(monkeypatch):
    monkeypatch.setattr("app.performance.training_plan.available_bytes", lambda: 1 << 20)
    plan = plan_of(num_devices=2)
    assert any("main memory are free" in warning for warning in plan.warnings(on_cpu=True))
    assert not any("main memory" in warning for warning in plan.warnings(on_cpu=False))


def test_what_is_printed(lenet, capsys):
    print_training_plan(lenet)
    print_probe(lenet, [make_sample("manual", 3, [0.1, 0.1, 0.1], simulated=True)])
    shown = capsys.readouterr().out
    assert "on 3 devices" in shown and "100 images: 34 on 1 device, 33 on 2 devices" in shown
    assert "30 images: 10 on each device" in shown
    assert "11 an epoch of 1,030 images, 44 in 4 epochs" in shown
    assert "100.0 ms a step" in shown and "an epoch  1.1 s, 4 epochs 4.4 s" in shown
    assert "timing is not scaling" in shown


def test_every_gpu_is_planned_for_where_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(command, "visible_gpus", lambda: ["0", "1", "2"])
    assert command._with_all_gpus(Config.of("plan")).num_devices_planned == 3
    for options in ({"device": "cpu"}, {"num_devices": 5}, {"devices_per_worker": 2}):
        config = Config.of("plan", **options)
        assert command._with_all_gpus(config) == config


def test_the_estimate_is_near_what_a_process_is_seen_to_take():
    result = run_ok("plan", "--probe", "--device=cpu", "--num_devices=1", "--batch_size=1024")
    (apart,) = re.findall(r"MiB estimated: ([+-]\d+)%", result.stdout)
    assert abs(int(apart)) <= 25
    assert re.search(r"an epoch  [\d.]+ s, 10 epochs", result.stdout)
