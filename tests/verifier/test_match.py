"""Variables of two traces in pairs: Keras, PyTorch and JAX name, order and transpose them."""

import numpy as np
import pytest

from lockstep.data.match import Matching
from lockstep.data.trace import STATE, STATISTIC, WEIGHT, About, Trace, Variable
from lockstep.stages.examples import has_examples_second

LENET = {
    "conv1": (3, 3, 1, 20), "conv2": (5, 5, 20, 50), "hidden": (800, 128), "logits": (128, 10),
}  # fmt: skip
LAYOUTS = {4: "HWIO", 2: "IO"}


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


def keras_layer(name, kernel):
    yield weight(f"{name}/kernel", kernel, LAYOUTS[kernel.ndim])
    yield weight(f"{name}/bias", np.zeros(kernel.shape[-1]))


def torch_layer(name, kernel):
    """As PyTorch lays it out: OIHW, OI."""
    layout = {4: "OIHW", 2: "OI"}[kernel.ndim]
    axes = (3, 2, 0, 1) if kernel.ndim == 4 else (1, 0)
    yield weight(f"{name}.weight", kernel.transpose(axes), layout)
    yield weight(f"{name}.bias", np.zeros(kernel.shape[-1]))


def jax_tree(prefix, tree):
    """A pytree's leaves in JAX's order: keys of dicts are sorted."""
    if not isinstance(tree, dict):
        yield weight(prefix, tree, LAYOUTS.get(np.ndim(tree), ""))
        return
    for key in sorted(tree):
        yield from jax_tree(f"{prefix}/{key}" if prefix else key, tree[key])


def lenet(layer, names=LENET):
    return [
        v for name, s in zip(names, LENET.values(), strict=True) for v in layer(name, values(s))
    ]


def names_of(matching):
    return {(pair.first, pair.second) for pair in matching.pairs}


def axes_of(matching):
    """Returns the permutation of the axes of each pair; None for the same order."""
    axes = {pair.first: pair.transpose for pair in matching.pairs}
    return {name: a if a != tuple(sorted(a)) else None for name, a in axes.items()}


def matched(first, second, names=None):
    """Returns the matching, whose pairs have equal arrays in the order of the first's axes."""
    matching = Matching(first, second, names or {})
    own, other = first.named(0, "before", 0), second.named(0, "before", 0)
    for pair in matching.pairs:
        array = np.transpose(other[pair.second], pair.transpose)
        np.testing.assert_allclose(own[pair.first], array, rtol=0, atol=1e-7)
    laid_out = matching.to_first(other)
    assert all(np.allclose(laid_out[p.first], own[p.first]) for p in matching.pairs)
    return matching


def all_matched(first, second, names=None):
    matching = matched(first, second, names)
    assert (matching.unmatched_first, matching.unmatched_second) == ([], [])
    return matching


def keras_norm(name, width, seed):
    for part, offset in (("gamma", 0), ("beta", 1)):
        yield weight(f"{name}/{part}", values((width,), seed + offset))
    for part, offset in (("moving_mean", 2), ("moving_variance", 3)):
        yield statistic(f"{name}/{part}", values((width,), seed + offset))


def torch_norm(name, width, seed):
    for part, offset in (("weight", 0), ("bias", 1)):
        yield weight(f"{name}.{part}", values((width,), seed + offset))
    for part, offset in (("running_mean", 2), ("running_var", 3)):
        yield statistic(f"{name}.{part}", values((width,), seed + offset))
    yield statistic(f"{name}.num_batches_tracked", 7)


def conv(size, inputs, outputs, seed):
    return values((size, size, inputs, outputs), seed)


def keras_resnet(blocks=((8, 8), (8, 16))):
    """Residual blocks as Keras orders them: each convolution before its normalisation."""
    variables = [*keras_layer("stem_conv", conv(3, 1, 8, 1)), *keras_norm("stem_norm", 8, 1)]
    for index, (inputs, width) in enumerate(blocks):
        name, seed = f"block{index}", 100 * (index + 1)
        variables += keras_layer(f"{name}_conv1", conv(3, inputs, width, seed))
        variables += keras_norm(f"{name}_norm1", width, seed + 10)
        variables += keras_layer(f"{name}_conv2", conv(3, width, width, seed + 1))
        variables += keras_norm(f"{name}_norm2", width, seed + 20)
        if inputs != width:
            variables += keras_layer(f"{name}_shortcut", conv(1, inputs, width, seed + 2))
    return [*variables, *keras_layer("logits", values((16, 10)))]


def torch_resnet(blocks=((8, 8), (8, 16))):
    """The same in the order of d2l's PyTorch class: all convolutions, then normalisations."""
    variables = [*torch_layer("net.0", conv(3, 1, 8, 1)), *torch_norm("net.1", 8, 1)]
    for index, (inputs, width) in enumerate(blocks):
        name, seed = f"net.{index + 3}", 100 * (index + 1)
        variables += torch_layer(f"{name}.conv1", conv(3, inputs, width, seed))
        variables += torch_layer(f"{name}.conv2", conv(3, width, width, seed + 1))
        if inputs != width:
            variables += torch_layer(f"{name}.conv3", conv(1, inputs, width, seed + 2))
        variables += torch_norm(f"{name}.bn1", width, seed + 10)
        variables += torch_norm(f"{name}.bn2", width, seed + 20)
    return [*variables, *torch_layer("net.9", values((16, 10)))]


# --- Names ---------------------------------------------------------------------------------------


def test_equal_recordings_match_by_name():
    momentum = Variable("m", STATE, of="conv1/kernel", slot="momentum"), values((3, 3, 1, 20))
    variables = [*lenet(keras_layer), momentum]
    matching = all_matched(trace("keras", *variables), trace("keras", *variables))
    assert [pair.first for pair in matching.pairs] == [v.name for v, _ in variables[:-1]]


def test_names_of_a_common_part_are_the_same_without_it():
    first = trace("keras", *lenet(keras_layer))
    second = trace("torch", *lenet(torch_layer, [f"module.Net.{name}" for name in LENET]))
    matching = all_matched(first, second)
    assert ("conv1/kernel", "module.Net.conv1.weight") in names_of(matching)
    found = axes_of(matching)
    assert (found["conv2/kernel"], found["hidden/kernel"]) == ((2, 3, 1, 0), (1, 0))
    assert found["conv2/bias"] is None
    back = axes_of(all_matched(second, first))
    assert back["module.Net.conv2.weight"] == (3, 2, 0, 1)


def test_the_same_layer_with_another_shape_is_not_paired_with_another_one():
    first = trace("keras", weight("head/kernel", values((6, 4)), "IO"))
    head = weight("head.weight", values((5, 6)), "OI")
    second = trace("torch", head, weight("extra.weight", values((4, 6)), "OI"))
    matching = Matching(first, second, {})
    assert matching.pairs == [] and matching.unmatched_first == ["head/kernel"]
    assert matching.unmatched_second == ["head.weight", "extra.weight"]


def test_numbers_in_names_are_not_trusted_where_they_differ():
    """Keras counts dense layers, a Sequential of PyTorch counts activations, too."""
    kernels = [values((6, 6), seed) for seed in range(3)]
    first = trace("jax", *(v for i, k in enumerate(kernels) for v in jax_tree(f"{i}", {"w": k})))
    torch = [v for i, k in enumerate(kernels) for v in torch_layer(f"{2 * i}", k)]
    matching = matched(first, trace("torch", *torch))
    assert names_of(matching) == {("0/w", "0.weight"), ("1/w", "2.weight"), ("2/w", "4.weight")}
    assert matching.unmatched_second == ["0.bias", "2.bias", "4.bias"]
    first, second = (
        trace("jax", *(weight(f"net/w{i + start}", k) for i, k in enumerate(kernels)))
        for start in (0, 1)
    )
    matching = matched(first, second)
    assert names_of(matching) == {(f"net/w{i}", f"net/w{i + 1}") for i in range(3)}


# --- Order and layers ----------------------------------------------------------------------------


def test_lenet_of_keras_and_torch_with_other_names():
    torch_names = ("features.0", "features.3", "classifier.1", "classifier.3")
    first = trace("keras", *lenet(keras_layer))
    matching = all_matched(first, trace("torch", *lenet(torch_layer, torch_names)))
    assert ("hidden/kernel", "classifier.1.weight") in names_of(matching)


@pytest.mark.parametrize(("kernel", "bias"), [("kernel", "bias"), ("w", "b")])
def test_lenet_of_keras_and_jax_whose_biases_come_first(kernel, bias):
    tree = {
        f"layer_{letter}": {kernel: values(shape), bias: np.zeros(shape[-1])}
        for letter, shape in zip("abcd", LENET.values(), strict=True)
    }
    jax = trace("jax", *jax_tree("params", tree))
    assert jax.keys[0] == f"params/layer_a/{bias}"
    matching = all_matched(trace("keras", *lenet(keras_layer)), jax)
    assert ("conv1/bias", f"params/layer_a/{bias}") in names_of(matching)


def test_keys_of_jax_which_are_sorted_are_paired_by_values():
    """ "decoder" comes before "encoder" in a pytree, though it is applied after it."""
    square = [values((8, 8), seed) for seed in range(12)]
    keras = [v for i, w in enumerate(square) for v in keras_layer(f"dense_{i + 5}", w)]
    jax = [v for i, w in enumerate(square) for v in jax_tree(f"{i}", {"b": np.zeros(8), "w": w})]
    matching = all_matched(trace("keras", *keras), trace("jax", *jax))
    assert ("dense_15/bias", "10/b") in names_of(matching)
    encoder, decoder = square[:2]
    keras = trace("keras", *keras_layer("enc", encoder), *keras_layer("dec", decoder))
    tree = {"encoder": {"w": encoder + 1e-9, "b": np.zeros(8)}, "decoder": {"w": decoder}}
    matching = matched(keras, trace("jax", *jax_tree("", tree)))
    assert [pair.second for pair in matching.pairs] == ["encoder/w", "encoder/b", "decoder/w"]
    tree = {"encoder": {"w": square[2]}, "decoder": {"w": square[3]}}  # No equal values.
    matching = Matching(keras, trace("jax", *jax_tree("", tree)), {})
    assert matching.pairs == [] and len(matching.unmatched_first) == 4
    assert matching.unmatched_second == ["decoder/w", "encoder/w"]


def test_resnet_of_keras_and_torch():
    keras, torch = trace("keras", *keras_resnet()), trace("torch", *torch_resnet())
    matching = all_matched(keras, torch)
    assert ("block1_norm2/moving_variance", "net.4.bn2.running_var") in names_of(matching)
    assert ("block1_shortcut/bias", "net.4.conv3.bias") in names_of(matching)
    assert not any("num_batches" in pair.second for pair in matching.pairs)
    assert len(matching.pairs) == len(torch.keys) - 5
    all_matched(torch, keras)
    first = trace("keras", *keras_layer("a", values((4, 4))), *keras_norm("n", 4, 1))
    second = trace("torch", *torch_norm("x.1", 4, 1), *torch_layer("x.0", values((4, 4))))
    assert ("n/beta", "x.1.bias") in names_of(all_matched(first, second))  # Not with a bias.


def test_nothing_is_guessed_where_counts_differ():
    square = [values((6, 6), seed) for seed in range(3)]
    first = [v for i, w in enumerate(square) for v in keras_layer(f"dense{i}", w)]
    second = [v for i, w in enumerate(square[1:]) for v in torch_layer(f"fc{i}", w)]
    second += torch_layer("head", values((6, 2)))
    first += keras_layer("out", values((6, 2)))
    matching = Matching(trace("keras", *first), trace("torch", *second), {})
    assert names_of(matching) == {("out/kernel", "head.weight"), ("out/bias", "head.bias")}
    assert len(matching.unmatched_first) == 6
    assert matching.unmatched_second == ["fc0.weight", "fc0.bias", "fc1.weight", "fc1.bias"]


def test_a_layer_that_has_two_partners_has_none():
    first, second = [], [weight("cell.bias", np.zeros(4))]
    for name, part, width in (("x", "a", 5), ("y", "b", 6)):
        first += [weight(f"{name}/kernel", values((4, width)), "IO")]
        first += [weight(f"{name}/bias", np.zeros(4))]
        second += [weight(f"cell.weight_{part}", values((width, 4)), "OI")]
    matching = Matching(trace("keras", *first), trace("torch", *second), {})
    assert names_of(matching) == {("x/kernel", "cell.weight_a"), ("y/kernel", "cell.weight_b")}
    assert matching.unmatched_first == ["x/bias", "y/bias"]


# --- Axes ----------------------------------------------------------------------------------------

DEPTHWISE, KERNEL = (2, 3, 0, 1), (2, 3, 1, 0)


@pytest.mark.parametrize(
    ("shape", "layouts", "other", "axes", "is_same_back"),
    [
        ((6, 4), ("IO", "OI"), (0, 1), "none", True),  # Layouts that contradict are not overruled.
        ((9, 4), ("", ""), (0, 1), None, True),
        ((3, 3, 2, 5), ("", ""), (3, 2, 0, 1), KERNEL, True),
        ((3, 3, 6, 1), ("HWIO", "OIHW"), DEPTHWISE, DEPTHWISE, True),
        ((3, 3, 6, 1), ("", ""), DEPTHWISE, DEPTHWISE, True),
        ((1, 1, 8, 8), ("", ""), (3, 2, 0, 1), KERNEL, False),  # Not told from the other direction.
        ((3, 3, 1, 8), ("", ""), (3, 2, 0, 1), KERNEL, True),
        ((3, 3, 8, 1), ("", ""), (3, 2, 0, 1), KERNEL, True),
        ((3, 3, 2, 2), ("", ""), (3, 2, 0, 1), KERNEL, False),
    ],
)
def test_axes_are_those_of_the_layouts_or_the_usual_ones(shape, layouts, other, axes, is_same_back):
    kernel = values(shape)
    first = trace("keras", weight("d/kernel", kernel, layouts[0]))
    for name in ("e.weight", "d.weight"):
        second = trace("torch", weight(name, kernel.transpose(other), layouts[1]))
        if axes == "none":
            assert Matching(first, second, {}).pairs == []
            break
        assert axes_of(all_matched(first, second)) == {"d/kernel": axes}
        if is_same_back:
            all_matched(second, first)


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
    encoder, decoder = (values((6, 6), seed) for seed in (1, 2))
    first = trace("keras", *keras_layer("enc", encoder), *keras_layer("dec", decoder))
    second = trace("torch", *torch_layer("dec", encoder), *torch_layer("enc", decoder))
    names = {"enc/kernel": "dec.weight", "dec/kernel": "enc.weight"}
    for given in (names, {value: key for key, value in names.items()}):
        matching = matched(first, second, given | {"enc/bias": "dec.bias"})
        assert names_of(matching) >= {*names.items(), ("dec/bias", "enc.bias")}


@pytest.mark.parametrize(
    ("names", "wrong"),
    [
        ({"conv1/kernel": "conv9.weight"}, "'conv1/kernel' and 'conv9.weight' are not one weight"),
        ({"x": "conv1.weight"}, "'x' and 'conv1.weight' are not one weight or statistic of"),
        ({"conv1/kernel": "conv1.weight", "conv1/bias": "conv1.weight"}, "use each once"),
        ({"conv1/kernel": "hidden.weight"}, "'hidden.weight' are not one weight"),
    ],
)
def test_a_wrong_map_is_refused(names, wrong):
    first, second = trace("keras", *lenet(keras_layer)), trace("torch", *lenet(torch_layer))
    with pytest.raises(ValueError) as caught:
        Matching(first, second, names)
    assert wrong in str(caught.value)


def test_inputs_of_the_layout_time_batch_are_recognised():
    def trace(*shapes):
        about = About("torch", len(shapes), steps=(0,))
        arrays = {f"1/data/{r}/0": np.zeros(shape) for r, shape in enumerate(shapes)}
        return Trace(about, arrays)

    assert has_examples_second(trace((5, 8)), trace((5, 4), (5, 4)))
    assert not has_examples_second(trace((8, 5)), trace((4, 5), (4, 5)))
    assert not has_examples_second(trace((8,)), trace((4,), (4,)))
    assert not has_examples_second(trace((5, 8)), trace((5, 8)))
    assert not has_examples_second(trace((4, 8)), trace((4, 8), (4, 8)))  # The batch is larger.
