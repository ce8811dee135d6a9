"""Tests the options: the table, the rules between options, and the config of a command."""

import dataclasses
import itertools
import json

import pytest

from app.options import Config, split_numbers
from app.options.help_text import PAGE, option_page
from app.options.names import RECIPE_NAMES
from app.options.option import option, rows_of
from app.options.rules import check_shards, num_framework_replicas
from app.options.table import COMMANDS, TABLE, Distribution, options_of
from app.runtime.errors import ConfigError
from app.training.recipes import RECIPES
from strategies import STRATEGIES, STRATEGY_OPTIONS
from strategies.collectives import shard_sizes

_COUNTS = "--counts must be whole numbers between 1 and 9, separated by commas, got "
_WORKERS = {"strategy": "multi_worker", "device": "cpu"}


def test_recipes_are_those_of_the_option():
    assert set(RECIPE_NAMES) == set(RECIPES)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_help_text_and_a_default_that_is_allowed(command):
    assert len(options_of(command)) == sum(command in row.commands for row in TABLE)
    for each in options_of(command).values():
        assert each.help.endswith(".")
        assert each.required or each.default == () or each.parse(each.default) == each.default


def test_the_table_of_options_in_the_docs_is_that_of_the_program():
    """`make docs` writes it."""
    assert PAGE.read_text(encoding="utf-8") == option_page()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Small:
    size: int = option(2, "A size.", (), metavar="N", low=1, high=9)
    rate: float | None = option(None, "A rate.", (), metavar="X", above=0.0, high=5.0)
    kind: str = option("a", "A kind.", (), choices=("a", "b"))
    counts: tuple[int, ...] = option((1, 2), "Counts.", (), metavar="N,M", low=1, high=9)
    is_on: bool = option(False, "A switch.", ())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("size", 0, "--size must be a whole number between 1 and 9, got 0"),
        ("size", "10", "--size must be a whole number between 1 and 9, got 10"),
        ("size", "x", "--size must be a whole number between 1 and 9, got x"),
        ("size", 2.5, "--size must be a whole number between 1 and 9, got 2.5"),
        ("size", True, "--size must be a whole number between 1 and 9, got True"),
        ("size", None, "--size must be a whole number between 1 and 9, got None"),
        ("size", "1\n", None),
        ("rate", 0, "--rate must be a number above 0, at most 5, got 0"),
        ("rate", float("nan"), "--rate must be a number above 0, at most 5, got nan"),
        ("rate", "", "--rate has no value; write --rate=X"),
        ("kind", "c", "--kind must be one of a, b, got 'c'"),
        (
            "counts",
            (1, 0),
            "--counts must be whole numbers between 1 and 9, separated by commas, got 1,0",
        ),
        ("counts", "1,1", "--counts must name each value once, got 1,1"),
        ("counts", 3, _COUNTS + "3"),
        ("counts", (), "--counts has no value; write --counts=N,M"),
        ("is_on", "maybe", "--is_on must be true or false, got 'maybe'"),
    ],
)
def test_a_value_is_checked_by_type_choices_and_bounds(name, value, message):
    (row,) = [each for each in rows_of("small", _Small) if each.name == name]
    if message is None:
        assert row.parse(value) == 1
        return
    with pytest.raises(ConfigError) as refusal:
        row.parse(value)
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    ("command", "options", "named"),
    [
        ("trian", {}, "did you mean train?"),
        ("train", {"epochs": "x"}, "--epochs must be a whole number between 1 and 100000, got x"),
        ("train", {"lr": 1}, "--lr is not an option of train"),
        ("evaluate", {"run": "x", "epochs": 2}, "--epochs is not an option of evaluate, only of"),
        ("doctor", {"strategies": ("multi_worker",)}, "got 'multi_worker'"),
        (
            "doctor",
            {"strategies": ("single",), "all_reduce": "ring"},
            "--all_reduce=ring needs the strategy manual",
        ),
        ("evaluate", {"run": "x", "strategy": "multi_worker"}, "got 'multi_worker'"),
        ("train", {"model": "resnet17"}, "got 'resnet17'; did you mean resnet18?"),
        ("train", {"strategy": "both"}, "--strategy must be one of single, manual, mirrored"),
        ("train", {"dataset": "mnist"}, "got 'mnist'"),
        ("train", {"recipe": "slow"}, "--recipe"),
        ("train", {"device": "tpu"}, "got 'tpu'"),
        ("train", {"all_reduce": "magic"}, "got 'magic'"),
        ("train", {"strategy": "mirrored", "all_reduce": "tree"}, "--all_reduce=tree is not avail"),
        ("train", {"all_reduce": "nccl"}, "only in mirrored and multi_worker"),
        ("train", {"last_batch": "pad"}, "got 'pad'"),
        ("train", {"batch_norm": "global"}, "got 'global'"),
        (
            "train",
            {"num_devices": 0},
            "a whole number between 1 and 64, got 0",
        ),
        ("train", {"num_devices": -2}, "got -2"),
        ("train", {"num_devices": 65}, "got 65"),
        ("train", {"num_gpus": 0}, "--num_gpus must be a whole number between 1 and 64, got 0"),
        ("train", {"num_gpus": 2, "device": "cpu"}, "--num_gpus=2 contradicts --device=cpu"),
        ("train", {"num_gpus": 2, "num_devices": 3}, "--num_gpus=2 contradicts --num_devices=3"),
        ("train", {"strategy": "single", "num_devices": 2}, "--strategy=single runs on one device"),
        (
            "train",
            {"strategy": "single", "all_reduce": "ring"},
            "ring needs the strategy",
        ),
        (
            "train",
            {"start_timeout_sec": 3},
            "--start_timeout_sec=3 needs the strategy multi_worker",
        ),
        ("compare", {"num_workers": 3}, "--num_workers=3 needs the strategy multi_worker"),
        (
            "train",
            {"global_batch_size": 0},
            "number between 1 and 60000",
        ),
        ("train", {"global_batch_size": 1, "num_devices": 2}, "number of replicas, 2, got 1"),
        ("train", {"device": "cpu", "global_batch_size": 1}, "number of replicas, 2, got 1"),
        (
            "train",
            {"learning_rate": 0.0},
            "a number above 0, at most 3.4e+38, got 0.0",
        ),
        ("train", {"learning_rate": -1.0}, "got -1.0"),
        ("train", {"learning_rate": float("nan")}, "got nan"),
        ("train", {"learning_rate": float("inf")}, "got inf"),
        ("train", {"epochs": 0}, "got 0"),
        ("train", {"seed": -1}, "--seed must be a whole number between 0 and 4294967295, got -1"),
        ("train", {"seed": 2**32}, "got 4294967296"),
        ("train", {"num_train_examples": 60_001}, "--num_train_examples"),
        (
            "train",
            {"num_train_examples": 1001, "num_devices": 2, "global_batch_size": 100},
            "leaves 1 of 1001",
        ),
        ("train", {"num_train_examples": 50, "last_batch": "drop"}, "--last_batch=drop leaves no"),
        ("train", {"dataset": "synthetic", "data_dir": "/x"}, "--data_dir means nothing with"),
        ("train", {"dataset": "synthetic", "allow_unverified_data": True}, "--allow_unverified"),
        ("train", {"inject": "drop_gradient:strategy=mirrored"}, "names the strategy mirrored"),
        ("evaluate", {"run": "r", "images": ("a.png",), "data_dir": "/x"}, "with --images"),
        ("train", {"verbosity": 7}, "--verbosity must be a whole number between -1 and 1, got 7"),
        ("evaluate", {}, "--run is required"),
        ("report", {"strategy": "manual"}, "--strategy is not an option of report, only of"),
        ("train", {"strategy": "multi_worker", "max_restarts": -1}, "--max_restarts"),
        (
            "train",
            {"strategy": "multi_worker", "num_workers": 4, "device": "cpu", "global_batch_size": 3},
            "number of replicas, 4, got 3",
        ),
        (
            "train",
            {
                "strategy": "multi_worker",
                "num_workers": 2,
                "device": "cpu",
                "inject": "drop_gradient:replica=5",
            },
            "needs at least 6 replicas, got 2",
        ),
        ("compare", {"strategies": ("manual",)}, "--strategies must name at least two, got manual"),
        ("compare", {"strategies": ("manual", "manual")}, "must name each value once"),
        ("compare", {"strategies": ("manual", "nccl")}, "got 'nccl'"),
        ("verify", {"inject": "perturb_weight:step=9", "steps": 3}, "needs --steps=9 or more"),
        ("verify", {"inject": "slow_replica", "steps": 3}, "needs --steps=5 or more"),
        (
            "benchmark",
            {"repeats": 1},
            "number between 2 and 10000, got 1",
        ),
        ("benchmark", {"strategies": ("single",), "num_devices": (2,)}, "runs on one device"),
        ("benchmark", {"model": ("lenet", "lenet")}, "--model must name each value once"),
        (
            "train",
            {"shard": "gradients"},
            "--shard=gradients needs the strategy sharded, got manual",
        ),
        ("train", {"recompute": True}, "--recompute needs the strategy pipeline, got manual"),
        (
            "train",
            {"strategy": "tensor", "pipeline_cuts": ("pool1", "pool2")},
            "--pipeline_cuts=pool1,pool2 needs the strategy pipeline, got tensor; leave",
        ),
        (
            "train",
            {"strategy": "single", "batch_norm": "sync"},
            "--batch_norm=sync needs the strategy manual, mirrored, multi_worker or sharded, got",
        ),
        (
            "train",
            {"strategy": "pipeline", "accumulate_steps": 2},
            "--accumulate_steps=2 needs the",
        ),
        ("train", {"strategy": "tensor", "jit_compile": True}, "--jit_compile needs the strategy"),
        ("train", {"strategy": "sharded", "all_reduce": "ring"}, "--all_reduce=ring needs the"),
        (
            "train",
            {"strategy": "multi_worker", "schedule": "gpipe"},
            "--schedule=gpipe needs the strategy pipeline, got multi_",
        ),
        (
            "verify",
            {"model_parallel": 2},
            "--model_parallel=2 needs the strategy pipeline or tensor",
        ),
        ("benchmark", {"shard": "optimizer"}, "got single, manual, mirrored; leave the flag out"),
        (
            "train",
            {"strategy": "pipeline", "num_devices": 4, "model_parallel": 3},
            "--model_parallel=3 must divide the number of devices, 4; use 1, 2 or 4, or"
            " --num_devices=6",
        ),
        (
            "verify",
            {"strategies": ("manual", "tensor"), "num_devices": 2, "model_parallel": 4},
            "--model_parallel=4 must divide the number of devices, 2; use 1 or 2, or",
        ),
        (
            "train",
            {"num_devices": 3, "shard_weights": (3, 1)},
            "--shard_weights=3,1 must have a weight for each replica, 3, got 2",
        ),
        (
            "train",
            {
                "strategy": "multi_worker",
                "num_workers": 3,
                "device": "cpu",
                "shard_weights": (3, 1),
            },
            "--shard_weights=3,1 must have a weight for each replica, 3, got 2",
        ),
        (
            "train",
            {"shard_weights": (3, 0)},
            "--shard_weights must be whole numbers between 1 and 1000",
        ),
        (
            "train",
            {"num_devices": 2, "shard_weights": (3, 1), "global_batch_size": 3},
            "--shard_weights=3,1 leaves a shard of --global_batch_size=3 without examples; use"
            " --global_batch_size=4 or more",
        ),
        (
            "train",
            {
                **{"num_devices": 2, "shard_weights": (3, 1), "global_batch_size": 4},
                **{"num_train_examples": 7},
            },
            "leaves 3 of 7 training examples for the last batch, too few for --shard_weights=3,1",
        ),
        (
            "train",
            {"strategy": "pipeline", "micro_batches": 512},
            "--micro_batches=512 must be at most --global_batch_size=256",
        ),
        (
            "train",
            {
                **{"strategy": "pipeline", "num_devices": 4, "model_parallel": 2},
                **{"micro_batches": 200},
            },
            "--micro_batches=200 must be at most 128, the share of each of 2 replicas in"
            " --global_batch_size=256",
        ),
        (
            "train",
            {"strategy": "single", "accumulate_steps": 8, "global_batch_size": 7},
            "--accumulate_steps=8 must be at most --global_batch_size=7",
        ),
        (
            "train",
            {
                **{"num_devices": 2, "accumulate_steps": 4, "global_batch_size": 100},
                **{"num_train_examples": 1007},
            },
            "leaves 7 of 1007 training examples for the last batch, too few for 8 shards",
        ),
        (
            "train",
            {"batch_norm": "sync", "accumulate_steps": 2},
            "--batch_norm=sync needs the whole batch at once, got --accumulate_steps=2",
        ),
        (
            "compare",
            {"batch_norm": "sync", "jit_compile": True},
            "cannot compile --batch_norm=sync",
        ),
        ("report", {}, "report needs the directory of a run"),
        ("demo", {"all_reduce": "nccl"}, "--all_reduce must be one of auto, reduce_to_one"),
    ],
)
def test_refuses_and_names_the_value(command, options, named):
    with pytest.raises(ConfigError) as refusal:
        Config.of(command, **options)
    assert named in str(refusal.value) and "\n" not in str(refusal.value)


def check(num_devices, size, num_examples, last_batch="keep"):
    config = Config.of(global_batch_size=size, last_batch=last_batch)
    check_shards(config, num_devices, num_examples)


@pytest.mark.parametrize(
    ("num_replicas", "size", "num_examples", "last_batch"),
    [(2, 2, 10, "keep"), (3, 100, 1000, "keep"), (4, 7, 16, "drop"), (4, 256, 60_000, "keep")],
)
def test_accepts_shards_that_all_have_examples(num_replicas, size, num_examples, last_batch):
    assert check(num_replicas, size, num_examples, last_batch) is None


def test_refuses_a_last_batch_that_leaves_a_replica_without_examples():
    with pytest.raises(ConfigError, match="leaves 2 of 16"):
        check(4, 7, 16)


def test_single_runs_on_one_device_whatever_the_machine_has():
    assert Config.of(strategy="single").num_devices_of_all_workers == 1
    assert Config.of("compare", num_devices=3).num_devices_of_all_workers == 3
    assert Config.of().num_devices_of_all_workers is None
    assert Config.of(device="cpu").num_devices_of_all_workers == 2


def test_the_flags_of_a_training_give_the_same_training():
    config = Config.of("compare", num_devices=3, all_reduce="reduce_to_one", epochs=2, seed=7)
    training = config.for_training("mirrored")
    assert training == Config.of(
        "train", strategy="mirrored", num_devices=3, all_reduce="reduce_to_one", epochs=2, seed=7
    )
    assert set(training.flags()) == {
        *("--strategy=mirrored", "--num_devices=3", "--all_reduce=reduce_to_one"),
        *("--epochs=2", "--seed=7"),
    }
    single = config.for_training("single")
    assert (single.distribution.num_devices, single.distribution.all_reduce) == (None, "auto")
    assert single.training.seed == 7


def test_lists_and_the_output_directory_stay_with_their_command():
    benchmark = Config.of("benchmark", model=("resnet18",))
    assert benchmark.for_training("manual").training.model == "lenet"
    assert benchmark.for_training("manual").distribution.num_devices is None
    assert Config.of("train", out="runs/x").flags() == []


def test_beside_workers_others_have_as_many_replicas_on_one_machine():
    config = Config.of("verify", strategies=("single", "manual", "multi_worker"), num_workers=3)
    assert config.num_devices_of_all_workers == 3
    assert config.for_training("manual").distribution.num_devices == 3
    assert config.for_training("multi_worker").distribution.num_devices == 1
    assert config.for_training("multi_worker").cluster.num_workers == 3
    assert config.for_training("single").distribution.num_devices is None
    assert config.on_one_machine().distribution.num_devices == 3


def test_results_depend_on_what_is_marked_so():
    fields = Config.of(seed=3, inject="drop_gradient").result_fields()
    assert fields["seed"] == 3 and fields["inject"] == "drop_gradient:replica=1"
    assert {"out", "overwrite", "verbosity", "data_dir", "num_devices"}.isdisjoint(fields)
    assert len(fields) == 24


def test_lists_are_recorded_as_they_come_back_from_a_file():
    fields = Config.of(num_devices=2, shard_weights=(3, 3)).result_fields()
    assert json.loads(json.dumps(fields)) == fields and fields["shard_weights"] == [3, 3]


def test_a_list_is_written_on_the_command_line_as_it_is_read():
    config = Config.of("train", strategy="pipeline", pipeline_cuts=("a", "b"), recompute=True)
    assert set(config.flags()) == {*("--strategy=pipeline", "--recompute", "--pipeline_cuts=a,b")}


def test_an_option_goes_to_the_strategies_that_have_it_and_to_no_other():
    config = Config.of(
        "verify",
        strategies=("single", "manual", "sharded", "pipeline", "tensor"),
        num_devices=4,
        all_reduce="ring",
        jit_compile=True,
        accumulate_steps=2,
        shard_weights=(3, 1, 1, 1),
        shard="gradients",
        micro_batches=8,
        pipeline_cuts=("pool1",),
        model_parallel=2,
    )
    changed = {
        name: {flag.partition("=")[0].removeprefix("--") for flag in flags} - {"strategy"}
        for name in config.strategies
        if (flags := config.for_training(name).flags())
    }
    data = {"num_devices", "jit_compile", "accumulate_steps", "shard_weights"}
    model = {"num_devices", "model_parallel"}
    assert changed == {
        "single": {"jit_compile", "accumulate_steps"},
        "manual": {*data, "all_reduce"},
        "sharded": {*data, "shard"},
        "pipeline": {*model, "micro_batches", "pipeline_cuts"},
        "tensor": model,
    }


def test_every_strategy_of_the_table_has_options_that_exist():
    assert set(STRATEGY_OPTIONS) == set(STRATEGIES)
    assert set().union(*STRATEGY_OPTIONS.values()) <= options_of("verify").keys()


@pytest.mark.parametrize(
    ("strategy", "options", "num_devices", "numbers"),
    [
        ("single", {"accumulate_steps": 4}, 1, (1, 4, 1)),
        ("manual", {}, 3, (3, 3, 3)),
        ("mirrored", {"accumulate_steps": 2}, 3, (3, 6, 3)),
        ("sharded", {}, 4, (4, 4, 1)),
        ("sharded", {"shard": "gradients", "accumulate_steps": 2}, 4, (4, 8, 4)),
        ("pipeline", {}, 3, (1, 4, 1)),
        ("pipeline", {"model_parallel": 2, "micro_batches": 8}, 4, (2, 16, 2)),
        ("pipeline", {"model_parallel": 1}, 2, (2, 8, 2)),
        ("tensor", {"micro_batches": 8}, 4, (1, 1, 1)),
        ("tensor", {"model_parallel": 2}, 4, (2, 2, 2)),
        ("my_own", {}, 3, (3, 3, 3)),
    ],
)
def test_numbers_of_a_strategy_follow_from_its_options(strategy, options, num_devices, numbers):
    split = strategy, Distribution(**options), num_devices
    functions = split_numbers.num_replicas, split_numbers.num_shards, split_numbers.num_copies
    assert tuple(function(*split) for function in functions) == numbers


@pytest.mark.parametrize("weights", [(3, 1), (1, 3), (2, 2, 5), (1, 1, 1), (5, 1, 1)])
@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_no_shard_is_empty_from_the_fewest_examples_on_and_one_is_below(weights, accumulate_steps):
    """Shards are runs of equal units, as many as their weight, each a shard of `shard_bounds`."""
    split = Distribution(shard_weights=weights, accumulate_steps=accumulate_steps)
    per_shard = [weight for weight in weights for _ in range(accumulate_steps)]
    ends = list(itertools.accumulate(per_shard))

    def has_empty_shard(num_examples):
        sizes = shard_sizes(num_examples, sum(per_shard))
        return not all(
            sum(sizes[end - weight : end]) for end, weight in zip(ends, per_shard, strict=True)
        )

    fewest = split_numbers.fewest_examples("manual", split, len(weights))
    assert has_empty_shard(fewest - 1)
    assert not any(has_empty_shard(n) for n in range(fewest, fewest + 20))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategies": ("torch_ddp",)}, "has no strategy to compare with; add single"),
        ({"model": "resnet9"}, "--model=resnet9 does not run in torch_ddp; use lenet or resnet18"),
        ({"recipe": "fast"}, "--recipe=fast does not run in torch_ddp; use --recipe=d2l"),
        ({"precision": "mixed_bfloat16"}, "use --precision=float32"),
        ({"batch_norm": "sync"}, "use --batch_norm=average"),
        ({"jit_compile": True}, "--jit_compile does not run in torch_ddp"),
        ({"num_gpus": 2}, "torch_ddp runs on CPUs here; use --device=cpu"),
        ({"global_batch_size": 255}, "255 does not divide over 2 replicas, as jax_pmap requires"),
        ({"num_train_examples": 999}, "last batch of 231 examples .* use --last_batch=drop"),
    ],
)
@pytest.mark.parametrize("command", ["compare", "verify"])
def test_what_a_framework_cannot_train_is_refused(command, options, message):
    names = ("single", "manual", "torch_ddp", "jax_pmap")
    with pytest.raises(ConfigError, match=message):
        Config.of(command, **{"strategies": names, **options})


def test_frameworks_have_as_many_replicas_as_the_strategies():
    names = ("single", "manual", "torch_ddp")
    config = Config.of("verify", strategies=names, num_devices=3, accumulate_steps=2)
    assert num_framework_replicas(config) == 3
    assert num_framework_replicas(Config.of("verify", strategies=names)) == 2
    assert config.own_strategies == ("single", "manual")
    assert config.for_training("torch_ddp").distribution.strategy == "single"
