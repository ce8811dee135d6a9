"""What `--inject` may say; `messages.txt` has what is refused before anything is loaded."""

from app.options import Config
from app.options.fault import FAULTS, Fault
from app.options.rules import faulty_strategy
from tests.in_process import parse_here


def test_every_fault_has_defaults_and_one_spelling():
    for name in FAULTS:
        fault = Fault.parse(name)
        assert fault.parameters == FAULTS[name][1]
        assert Fault.parse(str(fault)) == fault
    fault = Fault.parse("perturb_weight:replica=2,step=7,strategy=mirrored")
    assert (fault.parameters, fault.strategy) == ({"replica": 2, "step": 7}, "mirrored")
    assert Fault.parse("scale_gradient:factor=0.5").parameters == {"factor": 0.5}
    spelled = [Config.of(inject=text) for text in ("drop_gradient", "drop_gradient:replica=1")]
    assert spelled[0].result_fields() == spelled[1].result_fields()
    fault = Fault.parse("mean_of_means:strategy=manual")
    assert Fault.parse(fault.spec) == fault


POSSIBLE = """
train --inject=scale_gradient --strategy=single
train --inject=drop_gradient --num_devices=2
train --inject=drop_gradient --strategy=pipeline --num_devices=4 --model_parallel=2
train --inject=lost_micro_batch:micro_batch=3 --strategy=pipeline --num_devices=2
train --inject=divided_twice --accumulate_steps=2
train --inject=wrong_shard --strategy=sharded --num_devices=2
train --inject=perturb_weight --strategy=sharded --num_devices=2 --shard=gradients
verify --inject=stale_stage --strategies=single,pipeline
verify --all_reduce=hierarchical --strategies=single,mirrored
verify --strategies=mirrored --num_devices=3
verify --communication_dtype=bfloat16 --strategies=mirrored
"""


def test_what_can_happen_is_not_refused():
    for line in POSSIBLE.strip().splitlines():
        config = parse_here(*line.split())
        assert (config.verification.fault is not None) == ("--inject" in line), line


def test_a_fault_goes_to_the_first_strategy_that_can_have_it():
    strategies = ("single", "manual", "sharded", "pipeline", "tensor")
    for fault, faulty in {
        "drop_gradient": "manual", "perturb_weight": "manual", "stale_stage": "pipeline",
        "lost_micro_batch": "pipeline", "wrong_shard": "sharded", "repeated_bias": "tensor",
        "drop_gradient:strategy=sharded": "sharded",
    }.items():  # fmt: skip
        config = Config.of("verify", strategies=strategies, num_devices=2, inject=fault)
        assert faulty_strategy(config) == faulty
