"""Steps whose mistake a computation names: each with its numbers, made by hand, and a right one."""

import dataclasses
import types

import numpy as np
import pytest

from lockstep.comparison import compare_traces
from lockstep.data.trace import About, Trace, Variable
from lockstep.explain.part_updates import scaled_by_parts
from tests.verifier.script_samples import Script, in_bfloat16

RANDOM = np.random.default_rng(7)
WEIGHT, GRADIENT = RANDOM.normal(size=(2, 8, 6)).astype(np.float32)
OLD = np.float32(0.1) * RANDOM.normal(size=(8, 6)).astype(np.float32)


def trace(before, after, *, gradients=(GRADIENT,), replicas=1, raw=(), left=None, **about):
    """Returns a recording of one step of one weight, `w`, with state of the names beside it.

    Args:
        before, after: for each copy, or for all, name → array; "w" is the weight.
        gradients: what each copy applies; () if it is not recorded.
        replicas: number of copies.
        raw: what each shard sends.
        left: what the script changes after the update, as `after`.
        about: more of the description.
    """
    befores, afters, lefts = (
        given if isinstance(given, list) else [given] * replicas for given in (before, after, left)
    )
    slots = [name for name in {**befores[0], **afters[0]} if name != "w"]
    variables = [Variable("w", "weight", shape=afters[0]["w"].shape)]
    for slot in slots:
        of = "" if slot == "flat" else "w"
        shape = np.shape(afters[0][slot])
        if slot == "constant":
            variables.append(Variable(slot, "statistic", shape=shape))
        else:
            variables.append(Variable(slot, "optimizer state", of=of, slot=slot, shape=shape))
    names = ("w", *slots)
    settings = {"class": "Own", **about.pop("optimizer", {})}
    found = Trace(About(
        "torch", replicas, steps=(0,), variables=tuple(variables),
        gradients=("w",) if len(gradients) else (), optimizer=settings, **about,
    ), name="one.npz" if replicas == 1 else "two.npz")  # fmt: skip
    for copy in range(replicas):
        for kind, arrays in (("before", befores), ("after", afters), ("left", lefts)):
            own = arrays[copy]
            if own is not None:
                found.put(0, kind, copy, [own.get(name) for name in names])
        if len(gradients):
            found.put(0, "clipped", copy, [gradients[copy % len(gradients)]])
        if len(raw):
            found.put(0, "raw", copy, [raw[copy]])
    return found


def details(first, second):
    """Returns the details of what the comparison finds in the second recording."""
    *_, verdict = compare_traces([first, second], {}).values()
    return [finding.detail for finding in verdict.faults]


def part_of(rank, array, axis=0):
    return np.split(array, 2, axis)[rank]


def joined(of_part, *arrays, axis=0):
    """Returns what two ranks make of their parts."""
    return np.concatenate([of_part(*(part_of(r, a, axis) for a in arrays)) for r in (0, 1)], axis)


# --- Updates of an unknown rule ------------------------------------------------------------------


def lamb(weight, gradient):
    return weight - 0.02 * gradient * np.linalg.norm(weight) / np.linalg.norm(gradient)


def clipped_update(weight, gradient):
    size = np.sqrt(np.mean(gradient**2)) / 0.5
    return weight - 0.02 * gradient / max(1.0, size)


def orthogonal(weight, gradient):
    u, _, v = np.linalg.svd(gradient, full_matrices=False)
    return (weight - 0.1 * u @ v).astype(np.float32)


def scaled_by_shape(weight, gradient):
    """The scale is that of the part, and the matrix the whole one."""
    u, _, v = np.linalg.svd(GRADIENT, full_matrices=False)
    own = (u @ v)[: len(weight)] if np.all(weight == WEIGHT[: len(weight)]) else (u @ v)[4:]
    rows, columns = weight.shape
    return (weight - 0.1 * max(1.0, rows / columns) ** 0.5 * own).astype(np.float32)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("rule", [lamb, clipped_update, orthogonal])
def test_an_update_from_a_part_is_that_of_the_part(rule, axis):
    if rule is orthogonal and axis == 1:
        pytest.skip("parts of three columns have too few singular vectors")
    first = trace({"w": WEIGHT}, {"w": rule(WEIGHT, GRADIENT)})
    right = trace({"w": WEIGHT}, {"w": rule(WEIGHT, GRADIENT)}, replicas=2)
    by_parts = {"w": joined(rule, WEIGHT, GRADIENT, axis=axis)}
    assert details(first, right) == []
    wrong = trace({"w": WEIGHT}, by_parts, replicas=2)
    assert details(first, wrong) == ["updated_from_a_part"]
    other = {"w": by_parts["w"] + np.float32(0.01) * RANDOM.normal(size=(8, 6)).astype(np.float32)}
    assert details(first, trace({"w": WEIGHT}, other, replicas=2)) == ["unexplained"]


def test_an_update_that_is_scaled_by_the_shape_of_a_part():
    first = trace({"w": WEIGHT}, {"w": scaled_by_shape(WEIGHT, GRADIENT)})
    wrong = {"w": joined(scaled_by_shape, WEIGHT, GRADIENT)}
    assert details(first, trace({"w": WEIGHT}, wrong, replicas=2)) == ["updated_from_a_part"]


@pytest.mark.parametrize("axis", [0, 1])
def test_parts_that_change_by_factors_of_their_own(axis):
    def by_largest(weight, gradient):
        return weight - 0.02 * gradient / np.max(np.abs(gradient))

    first = trace({"w": WEIGHT}, {"w": by_largest(WEIGHT, GRADIENT)})
    wrong = {"w": joined(by_largest, WEIGHT, GRADIENT, axis=axis)}
    assert details(first, trace({"w": WEIGHT}, wrong, replicas=2)) == ["updated_from_a_part"]


def test_a_learning_rate_of_each_rank_and_weights_that_fewer_ranks_have():
    changed = {}
    for rows in (5, 8, 1):  # Of 4 ranks, those that have rows of a weight: 3, 4 and 1.
        rates = np.repeat([1.0, 2.0, 0.5, 3.0], -(-rows // 4))[:rows, None]
        by = RANDOM.normal(size=(rows, 6))
        changed[f"w{rows}"] = by, by, by * rates
    about = types.SimpleNamespace(num_replicas=4, mesh={})
    step = types.SimpleNamespace(trace=types.SimpleNamespace(about=about), copies=(0, 1, 2, 3))
    for names in (("w5", "w8", "w1"), ("w8", "w5", "w1")):
        given = {name: changed[name] for name in names}
        detail, text = scaled_by_parts(types.SimpleNamespace(second=step), given)
        assert detail == "other_learning_rate" and "1, 2, 0.5, 3 times" in text


def test_means_of_squares_of_the_own_rows():
    def factored(gradient, of_columns):
        square = gradient**2 + 1e-8
        return {"w": WEIGHT - 0.02 * gradient / np.sqrt(of_columns), "columns": of_columns,
                "rows": square.mean(1)}  # fmt: skip

    square = GRADIENT**2 + 1e-8
    before = {"w": WEIGHT, "columns": np.zeros(6, np.float32), "rows": np.zeros(8, np.float32)}
    first = trace(before, factored(GRADIENT, square.mean(0)))
    own = [part_of(rank, square).mean(0) for rank in (0, 1)]
    update = np.concatenate([
        part_of(r, WEIGHT) - 0.02 * part_of(r, GRADIENT) / np.sqrt(own[r]) for r in (0, 1)
    ])  # fmt: skip
    after = [factored(GRADIENT, own[r]) | {"w": update} for r in (0, 1)]
    wrong = details(first, trace(before, after, replicas=2))
    assert wrong[0] == "updated_from_a_part"


@pytest.mark.parametrize(
    ("second", "cause"),
    [
        (lambda new: 0.9 * OLD + 0.1 * new, ""),
        (lambda new: 0.9 * OLD + 0.1 * WEIGHT, "stale_average"),
        (lambda new: 0.81 * OLD + 0.19 * new, "doubled_average"),
        (lambda new: 0.8 * OLD + 0.2 * new, "other_average_decay"),
        (lambda new: 0.9 * OLD + 0.2 * new, "other_statistics"),
    ],
)
def test_averages_that_an_optimizer_keeps(second, cause):
    new = WEIGHT - np.float32(0.1) * GRADIENT
    before = {"w": WEIGHT, "average": OLD}
    first, own = (
        trace(before, {"w": new, "average": average.astype(np.float32)}, replicas=number)
        for number, average in ((1, 0.9 * OLD + 0.1 * new), (2, second(new)))
    )
    assert details(first, own) == ([cause] if cause else [])


# --- Precision -----------------------------------------------------------------------------------


def short(array):
    words = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((words + 0x7FFF + (words >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def in_float16(array):
    return array.astype(np.float16).astype(np.float32)


SHORT, LOST = short(WEIGHT), (WEIGHT - short(WEIGHT)).astype(np.float32)
UPDATE = np.float32(-0.05) * GRADIENT


def with_compensation(times):
    total = UPDATE + np.float32(times) * LOST
    new = short(SHORT + total)
    return {"w": new, "compensation": total - (new - SHORT)}


@pytest.mark.parametrize(
    ("times", "cause"), [(1, ""), (0, "reduced_precision"), (-1, "other_optimizer")]
)
def test_compensation_of_rounding(times, cause):
    before = {"w": SHORT, "compensation": LOST}
    first = trace(before, with_compensation(1))
    second = trace(before, with_compensation(times), replicas=2)
    assert details(first, second) == ([cause] if cause else [])


@pytest.mark.parametrize(
    ("master", "weight", "cause"),
    [
        (WEIGHT + UPDATE, short(WEIGHT + UPDATE), ""),
        (SHORT + UPDATE, short(SHORT + UPDATE), "reduced_precision"),
        (WEIGHT, short(SHORT + short(UPDATE)), "reduced_precision"),
    ],
)
def test_master_weights(master, weight, cause):
    before = {"w": SHORT, "master": WEIGHT}
    first = trace(before, {"w": short(WEIGHT + UPDATE), "master": WEIGHT + UPDATE})
    second = trace(before, {"w": weight, "master": master}, replicas=2)
    assert details(first, second) == ([cause] if cause else [])


def at_random(seed):
    noise = np.random.default_rng(seed).integers(1 << 16, size=WEIGHT.shape, dtype=np.uint32)
    words = (SHORT + UPDATE).astype(np.float32).view(np.uint32)
    return {"w": ((words + noise) & 0xFFFF0000).astype(np.uint32).view(np.float32)}


@pytest.mark.parametrize(
    ("after", "cause"),
    [(at_random(1), ""), (at_random(2), "other_random_numbers"),
     ({"w": short(SHORT + UPDATE)}, "reduced_precision")],
)  # fmt: skip
def test_weights_that_are_rounded_at_random(after, cause):
    rate = {"optimizer": {"learning_rate": 0.05}}
    first = trace({"w": SHORT}, at_random(1), **rate)
    assert details(first, trace({"w": SHORT}, after, replicas=2, **rate)) == [cause][: bool(cause)]


def test_weights_that_follow_state_of_another_rule():
    def after(state):
        return {"w": WEIGHT - np.float32(0.5) * state, "momentum": state}

    before, state = {"w": WEIGHT, "momentum": OLD}, np.float32(0.9) * OLD + GRADIENT
    first = trace(before, after(state))
    coarse = np.float32(0.02) * np.round(state / np.float32(0.02))
    assert details(first, trace(before, after(coarse), replicas=2)) == ["other_optimizer"]


@pytest.mark.parametrize(
    ("rounded", "cause"),
    [(in_float16, "reduced_precision"), (np.zeros_like, "reset_state"), (np.copy, "")],
)
def test_state_that_a_script_replaces_after_the_update(rounded, cause):
    before = {"w": WEIGHT, "momentum": OLD}
    after = {"w": WEIGHT + UPDATE, "momentum": OLD + GRADIENT}
    left = {"momentum": rounded(after["momentum"])}
    second = trace(before, after, replicas=2, left=left)
    assert details(trace(before, after), second) == ([cause] if cause else [])


# --- Gradients -----------------------------------------------------------------------------------


def step(gradients, **changes):
    after = [{"w": WEIGHT - np.float32(0.1) * gradient} for gradient in gradients]
    return trace({"w": WEIGHT}, after, gradients=gradients, replicas=len(gradients), **changes)


def test_gradients_that_have_the_digits_of_16_bits():
    assert details(step([GRADIENT]), step([short(GRADIENT)] * 2)) == ["reduced_precision"]
    coarse = short(np.float32(1.2) * GRADIENT)
    assert details(step([GRADIENT]), step([coarse] * 2)) != ["reduced_precision"]


def test_gradients_of_a_factor_that_no_shard_sends():
    wrong = step([2 * GRADIENT] * 2, raw=[GRADIENT + OLD, OLD])
    assert details(step([GRADIENT]), wrong) == ["sum_instead_of_mean"]


def test_gradients_whose_mean_over_the_copies_is_right():
    wrong = step([GRADIENT + OLD, GRADIENT - OLD], raw=[OLD, OLD])
    assert details(step([GRADIENT]), wrong)[0] == "not_all_reduced"


@pytest.mark.parametrize(
    ("factors", "cause"),
    [((1, 1), ""), ((1, 32), "loss_scale_left"), ((32, 32), "loss_scale_left"),
     ((1, 16), "scaled_gradient"), ((30, 30), "scaled_gradient")],
)  # fmt: skip
def test_a_factor_that_the_reference_takes_out_after_the_backward_pass(factors, cause):
    """A power of two is a scale; another number, as of tokens, is only a factor."""
    scale = np.float32(30 if 30 in factors else 32)
    own = GRADIENT + OLD, GRADIENT - OLD
    mean = sum(np.float32(times / 2) * g for times, g in zip(factors, own, strict=True))
    second = step([mean] * 2, raw=[scale * g for g in own])
    found = details(step([GRADIENT], raw=[scale * GRADIENT]), second)
    assert found[:1] == [cause][: bool(cause)]


@pytest.mark.parametrize(
    ("times", "limit", "cause"),
    [(1, 0.9, ""), (2, 0.9, "sum_instead_of_mean"), (3, 0.9, "scaled_gradient"),
     (1, 0.5, "other_clipping")],
)  # fmt: skip
def test_gradients_whose_values_a_script_clips_by_hand(times, limit, cause):
    own = [np.clip(np.float32(times) * GRADIENT, -np.float32(limit), np.float32(limit))] * 2
    first = step([np.clip(GRADIENT, -np.float32(0.9), np.float32(0.9))])
    assert details(first, step(own))[:1] == [cause][: bool(cause)]
    noise = step([own[0] + np.float32(0.1) * OLD] * 2)
    assert details(first, noise)[0] in ("unexplained", "scaled_gradient")


# --- Without gradients ---------------------------------------------------------------------------


def momentum(factor):
    state = np.float32(0.9) * OLD + np.float32(factor) * GRADIENT
    return {"w": WEIGHT - np.float32(0.1) * state, "momentum": state}


@pytest.mark.parametrize(
    ("factors", "cause"),
    [((1, 1), ""), ((2, 2), "sum_instead_of_mean"), ((0.5, 0.5), "mean_instead_of_sum"),
     ((0.3, 0.3), "scaled_gradient"), ((0.7, 1.3), "not_all_reduced")],
)  # fmt: skip
def test_state_tells_of_gradients_that_are_not_recorded(factors, cause):
    before = {"w": WEIGHT, "momentum": OLD}
    first = trace(before, momentum(1), gradients=())
    second = trace(before, [*map(momentum, factors)], gradients=(), replicas=2)
    assert details(first, second)[:1] == ([cause] if cause else [])


@pytest.mark.parametrize(
    ("first", "second", "cause"),
    [(GRADIENT + OLD, GRADIENT - OLD, "not_all_reduced"), (GRADIENT, GRADIENT, ""),
     (GRADIENT + OLD, GRADIENT, "diverged_replicas")],
)  # fmt: skip
def test_squares_tell_of_gradients_that_are_not_recorded(first, second, cause):
    def adagrad(gradient):
        squares = OLD**2 + gradient**2
        update = np.float32(0.1) * gradient / (np.sqrt(squares) + np.float32(0.01))
        return {"w": WEIGHT - update, "squares": squares}

    before = {"w": WEIGHT, "squares": OLD**2}
    right = trace(before, adagrad(GRADIENT), gradients=())
    own = trace(before, [adagrad(first), adagrad(second)], gradients=(), replicas=2)
    found = details(right, own)
    assert found[:1] == [cause][: bool(cause)]


FLAT = np.pad(WEIGHT.ravel(), (0, 4))


def flat_step(gradient, replicas=1, exchanged=False):
    state = np.float32(0.9) * np.pad(OLD.ravel(), (0, 4)) + gradient
    new = FLAT - np.float32(0.1) * state
    new = np.concatenate(np.split(new, 2)[::-1]) if exchanged else new
    before = {"w": WEIGHT, "flat": np.pad(OLD.ravel(), (0, 4))}
    after = {"w": new[:48].reshape(8, 6), "flat": state}
    return trace(before, after, gradients=(), replicas=replicas)


def clipped(gradient):
    return np.float32(0.2) * gradient / np.linalg.norm(gradient)


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        (lambda g: flat_step(clipped(g), 2), ""),
        (lambda g: flat_step(clipped(g), 2, exchanged=True), "swapped_parts"),
        (lambda g: flat_step(clipped(np.roll(g, 4)), 2), "swapped_parts"),
        (lambda g: flat_step(joined(clipped, g), 2), "clipped_by_local_norm"),
    ],
)
def test_weights_that_are_one_vector(wrong, cause):
    gradient = np.pad(GRADIENT.ravel(), (0, 4))
    assert details(flat_step(clipped(gradient)), wrong(gradient))[:1] == [cause][: bool(cause)]


@pytest.mark.parametrize(
    ("more", "cause"),
    [(0, ""), (0.1, "regulariser_repeated"), (-0.1, "regulariser_missing")],
)
def test_penalties_of_absolute_values(more, cause):
    penalty = np.float32(more) * (np.sign(WEIGHT) + np.float32(0.3) * WEIGHT)
    assert details(step([GRADIENT]), step([GRADIENT + penalty] * 2))[:1] == [cause][: bool(cause)]


DECAY = np.where(np.arange(8) < 5, 0.05, 0)[:, None]


def test_elements_that_an_optimizer_does_not_update():
    """Each rank updates its rows, by a rule that no state shows, and one does not send them."""
    new = WEIGHT - np.float32(0.1) * np.sign(GRADIENT)
    first = trace({"w": WEIGHT}, {"w": new})
    own = GRADIENT + OLD, GRADIENT - OLD
    for left, cause in ((new, ""), (np.concatenate([new[:4], WEIGHT[4:]]), "not_updated")):
        second = trace({"w": WEIGHT}, {"w": left}, gradients=own, raw=own, replicas=2)
        assert details(first, second)[:1] == [cause][: bool(cause)]


@pytest.mark.parametrize("given", [(GRADIENT,), (GRADIENT + OLD, GRADIENT - OLD)])
@pytest.mark.parametrize(
    ("decay", "cause"),
    [
        (DECAY, ""),
        (0, "other_weight_decay"),
        (DECAY[::-1], "other_weight_decay"),
        (DECAY * OLD, "unexplained"),
    ],
)
def test_elements_that_decay_by_a_rule_that_no_state_shows(given, decay, cause):
    """The last rows do not decay; the optimizer is given the sum, or reduces gradients itself."""
    new = WEIGHT - np.float32(0.1) * np.sign(GRADIENT)
    first = trace({"w": WEIGHT}, {"w": (new - DECAY * WEIGHT).astype(np.float32)})
    after = {"w": (new - decay * WEIGHT).astype(np.float32)}
    raw = given if len(given) > 1 else ()
    second = trace({"w": WEIGHT}, after, gradients=given, raw=raw, replicas=2)
    assert details(first, second)[:1] == [cause][: bool(cause)]


ESTIMATE = np.abs(OLD) + np.float32(0.01)
SQUARE = GRADIENT**2


@pytest.mark.parametrize("is_square", [False, True])
def test_state_that_another_rank_starts_from_zero(is_square):
    """Its owner has changed; the rank that has it leaves it as it was."""
    of_step = np.float32(0.1) * (SQUARE if is_square else GRADIENT)
    old = ESTIMATE if is_square else OLD

    def after(state, own):
        return {"w": WEIGHT - np.float32(0.1) * np.sign(GRADIENT) * state, "state": own}

    before, right = {"w": WEIGHT, "state": old}, np.float32(0.9) * old + of_step
    first = trace(before, after(right, right))
    assert details(first, trace(before, after(right, right), replicas=2)) == []
    copies = [after(of_step, old), after(of_step, of_step)]
    second = trace([before, {"w": WEIGHT}], copies, replicas=2)
    assert "reset_state" in details(first, second)


@pytest.mark.parametrize(
    ("first", "second", "cause"),
    [
        (ESTIMATE, [ESTIMATE] * 2, ""),
        (ESTIMATE, [ESTIMATE / 2] * 2, "other_statistics"),
        (ESTIMATE, [ESTIMATE[::-1]] * 2, "other_statistics"),
        (ESTIMATE, [ESTIMATE / 2, ESTIMATE * 2], "diverged_replicas"),
        (SQUARE, [SQUARE[::-1]] * 2, "unexplained"),
    ],
)
def test_state_that_does_not_follow_the_gradients(first, second, cause):
    """Of curvature; that of squared gradients is not explained by other values."""

    def after(estimate):
        state = np.float32(0.3) * estimate
        return {"w": WEIGHT - np.float32(0.01) * GRADIENT / (state + 1), "curvature": state}

    before = {"w": WEIGHT, "curvature": np.zeros_like(WEIGHT)}
    found = details(trace(before, after(first)), trace(before, [*map(after, second)], replicas=2))
    assert found[:1] == [cause][: bool(cause)]


# --- Losses --------------------------------------------------------------------------------------

INPUTS, OUTPUTS = RANDOM.normal(size=(2, 4, 12)).astype(np.float32)


def with_loss(of_outputs, replicas=1, gradients=(GRADIENT,)):
    """Returns a step whose shards have gradients of their outputs by a function of them."""
    found = step([*gradients] * (replicas // len(gradients) or 1), raw=[GRADIENT] * replicas)
    for shard, rows in enumerate(np.split(np.arange(4), replicas)):
        for kind, array in (
            ("data", INPUTS[rows]),
            ("y_pred", OUTPUTS[rows]),
            ("y_grad", replicas * of_outputs(rows)),
        ):
            found.put(0, kind, shard, [array.astype(np.float32)])
    return found


def of_all(rows):
    return (np.tanh(OUTPUTS @ OUTPUTS.T) @ OUTPUTS)[rows] / 4


def of_own(rows):
    return np.tanh(OUTPUTS[rows] @ OUTPUTS[rows].T) @ OUTPUTS[rows] / 4


def test_a_loss_that_compares_the_outputs_of_a_replica():
    wrong = [2 * GRADIENT + OLD, GRADIENT]
    first = with_loss(of_all)
    assert details(first, with_loss(of_all, 2)) == []
    assert details(first, with_loss(of_own, 2, wrong))[0] == "not_a_sum_over_examples"


def test_a_loss_that_weights_each_example_by_its_own_number():
    lengths = np.array([1, 3, 2, 5], np.float32)[:, None]
    first = with_loss(lambda rows: np.cos(OUTPUTS[rows]) / 4)
    second = with_loss(lambda rows: (np.cos(OUTPUTS) * lengths)[rows], 2, [OLD, OLD])
    assert details(first, second)[0] == "other_loss_reduction"


def test_a_loss_scale_of_each_replica_by_which_it_divides_the_sum():
    def scaled(by):
        return with_loss(
            lambda rows: np.cos(OUTPUTS[rows]) / 4 * (by if rows[0] else 1), 2,
            [GRADIENT, GRADIENT / by],
        )  # fmt: skip

    first = with_loss(lambda rows: np.cos(OUTPUTS[rows]) / 4)
    assert details(first, scaled(1)) == []
    assert details(first, scaled(4))[0] == "other_loss_scale"


# --- What replicas had before the first recording was loaded -------------------------------------


@pytest.mark.parametrize("name", ["constant", "memory"])
@pytest.mark.parametrize("far", [(0, 0), (0, 1), (1, 1), (1, 2)])
def test_state_that_replay_replaces_is_compared_on_each_copy(name, far):
    states = {"w": WEIGHT, name: OLD}, {"w": WEIGHT - np.float32(0.1) * GRADIENT, name: OLD}
    first, second = trace(*states), trace(*states, replicas=2, replayed="one.npz")
    for copy, more in enumerate(far):
        second.put(0, "replaced", copy, [WEIGHT, OLD + np.float32(more)])
    causes = {(0, 0): [], (0, 1): ["diverged_replicas"], (1, 1): ["other_initial_state"],
              (1, 2): ["other_initial_state"]}  # fmt: skip
    if name == "memory" and far == (1, 2):  # State of each replica, as that of an error feedback.
        assert "other_initial_state" not in details(first, second)
    else:
        assert details(first, second)[:1] == causes[far]


@pytest.mark.parametrize("apart", [0, 1])
def test_statistics_that_steps_change_start_equal(apart):
    states = {"w": WEIGHT, "constant": OLD}, {"w": WEIGHT - GRADIENT, "constant": OLD + OLD}
    first, second = trace(*states), trace(*states, replicas=2, replayed="one.npz")
    for copy in (0, 1):
        second.put(0, "replaced", copy, [WEIGHT, OLD + np.float32(copy * apart)])
    assert details(first, second) == ["diverged_replicas"] * apart
    for copy in (0, 1):  # A script that changes them after its steps may have done so before.
        second.put(0, "left", copy, [WEIGHT - GRADIENT, OLD + np.float32(copy)])
    assert "diverged_replicas" not in details(first, second)[:1]


def test_a_divisor_that_is_a_number_of_examples_is_no_loss_scale():
    own = [np.float32(32) * GRADIENT] * 2
    first = step([GRADIENT], raw=[np.float32(32) * GRADIENT])
    second = step(own, raw=own)
    assert details(first, second)[0] == "loss_scale_left"
    examples = np.arange(64, dtype=np.float32).reshape(32, 2)
    for recording, parts in ((first, 1), (second, 2)):
        for shard, rows in enumerate(np.split(examples, parts)):
            recording.put(0, "data", shard, [rows])
    assert details(first, second)[0] != "loss_scale_left"


# --- Backward passes of a step -------------------------------------------------------------------

PASSES = RANDOM.normal(size=(2, 3, 8, 6)).astype(np.float32)  # Of two shards, three for each.
OLD_PASSES = RANDOM.normal(size=(2, 3, 8, 6)).astype(np.float32)
SHARES = np.full((2, 3), 0.5, np.float32)


def counted(factors=1.0, passes=PASSES):
    """Returns the mean over the shards of passes with other factors."""
    return np.einsum("skij,sk->ij", passes, SHARES * factors).astype(np.float32)


def of_passes(given, passes=PASSES, right=None, before=(), **about):
    """Returns what the comparison finds if copies are given some sums of passes.

    Args:
        given: for each copy, the gradient.
        passes: what each pass of each shard adds.
        right: the gradient of the reference; None for that of all passes.
        before: the passes of a step before, which is right.
        about: more of the description of the second recording.
    """
    right = counted(passes=passes) if right is None else right
    steps = [([counted(passes=before)], before)] if len(before) else []
    steps += [(given, passes)]
    recordings = []
    for copies in (1, 2):
        more = about if copies == 2 else {}
        own = trace({"w": WEIGHT}, {"w": WEIGHT}, replicas=copies, **more)
        own = Trace(dataclasses.replace(own.about, steps=tuple(range(len(steps)))), name=own.name)
        start = WEIGHT
        for position, (sums, added) in enumerate(steps):
            first = right if sums is given else sums[0]
            for copy in range(copies):
                gradient = first if copies == 1 else sums[copy % len(sums)]
                after = start - np.float32(0.1) * gradient
                for kind, array in (("before", start), ("clipped", gradient), ("after", after)):
                    own.put(position, kind, copy, [array])
                if copies == 2:
                    own.put(position, "added", copy, [*added[copy]])
            start = after
        recordings.append(own)
    return details(*recordings)


def clipped_to_norm(array, limit=4.0):
    return array * np.float32(min(1, limit / np.linalg.norm(array)))


def clipped_so_far(each, limit=4.0):
    total = np.zeros_like(each[0])
    for own in each[:-1]:
        total = clipped_to_norm(total + own, limit)
    return total + each[-1]


def each_clipped(clip):
    return counted(passes=np.array([[clip(each) for each in own] for own in PASSES]))


def test_sums_of_all_passes_are_right():
    assert of_passes([counted()]) == []


def test_passes_that_cancel_are_rounded_by_their_own_size():
    passes = PASSES.copy()
    passes[:, 1] += np.float32(1e4) * OLD_PASSES[:, 0]
    passes[:, 2] -= np.float32(1e4) * OLD_PASSES[:, 0]
    rounding = np.float32(1e-3) * OLD_PASSES[0, 1]
    assert of_passes([counted(passes=passes) + rounding], passes) == []
    assert of_passes([counted() + rounding]) == ["unexplained"]


@pytest.mark.parametrize(
    ("given", "detail"),
    [
        ([counted([0, 0, 1])], "lost_micro_batch"),
        ([counted([1, 0, 0])], "lost_micro_batch"),
        ([counted([1.5, 1.5, 0])], "lost_micro_batch"),
        ([counted([[1, 1, 1], [1, 1, 0]])], "lost_micro_batch"),
        ([counted([3, 2, 1])], "repeated_gradient"),
        ([counted([1, 2, 4.5])], "scaled_gradient"),
        ([counted([[2, 2, 2], [1, 1, 1]])], "unexplained"),  # A factor of a shard, not of a pass.
        (
            [counted([[1, 1, 2 * (r == 0)], [1, 1, 2 * (r == 1)]]) for r in (0, 1)],
            "not_all_reduced",
        ),
        ([each_clipped(clipped_to_norm)], "clipped_in_each_micro_batch"),
        ([each_clipped(lambda g: np.clip(g, -0.7, 0.7))], "clipped_in_each_micro_batch"),
        (
            [(clipped_so_far(PASSES[0]) + clipped_so_far(PASSES[1])) / 2],
            "clipped_in_each_micro_batch",
        ),
        ([clipped_so_far(PASSES.mean(0))], "clipped_in_each_micro_batch"),
        ([counted() + RANDOM.normal(size=(8, 6)).astype(np.float32)], "unexplained"),
    ],
)
def test_what_copies_are_given_is_a_sum_of_passes(given, detail):
    assert detail in of_passes(given)[:1]


def test_a_factor_of_one_pass_alone_is_no_clipping():
    assert of_passes([counted([0.5, 1, 1])])[:1] == ["scaled_gradient"]


def test_passes_before_each_are_divided_by_the_loss_scale_again():
    given = [counted([1 / 16, 1 / 4, 1])]
    found = of_passes(given, loss_scale=(4.0,)), of_passes(given, loss_scale=(8.0,))
    assert [each[0] for each in found] == ["unscaled_between_micro_batches", "scaled_gradient"]


def test_passes_of_the_step_before_are_added():
    given = counted() + counted([0, 0, 1], OLD_PASSES)
    assert of_passes([given], before=OLD_PASSES)[:1] == ["stale_gradient"]


def test_passes_that_count_equally_and_have_other_numbers_of_tokens():
    sizes = np.array([[2, 4, 8], [1, 1, 8]], np.float32)
    right = counted(6 * sizes / sizes.sum())
    assert of_passes([counted()], right=right)[:1] == ["mean_of_means"]
    assert of_passes([right], right=right) == []


def in_state(factors, power, noise=0.0):
    """Returns what is found if only state shows which passes count, as of an own sharded rule."""
    recordings = []
    for copies, own in ((1, 1.0), (2, factors)):
        total = counted(own) + np.float32(noise if copies == 2 else 0) * GRADIENT
        new = np.abs(OLD) + total**power
        after = {"w": WEIGHT - np.float32(0.1) * total, "kept": new}
        recording = trace({"w": WEIGHT, "kept": np.abs(OLD)}, after, gradients=(), replicas=copies)
        about = dataclasses.replace(recording.about, gradients=("w",))
        recording = Trace(about, recording.stored(), recording.name)
        for shard in range(copies):
            passes = PASSES.mean(0) if copies == 1 else PASSES[shard]
            recording.put(0, "added", shard, [*passes])
        recordings.append(recording)
    return details(*recordings)


@pytest.mark.parametrize("power", [1, 2])
def test_state_that_shows_which_passes_count(power):
    assert in_state(1.0, power) == []
    assert in_state(np.array([0, 0, 1]), power)[:1] == ["lost_micro_batch"]
    assert in_state(np.array([1, 0, 1]), power)[:1] == ["lost_micro_batch"]
    assert in_state(np.array([3, 2, 1]), power)[:1] == ["repeated_gradient"]
    assert in_state(1.0, power, noise=1.0)[:1] == ["unexplained"]


# --- Numbers that are rounded to 16 bits in an update --------------------------------------------


def adam_with(round_state=lambda a: a, round_setting=lambda x: x):
    """Returns the update of Adam in which state, or settings, are rounded."""

    def update(script, weights, gradients, state):
        settings = {k: round_setting(v) for k, v in script.settings.items()}
        betas = settings["beta_1"], settings["beta_2"]
        for i, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            first, second, number = state[3 * i : 3 * i + 3]
            number += 1
            first[:] = round_state(betas[0] * first + (1 - betas[0]) * gradient)
            second[:] = round_state(betas[1] * second + (1 - betas[1]) * gradient**2)
            left = [1 - beta ** float(number) for beta in betas]
            root = np.sqrt(second / left[1]) + settings["epsilon"]
            weight -= np.float32(settings["learning_rate"] / left[0]) * first / root

    return update


@pytest.mark.parametrize(
    ("given", "detail"),
    [
        ({}, set()),
        ({"round_state": in_bfloat16}, {"reduced_precision"}),
        ({"round_setting": lambda x: float(in_bfloat16(x))}, {"reduced_precision"}),
        ({"round_state": lambda a: a * np.float32(1.002)}, {"unexplained"}),
    ],
)
def test_an_update_with_rounded_numbers(given, detail):
    own = {"optimizer": "Adam", "settings": {"learning_rate": 0.03, "epsilon": 1e-4}}
    first = Script(**own)
    second = Script(replicas=2, replay=first, update=adam_with(**given), **own)
    *_, verdict = compare_traces([first.trace(), second.trace("two.npz")], {}).values()
    assert {finding.detail for finding in verdict.faults} == detail
