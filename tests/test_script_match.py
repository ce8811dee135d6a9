"""Variables of two recordings in pairs: Keras, PyTorch and JAX name, order and transpose them."""

import json

import numpy as np
import pytest

from app.records.script_trace import Rows, load_trace
from app.runtime.errors import ConfigError
from app.verification.script_match import match_variables

LENET = {
    "conv1": (3, 3, 1, 20), "conv2": (5, 5, 20, 50), "hidden": (800, 128), "logits": (128, 10),
}  # fmt: skip
LAYOUTS = {4: "HWIO", 2: "IO"}
TORCH = {4: (3, 2, 0, 1), 2: (1, 0)}


def weight(name, value, layout=""):
    return {"name": name, "kind": "weight", "layout": layout}, np.asarray(value, np.float32)


def statistic(name, value):
    return {"name": name, "kind": "statistic", "layout": ""}, np.asarray(value, np.float32)


def state(name, of, slot, value):
    entry = {"name": name, "kind": "optimizer state", "of": of, "slot": slot}
    return entry, None if value is None else np.asarray(value, np.float32)


@pytest.fixture
def trace(tmp_path):
    """Writes a trace of one step of these variables; arrays that are None are left out."""

    def write(framework, *variables, **about):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.npz"
        about = {
            "format": "lockstep trace", "version": 1, "framework": framework, "num_replicas": 1,
            "replicas": [0], "steps": [0], "variables": [entry for entry, _ in variables],
            "gradients": [],
        } | about  # fmt: skip
        before = {f"1/before/0/{i}": v for i, (_, v) in enumerate(variables) if v is not None}
        np.savez(path, about=np.array(json.dumps(about)), **before)
        return load_trace(path)

    return write


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


def as_first(pair, array):
    """Returns an array of the second recording with the axes of the first."""
    if pair.transpose is None:
        return array
    return np.transpose(array.dense() if isinstance(array, Rows) else array, pair.transpose)


def assert_values_equal(matching, first, second):
    """Asserts that each pair has equal arrays once the second's axes are in the first's order."""
    own, other = first.arrays(0, "before", 0), second.arrays(0, "before", 0)
    for pair in [*matching.pairs, *matching.state]:
        np.testing.assert_array_equal(
            own[pair.first_index], as_first(pair, other[pair.second_index])
        )
        assert first.variables[pair.first_index].name == pair.first
        assert second.variables[pair.second_index].name == pair.second


def assert_all_match(first, second, names=None):
    matching = match_variables(first, second, names or {})
    assert (matching.unmatched_first, matching.unmatched_second) == ((), ())
    assert_values_equal(matching, first, second)
    return matching


def test_equal_recordings_match_by_name(trace):
    variables = [*lenet(keras_layer), state("m", "conv1/kernel", "momentum", values((3, 3, 1, 20)))]
    matching = assert_all_match(trace("keras", *variables), trace("keras", *variables))
    assert {(pair.means, pair.transpose) for pair in matching.pairs} == {("name", None)}
    assert [pair.first for pair in matching.pairs] == [v["name"] for v, _ in variables[:-1]]
    assert len(matching.state) == 1


def test_lenet_of_keras_and_torch_with_equal_layers(trace):
    keras, torch = trace("keras", *lenet(keras_layer)), trace("torch", *lenet(torch_layer))
    matching = assert_all_match(keras, torch)
    assert ("conv1/kernel", "conv1.weight") in names_of(matching)
    found = {pair.first: pair.transpose for pair in matching.pairs}
    assert (found["conv2/kernel"], found["hidden/kernel"]) == ((2, 3, 1, 0), (1, 0))
    assert found["conv2/bias"] is None
    back = assert_all_match(torch, keras)
    assert {pair.first: pair.transpose for pair in back.pairs}["conv2.weight"] == (3, 2, 0, 1)


def test_lenet_of_keras_and_torch_with_other_names(trace):
    torch_names = ("features.0", "features.3", "classifier.1", "classifier.3")
    first = trace("keras", *lenet(keras_layer))
    second = trace("torch", *lenet(torch_layer, torch_names))
    matching = assert_all_match(first, second)
    assert ("hidden/kernel", "classifier.1.weight") in names_of(matching)
    means = {pair.first.rpartition("/")[2]: pair.means for pair in matching.pairs}
    assert means == {"kernel": "order", "bias": "layer"}


@pytest.mark.parametrize(("kernel", "bias"), [("kernel", "bias"), ("w", "b")])
def test_lenet_of_keras_and_jax_whose_biases_come_first(trace, kernel, bias):
    tree = {
        f"layer_{letter}": {kernel: values(shape), bias: np.zeros(shape[-1])}
        for letter, shape in zip("abcd", LENET.values(), strict=True)
    }
    jax = trace("jax", *jax_tree("params", tree))
    assert jax.variables[0].name == f"params/layer_a/{bias}"
    matching = assert_all_match(trace("keras", *lenet(keras_layer)), jax)
    assert ("conv1/bias", f"params/layer_a/{bias}") in names_of(matching)


def test_jax_lists_keep_their_order(trace):
    square = [values((8, 8), seed) for seed in range(12)]
    jax = [
        v for i, w in enumerate(square)
        for v in (weight(f"{i}/b", np.zeros(8)), weight(f"{i}/w", w, "IO"))
    ]  # fmt: skip
    keras = [v for i, w in enumerate(square) for v in keras_layer(f"dense_{i + 5}", w)]
    matching = assert_all_match(trace("keras", *keras), trace("jax", *jax))
    assert ("dense_15/bias", "10/b") in names_of(matching)


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


def keras_resnet(blocks=((8, 8), (8, 16), (16, 16))):
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


def torch_resnet(blocks=((8, 8), (8, 16), (16, 16))):
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


def test_resnet_of_keras_and_torch(trace):
    keras, torch = trace("keras", *keras_resnet()), trace("torch", *torch_resnet())
    matching = assert_all_match(keras, torch)
    assert ("block1_norm2/moving_variance", "net.4.bn2.running_var") in names_of(matching)
    assert ("block1_shortcut/bias", "net.4.conv3.bias") in names_of(matching)
    assert not any("num_batches" in pair.second for pair in matching.pairs)
    assert len(matching.pairs) == len(keras.variables)
    assert_all_match(torch, keras)


def test_a_norm_is_not_mixed_up_with_a_bias_of_the_same_shape(trace):
    first = trace("keras", *keras_layer("a", values((4, 4))), *keras_norm("n", 4, 1))
    second = trace("torch", *torch_norm("x.1", 4, 1), *torch_layer("x.0", values((4, 4))))
    assert ("n/beta", "x.1.bias") in names_of(assert_all_match(first, second))


def test_names_of_a_common_part_are_the_same_without_it(trace):
    first = trace("keras", *lenet(keras_layer))
    second = trace("torch", *lenet(torch_layer, [f"module.Net.{name}" for name in LENET]))
    assert {pair.means for pair in assert_all_match(first, second).pairs} == {"name"}


def test_numbers_in_names_are_not_trusted_where_they_differ(trace):
    """Keras counts dense layers, a Sequential of PyTorch counts activations, too."""
    kernels = [values((6, 6), seed) for seed in range(3)]
    first = trace("jax", *(v for i, k in enumerate(kernels) for v in jax_tree(f"{i}", {"w": k})))
    torch = [v for i, k in enumerate(kernels) for v in torch_layer(f"{2 * i}", k)]
    second = trace("torch", *torch)
    matching = match_variables(first, second, {})
    assert names_of(matching) == {("0/w", "0.weight"), ("1/w", "2.weight"), ("2/w", "4.weight")}
    assert_values_equal(matching, first, second)
    assert matching.unmatched_second == ("0.bias", "2.bias", "4.bias")


def test_nothing_is_guessed_where_counts_differ(trace):
    square = [values((6, 6), seed) for seed in range(3)]
    first = [v for i, w in enumerate(square) for v in keras_layer(f"dense{i}", w)]
    second = [v for i, w in enumerate(square[1:]) for v in torch_layer(f"fc{i}", w)]
    second += torch_layer("head", values((6, 2)))
    first += keras_layer("out", values((6, 2)))
    matching = match_variables(trace("keras", *first), trace("torch", *second), {})
    assert names_of(matching) == {("out/kernel", "head.weight"), ("out/bias", "head.bias")}
    assert matching.unmatched_first == tuple(
        f"dense{i}/{part}" for i in range(3) for part in ("kernel", "bias")
    )
    assert matching.unmatched_second == ("fc0.weight", "fc0.bias", "fc1.weight", "fc1.bias")


def test_the_same_layer_with_another_shape_is_not_paired_with_another_one(trace):
    first = trace("keras", weight("head/kernel", values((6, 4)), "IO"))
    second = trace(
        "torch", weight("head.weight", values((5, 6)), "OI"),
        weight("extra.weight", values((4, 6)), "OI"),
    )  # fmt: skip
    matching = match_variables(first, second, {})
    assert matching.pairs == ()
    assert matching.unmatched_first == ("head/kernel",)
    assert matching.unmatched_second == ("head.weight", "extra.weight")


def test_layouts_that_contradict_a_shape_are_not_overruled(trace):
    first = trace("keras", weight("a/kernel", values((6, 4)), "IO"))
    second = trace("torch", weight("b.weight", values((6, 4)), "OI"))
    assert match_variables(first, second, {}).pairs == ()


def test_unknown_layouts_are_tried_as_they_are_and_transposed(trace):
    kernel, table = values((3, 3, 2, 5)), values((9, 4))
    first = trace("keras", weight("c", kernel), weight("d", table))
    second = trace("torch", weight("x", kernel.transpose(3, 2, 0, 1)), weight("y", table))
    found = {pair.first: pair.transpose for pair in assert_all_match(first, second).pairs}
    assert found == {"c": (2, 3, 1, 0), "d": None}


@pytest.mark.parametrize("layouts", [("HWIO", "OIHW"), ("", "")])
def test_depthwise_kernels_are_transposed_in_their_own_way(trace, layouts):
    kernel = values((3, 3, 6, 1))
    first = trace("keras", weight("d/kernel", kernel, layouts[0]))
    second = trace("torch", weight("d.weight", kernel.transpose(2, 3, 0, 1), layouts[1]))
    for pair_of in ((first, second), (second, first)):
        assert assert_all_match(*pair_of).pairs[0].transpose == (2, 3, 0, 1)


@pytest.mark.parametrize("shape", [(1, 1, 8, 8), (3, 3, 1, 8), (3, 3, 8, 1), (3, 3, 2, 2)])
def test_other_kernels_are_not_taken_for_depthwise_ones(trace, shape):
    kernel = values(shape)
    first = trace("keras", weight("c/kernel", kernel))
    second = trace("torch", weight("c.weight", kernel.transpose(3, 2, 0, 1)))
    assert_all_match(first, second)
    if shape[2] != shape[3]:  # Else the axes cannot be told from those of the other direction.
        assert_all_match(second, first)


def test_a_layer_that_has_two_partners_has_none(trace):
    vector = np.zeros(4)
    first = trace(
        "keras", weight("x/kernel", values((4, 5)), "IO"), weight("x/bias", vector),
        weight("y/kernel", values((4, 6)), "IO"), weight("y/bias", vector),
    )  # fmt: skip
    second = trace(
        "torch", weight("cell.weight_a", values((5, 4)), "OI"),
        weight("cell.weight_b", values((6, 4)), "OI"), weight("cell.bias", vector),
    )  # fmt: skip
    matching = match_variables(first, second, {})
    assert names_of(matching) == {("x/kernel", "cell.weight_a"), ("y/kernel", "cell.weight_b")}
    assert matching.unmatched_first == ("x/bias", "y/bias")


def sorted_jax(trace, **layers):
    return trace("jax", *jax_tree("", layers))


def test_sorted_keys_of_jax_are_paired_by_values(trace):
    """ "decoder" comes before "encoder" in a pytree, though it is applied after it."""
    encoder, decoder = (values((6, 6), seed) for seed in (1, 2))
    keras = [*keras_layer("enc", encoder), *keras_layer("dec", decoder)]
    zeros = np.zeros(6)
    jax = sorted_jax(
        trace, encoder={"w": encoder + 1e-9, "b": zeros}, decoder={"w": decoder, "b": zeros}
    )
    matching = match_variables(trace("keras", *keras), jax, {})
    assert names_of(matching) == {
        ("enc/kernel", "encoder/w"), ("enc/bias", "encoder/b"),
        ("dec/kernel", "decoder/w"), ("dec/bias", "decoder/b"),
    }  # fmt: skip
    assert [pair.means for pair in matching.pairs] == ["values", "layer"] * 2


def test_sorted_keys_of_jax_are_not_guessed_without_equal_values(trace):
    keras = [*keras_layer("enc", values((6, 6), 1)), *keras_layer("dec", values((6, 6), 2))]
    jax = sorted_jax(trace, encoder={"w": values((6, 6), 3)}, decoder={"w": values((6, 6), 4)})
    matching = match_variables(trace("keras", *keras), jax, {})
    assert matching.pairs == () and len(matching.unmatched_first) == 4
    assert matching.unmatched_second == ("decoder/w", "encoder/w")


# --- Map of names --------------------------------------------------------------------------------


def test_a_map_comes_first_in_either_direction(trace):
    encoder, decoder = (values((6, 6), seed) for seed in (1, 2))
    first = trace("keras", *keras_layer("enc", encoder), *keras_layer("dec", decoder))
    second = trace("torch", *torch_layer("dec", encoder), *torch_layer("enc", decoder))
    names = {"enc/kernel": "dec.weight", "dec/kernel": "enc.weight"}
    for given in (names, {value: key for key, value in names.items()}):
        matching = match_variables(first, second, given | {"enc/bias": "dec.bias"})
        assert {("enc/kernel", "dec.weight"), ("dec/kernel", "enc.weight")} <= names_of(matching)
        assert ("dec/bias", "enc.bias") in names_of(matching)
        assert {pair.means for pair in matching.pairs} == {"map", "layer"}
        assert_values_equal(matching, first, second)


@pytest.mark.parametrize(
    ("names", "wrong"),
    [
        ({"conv1/kernel": "conv9.weight"}, "'conv1/kernel' and 'conv9.weight' are not one weight"),
        ({"x": "conv1.weight"}, "'x' and 'conv1.weight' are not one weight or statistic of"),
        ({"conv1/kernel": "conv1.weight", "conv1/bias": "conv1.weight"}, "use each once"),
        ({"conv1/kernel": "hidden.weight"}, "has shape (3, 3, 1, 20), and 'hidden.weight' (128,"),
    ],
)
def test_a_wrong_map_is_refused(trace, names, wrong):
    first, second = trace("keras", *lenet(keras_layer)), trace("torch", *lenet(torch_layer))
    with pytest.raises(ConfigError) as caught:
        match_variables(first, second, names)
    assert wrong in str(caught.value) and "; " in str(caught.value)


# --- Optimizer state -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "other"),
    [
        (("momentum",), ("momentum_buffer",)),
        (("momentum",), ("trace",)),
        (("momentum", "velocity", "velocity_hat"), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
        (("m", "v"), ("mu", "nu")),
    ],
)
def test_optimizer_state_follows_its_weight(trace, own, other):
    kernel = values((4, 3))
    slots = {slot: values((4, 3), seed) for seed, slot in enumerate(own)}
    first = trace(
        "keras", state("step", "", "iteration", 3), *keras_layer("a", kernel),
        *(state(f"opt/{s}", "a/kernel", s, v) for s, v in slots.items()),
    )  # fmt: skip
    second = trace(
        "torch", *torch_layer("b", kernel),
        *(state(f"b.weight/{s}", "b.weight", s, v.T)
          for s, v in reversed(list(zip(other, slots.values(), strict=True)))),
        state("b.weight/step", "b.weight", "step", 3),
    )  # fmt: skip
    matching = assert_all_match(first, second)
    assert [(p.first, p.second) for p in matching.state] == [
        (f"opt/{a}", f"b.weight/{b}") for a, b in zip(own, other, strict=True)
    ]
    assert {(p.transpose, p.means) for p in matching.state} == {((1, 0), "state")}


def test_optimizer_state_without_partner_is_listed(trace):
    kernel = values((4, 3))
    momentum = state("opt/m", "a/kernel", "momentum", kernel)
    first = trace("keras", *keras_layer("a", kernel), momentum)
    second = trace("torch", *torch_layer("a", kernel), state("s", "a.weight", "sum", kernel.T))
    matching = match_variables(first, second, {})
    assert (matching.state, matching.unmatched_first) == ((), ("opt/m",))
    assert matching.unmatched_second == ("s",)


def test_state_that_does_not_exist_yet_has_its_shape_from_later_arrays(trace, tmp_path):
    kernel = values((4, 3))
    first = trace("keras", *keras_layer("a", kernel), state("m", "a/kernel", "momentum", kernel))
    second = trace(
        "torch", *torch_layer("a", kernel), state("n", "a.weight", "momentum_buffer", None)
    )
    assert match_variables(first, second, {}).unmatched_first == ("m",)
    with np.load(second.name) as file:
        members = dict(file)
    np.savez(second.name, **members, **{"1/after/0/2": kernel.T.astype(np.float32)})
    matching = match_variables(first, load_trace(tmp_path / "1.npz"), {})
    assert [(pair.first, pair.second) for pair in matching.state] == [("m", "n")]


# --- Arrays --------------------------------------------------------------------------------------


def test_shapes_come_from_gradients_where_there_is_nothing_else(tmp_path, trace):
    kernel = values((4, 3))
    first = trace("keras", weight("a/kernel", kernel, "IO"))
    entry = {"name": "b.weight", "kind": "weight", "layout": "OI"}
    second = trace("torch", (entry, None), gradients=["b.weight"])
    assert match_variables(first, second, {}).pairs == ()
    with np.load(second.name) as file:
        members = dict(file)
    np.savez(second.name, **members, **{"1/sums/0/0": kernel.T})
    (pair,) = match_variables(first, load_trace(tmp_path / "1.npz"), {}).pairs
    assert pair.transpose == (1, 0)
