"""Recordings of a small training: each row of the table, and what has no row."""

import json

import numpy as np
import pytest

from lockstep.__main__ import main
from lockstep.answer.verdict import FAULT
from lockstep.comparison import compare_traces, not_trained
from lockstep.data.trace import STATISTIC, WEIGHT, About, Trace, Variable
from lockstep.reference import of_pair, tolerance_of
from lockstep.stages import start
from tests.verifier import check, modules, outputs, shown
from tests.verifier.changes import little_noise, times
from tests.verifier.edits import WITHOUT_GRADIENTS, edit
from tests.verifier.recordings import ROWS, compared, pair, tolerance
from tests.verifier.script_samples import Script


@pytest.mark.parametrize("row", [*ROWS, *outputs.ROWS, *modules.ROWS], ids=lambda row: row.name)
def test_verdict(row):
    check(row)


@pytest.fixture(scope="module")
def one():
    return Script()


def test_initial_values_of_another_spread_have_another_initialiser(one, monkeypatch):
    monkeypatch.setattr(start, "_LARGE", 36)  # The kernel has fewer than 100 values.
    for scale, cause in ((0.1, "other_initial_weights"), (0.2, "other_initialiser")):
        assert shown(compared(one, Script(seed=1, initial_scale=scale))) == f"start: {cause}"


def test_the_tolerance_is_computed_from_permuted_examples(one):
    permuted = tolerance()
    assert set(permuted.spread) == {"dense/kernel", "dense/bias"}
    assert all(0 <= spread < 1e-5 for spread in permuted.spread.values())
    assert "2 steps of" in permuted.text and permuted.times == 8
    assert "counts as 0 behind BatchNorm" in permuted.text
    given = tolerance_of(one.trace(), None, {}, 0.5)
    assert given.allowed(["dense/kernel"]) == 0.5 and "--tolerance" in given.text
    first, keras = one.trace(), Script(framework="keras").trace()
    assert of_pair(permuted, first, first) is permuted
    assert of_pair(given, first, keras) is given
    wider = of_pair(permuted, first, keras)
    assert wider.times == 64 and "two frameworks" in wider.text
    with pytest.raises(ValueError, match="no step starts from the state of"):
        tolerance_of(first, Script(seed=1, permute=1).trace(), {}, None)
    idle = Script(about={"gradients": []}, **WITHOUT_GRADIENTS).trace()
    assert not tolerance_of(idle, idle, {}, None).spread


def test_the_tolerance_is_at_least_the_rounding_of_autocast():
    """Without an effect of permuting, too: a sum over fewer examples is rounded otherwise."""

    def in_float16(script, replica, gradients):
        return [g.astype(np.float16).astype(np.float32) for g in gradients]

    half = Script(about={"computed_in": "float16"}, gradient=in_float16)
    again = Script(permute=1, replay=half, steps=(0, 1), gradient=in_float16).trace("again.npz")
    two = Script(replicas=2, replay=half, gradient=in_float16).trace("two.npz")
    wrong = Script(replicas=2, replay=half, **times(1.05)).trace("wrong.npz")
    for permuted in ([], [again]):
        verdicts = compare_traces([half.trace("one.npz"), two, wrong, *permuted], {})
        assert verdicts["one.npz"].ok and verdicts["two.npz"].ok and verdicts["wrong.npz"].faults
        assert "of float16" in verdicts["two.npz"].tolerance

    def bfloat16(**about):
        return Script(about={"computed_in": "bfloat16", **about}).trace()

    tolerance = tolerance_of(bfloat16(), None, {}, None)
    assert (tolerance.times, tolerance.unit) == (2, 2**-7)  # Behind a BatchNorm.
    assert tolerance_of(bfloat16(layers=[]), None, {}, None).times == 1
    assert of_pair(tolerance, bfloat16(), bfloat16(mesh={"tp": 1})).times == 4
    assert of_pair(tolerance, bfloat16(), bfloat16()) is tolerance


def test_a_fault_that_the_permuted_recording_shares_is_found(one):
    """A permuted recording of the wrong script must not make its fault a matter of rounding."""
    wrong = Script(permute=1, replay=one, steps=(0, 1), **times(0.5)).trace()
    tolerance = tolerance_of(one.trace(), wrong, {}, None)
    report = compared(*pair({}, {**times(0.5)}), tolerance)
    assert shown(report) == "gradients: mean_instead_of_sum"


def test_a_factor_of_one_explains_nothing():
    """The difference is 2 to 4 times the tolerance, and no smaller with the factor."""
    first, second = pair({}, {"gradient": little_noise})
    verdict = compared(first, second, tolerance_of(first.trace(), None, {}, 1e-2))
    assert [each.detail for each in verdict.faults] == ["unexplained"]


def test_several_recordings_have_verdicts_by_their_names(one):
    second = Script(replicas=2, replay=one, reduce=None).trace("runs/two.npz")
    permuted = Script(permute=1, replay=one, steps=(0,)).trace("permuted.npz")
    steps = []
    verdicts = compare_traces([one.trace(), permuted, second], {}, on_step=steps.append)
    assert list(verdicts) == ["one.npz", "two.npz"] and steps == list(range(1, 9))
    assert verdicts["one.npz"].ok and not verdicts["two.npz"].ok
    assert verdicts["two.npz"].reference == "training of one.npz"
    assert "permuting" in verdicts["two.npz"].tolerance
    # The names are those of the second recording; the permuted one is of the first script.
    other = Script(replay=one, renamed={"dense/bias": "other"}).trace("x")
    verdicts = compare_traces([one.trace(), permuted, other], {"other": "dense/bias"})
    assert all(each.ok and not each.notes for each in verdicts.values())


@pytest.mark.parametrize("kind", ["data", "loss", "raw", "sums", "clipped", "before", "after"])
@pytest.mark.parametrize("number", [np.nan, np.inf, 3e38])
def test_numbers_that_overflow_cause_no_warning(kind, number, recwarn):
    wrong = edit(lambda array: np.full_like(array, number), kind, 1, 0, 1)
    traces = [script.trace() for script in pair({}, wrong)]
    compare_traces(traces, {})
    assert not recwarn.list


@pytest.mark.parametrize(
    ("traces", "text"),
    [
        ([{"permute": 1}], "is recorded with permute="),
        ([{}, {"permute": 1}, {"permute": 2}], "is the second recording with permute="),
        ([{}, {"steps": (4,)}], "has no step in common"),
    ],
)
def test_recordings_with_nothing_in_common_are_refused(traces, text):
    with pytest.raises(ValueError, match=text):
        compare_traces([Script(**changes).trace() for changes in traces], {})


def test_recordings_without_a_common_weight_are_refused(one):
    other = Trace(About("torch", 1, (0,), (Variable("x", WEIGHT),)))
    other.put(0, "before", 0, [np.ones((7, 7), np.float32)])
    with pytest.raises(ValueError, match=r"no weight matches .*; pass --name_map"):
        compare_traces([one.trace(), other], {})


def test_the_command_takes_names_and_says_which_steps_only_one_has(tmp_path, capsys, one):
    first = one.write(tmp_path / "one.npz")
    second = Script(replicas=2, renamed={"dense/bias": "other"}).write(tmp_path / "two.npz")
    assert main([first, second, "--name_map=other=dense/bias", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)["trainings"]["two.npz"]
    assert [*record["not_checked"]["steps"]] == ["step 1", "step 2"]


def test_a_weight_that_one_script_does_not_train_is_a_fault():
    """Keras lists the weights of a frozen layer among the other variables of a model."""
    both, frozen = (
        Trace(About("keras", 1, (0,), (Variable("kernel", WEIGHT), Variable("bias", kind))))
        for kind in (WEIGHT, STATISTIC)
    )
    assert not [*not_trained(both, both)]
    for traces, which, detail in (
        ((both, frozen), "second", "frozen"), ((frozen, both), "first", "not_frozen"),
    ):  # fmt: skip
        (finding,) = not_trained(*traces)
        assert (finding.status, finding.detail, finding.tensors) == (FAULT, detail, ("bias",))
        assert finding.text == f"not trained in the {which} recording: bias"
