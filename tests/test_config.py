"""What is refused before anything is loaded, and the arithmetic of shards."""

import dataclasses

import pytest

from app.cli.usage import COMMAND_HELP
from app.config import Config, options
from app.config.constraints import check_shards
from app.config.flag_groups import GROUPS
from app.config.options import COMMANDS
from app.runtime.errors import ConfigError
from app.training.recipes import RECIPES


def test_recipe_names_are_those_of_the_dict():
    assert set(options.RECIPE_NAMES) == set(RECIPES)


def test_every_option_has_a_flag_and_a_command():
    options = {field.name for field in dataclasses.fields(Config)} - {"command"}
    options -= {"planned_global_batch_size"}  # The flag is --global_batch_size, too.
    options -= {"experiment", "directories"}  # Words after the command.
    assert set().union(*COMMANDS.values()) == options
    options -= {"device_counts"}  # The flag is --num_devices, too.
    assert {name for group in GROUPS.values() for name in group} == options
    assert set(COMMAND_HELP) == set(COMMANDS)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"command": "trian"}, "trian"),
        ({"command": "doctor", "strategies": ("multi_worker",)}, "--strategies=multi_worker"),
        ({"model": "resnet19"}, "--model=resnet19"),
        ({"strategy": "both"}, "--strategy=both"),
        ({"dataset": "mnist"}, "--dataset=mnist"),
        ({"recipe": "slow"}, "--recipe=slow"),
        ({"device": "tpu"}, "--device=tpu"),
        ({"all_reduce": "magic"}, "--all_reduce=magic"),
        ({"last_batch": "pad"}, "--last_batch=pad"),
        ({"batch_norm": "sync"}, "--batch_norm=sync"),
        ({"num_devices": 0}, "--num_devices=0"),
        ({"num_devices": -2}, "--num_devices=-2"),
        ({"num_devices": 65}, "65 devices"),
        ({"num_gpus": 0}, "--num_gpus=0"),
        ({"num_gpus": 2, "device": "cpu"}, "--num_gpus=2"),
        ({"num_gpus": 2, "num_devices": 3}, "--num_devices=3"),
        ({"strategy": "single", "num_devices": 2}, "--strategy=single"),
        ({"strategy": "single", "all_reduce": "reduce_to_one"}, "--all_reduce=reduce_to_one"),
        ({"global_batch_size": 0}, "--global_batch_size=0"),
        ({"global_batch_size": 1, "num_devices": 2}, "--global_batch_size=1"),
        ({"learning_rate": 0.0}, "--learning_rate=0.0"),
        ({"learning_rate": -1.0}, "--learning_rate=-1.0"),
        ({"learning_rate": float("nan")}, "--learning_rate=nan"),
        ({"learning_rate": float("inf")}, "--learning_rate=inf"),
        ({"epochs": 0}, "--epochs=0"),
        ({"seed": -1}, "--seed=-1"),
        ({"seed": 2**32}, "--seed=4294967296"),
        ({"num_train_examples": 0}, "--num_train_examples=0"),
        ({"num_train_examples": 60_001}, "--num_train_examples=60001"),
        ({"num_train_examples": 1001, "num_devices": 2, "global_batch_size": 100}, "leaves 1"),
        ({"num_train_examples": 50, "last_batch": "drop"}, "--last_batch=drop"),
        ({"dataset": "synthetic", "data_dir": "/x"}, "--data_dir with --dataset=synthetic"),
        ({"dataset": "synthetic", "allow_unverified_data": True}, "--allow_unverified_data with"),
        ({"command": "predict", "run": "r", "images": ("a.png",), "data_dir": "/x"}, "--images"),
        ({"verbosity": 7}, "--verbosity=7"),
        ({"device": "cpu", "global_batch_size": 1}, "--global_batch_size=1"),
        ({"command": "evaluate"}, "--run"),
        ({"command": "compare", "strategies": ("manual",)}, "--strategies=manual"),
        ({"command": "compare", "strategies": ("manual", "manual")}, "--strategies=manual,manual"),
        ({"command": "compare", "strategies": ("manual", "nccl")}, "--strategies=nccl"),
    ],
)
def test_refuses_and_names_the_value(options, named):
    with pytest.raises(ConfigError) as refusal:
        Config(**options)
    message = str(refusal.value)
    assert named in message
    # The three parts: the value — what is required — what to do.
    assert " — " in message and (";" in message)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("num_replicas", "size", "num_examples", "last_batch"),
    [(2, 2, 10, "keep"), (3, 100, 1000, "keep"), (4, 7, 16, "drop"), (4, 256, 60_000, "keep")],
)
def test_accepts_shards_that_all_have_examples(num_replicas, size, num_examples, last_batch):
    config = Config(global_batch_size=size, last_batch=last_batch)
    assert check_shards(config, num_replicas, num_examples) is None


def test_refuses_a_last_batch_that_leaves_a_replica_without_examples():
    config = Config(global_batch_size=7)
    with pytest.raises(ConfigError, match="leaves 2 of 16"):
        check_shards(config, 4, 16)


def test_single_runs_on_one_device_whatever_the_machine_has():
    assert Config(strategy="single").num_replicas_asked == 1
    assert Config(command="compare", strategy="manual", num_devices=3).num_replicas_asked == 3
    assert Config().num_replicas_asked is None
