"""The claim: what a step does to all state, on each copy, and what changes between two steps."""

import dataclasses
import json
import re

import numpy as np
import pytest

from lockstep.answer.text import notes_of, sentence_of
from lockstep.answer.verdict import CLEAN, EXIT_CODE_OF, FAULT, NOT_VERIFIED
from lockstep.comparison import verify_against, verify_alone
from lockstep.data.trace import STATE, STATISTIC, WEIGHT, Trace, Variable
from lockstep.numeric.arrays import EPS
from lockstep.numeric.state_bounds import of_change, of_start, spread_of
from lockstep.numeric.tolerance import Tolerance
from lockstep.reference import StepPair, common_steps, match_traces
from tests.verifier.script_samples import NORM, Script, sgd

# A weight that a second optimizer updates after the recorded one, and a codebook that is no
# BatchNorm's; their arrays follow those of the optimizer.
HEAD, CODES = Variable("head", WEIGHT), Variable("codes", STATISTIC)
VQ = {"name": "vq", "class": "VectorQuantizer", "weights": ["codes"]}
LION = {"optimizer": {"class": "Lion", "framework": "torch"}}
TWO, UNKNOWN = {"replicas": 2}, {"about": LION}


@pytest.fixture(scope="module")
def one():
    return Script()


def compared(first, second):
    return verify_against(first.trace(), second.trace("two.npz"), {}, Tolerance())


def shown(verdict):
    return [(f.stage, f.detail, f.steps, f.items, f.tensors) for f in verdict.faults]


def edited(kinds, number, change, steps=(1, 2, 3, 4)):
    """Returns an `edit` of a script that changes arrays in its recording."""

    def edit(script):
        for name, array in script.arrays.items():
            position, kind, replica, index = name.split("/")
            if kind in kinds and int(index) == number and int(position) in steps:
                script.arrays[name] = change(array, int(position), int(replica)).astype(array.dtype)

    return edit


def with_more(variable, values):
    """Returns an `edit` that adds a variable: `values(position, kind, replica)`."""
    number = 4 + 2  # Weights, statistics, and the state of both weights.

    def edit(script):
        for position in range(1, len(script.steps) + 1):
            for replica in range(script.replicas):
                for kind in ("before", "after"):
                    value = np.float32(values(position, kind, replica)) * np.ones(5, np.float32)
                    script.arrays[f"{position}/{kind}/{replica}/{number}"] = value

    return {"more_variables": (variable,), "edit": edit}


# --- The step ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("replica", [0, 1])
def test_no_state_of_any_copy_may_change_differently(one, number, replica):
    """Whatever it is: weights, statistics, and state, of an optimizer without a known rule."""

    def change(array, position, copy):
        return array * (1 + 1e-3 * (copy == replica)) + 1e-3 * (copy == replica)

    about = {"about": {**LION, "layers": ({**VQ, "weights": list(NORM)},)}}
    first = Script(**about)
    edit = edited(["after"], number, change, steps=(2,))
    verdict = compared(first, Script(**TWO, **about, replay=first, edit=edit))
    assert verdict.status == FAULT
    assert 1 in verdict.faults[0].steps


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("scale", [1e-3, 0.1, 10])
def test_right_trainings_agree_in_all_state(optimizer, replicas, scale):
    for about in ({}, LION):
        first = Script(optimizer=optimizer, initial_scale=scale, about=about)
        second = Script(
            replicas, optimizer=optimizer, initial_scale=scale, about=about, replay=first
        )
        verdict = compared(first, second)
        assert verdict.status == CLEAN and not verdict.notes, str(verdict)


def codes(script_replicas, far=0.0, drift=0.0):
    def values(position, kind, replica):
        start = position if kind == "before" else position + 1
        return start + drift * (kind == "after") + far * (kind == "after") * replica

    return {**with_more(CODES, values), "about": {"layers": (VQ,)}, "replicas": script_replicas}


@pytest.mark.parametrize(("more", "copies"), [({"far": 0.1}, ("replica 1",)), ({"drift": 0.1}, ())])
def test_buffers_that_are_no_batch_norm_are_not_local_by_design(more, copies):
    first = Script(**codes(1))
    right = compared(first, Script(**codes(2), replay=first))
    assert right.status == CLEAN
    verdict = compared(first, Script(**codes(2, **more), replay=first))
    fault = verdict.faults[0]
    assert (fault.stage, fault.tensors) == ("statistics", ("codes",)) and fault.steps == (
        0,
        1,
        2,
        3,
    )
    assert not copies or fault.items == copies or fault.detail == "other_statistics"
    assert EXIT_CODE_OF[verdict.status] == 9


def test_a_difference_that_has_a_cause_is_not_reported_twice(one):
    def twice(script, weights, gradients, state):
        for _ in range(2):
            sgd(script, weights, gradients, state)

    verdict = compared(one, Script(**TWO, replay=one, update=twice))
    assert [fault.detail for fault in verdict.faults] == ["updated_twice"]


# --- Owned state ---------------------------------------------------------------------------------


def owned(script):
    """Replica 0 keeps the momentum of the kernel, replica 1 that of the bias; others stay 0."""
    for name, array in script.arrays.items():
        _, kind, replica, index = name.split("/")
        if kind in ("before", "after") and index in ("4", "5") and int(index) - 4 != int(replica):
            script.arrays[name] = np.zeros_like(array)


def halves(script):
    """Each of two replicas keeps its rows of the momentum of the kernel."""
    for name in [n for n in script.arrays if re.fullmatch(r"\d/(before|after)/\d/4", n)]:
        script.arrays[name] = np.split(script.arrays[name], 2)[int(name.split("/")[2])]


@pytest.mark.parametrize("edit", [owned, halves])
def test_state_that_its_rank_owns_is_no_diverged_replica(edit):
    first = Script(**UNKNOWN)
    verdict = compared(first, Script(**TWO, **UNKNOWN, replay=first, edit=edit))
    assert verdict.status == CLEAN, str(verdict)


@pytest.mark.parametrize("edit", [owned, halves])
def test_a_fault_in_owned_state_is_found(edit):
    def both(script):
        edited(["after"], 4, lambda array, *_: array * 1.01, steps=(2,))(script)
        edit(script)

    first = Script(**UNKNOWN)
    verdict = compared(first, Script(**TWO, **UNKNOWN, replay=first, edit=both))
    assert verdict.status == FAULT


def test_a_replica_that_resumes_with_the_state_of_another_is_found():
    """A checkpoint that one replica wrote has zeros for the state that others own."""

    def resumed(script):
        owned(script)
        for name, array in list(script.arrays.items()):
            position, kind, replica, index = name.split("/")
            if kind == "after" and position != "4":
                is_lost = position == "2" and replica == "1" and index in ("4", "5")
                own = script.arrays[f"2/after/0/{index}"] if is_lost else array
                script.arrays[f"{int(position) + 1}/replaced/{replica}/{index}"] = own.copy()

    first = Script(**UNKNOWN)
    verdict = compared(
        first, Script(**TWO, replay=first, edit=resumed, about={**LION, "replayed": "one.npz"})
    )
    fault = verdict.faults[0]
    assert (fault.detail, fault.steps, fault.items) == ("not_restored", (2,), ("replica 1",))
    assert "of another replica" in fault.text


def test_a_resumed_job_is_told_its_first_step(one):
    """Its step 0 is a later one of the reference; with `first_step=`, it would be compared."""

    def from_step(number):
        def edit(script):
            for name, array in one.arrays.items():
                if name.startswith(f"{number + 1}/before/0/"):
                    script.arrays[f"1/replaced/0/{name.rpartition('/')[2]}"] = array.copy()

        return edit

    options = {"replay": one, "about": {"replayed": "one.npz"}}
    verdict = compared(one, Script(**options, edit=from_step(2)))
    assert verdict.status == NOT_VERIFIED and not verdict.findings
    assert sentence_of(verdict).endswith("that resumes there with first_step=2"), verdict
    assert compared(one, Script(**options, edit=from_step(0))).status == CLEAN


def test_state_without_an_owner_is_a_fault():
    def no_copy(script):
        edited(["after"], 4, lambda array, position, copy: array * (0.5 + copy), (2,))(script)

    first = Script(**UNKNOWN)
    verdict = compared(first, Script(**TWO, **UNKNOWN, replay=first, edit=no_copy))
    assert {fault.detail for fault in verdict.faults} & {"diverged_replicas", "unexplained"}


@pytest.mark.parametrize(("factor", "is_right"), [(1, True), (2, False)])
def test_an_optimizer_may_reduce_gradients_itself(factor, is_right):
    """Each replica gives its own gradient to the optimizer, which averages, or sums, them."""

    def not_reduced(script):
        for name in [n for n in script.arrays if n.split("/")[1] in ("clipped", "sums")]:
            position, _, replica, index = name.split("/")
            script.arrays[name] = script.arrays[f"{position}/raw/{replica}/{index}"]

    def update(script, weights, gradients, state):
        sgd(script, weights, [np.float32(factor) * g for g in gradients], state)

    first = Script(**UNKNOWN)
    second = Script(**TWO, **UNKNOWN, replay=first, edit=not_reduced, update=update)
    assert (compared(first, second).status == CLEAN) == is_right


# --- Between two steps ---------------------------------------------------------------------------


def second_optimizer(factor=1.0):
    """The head changes between the steps: an optimizer that is not recorded updates it there."""

    def values(position, kind, replica):
        return 1 + np.float32(0.1 * factor) * (position - 1)

    return with_more(HEAD, values)


@pytest.mark.parametrize(("factor", "is_right"), [(1, True), (1 + 1e-3, False), (2, False)])
def test_what_changes_between_two_steps_has_to_change_equally(factor, is_right):
    settings = {
        "about": {
            "settings": tuple([{"weights": ["dense/kernel", "dense/bias"]}] for _ in range(4))
        }
    }
    first = Script(**second_optimizer(), **settings)
    second = Script(**TWO, **second_optimizer(), **settings, replay=first)

    def own(script):
        """What the script had before the state of the reference was loaded."""
        for position in range(2, 5):
            for replica in range(2):
                for index in range(7):
                    old = script.arrays[f"{position - 1}/after/{replica}/{index}"]
                    by = np.float32(0.1 * factor * (index == 6))
                    script.arrays[f"{position}/replaced/{replica}/{index}"] = old + by

    own(second)
    verdict = compared(first, second)
    assert (verdict.status == CLEAN) == is_right, str(verdict)
    assert is_right or shown(verdict)[0][:2] == ("start", "changed_on_its_own")


@pytest.mark.parametrize("number", [0, 2, 4])
def test_between_two_steps_no_bit_may_change(one, number):
    def own(script):
        for position in range(2, 5):
            for replica in range(2):
                for index in range(6):
                    old = script.arrays[f"{position - 1}/after/{replica}/{index}"].copy()
                    if (position, replica, index) == (3, 1, number):
                        old.ravel()[-1] = np.nextafter(old.ravel()[-1], np.float32(9))
                    script.arrays[f"{position}/replaced/{replica}/{index}"] = old

    verdict = compared(one, Script(**TWO, replay=one, edit=own))
    assert [(f.stage, f.steps, f.items) for f in verdict.faults] == [
        ("start", (2,), ("replica 1",))
    ]


def test_buffers_that_ddp_sends_to_all_replicas_are_no_fault(one):
    """Each replica has its own statistics, until replica 0 sends its own before the next step."""

    def broadcast(script):
        for position in range(2, 5):
            for replica in range(2):
                for index in range(6):
                    source = 0 if index in (2, 3) else replica
                    old = script.arrays[f"{position - 1}/after/{source}/{index}"]
                    script.arrays[f"{position}/replaced/{replica}/{index}"] = old

    verdict = compared(one, Script(**TWO, replay=one, local_norm=True, edit=broadcast))
    assert not verdict.faults and [f.detail for f in verdict.findings] == ["local_statistics"]


# --- The whole training --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({"ended_with": "RuntimeError: out of memory"}, "exception: RuntimeError: out of memory"),
        ({"asked": (0, 1, 2, 3, 4, 5)}, "ended before step 4, step 5, which were to be recorded"),
    ],
)
def test_a_training_that_did_not_end_is_not_verified(one, about, reason):
    for first, second in (
        (one, Script(**TWO, replay=one, about=about)),
        (Script(about=about), one),
    ):
        verdict = compared(first, second)
        assert verdict.status == NOT_VERIFIED and EXIT_CODE_OF[verdict.status] == 3
        assert reason in sentence_of(verdict) and not verdict.ok
    alone = verify_alone(Script(about=about).trace())
    assert alone.status == NOT_VERIFIED and reason in alone.unverified[0]
    wrong = compared(one, Script(**TWO, replay=one, about=about, reduce=None))
    assert wrong.status == FAULT and reason in notes_of(wrong)[-1]


def bias_in(*steps):
    """The bias has a gradient in some steps only."""

    def gradient(script, replica, gradients):
        return [gradients[0], gradients[1] * (len(script.states) - 1 in steps)]

    return {"gradient": gradient}


EXTRA = with_more(HEAD, lambda position, kind, replica: position + (kind == "after"))
NOT_COMPARED = {  # Both trainings, and why the weights of the second one are not compared.
    "steps from other states": (
        bias_in(3), {}, {},
        "no step was compared that updates dense/bias",
    ),
    "without the state after a step": (
        {"edit": lambda s: [s.arrays.pop(n) for n in [*s.arrays] if "/after/" in n]},
        {}, {}, "no step was compared that updates dense/kernel, dense/bias:",
    ),
    "only in the second": ({}, {}, EXTRA, "the first recording has no weight that matches head:"),
    "only in the first": (
        {}, EXTRA, {}, "this recording has no weight that matches head",
    ),
}  # fmt: skip


@pytest.mark.parametrize("optimizer", [{}, UNKNOWN])
@pytest.mark.parametrize("name", NOT_COMPARED)
def test_a_trained_weight_has_to_be_compared_in_some_step(name, optimizer):
    both, of_first, of_second, why = NOT_COMPARED[name]
    first = Script(**both, **of_first, **optimizer)
    replay = {} if name == "steps from other states" else {"replay": first}
    verdict = compared(first, Script(**TWO, **both, **of_second, **optimizer, **replay))
    assert verdict.status == NOT_VERIFIED, str(verdict)
    assert why in sentence_of(verdict)
    record = json.loads(verdict.to_json())["not_checked"]
    assert record["weights"] and any(record["weights"][0] in why for why in record["training"])


def test_weights_that_no_training_trains_need_not_be_compared():
    """The bias has no gradient; the head has none either, and is in one recording only."""
    still = with_more(HEAD, lambda *_: 1.0)
    first = Script(**bias_in())
    assert compared(first, Script(**TWO, **bias_in(), **still, replay=first)).status == CLEAN


def test_a_replica_that_ends_early_does_not_hide_the_others(one):
    """The last batch has examples for replica 0 only."""

    def first_only(rows, replica, count):
        return rows[replica::count] if len(rows) == 16 else rows[: len(rows) * (replica == 0)]

    def reduce(factor):
        def mean(sent):
            is_last = not np.any(sent[1][0])
            weights = (factor, 0) if is_last else (0.5, 0.5)
            whole = [
                np.float32(weights[0]) * a + np.float32(weights[1]) * b
                for a, b in zip(*sent, strict=True)
            ]
            return [[a.copy() for a in whole] for _ in sent]

        return mean

    def without(script):
        """At the end, as `join` does, the replica gets what the other one has trained since."""
        for name in [n for n in script.arrays if re.match(r"3/\w+/1/", n)]:
            del script.arrays[name]
        last = {n: array for n, array in script.arrays.items() if n.startswith("3/after/0/")}
        script.arrays |= {f"2/left/1/{n.split('/')[-1]}": array for n, array in last.items()}

    options = {"steps": (0, 1, 2), "shard": first_only, "weighted": False, "edit": without}
    first = Script(steps=(0, 1, 2))
    right = compared(first, Script(**TWO, **options, reduce=reduce(1), replay=first))
    assert right.status == CLEAN, str(right)
    assert "replica 1 ended before step 2: the other replicas are compared" in right.notes
    wrong = compared(first, Script(**TWO, **options, reduce=reduce(0.5), replay=first))
    (fault,) = wrong.faults
    assert (fault.detail, fault.steps, fault.items) == ("wrong_count", (2,), ("replica 0",))


def test_a_trace_without_a_replica_keeps_its_name():
    trace = Script(
        **TWO, edit=lambda s: [s.arrays.pop(n) for n in [*s.arrays] if n[:8] == "4/after/"]
    )
    found = trace.trace().without([0])
    assert found.copies == range(1) and found.name_of("before", 0) == "replica 1"
    assert isinstance(found, Trace) and dataclasses.is_dataclass(found.about)
    assert found.arrays(0, "before", 0) is not None and STATE in found.kinds.values()


# --- Bounds --------------------------------------------------------------------------------------


def test_the_bound_of_a_change_ignores_the_difference_of_a_wrong_gradient():
    first, second = np.ones(4), np.array([1, 1 + 1e-6, 1.5, 2])
    agreeing = spread_of(first, second, 1e-4)
    assert agreeing[0] == 0 and agreeing[1] < 2e-6 and np.isinf(agreeing[2:]).all()
    assert spread_of(first, second, 0.0).max() < 1e-5
    allowed = of_change(first, first, first, agreeing, unit=1e-7, is_weight=True, mixes=0.0)
    assert allowed[0] < 1e-5 < allowed[1] < 1e-3 and np.isinf(allowed[2:]).all()


def test_a_gradient_that_cancels_the_momentum_may_differ_in_its_last_place():
    """Adam's second step: of 1,000 changes, that of one weight is 1e-5 of the usual one."""

    def change(gradient):
        momentum = np.float32(0.1) * gradient + np.float32(0.9) * momenta
        return (1e-3 * momentum / np.abs(momenta)).astype(np.float64)

    momenta = np.full(1000, 1.6e-5, np.float32)
    gradient = np.full(1000, 1e-4, np.float32)
    gradient[0] = -9 * momenta[0] * np.float32(1 + 1e-5)
    other = np.nextafter(gradient, np.float32(0))
    first, second, size = change(gradient), change(other), np.full(1000, 1e-6)
    spread = spread_of(gradient, other, 1e-4)
    assert 0 < spread.max() <= EPS and abs(first[0]) < 1e-4 * abs(first[1])
    allowed = of_change(first, second, size, spread, unit=EPS, is_weight=True, mixes=0.0)
    assert (np.abs(second - first) <= allowed).all() and (allowed < 1e-5 * first[1]).all()
    assert np.abs(second - first)[0] > 64 * EPS * np.abs(first[0])


def test_elements_whose_gradients_are_rounding_alone_are_counted():
    """The bias, its momentum: the change of one element of each is not known, in four steps."""

    def rounding(value):
        def gradient(script, replica, gradients):
            gradients[1][0] = value
            return gradients

        return {"gradient": gradient}

    first = Script(**UNKNOWN, **rounding(1e-9))
    second = Script(**TWO, **UNKNOWN, **rounding(1.1e-9), replay=first)
    verdict = compared(first, second)
    assert verdict.status == CLEAN
    assert json.loads(verdict.to_json())["not_checked"]["elements"] == 2 * 4
    equal = Script(**TWO, **UNKNOWN, **rounding(1e-9), replay=first)
    assert compared(first, equal).unknown_elements == 0


def test_what_the_reference_does_not_change_may_not_change_by_a_bit():
    assert not of_start(np.zeros(3), np.ones(3), np.zeros(())).any()
    assert of_start(np.ones(3), np.ones(3), np.zeros(())).all()


def test_the_bound_knows_the_mean_size_of_what_the_replicas_send(one):
    two = Script(replicas=2, replay=one).trace("two.npz")
    (reference, step), *_ = common_steps(one.trace(), two)
    pair = StepPair(reference, step, match_traces(one.trace(), two, {}), Tolerance())
    pair.measure_terms()
    sent = [own["dense/kernel"] for own in step.named("raw")]
    mean = np.mean([np.linalg.norm(gradient) for gradient in sent])
    assert pair.tolerance.summed["dense/kernel"] == pytest.approx(mean)
