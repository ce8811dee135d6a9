"""Forward and backward passes whose mistake a computation names, made by hand, and right ones."""

import dataclasses

import numpy as np
import pytest

from lockstep.comparison import compare_traces
from lockstep.data.trace import About, Trace, Variable

RANDOM = np.random.default_rng(11)
WEIGHT, GRADIENT, OLD = RANDOM.normal(size=(3, 6, 5)).astype(np.float32)
WORDS = RANDOM.normal(size=(8, 4, 5)).astype(np.float32)  # Outputs: 8 examples of 4 words.
TARGETS = RANDOM.integers(5, size=(8, 4))
COUNTED = np.arange(4) < np.array([4, 3, 4, 4, 1, 2, 1, 1])[:, None]
RATE = np.float32(0.1)


def trace(gradients, before=None, after=None, variables=(), framework="jax", **about):
    """Returns a recording of one step of SGD of one weight, `w`.

    Args:
        gradients: what each copy applies.
        before, after: for each copy, name → array of what there is beside the weight.
        variables: these names, with their kinds.
        framework: that of the script.
        about: more of the description.
    """
    number = len(gradients)
    described = [Variable("w", "weight"), *(Variable(*each) for each in variables)]
    about = {
        "variables": tuple(described), "gradients": ("w",), "num_replicas": number,
        "optimizer": {"class": "SGD", "learning_rate": 0.1}, "steps": (0,), "reduction": "mean",
        **about,
    }  # fmt: skip
    found = Trace(About(framework, **about), name="one.npz" if number == 1 else "two.npz")
    for copy, gradient in enumerate(gradients):
        start, end = (own[copy] if own else {} for own in (before, after))
        names = [name for name, _ in variables]
        found.put(0, "before", copy, [WEIGHT, *(start[name] for name in names)])
        found.put(0, "after", copy, [WEIGHT - RATE * gradient, *(end[name] for name in names)])
        found.put(0, "clipped" if "mesh" in about else "sums", copy, [gradient])
    return found


def details(first, second):
    """Returns the details of what the comparison finds in the second recording."""
    *_, verdict = compare_traces([first, second], {}).values()
    return [finding.detail for finding in verdict.faults]


# --- The loss ------------------------------------------------------------------------------------


def cross_entropies(rows):
    """Returns the losses of words, 0 of those that do not count, and gradients by the outputs."""
    outputs = np.float64(WORDS[rows])
    p = np.exp(outputs) / np.exp(outputs).sum(-1, keepdims=True)
    of_target = np.take_along_axis(p, TARGETS[rows][..., None], -1)[..., 0]
    one_hot = np.eye(5)[TARGETS[rows]]
    return -np.log(of_target) * COUNTED[rows], (p - one_hot) * COUNTED[rows][..., None]


def of_words(loss, replicas, gradient=GRADIENT):
    """Returns a step that divides after its backward pass, and reports a loss."""
    found = trace([gradient] * replicas)
    for shard, rows in enumerate(np.split(np.arange(8), replicas)):
        arrays = np.float32(rows)[:, None], WORDS[rows], np.float32(cross_entropies(rows)[1])
        for kind, array in zip(("data", "y_pred", "y_grad"), arrays, strict=True):
            found.put(0, kind, shard, [array])
        found.put(0, "loss", shard, [np.float32(loss)])
    return found


def test_a_mean_of_the_means_over_the_words_of_each_replica():
    losses = cross_entropies(np.arange(8))[0]
    whole = losses.sum() / COUNTED.sum()
    halves = [losses[i : i + 4].sum() / COUNTED[i : i + 4].sum() for i in (0, 4)]
    first = of_words(whole, 1)
    assert details(first, of_words(whole, 2)) == []
    found = details(first, of_words(np.mean(halves), 2, GRADIENT + OLD))
    assert {*found} == {"mean_of_means"}
    assert "mean_of_means" not in details(first, of_words(1.01 * whole, 2, GRADIENT + OLD))


@pytest.mark.parametrize(
    ("times", "size", "cause"),
    [(1, 1, ""), (2, 1, "regulariser_repeated"), (0, 1, "regulariser_missing"),
     (4, 4, "other_loss_reduction"), (1.5, 1, "other_loss"), (4, 1, "other_loss")],
)  # fmt: skip
def test_penalties_that_count_another_number_of_times(times, size, cause):
    def step(losses, penalties, gradient):
        found = trace([gradient] * len(losses), framework="keras")
        for shard, rows in enumerate(np.split(np.arange(8), len(losses))):
            found.put(0, "data", shard, [np.float32(rows)[:, None]])
            found.put(0, "objective", shard, [np.float32(losses[shard]), penalties[shard]])
        return found

    first = step([3.5], [np.float32(0.5)], GRADIENT)
    own, share = [1.0 + times * 0.2, 2.0 + times * 0.3], np.float32([0.2 * size, 0.3 * size])
    second = step(own, share, GRADIENT if times == 1 else GRADIENT + OLD)
    assert details(first, second)[:1] == ([cause] if cause else [])


# --- Layers --------------------------------------------------------------------------------------

NORM = ("state/norm/mean", "statistic"), ("state/norm/var", "statistic")
INPUTS = RANDOM.normal(size=(8, 5)).astype(np.float32) + np.arange(8)[:, None] / 4


def normalised(statistics, outputs, gradient=GRADIENT):
    """Returns a step whose copies leave these statistics."""
    number = len(statistics)
    start = [{name: np.full(5, i, np.float32) for i, (name, _) in enumerate(NORM)}] * number
    after = [
        {name: np.float32(0.9 * i + 0.1 * own[i]) for i, (name, _) in enumerate(NORM)}
        for own in statistics
    ]
    found = trace([gradient] * number, start, after, NORM)
    for shard, rows in enumerate(np.split(np.arange(8), number)):
        for kind, array in (("data", INPUTS), ("y_pred", outputs), ("y_grad", np.cos(outputs))):
            found.put(0, kind, shard, [np.float32(array[rows])])
    return found


def moments(rows):
    return INPUTS[rows].mean(0), INPUTS[rows].var(0)


def test_layers_that_normalise_the_examples_of_each_replica():
    whole = [moments(np.arange(8))]
    own = [moments(rows) for rows in np.split(np.arange(8), 2)]
    first = normalised(whole, INPUTS)
    assert details(first, normalised(whole * 2, INPUTS)) == []
    outputs = INPUTS + np.arange(5)
    assert details(first, normalised(own, outputs, GRADIENT + OLD))[0] == "local_statistics"
    other = [(mean, 2 * variance) for mean, variance in own]  # The means tell who shares them.
    assert details(first, normalised(other, outputs, GRADIENT + OLD))[0] == "diverged_replicas"
    other = [(2 * mean, 2 * variance) for mean, variance in own]
    assert details(first, normalised(other, outputs, GRADIENT + OLD))[0] == "other_outputs"


def test_layers_in_inference_mode_keep_their_statistics():
    whole = [moments(np.arange(8))]
    first, outputs = normalised(whole, INPUTS), INPUTS + np.arange(5)
    kept = [(np.zeros(5), np.ones(5))] * 2
    assert details(first, normalised(kept, outputs, GRADIENT + OLD))[0] == "inference_mode"
    # A layer that is not called has no gradient.
    assert details(first, normalised(kept, outputs, 0 * GRADIENT))[0] == "other_outputs"


@pytest.mark.parametrize(("alpha", "cause"), [(2, []), (4, ["other_layer_settings"])])
def test_settings_of_layers_that_are_numbers(alpha, cause):
    def step(alpha, gradient, replicas):
        layer = {"name": "hidden", "class": "Dense", "weights": ["w"]}
        layer["settings"] = {"lora_alpha": alpha, "activation": "tanh"}
        return trace([gradient] * replicas, framework="keras", layers=(layer,))

    second = step(alpha, GRADIENT if alpha == 2 else GRADIENT + OLD, 2)
    assert details(step(2, GRADIENT, 1), second) == cause


# --- The backward pass, and after it -------------------------------------------------------------


def backward(raw, loss=1.0, kind_of_gradients="raw"):
    """Returns a step of which outputs, and the gradient of the loss by them, are right."""
    found = trace([np.mean(raw, axis=0)] * len(raw))
    for shard, rows in enumerate(np.split(np.arange(8), len(raw))):
        for kind, array in (("data", INPUTS), ("y_pred", INPUTS), ("y_grad", np.cos(INPUTS))):
            found.put(0, kind, shard, [np.float32(array[rows])])
        found.put(0, kind_of_gradients, shard, [raw[shard]])
        found.put(0, "loss", shard, [np.float32(loss)])
    return found


def test_a_backward_rule_in_jax_that_is_wrong():
    first, wrong = backward([GRADIENT]), [GRADIENT + OLD, GRADIENT + OLD * OLD]
    assert details(first, backward([GRADIENT + OLD, GRADIENT - OLD])) == []
    assert details(first, backward(wrong)) == ["other_backward"]
    assert "other_backward" not in details(first, backward(wrong, loss=1.1))  # Of another loss.


def test_a_wrong_backward_pass_that_adds_over_devices():
    first = backward([GRADIENT])
    assert details(first, backward([GRADIENT] * 2, kind_of_gradients="sums")) == []
    wrong = backward([GRADIENT + OLD] * 2, kind_of_gradients="sums")
    assert details(first, wrong) == ["other_backward"]


@pytest.mark.parametrize(
    ("own", "cause"),
    [(lambda rank: GRADIENT, []), (lambda rank: (rank + 1) * OLD, ["partial_not_reduced"]),
     (lambda rank: OLD, ["unexplained"])],
)  # fmt: skip
def test_ranks_of_a_model_whose_backward_passes_lack_a_sum(own, cause):
    mesh = {"mesh": {"model": 2}, "data_axes": (), "num_replicas": 1, "reduction": ""}
    second = trace([own(rank) for rank in (0, 1)], **mesh)
    assert details(trace([GRADIENT]), second)[:1] == cause


@pytest.mark.parametrize("is_of_model", [False, True])
def test_ranks_of_a_model_may_start_with_other_parts_of_statistics(is_of_model):
    names, mesh = (("constant", "statistic"),), {"mesh": {"model": 2}, "data_axes": ()}
    mesh |= {"num_replicas": 1, "reduction": ""}
    start, after = [{"constant": OLD}] * 2, [{"constant": OLD + OLD}] * 2
    first = trace([GRADIENT], start, after, names)
    about = {"replayed": "one.npz", **(mesh if is_of_model else {})}
    second = trace([GRADIENT] * 2, start, after, names, **about)
    for copy in (0, 1):
        second.put(0, "replaced", copy, [WEIGHT, OLD + np.float32(copy)])
    assert details(first, second) == ([] if is_of_model else ["diverged_replicas"])


def test_weights_that_only_the_second_recording_updates():
    names = (("body", "weight"),)
    about = {"optimizer": {"class": "Own"}}

    def step(moved, replicas):
        start, after = {"body": OLD}, {"body": OLD + moved}
        found = trace([GRADIENT] * replicas, [start] * 2, [after] * 2, names, **about)
        found.about = dataclasses.replace(found.about, gradients=("w", "body"))
        for copy in range(replicas):
            found.put(0, "sums", copy, [GRADIENT, GRADIENT])
        return found

    assert details(step(0, 1), step(0, 2)) == []
    assert details(step(0, 1), step(GRADIENT, 2)) == ["not_frozen"]
    assert details(step(OLD * GRADIENT, 1), step(GRADIENT, 2)) != ["not_frozen"]


def test_weights_that_a_script_sets_before_its_update():
    settings = (({"learning_rate": 0.1, "weights": ["w"]},),)
    about = {"framework": "torch", "settings": settings}
    about["optimizer"] = {"class": "SGD", "framework": "torch"}
    found = trace([GRADIENT], **about)
    found.put(0, "after", 0, [OLD - RATE * GRADIENT])
    assert [f.detail for f in compare_traces([found], {})["one.npz"].faults]
    found.put(0, "set", 0, [OLD])
    assert not compare_traces([found], {})["one.npz"].faults


def keyed(keys, *, counts=True, layers=()):
    """Returns the steps of a script of JAX that passes a key, and state that may count them."""
    variables = Variable("w", "weight"), Variable("count", "optimizer state")
    about = About("jax", 1, steps=(0, 1), variables=variables, gradients=("w",), layers=layers)
    found = Trace(about)
    for step, key in enumerate(keys):
        for kind, number in (("before", step), ("after", step + 1)):
            state = [GRADIENT * np.float32(1 - number), np.int32(number * counts)]
            found.put(step, kind, 0, state)
        found.put(step, "random", 0, [np.array([0, key], np.uint32).view(np.uint8)])
        found.put(step, "loss", 0, [np.float32(1)])
    return found


def test_a_key_may_stay_where_a_step_counts():
    assert not details(keyed([3, 4]), keyed([3, 4]))
    assert details(keyed([3, 4]), keyed([3, 3])) == ["random_numbers_repeated"]
    assert not details(keyed([3, 3]), keyed([3, 3]))  # It may fold in the number of the step.
    fixed = keyed([3, 3], counts=False)
    assert details(fixed, fixed) == ["random_numbers_repeated"]
    drawing = keyed([3, 3], layers=({"name": "drop", "class": "Dropout", "rate": 0.5},))
    for each, found in ((keyed([3, 3]), 0), (fixed, 1), (drawing, 1)):
        verdicts = compare_traces([each], {}).values()
        assert [f.detail for v in verdicts for f in v.faults] == ["random_numbers_repeated"] * found
