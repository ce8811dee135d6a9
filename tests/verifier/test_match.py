"""Variables of two traces in pairs: Keras, PyTorch and JAX name, order and transpose them."""

import numpy as np
import pytest

from lockstep.data.match import Matching
from lockstep.data.trace import STATE, STATISTIC, WEIGHT, About, Trace, Variable

NORM = {
    "keras": ("/gamma", "/beta", "/moving_mean", "/moving_variance"),
    "torch": (".weight", ".bias", ".running_mean", ".running_var"),
}


def weight(name, value, layout=""):
    return Variable(name, WEIGHT, layout), np.asarray(value, np.float32)


def statistic(name, value):
    return Variable(name, STATISTIC), np.asarray(value, np.float32)


def trace(framework, *variables, **about):
    """Returns a trace of one step of these variables; arrays that are None are left out."""
    described = About(framework, 1, (0,), tuple(entry for entry, _ in variables), **about)
    found = Trace(described, name=framework)
    found.put(0, "before", 0, [value for _, value in variables])
    return found


def values(shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def layer(framework, name, kernel):
    """Returns kernel and bias as a framework names, orders and lays them out."""
    bias, layout = np.zeros(kernel.shape[-1]), "HWIO"[-kernel.ndim :]
    if framework == "keras":
        return [weight(f"{name}/kernel", kernel, layout), weight(f"{name}/bias", bias)]
    if framework == "jax":  # Keys of a dict are sorted: the bias comes first.
        return [weight(f"{name}/b", bias), weight(f"{name}/w", kernel, layout)]
    axes = (3, 2, 0, 1) if kernel.ndim == 4 else (1, 0)
    kernel, layout = kernel.transpose(axes), "".join(layout[axis] for axis in axes)
    return [weight(f"{name}.weight", kernel, layout), weight(f"{name}.bias", bias)]


def norms(framework, *names):
    """Returns normalisations in the order of a framework; their numbers are those of the names."""
    return trace(framework, *(
        (weight if place < 2 else statistic)(name + end, values((8,), 9 * int(name[-1]) + place))
        for name in names for place, end in enumerate(NORM[framework])
    ))  # fmt: skip


def matched(first, second, names=None):
    """Returns the matching, whose pairs have equal arrays in the order of the first's axes."""
    matching = Matching(first, second, names or {})
    own, other = first.named(0, "before", 0), second.named(0, "before", 0)
    laid_out = matching.to_first(other)
    assert laid_out.keys() == {pair.first for pair in matching.pairs}
    for key, array in laid_out.items():
        np.testing.assert_allclose(own[key], array, rtol=0, atol=1e-7)
    return matching


def names_of(matching):
    return {(pair.first, pair.second) for pair in matching.pairs}


# --- Names, order and layers ---------------------------------------------------------------------

SQUARE = [values((8, 8), seed) for seed in range(4)]


def coders(framework, **layers):
    return trace(framework, *(v for name, w in layers.items() for v in layer(framework, name, w)))


CONV, DENSE = values((3, 3, 1, 20)), values((80, 12))
KERAS = coders("keras", conv1=CONV, hidden=DENSE)
CODERS = coders("keras", enc=SQUARE[0], dec=SQUARE[1])


def jax_list(start=0):
    return trace("jax", *(weight(f"net/w{i + start}", w) for i, w in enumerate(SQUARE[:3])))


def adapters(framework, first, second):
    """Two layers, each with a matrix of values and one of zeros, which all have one shape."""
    return trace(framework, *(
        weight(name.format(number), value)
        for number, size in ((1, 4), (2, 8))
        for name, value in ((first, values((2, size))), (second, np.zeros((4, 2))))
    ))  # fmt: skip


ALL = {  # Two traces, and one of the pairs; all variables have a partner.
    "names with a common part, in another order": (
        CODERS, coders("torch", **{"module.dec": SQUARE[1], "module.enc": SQUARE[0]}),
        ("dec/bias", "module.dec.bias"),
    ),
    "other names": (
        KERAS, coders("torch", **{"f.0": CONV, "classifier.1": DENSE}),
        ("hidden/bias", "classifier.1.bias"),
    ),
    "keys of JAX": (
        KERAS, coders("jax", **{"params/a": CONV, "params/b": DENSE}),
        ("conv1/bias", "params/a/b"),
    ),
    # "decoder" comes before "encoder" in a pytree, though it is applied after it.
    "keys of JAX in another order": (
        CODERS, coders("jax", decoder=SQUARE[1], encoder=SQUARE[0] + 1e-9),
        ("dec/bias", "decoder/b"),
    ),
    "zeros, by the layer of what is matched": (
        adapters("torch", "l{}.lora_A", "l{}.lora_B"), adapters("jax", "m{}.a", "m{}.b"),
        ("l2.lora_B", "m2.b"),
    ),
    "numbers that start elsewhere": (jax_list(), jax_list(1), ("net/w1", "net/w2")),
    "normalisations": (
        norms("keras", "a_norm1", "b_norm2"), norms("torch", "a.norm1", "b.norm2"),
        ("b_norm2/moving_variance", "b.norm2.running_var"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_all_variables_are_matched_in_both_directions(name):
    first, second, pair = ALL[name]
    matching = matched(first, second)
    assert pair in names_of(matching)
    assert (matching.unmatched_first, matching.unmatched_second) == ([], [])
    assert [found.first for found in matching.pairs] == first.keys
    assert names_of(matched(second, first)) == {(b, a) for a, b in names_of(matching)}


def test_state_and_counters_are_not_matched():
    momentum = Variable("m", STATE, of="conv1/kernel", slot="momentum"), values((3, 3, 1, 20))
    kernel = weight("conv1/kernel", values((3, 3, 1, 20)))
    counter = statistic("n.num_batches_tracked", 7)
    matching = matched(trace("keras", kernel, momentum), trace("keras", kernel, momentum, counter))
    assert names_of(matching) == {("conv1/kernel", "conv1/kernel")}
    assert (matching.unmatched_first, matching.unmatched_second) == ([], [])


SOME = {  # Two traces, the pairs, and the variables of both without a partner.
    "other shape": (
        [weight("head/kernel", values((6, 4)), "IO")],
        [weight("head.weight", values((5, 6)), "OI"), weight("extra.weight", values((4, 6)), "OI")],
        [], "head/kernel", "head.weight extra.weight",
    ),
    "a layer with two partners": (
        [weight("x/kernel", values((4, 5)), "IO"), weight("x/bias", np.zeros(4)),
         weight("y/kernel", values((4, 6)), "IO"), weight("y/bias", np.zeros(4))],
        [weight("cell.bias", np.zeros(4)), weight("cell.weight_a", values((4, 5)).T, "OI"),
         weight("cell.weight_b", values((4, 6)).T, "OI")],
        [("x/kernel", "cell.weight_a"), ("y/kernel", "cell.weight_b")],
        "x/bias y/bias", "cell.bias",
    ),
    "numbers that count other layers": (
        [weight(f"{i}/w", w, "IO") for i, w in enumerate(SQUARE[:3])],
        [v for i, w in enumerate(SQUARE[:3]) for v in layer("torch", f"{2 * i}", w)],
        [("0/w", "0.weight"), ("1/w", "2.weight"), ("2/w", "4.weight")],
        "", "0.bias 2.bias 4.bias",
    ),
    "layouts that contradict": (
        [weight("d/kernel", values((6, 4)), "IO")], [weight("d.weight", values((6, 4)), "OI")],
        [], "d/kernel", "d.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SOME)
def test_nothing_is_guessed(name):
    first, second, pairs, *unmatched = SOME[name]
    matching = matched(trace("keras", *first), trace("torch", *second))
    assert names_of(matching) == {*pairs}
    assert [matching.unmatched_first, matching.unmatched_second] == [x.split() for x in unmatched]


def test_keys_of_jax_without_equal_values_are_not_matched():
    matching = Matching(CODERS, coders("jax", decoder=SQUARE[3], encoder=SQUARE[2]), {})
    assert matching.pairs == [] and len(matching.unmatched_first) == 4
    assert matching.unmatched_second == ["decoder/b", "decoder/w", "encoder/b", "encoder/w"]


# --- Axes ----------------------------------------------------------------------------------------

DEPTHWISE, KERNEL = (2, 3, 0, 1), (2, 3, 1, 0)


@pytest.mark.parametrize(("shape", "layouts", "other", "axes", "is_same_back"), [
    ((3, 3, 2, 5), ("", ""), (3, 2, 0, 1), KERNEL, True),
    ((3, 3, 6, 1), ("HWIO", "OIHW"), DEPTHWISE, DEPTHWISE, True),
    ((1, 1, 8, 8), ("", ""), (3, 2, 0, 1), KERNEL, False),  # Not told from the other direction.
    ((3, 3, 1, 8), ("", ""), (3, 2, 0, 1), KERNEL, True),
    ((3, 3, 2, 2), ("", ""), (3, 2, 0, 1), KERNEL, False),
    ((3, 3, 3, 2, 5), ("", ""), (4, 3, 0, 1, 2), (2, 3, 4, 1, 0), True),
])  # fmt: skip
def test_axes_are_those_of_the_layouts_or_the_usual_ones(shape, layouts, other, axes, is_same_back):
    kernel = values(shape)
    first = trace("keras", weight("d/kernel", kernel, layouts[0]))
    for name in ("e.weight", "d.weight"):
        second = trace("torch", weight(name, kernel.transpose(other), layouts[1]))
        (pair,) = matched(first, second).pairs
        assert pair.transpose == axes
        if is_same_back:
            assert matched(second, first).pairs


def test_shapes_come_from_gradients_where_there_is_nothing_else():
    kernel = values((4, 3))
    first = trace("keras", weight("a/kernel", kernel, "IO"))
    entry = Variable("b.weight", WEIGHT, "OI")
    second = trace("torch", (entry, None), gradients=("b.weight",))
    assert Matching(first, second, {}).pairs == []
    second.put(0, "sums", 0, [kernel.T])
    (pair,) = Matching(first, second, {}).pairs
    assert pair.transpose == (1, 0)


# --- Map of names --------------------------------------------------------------------------------


def test_a_map_comes_first_in_either_direction():
    second = coders("torch", dec=SQUARE[0], enc=SQUARE[1])
    names = {"enc/kernel": "dec.weight", "dec/kernel": "enc.weight"}
    for given in (names, {value: key for key, value in names.items()}):
        matching = matched(CODERS, second, given | {"enc/bias": "dec.bias"})
        assert names_of(matching) >= {*names.items(), ("dec/bias", "enc.bias")}


@pytest.mark.parametrize(("names", "wrong"), [
    ({"conv1/kernel": "conv9.weight"}, "'conv1/kernel' and 'conv9.weight' are not one weight"),
    ({"conv1/kernel": "conv1.weight", "conv1/bias": "conv1.weight"}, "use each once"),
    ({"conv1/kernel": "hidden.weight"}, "'hidden.weight' are not one weight"),
])  # fmt: skip
def test_a_wrong_map_is_refused(names, wrong):
    with pytest.raises(ValueError, match=wrong):
        Matching(KERAS, coders("torch", conv1=CONV, hidden=DENSE), names)
