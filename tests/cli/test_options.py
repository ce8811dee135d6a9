"""Tests the options: the table, the rules between options, and the config of a command.

`messages.txt` has what is refused, with its message.
"""

import itertools
import json

import pytest

from app.options import Config, names
from app.options.help_text import PAGE, option_page
from app.options.rules import check_shards
from app.options.table import COMMANDS, TABLE, Distribution, options_of
from app.runtime.errors import ConfigError
from app.training.recipes import RECIPES
from models import MODELS, load_model_builder
from strategies import ALL_REDUCE_ALGORITHMS, STRATEGIES, STRATEGY_OPTIONS, load_strategy_class
from strategies.collective_cluster import IMPLEMENTATIONS
from strategies.collectives import ALL_REDUCE_FUNCTIONS, shard_sizes
from strategies.layout import layout_of
from strategies.mirrored import CROSS_DEVICE_OPS
from tests.conftest import CPUS
from tests.in_process import parse_here


def test_every_option_has_a_help_text_and_a_default_that_is_allowed():
    for command in COMMANDS:
        assert len(options_of(command)) == sum(command in row.commands for row in TABLE)
    for each in TABLE:
        assert each.help.endswith(".")
        assert each.required or each.default == () or each.parse(each.default) == each.default
        assert each.placeholder or each.kind is bool
        assert each.bounds or each.kind not in (int, float)


def test_the_table_of_options_in_the_docs_is_that_of_the_program():
    """`make docs` writes it."""
    assert PAGE.read_text(encoding="utf-8") == option_page()


def test_values_of_programs_are_checked_like_those_of_the_command_line():
    config = Config.of(epochs=9, learning_rate=5, shard_weights=[3, 1], deterministic="f")
    assert (config.training.epochs, config.training.learning_rate) == (9, 5.0)
    assert config.distribution.shard_weights == (3, 1) and not config.training.deterministic
    assert Config.of(learning_rate=None) == Config.of()
    for name, values in {
        "epochs": (2.5, True, None, [1]), "learning_rate": (float("nan"), float("-inf")),
        "model": (None, ["lenet"]), "shard_weights": (3, (1, 0), ["x"]),
        "deterministic": (2, None),
    }.items():  # fmt: skip
        for value in values:
            with pytest.raises(ConfigError, match=f"^--{name} must be "):
                Config.of(**{name: value})


# Each option of each command at another value than its default.
ACCEPTED = """
train --model=resnet9 --recipe=fast --epochs=2 --global_batch_size=64 --learning_rate=0.5 --seed=7
  --last_batch=drop --precision=mixed_bfloat16 --jit_compile --deterministic
  --dataset=fashion_mnist --num_train_examples=640 --data_dir=d --allow_unverified_data
  --strategy=sharded --device=cpu --num_devices=2 --accumulate_steps=2 --shard_weights=3,1
  --shard=optimizer --out=o --overwrite --checkpoint_every=9 --stall_timeout_sec=0 --verbosity=0
  --inject=wrong_shard --verify_every=3 --on_mismatch=warn
train --strategy=pipeline --num_gpus=4 --model_parallel=2 --micro_batches=8 --schedule=gpipe
  --recompute --pipeline_cuts=a,b
train --strategy=multi_worker --num_workers=3 --max_restarts=0 --start_timeout_sec=9
  --all_reduce=ring --batch_norm=sync --model=resnet18
compare --strategies=manual,multi_worker --num_workers=3 --checkpoint_every=9 --epochs=1
  --stall_timeout_sec=9
verify --strategies=manual,mirrored --communication_dtype=bfloat16 --steps=9 --keep_traces
  --inject=slow_replica:replica=1,ms=9
verify --case=examples/case_fit.py --strategies=single --steps=2 --thorough
evaluate --run=r --strategy=tensor --num_devices=3 --images=a.png,b.npy
benchmark --repeats=5 --model=lenet,resnet9 --num_devices=1,4 --global_batch_size=64,128
  --precision=mixed_float16
benchmark --breakdown --strategies=manual --num_devices=4
report a b --out=x.html
doctor --strategies=manual --all_reduce=tree --out=o
demo allreduce --all_reduce=direct --num_devices=3
demo allreduce --wrong
"""


def test_each_option_is_accepted_and_can_be_written_again():
    used = set()
    for line in ACCEPTED.replace("\n  ", " ").split("\n")[1:-1]:
        command, *words = line.split()
        config = parse_here(command, *words)
        given = {word.partition("=")[0].removeprefix("--") for word in words if word[:2] == "--"}
        is_word = {name for name, row in options_of(command).items() if row.is_word}
        assert config.changed().keys() - is_word == given, line
        kept = [word for word in words if word[:2] != "--" or word.startswith("--out=")]
        flags = [each for each in config.flags() if each[2:].partition("=")[0] not in is_word]
        assert parse_here(command, *kept, *flags) == config, line
        used |= config.changed().keys()
    assert used == {row.name for row in TABLE}


def test_a_last_batch_that_leaves_a_replica_without_examples_is_refused():
    """The data set's size and the number of devices are known once the devices are set up."""
    check_shards(Config.of(global_batch_size=7, last_batch="drop"), 4, 16)
    check_shards(Config.of(global_batch_size=6), 4, 16)
    with pytest.raises(ConfigError):
        check_shards(Config.of(global_batch_size=7), 4, 16)


def test_the_options_offer_what_the_tables_hold():
    assert set(names.RECIPE_NAMES) == set(RECIPES)
    assert tuple(MODELS) == names.MODEL_NAMES
    assert tuple(STRATEGIES) == names.STRATEGY_NAMES
    assert set(STRATEGY_OPTIONS) == set(STRATEGIES)
    assert set().union(*STRATEGY_OPTIONS.values()) <= options_of("verify").keys()
    assert set(names.ALL_REDUCE_NAMES) == set().union(*ALL_REDUCE_ALGORITHMS.values())
    assert set(ALL_REDUCE_ALGORITHMS) <= set(STRATEGIES)
    assert ALL_REDUCE_ALGORITHMS["manual"] == ("reduce_to_one", *ALL_REDUCE_FUNCTIONS)
    assert ALL_REDUCE_ALGORITHMS["mirrored"] == tuple(CROSS_DEVICE_OPS)
    assert ALL_REDUCE_ALGORITHMS["multi_worker"] == tuple(IMPLEMENTATIONS)


def test_a_strategy_has_the_name_and_the_algorithms_of_the_tables():
    for name in STRATEGIES:
        strategy = load_strategy_class(name)(CPUS[:1], Distribution())
        assert strategy.name == name
        assert strategy.algorithm in ALL_REDUCE_ALGORITHMS.get(name, ("none",))


@pytest.mark.parametrize("target", ["nowhere:build", "__init__:nothing", " lenet"])
def test_a_wrong_entry_of_a_table_is_named(monkeypatch, target):
    for package, table, name, load in (
        ("models", MODELS, "lenet", load_model_builder),
        ("strategies", STRATEGIES, "manual", load_strategy_class),
    ):
        monkeypatch.setitem(table, name, f"{package}.{target}")
        shown = rf'^{package.upper()}\["{name}"\] = "{package}.{target}": '
        with pytest.raises(ImportError, match=shown):
            load(name)


def test_numbers_of_devices_of_a_command_and_of_its_trainings():
    assert Config.of(strategy="single").num_devices_of_all_workers == 1
    assert Config.of("compare", num_devices=3).num_devices_of_all_workers == 3
    assert Config.of().num_devices_of_all_workers is None
    assert Config.of(device="cpu").num_devices_of_all_workers == 2
    training = Config.of("benchmark", model=("resnet18",)).for_training("manual")
    assert (training.training.model, training.distribution.num_devices) == ("lenet", None)
    # Beside workers, others have as many replicas on one machine.
    config = Config.of("verify", strategies=("single", "manual", "multi_worker"), num_workers=3)
    assert config.num_devices_of_all_workers == 3
    of_workers = config.for_training("multi_worker")
    assert (of_workers.distribution.num_devices, of_workers.cluster.num_workers) == (1, 3)
    for training, number in {"manual": 3, "single": None}.items():
        assert config.for_training(training).distribution.num_devices == number
    assert config.on_one_machine().distribution.num_devices == 3
    # A framework has as many replicas as the strategies.
    strategies = ("single", "manual", "torch_ddp")
    config = Config.of("verify", strategies=strategies, num_devices=3, accumulate_steps=2)
    assert config.num_framework_replicas == 3
    assert Config.of("verify", strategies=strategies).num_framework_replicas == 2
    assert config.own_strategies == ("single", "manual")
    assert config.for_training("torch_ddp").distribution.strategy == "single"


def test_results_depend_on_what_is_marked_so():
    fields = Config.of(seed=3, inject="drop_gradient").result_fields()
    assert fields["seed"] == 3 and fields["inject"] == "drop_gradient:replica=1"
    assert {"out", "overwrite", "verbosity", "data_dir", "num_devices"}.isdisjoint(fields)
    assert len(fields) == 24
    fields = Config.of(num_devices=2, shard_weights=(3, 3)).result_fields()
    assert json.loads(json.dumps(fields)) == fields and fields["shard_weights"] == [3, 3]


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
        schedule="gpipe",
        recompute=True,
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
        "pipeline": {*model, "micro_batches", "pipeline_cuts", "schedule", "recompute"},
        "tensor": model,
    }


def test_numbers_of_a_strategy_follow_from_its_options():
    for strategy, options, num_devices, numbers in (
        ("single", {"accumulate_steps": 4}, 1, (1, 4, 1)),
        ("mirrored", {"accumulate_steps": 2}, 3, (3, 6, 3)),
        ("sharded", {}, 4, (4, 4, 1)),
        ("sharded", {"shard": "gradients", "accumulate_steps": 2}, 4, (4, 8, 4)),
        ("pipeline", {}, 3, (1, 4, 1)),
        ("pipeline", {"model_parallel": 2, "micro_batches": 8}, 4, (2, 16, 2)),
        ("pipeline", {"model_parallel": 1}, 2, (2, 8, 2)),
        ("tensor", {"micro_batches": 8}, 4, (1, 1, 1)),
        ("tensor", {"model_parallel": 2}, 4, (2, 2, 2)),
        ("my_own", {}, 3, (3, 3, 3)),
    ):
        layout = layout_of(strategy, Distribution(**options), num_devices)
        assert (layout.num_replicas, layout.num_shards, layout.num_copies) == numbers, strategy


@pytest.mark.parametrize("weights", [(3, 1), (1, 3), (2, 2, 5), (1, 1, 1)])
@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_no_shard_is_empty_from_the_fewest_examples_on_and_one_is_below(weights, accumulate_steps):
    """Shards are runs of equal units, as many as their weight, each a shard of `shard_bounds`."""
    split = Distribution(shard_weights=weights, accumulate_steps=accumulate_steps)
    per_shard = [weight for weight in weights for _ in range(accumulate_steps)]
    ends = list(itertools.accumulate(per_shard))

    def smallest_shard(num_examples):
        sizes = shard_sizes(num_examples, sum(per_shard))
        shards = zip(ends, per_shard, strict=True)
        return min(sum(sizes[end - weight : end]) for end, weight in shards)

    fewest = layout_of("manual", split, len(weights)).fewest_examples
    assert smallest_shard(fewest - 1) == 0
    assert all(smallest_shard(number) > 0 for number in range(fewest, fewest + 20))
