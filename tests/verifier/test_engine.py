"""The engine in `lockstep.engine`: the rows of `rows.py`, other small recordings, and formulas."""

import dataclasses
import functools
import importlib
import itertools

import numpy as np
import pytest

from lockstep.data.match import Matching
from lockstep.data.trace import Trace
from lockstep.engine import nodes
from lockstep.engine.bounds import bound_of, of_rounding
from lockstep.engine.claim import Claim
from lockstep.engine.pair import Pair
from lockstep.engine.solve import Term, formulas, rounded
from lockstep.engine.step import Step
from lockstep.engine.verdict import CLEAN, FAULT
from lockstep.engine.verify import verify
from lockstep.numeric import arrays
from lockstep.oracles.rules import RuleOracle, rule_of, updated

from . import shown
from .changes import (
    ADAM,
    MUON,
    NORM,
    SUMMED,
    WITHOUT_GRADIENTS,
    bias_times,
    edit,
    layers,
    of_shards,
    over_classes,
    pair,
    times,
    times_element,
    with_settings,
    without,
)
from .rows import FEW_DIGITS, NOTES, OF_CLASSES, RIGHT, WRONG
from .trainer import FEATURES, OUTPUTS, Script

# --- Small recordings -----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """A kernel is computed in two blocks, as large arrays are."""
    monkeypatch.setattr(arrays, "_BLOCK", 20)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_row_is_clean(name):
    reference, training = pair(*RIGHT[name])
    verdict = verify(reference.trace(), training.trace("two.npz"))
    assert (verdict.status, verdict.error) == (CLEAN, ""), verdict


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_row_has_its_place_and_name(name):
    found, first, second, *step = WRONG[name]
    reference, training = pair(first, second)
    verdict = verify(reference.trace(), training.trace("two.npz"))
    assert shown(verdict).removeprefix("fault: ") == found and not verdict.error
    assert not verdict.place or verdict.place.step == (step[0] if step else 0)


@pytest.mark.parametrize("name", [
    "1 replicas", "Adam", "AdamW", "Adam of Keras", "Nesterov", "plain SGD",
])  # fmt: skip
def test_the_rule_of_an_optimizer_computes_its_update(name):
    trace = pair(*RIGHT[name])[0].trace()
    for position in range(len(trace.steps)):
        before, after = (trace.named(position, kind, 0) for kind in ("before", "after"))
        gradients = Step(trace, position).applied(0)
        oracle = RuleOracle(trace, position, gradients)
        assert oracle.rules.keys() == gradients.keys()
        found = oracle.update(before, gradients)
        for key in {*gradients, *oracle.tracks}:
            change = after[key] - before.get(key, 0)
            np.testing.assert_allclose(found[key], after[key], atol=1e-4 * np.abs(change).max())


def test_rmsprop_divides_by_the_root_of_the_moment():
    """As PyTorch's does; its velocity sums the quotients."""
    settings = {"learning_rate": 0.1, "rho": 0.9, "epsilon": 0.5, "momentum": 0.8}
    rule = rule_of({"class": "RMSprop", "framework": "torch"}, settings)
    state = {"second_moment": np.array(4.0), "velocity": np.array(3.0)}
    found = updated(rule, np.array(1.0), np.array(2.0), state)
    assert found["second_moment"] == 0.9 * 4 + 0.1 * 2**2 == 4.0
    assert found["velocity"] == 0.8 * 3 + 2 / (2 + 0.5) == pytest.approx(3.2)
    assert found["weight"] == pytest.approx(1 - 0.1 * 3.2)


def test_a_claim_that_compares_nothing_does_not_hold():
    traces = [script.trace() for script in pair({}, without("before"))]
    step = Pair(*(Step(trace, 0) for trace in traces), Matching(*traces, {}))
    claim = Claim(step, bound_of(traces[0], None))
    assert not claim.is_known and not claim.holds


WITHOUT_NORM = {"about": {"layers": []}}  # Behind a norm, ties of units may move gradients.


def place_of(verdict):
    """Returns status, node and step."""
    place = verdict.place
    return verdict.status, place and place.node, place and place.step


def judged(first, second):
    reference, training = pair(first, second)
    given = {name: value for name, value in first.items() if name != "edit"}
    permuted = Script(**{**given, "permute": 1, "replay": reference, "steps": (0, 1)})
    return verify(reference.trace(), training.trace("two.npz"), permuted.trace("permuted.npz"))


ELEMENT = times_element(1 + 1e-4, 2, "after", 1, 0)


def test_one_element_of_a_weight_on_one_rank_is_a_fault():
    verdict = judged({}, ELEMENT)
    assert place_of(verdict) == (FAULT, "update", 1)
    assert verdict.place.tensors == ("dense/kernel",) and verdict.place.ranks == ("replica 1",)
    assert verdict.place.where == "in rows 1 of 12"
    verdict = judged({}, edit(lambda a: a + np.float32([0, 1e-3, 0]), "after", 1, 0, 2))
    assert verdict.place.where == "in columns 1 of 3"


def test_a_gradient_that_one_rank_scales_is_a_fault():
    verdict = judged(WITHOUT_NORM, {**WITHOUT_NORM, **times(1, 1 + 1e-3)})
    assert place_of(verdict)[:2] == (FAULT, "gradient")
    assert "0.5·g0 + 0.4995·g1" in str(verdict.formula)


def test_a_state_of_few_digits_does_not_hide_a_factor_of_the_kernel():
    assert judged(FEW_DIGITS, FEW_DIGITS).status == CLEAN
    of_kernel = {"gradient": lambda s, r, g: [np.float32(1.05) * g[0], g[1]]}
    verdict = judged(FEW_DIGITS, {**FEW_DIGITS, **of_kernel})
    assert (verdict.status, verdict.place.tensors[0]) == (FAULT, "dense/kernel"), str(verdict)


@pytest.mark.parametrize("moved, status", [(1.0, FAULT), (1.1, CLEAN)])
def test_in_16_bits_a_gradient_has_the_spread_of_permuted_examples(moved, status):
    """As on processors that accumulate sums over examples in bfloat16."""
    short = {"about": {"computed_in": "bfloat16"}}
    reference, training = pair(short, {**short, **bias_times(lambda step, r: 1.07)})
    given = {**short, **bias_times(lambda step, r: moved), "permute": 1, "replay": reference}
    permuted = Script(**given).trace("permuted.npz")
    verdict = verify(reference.trace(), training.trace("two.npz"), permuted)
    assert verdict.status == status, verdict


def test_in_16_bits_a_matrix_of_muon_is_not_compared():
    """Its update enlarges what gradients have over all classes, which is rounding alone."""

    def rounded_over_classes(*arguments, far=4e-3):
        return [gradient + far for gradient in over_classes(*arguments)]

    short = {**OF_CLASSES, "about": {**MUON, "computed_in": "bfloat16"}}
    verdict = judged(short, {**short, "gradient": rounded_over_classes})
    assert verdict.status == CLEAN and verdict.num_unknown >= FEATURES * OUTPUTS, str(verdict)
    adam = {**short, **ADAM, "update": None}
    nearer = {"gradient": functools.partial(rounded_over_classes, far=1e-4)}
    verdict = judged(adam, {**adam, **nearer, **with_settings(learning_rate=0.03)})
    assert (verdict.status, verdict.place.tensors[0]) == (FAULT, "dense/kernel"), str(verdict)


def test_without_gradients_what_permuted_examples_move_is_rounding():
    def of_bias(script, replica, gradients):  # As before a normalisation.
        noise = np.random.default_rng(10 * script.replicas + (script.permute or 0))
        return [gradients[0], noise.normal(size=gradients[1].shape) * 1e-8]

    first = {**ADAM, **WITHOUT_GRADIENTS, "gradient": of_bias}
    verdict = judged(first, WITHOUT_GRADIENTS)
    assert (verdict.status, verdict.num_unknown) == (CLEAN, 36), str(verdict)
    verdict = judged(first, {**WITHOUT_GRADIENTS, "gradient": lambda s, r, g: g})
    assert place_of(verdict) == (FAULT, "update", 0), str(verdict)
    assert all("bias" in name for name in verdict.place.tensors), str(verdict)
    verdict = judged(first, {**WITHOUT_GRADIENTS, **SUMMED})
    assert (verdict.status, verdict.name) == (FAULT, "wrong_factor"), str(verdict)


@pytest.mark.parametrize("tolerance, status", [(0.02, CLEAN), (0.005, FAULT)])
def test_a_tolerance_is_a_part_of_each_gradient(tolerance, status):
    traces = [script.trace(f"{n}.npz") for n, script in enumerate(pair({}, times(1.01)))]
    assert verify(*traces, tolerance=tolerance).status == status


def raises(*args):
    raise KeyError("broken")


@pytest.mark.parametrize("second", [SUMMED, ELEMENT])
def test_an_error_in_naming_or_in_a_node_loses_no_fault(second, monkeypatch):
    whole = judged({}, second)
    monkeypatch.setattr(importlib.import_module("lockstep.engine.verify"), "named", raises)
    verdict = judged({}, second)
    assert (verdict.status, verdict.name, verdict.error) == (FAULT, "", "KeyError: 'broken'")
    assert verdict.place == whole.place and verdict.formula == whole.formula
    monkeypatch.setattr(nodes, "NODES", (raises,))
    verdict = judged({}, second)
    assert place_of(verdict) == (FAULT, "update", whole.place.step)
    assert "dense/kernel" in verdict.place.tensors


@pytest.mark.parametrize("name", NOTES)
def test_what_was_not_compared_is_noted(name):
    first, second, told = NOTES[name]
    reference, training = pair(first, second)
    verdict = verify(reference.trace(), training.trace("two.npz"))
    assert verdict.status == CLEAN, verdict
    assert any(told in note for note in verdict.notes) if told else not verdict.notes


@pytest.mark.parametrize("trained, status", [(1, CLEAN), (0, FAULT)])
def test_a_replica_that_ends_before_the_first_recorded_step(trained, status):
    """It is noted, and named if it has made no update."""
    reference, training = (each.trace(f"{n}.npz") for n, each in enumerate(pair({}, {}), 1))
    more = {"num_replicas": 3, "replicas": (), "trained": trained}
    about = dataclasses.replace(training.about, **more)
    verdict = verify(reference, Trace(about, training.stored(), training.name))
    assert verdict.status == status, verdict
    if status == FAULT:
        assert verdict.place.ranks == ("replica 2",), verdict
    else:
        told = "replica 2 ended before the first recorded step"
        assert any(told in note for note in verdict.notes), verdict.notes


# --- Formulas -------------------------------------------------------------------------------------


def drawn(seed, **shapes):
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


GRADIENTS = [drawn(seed, kernel=(6, 4), bias=(2,)) for seed in range(3)]
TERMS = [Term(f"g{rank}", "gradient", rank, own) for rank, own in enumerate(GRADIENTS)]
NAMES = ["kernel", "bias"]


def combined(*factors):
    """Returns a sum of the gradients in float32."""
    return {
        name: sum(np.float32(f) * own[name] for f, own in zip(factors, GRADIENTS, strict=True))
        for name in NAMES
    }  # fmt: skip


@pytest.mark.parametrize("factors", [
    (1 / 3, 1 / 3, 1 / 3), (1.0, 1.0, 1.0), (0.5, 0.0, 0.5), (1 / 3, 1 / 3, 1.0), (-2.0, 7.5, 1e-3),
])  # fmt: skip
def test_factors_are_solved_for(factors):
    found, left = formulas(combined(*factors), NAMES, TERMS, of_rounding())
    assert not left and len(found) == 1 and all(found[0].known)
    assert found[0].factors == pytest.approx(factors, abs=1e-6)
    assert found[0].is_even == (len({*factors}) == 1)


def test_what_terms_do_not_give_has_no_formula():
    given = combined(1, 1, 1)
    given["kernel"] = given["kernel"] + np.float32(1e-4) * drawn(9, kernel=(6, 4))["kernel"]
    found, left = formulas(given, NAMES, TERMS, of_rounding())
    assert left == ["kernel"] and all("kernel" not in each.names for each in found)
    nan = {name: np.full_like(array, np.nan) for name, array in given.items()}
    assert formulas(nan, NAMES, TERMS, of_rounding()) == ([], NAMES)


def test_rounding_to_bfloat16_is_to_even():
    assert rounded(np.array([1 + 2.0**-9, 1 + 3 * 2.0**-9]), "bfloat16").tolist() == [1, 1 + 2**-7]


# --- A reference by parts ------------------------------------------------------------------------


@pytest.mark.parametrize("wrong, left, ways, status, note", [
    (None, None, ["ddp"], "clean", False),
    (1, None, ["ddp"], "fault", False),
    (0, None, ["ddp", "ddp"], "fault", False),
    (1, 0, ["ddp"], "clean", True),  # Something else than a forward pass changes it.
    (1, None, ["ddp", "ddp"], "clean", True),  # DDP sends those of rank 0 before the second.
])  # fmt: skip
def test_statistics_of_each_rank_are_those_of_its_part(wrong, left, ways, status, note):
    given = {**layers(NORM), **of_shards(), "steps": (0,)}
    reference, training = pair(given, {"local_norm": True})
    for index, rank in itertools.product((2, 3), (0, 1)):
        own = training.arrays[f"1/after/{rank}/{index}"]
        reference.arrays[f"1/own_after/{rank}/{index}"] = own * (1 + (rank == left))
        if rank == 0:
            reference.arrays[f"1/after/0/{index}"] = own
    if wrong is not None:
        name = f"1/after/{wrong}/3"
        training.arrays[name] = training.arrays[name] * np.float32(1.01)
    traces = reference.trace(), training.trace()
    traces[1].about = dataclasses.replace(traces[1].about, passes=(tuple(ways),))
    verdict = verify(*traces, by_parts=traces[0])
    assert verdict.status == status, str(verdict)
    assert any("statistics of other ranks" in text for text in verdict.notes) == note
    if status == "fault":
        assert (verdict.place.node, len(verdict.place.tensors)) == ("update", 1)
        assert verdict.place.ranks == (f"replica {wrong}",)
