"""What `--inject` may say, and what is refused before anything is loaded."""

import pytest

from app.options import Config
from app.options.fault import FAULTS, Fault
from app.runtime.errors import ConfigError


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_has_defaults_and_can_be_read_back(name):
    fault = Fault.parse(name)
    assert fault.parameters == FAULTS[name][1]
    assert Fault.parse(str(fault)) == fault


def test_parameters():
    fault = Fault.parse("perturb_weight:replica=2,step=7,strategy=mirrored")
    assert fault.parameters == {"replica": 2, "step": 7}
    assert fault.strategy == "mirrored"
    assert Fault.parse("scale_gradient:factor=0.5").parameters == {"factor": 0.5}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("drop", "drop_gradient"),
        ("drop_gradient:replicas=1", "replica"),
        ("drop_gradient:replica", "replica"),
        ("drop_gradient:replica=x", "whole number"),
        ("drop_gradient:replica=-1", "from 0"),
        ("scale_gradient:factor=nan", "above 0"),
        ("scale_gradient:factor=0", "above 0"),
        ("scale_gradient:factor=1", "changes nothing"),
        ("slow_replica:ms=0.5", "whole number"),
        ("mean_of_means:replica=1", "strategy"),
        ("drop_gradient:strategy=", "strategy"),
    ],
)
def test_refusals_name_what_is_required(text, named):
    with pytest.raises(ConfigError, match=named) as caught:
        Fault.parse(text)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"inject": "drop_gradient", "num_devices": 1},
        {"inject": "drop_gradient:replica=2", "num_devices": 2},
        {"inject": "drop_gradient", "strategy": "single"},
        {"inject": "drop_gradient:strategy=mirrored", "strategy": "manual"},
        {"inject": "perturb_weight:step=9", "command": "verify", "steps": 8},
        {"inject": "drop_gradient:strategy=single", "command": "verify"},
        {"inject": "slow_replica", "command": "verify", "steps": 4},
        {"inject": "drop_gradient", "strategy": "tensor", "num_devices": 2},
        {"inject": "drop_gradient", "strategy": "single", "accumulate_steps": 2},
        {"inject": "lost_micro_batch:micro_batch=4", "strategy": "pipeline", "num_devices": 2},
        {"inject": "lost_micro_batch", "strategy": "manual", "num_devices": 2},
        {"inject": "divided_twice", "strategy": "manual", "num_devices": 2},
        {"inject": "stale_stage:stage=2", "strategy": "pipeline", "num_devices": 2},
        {"inject": "stale_stage", "strategy": "tensor", "num_devices": 2},
        {"inject": "forgotten_backward_sum", "strategy": "pipeline", "num_devices": 2},
        {"inject": "repeated_bias", "strategy": "tensor", "num_devices": 2, "model_parallel": 1},
        {"inject": "wrong_shard", "strategy": "manual", "num_devices": 2},
        {"inject": "wrong_shard", "strategy": "sharded", "num_devices": 1},
        {"inject": "unsynced_batch_norm", "strategy": "pipeline", "num_devices": 2},
        {"inject": "stale_stage", "command": "verify", "strategies": ("single", "manual")},
        {"inject": "perturb_weight", "strategy": "sharded", "num_devices": 2},
        {"command": "verify", "steps": 0},
        {"command": "verify", "strategies": ("single",), "num_devices": 2},
        {"command": "verify", "strategies": ("manual", "manual")},
        {"all_reduce": "hierarchical", "strategy": "manual"},
        {"all_reduce": "hierarchical", "command": "verify"},
        {"all_reduce": "tree", "strategy": "mirrored"},
        {"all_reduce": "nccl", "strategy": "mirrored", "device": "cpu"},
        {"communication_dtype": "bfloat16"},
        {"command": "verify", "communication_dtype": "bfloat16", "strategies": ("single",)},
    ],
)  # fmt: skip
def test_what_cannot_happen_is_refused(options):
    with pytest.raises(ConfigError, match=r"^--"):
        Config.of(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"inject": "scale_gradient", "strategy": "single"},
        {"inject": "drop_gradient", "num_devices": 2},
        {"inject": "drop_gradient", "strategy": "pipeline", "num_devices": 4, "model_parallel": 2},
        {"inject": "lost_micro_batch:micro_batch=3", "strategy": "pipeline", "num_devices": 2},
        {"inject": "divided_twice", "strategy": "manual", "accumulate_steps": 2},
        {"inject": "wrong_shard", "strategy": "sharded", "num_devices": 2},
        {"inject": "stale_stage", "command": "verify", "strategies": ("single", "pipeline")},
        {"inject": "perturb_weight", "strategy": "sharded", "num_devices": 2, "shard": "gradients"},
        {"command": "verify", "all_reduce": "hierarchical", "strategies": ("single", "mirrored")},
        {"command": "verify", "strategies": ("mirrored",), "num_devices": 3},
        {"command": "verify", "communication_dtype": "bfloat16", "strategies": ("mirrored",)},
    ],
)  # fmt: skip
def test_what_can_happen_is_not(options):
    config = Config.of(**options)
    assert (config.verification.fault is not None) == ("inject" in options)


@pytest.mark.parametrize(
    ("fault", "faulty"),
    [
        ("drop_gradient", "manual"),
        ("stale_stage", "pipeline"),
        ("lost_micro_batch", "pipeline"),
        ("wrong_shard", "sharded"),
        ("repeated_bias", "tensor"),
        ("perturb_weight", "manual"),
        ("drop_gradient:strategy=sharded", "sharded"),
    ],
)
def test_a_fault_goes_to_the_first_strategy_that_can_have_it(fault, faulty):
    strategies = ("single", "manual", "sharded", "pipeline", "tensor")
    config = Config.of("verify", strategies=strategies, num_devices=2, inject=fault)
    assert config.faulty_strategy == faulty


def test_one_fault_has_one_spelling_in_the_records():
    spelled = [Config.of(inject=text) for text in ("drop_gradient", "drop_gradient:replica=1")]
    assert spelled[0].result_fields() == spelled[1].result_fields()
    spec = Fault.parse("mean_of_means:strategy=manual").spec
    assert Fault.parse(spec) == Fault.parse("mean_of_means:strategy=manual")
