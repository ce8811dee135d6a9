"""Differences that the random numbers of scripts explain, and that they must not explain."""

import dataclasses

import numpy as np
import pytest

from lockstep.comparison import compare_traces
from lockstep.data.trace import Trace
from lockstep.explain.corrections import other_count
from lockstep.explain.kept import Change
from tests.verifier.outputs import NUM, trained
from tests.verifier.test_explained_steps import GRADIENT, OLD, WEIGHT, details, trace

RANDOM = np.random.default_rng(3)
ONE, TWO, THREE, FOUR = np.float32(RANDOM.normal(size=(4, 5)))
ROWS, OTHER_ROWS = np.float32(RANDOM.normal(size=(2, NUM, 4)))
FIRST, SECOND = ROWS[: NUM // 2], ROWS[NUM // 2 :]


def found(first, second):
    *_, verdict = compare_traces([first, second], {}).values()
    return [finding.detail for finding in verdict.faults][:1]


def of_model(right, *own, outputs=lambda y: 2 * y):
    """Returns what is found if models draw these arrays, and outputs of replica 1 differ."""
    first, second = trained(), trained(replicas=2, output=outputs)
    first.put(0, "drawn_inside", 0, right)
    for replica, arrays in enumerate(own):
        second.put(0, "drawn_inside", replica, arrays)
    return found(first, second)


@pytest.mark.parametrize(
    ("own", "detail"),
    [
        (([ONE], [TWO]), "other_random_numbers"),
        (([ONE], [ONE]), "other_outputs"),
        (([TWO], [TWO]), "other_outputs"),  # Another seed.
        (([ONE], [TWO, TWO]), "other_outputs"),
        (([ONE], [ONE[:3]]), "other_outputs"),
        (([ONE], [ONE[:0]]), "other_outputs"),  # Another rank has sent what is used.
        (([ONE], []), "other_outputs"),
    ],
)
def test_a_replica_that_draws_other_numbers(own, detail):
    assert of_model([ONE], *own) == [detail]
    assert of_model([ONE], *own, outputs=lambda y: y) == []


@pytest.mark.parametrize(
    ("own", "detail"),
    [(ONE, "random_numbers_repeated"), (TWO, "other_outputs"), (THREE, "other_outputs")],
)
def test_a_step_that_draws_what_an_earlier_one_drew(own, detail):
    def recorded(replicas, *draws):
        changes = [lambda y: y, lambda y: 2 * y if replicas == 2 else y]
        steps = [trained(replicas=replicas, on_all=True, output=each) for each in changes]
        for step, array in zip(steps, draws, strict=True):
            for replica in range(replicas):
                step.put(0, "drawn_inside", replica, [array])
        later = {f"2{name[1:]}": array for name, array in steps[1].stored().items()}
        about = dataclasses.replace(steps[0].about, steps=(0, 1), micro_batches=(1, 1))
        return Trace(about, steps[0].stored() | later, steps[0].name)

    assert found(recorded(1, ONE, TWO), recorded(2, ONE, own)) == [detail]


@pytest.mark.parametrize(
    ("own", "detail"),
    [
        ((FIRST, FIRST), "same_random_numbers"),
        ((FIRST, SECOND), "other_outputs"),
        ((OTHER_ROWS[:6], OTHER_ROWS[6:]), "other_outputs"),  # Of each replica's own generator.
    ],
)
def test_replicas_that_draw_equal_parts(own, detail):
    assert of_model([ROWS], *([each] for each in own)) == [detail]


@pytest.mark.parametrize("is_equal", [True, False])
def test_replicas_that_return_equal_masks(is_equal):
    first, second = trained(), trained(replicas=2, output=lambda y: 2 * y)
    masks = np.arange(NUM * 9).reshape(NUM, 9) % 7 > 3
    first.put(0, "y_other", 0, [masks])
    for replica in (0, 1):
        second.put(0, "y_other", replica, [masks[0 if is_equal else replica :: 2]])
    assert found(first, second) == ["same_random_numbers" if is_equal else "other_outputs"]


@pytest.mark.parametrize(
    ("of_second", "detail"),
    [(ROWS, None), (OTHER_ROWS, "other_targets"), (np.roll(ROWS, 2, 0), "labels_shifted")],
)
def test_targets_that_are_random_numbers(of_second, detail):
    def recorded(replicas, numbers):
        parts = iter([numbers[r::replicas] for r in range(replicas)])
        result = trained(replicas=replicas, given=False, loss=lambda y, *_: y - next(parts))
        for replica in range(replicas):
            result.put(0, "drawn", replica, [numbers, ONE])
        return result

    first, second = recorded(1, ROWS), recorded(2, of_second)
    assert found(first, second) == ([detail] if detail else [])


# --- Noise in gradients --------------------------------------------------------------------------

NOISE, OTHER_NOISE = np.float32(RANDOM.normal(size=(2, *WEIGHT.shape)))


def noisy(noises, drawn, flat=False):
    """Returns a recording of copies whose gradients have noise, and of what they draw."""
    gradients = [np.float32(GRADIENT + noise / 8) for noise in noises]
    after = [{"w": np.float32(WEIGHT - 0.1 * gradient)} for gradient in gradients]
    result = trace({"w": WEIGHT}, after, gradients=gradients, replicas=len(gradients))
    for copy, noise in enumerate(drawn):
        result.put(0, "drawn", copy, [noise.ravel() if flat else noise])
    return result


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    ("noises", "drawn", "detail"),
    [
        ((NOISE, NOISE), (NOISE, NOISE), []),
        ((NOISE, OTHER_NOISE), (NOISE, OTHER_NOISE), ["diverged_replicas"]),
        ((2 * NOISE, 2 * NOISE), (NOISE, NOISE), ["repeated_gradient"]),
        ((OTHER_NOISE, OTHER_NOISE), (OTHER_NOISE, OTHER_NOISE), ["other_random_numbers"]),
    ],
)
def test_noise_in_gradients(noises, drawn, detail, flat):
    first = noisy([NOISE], [NOISE], flat)
    assert details(first, noisy(noises, drawn, flat))[:1] == detail
    # What is drawn does not explain what it is not part of.
    causes = {"diverged_replicas", "repeated_gradient", "other_random_numbers"}
    reshaped = [each.reshape(6, 8) for each in drawn]
    others = noisy([np.abs(OLD)] * 2, drawn, flat), noisy(noises, reshaped)
    assert not any(causes & {*details(first, wrong)} for wrong in others)


# --- Corrections of Adam's moments ---------------------------------------------------------------


def corrected(number, copies=1, epsilon=1e-4):
    rate, beta_1, beta_2 = 0.02, 0.9, 0.95
    mean, square = (np.float32(0.5 * OLD + 0.1 * g) for g in (GRADIENT, GRADIENT**2))
    square = np.abs(square)
    left = [1 - beta**number if number else 1.0 for beta in (beta_1, beta_2)]
    moved = rate * mean / left[0] / (np.sqrt(square / left[1]) + epsilon)
    before = {"w": WEIGHT, "mean": OLD, "square": np.abs(OLD)}
    settings = {"learning_rate": rate, "beta_1": beta_1, "beta_2": beta_2, "epsilon": 1e-4}
    return trace(
        before, {"w": np.float32(WEIGHT - moved), "mean": mean, "square": square}, replicas=copies,
        gradients=[GRADIENT] * copies, settings=((settings,),), optimizer=settings,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("number", "detail"), [(3, []), (5, ["other_optimizer"]), (0, ["bias_not_corrected"])]
)
def test_moments_that_are_corrected_by_another_count(number, detail):
    assert details(corrected(3), corrected(number, 2))[:1] == detail
    text = {5: "as after 5 in place of 3 updates", 0: "the bias of the moments is not"}
    *_, verdict = compare_traces([corrected(3), corrected(number, 2)], {}).values()
    assert text.get(number, "") in " ".join(finding.text for finding in verdict.faults)
    if detail:  # The reference does not follow the rule.
        assert details(corrected(3, epsilon=0.3), corrected(number, 2, 0.3))[:1] == ["unexplained"]


@pytest.mark.parametrize("number", [7, 0])
def test_weights_that_are_corrected_by_several_counts(number):
    changes = list[Change]()
    for name, own in (("first", 5), ("second", number)):
        steps = [corrected(3), corrected(own)]
        before, after = ([each.named(0, kind, 0) for each in steps] for kind in ("before", "after"))
        for key in ("w", "mean", "square"):
            arrays = [each[key] for each in before], [each[key] for each in after]
            changes.append(Change(name, key, *arrays))
    wrong = [change for change in changes if change.slot == "w"]
    states = [change for change in changes if change.slot != "w"]
    cause = other_count(steps[0].about.settings[0][0], wrong, states)
    pairs = f"5 in place of 3, {number or 'no'} in place of 3"
    assert cause == ("other_optimizer", f"the moments are corrected as after {pairs} updates")
