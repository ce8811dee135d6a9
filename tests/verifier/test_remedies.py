"""The program after each remedy for Keras, and after some together, is clean.

The code is that of examples/keras_remedies.py and docs/verify_your_own.md, as it stands there.
"""

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from lockstep.answer.causes import DETAILS, IN_FRAMEWORK
from tests.campaigns import zoo
from tests.conftest import ROOT
from tests.verifier.zoo import CASES, Program
from tests.verifier.zoo.small import OwnStep, dense, num_replicas, replica_id

NAMESPACE: dict[str, Any] = {"keras": keras, "tf": tf}
OWN = re.findall(r"```python\n(.*?)```", (ROOT / "docs/verify_your_own.md").read_text(), re.DOTALL)
exec((ROOT / "examples/keras_remedies.py").read_text() + OWN[1], NAMESPACE)

# Remedy → the details that it is for, and settings of `program`.
REMEDIES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "seeds": (("same_random_numbers",), {"random": NAMESPACE["ReplicaDropout"]}),
    "norm": (("local_statistics",), {"norm": NAMESPACE["synchronised_norm"]}),
    "per_example": (("scalar_loss_not_divided",), {"loss": NAMESPACE["loss_of_each_example"]}),
    "global_mean": (
        ("mean_of_means", "weighted_mean_of_means", "scaled_gradient"),
        {"loss": NAMESPACE["MeanOverGlobalBatch"](), "num_examples": 21},
    ),
    "regularised": (
        ("regulariser_repeated", "regulariser_missing", "not_all_reduced", "sum_instead_of_mean"),
        {"kind": NAMESPACE["RegularisedOnce"], "loss": "mse", "regularised": True},
    ),
    "clips": (("clipped_before_the_sum",), {"kind": NAMESPACE["ClipsTheSum"]}),
    "drop_remainder": (("mean_of_means",), {"drop_remainder": True, "num_examples": 21}),
    "weights": (("weighted_mean_of_means",), {"weighted": True}),
    "masks": (("weighted_mean_of_means",), {"masked": True}),
    "bfloat16": (("overflow_not_skipped",), {"policy": "mixed_bfloat16"}),
    "frozen": (("frozen",), {"frozen": True}),
}  # fmt: skip
# Remedies change one program together where they are about different things.
TOGETHER = [("norm", "seeds"), ("global_mean", "weights"), ("clips", "seeds")]


def network(
    *, random=None, norm=None, loss="mse", kind=keras.Sequential, regularised=False, masked=False,
    frozen=False,
):  # fmt: skip
    """Returns a compiled model with what the remedies are about."""
    layers = keras.layers
    first = [keras.Input((4,)), layers.Embedding(9, 6, mask_zero=True)]
    first = first if masked else [keras.Input((6,))]
    regulariser = keras.regularizers.L2(0.1) if regularised else None
    hidden = layers.Dense(8, "tanh", kernel_regularizer=regulariser, trainable=not frozen)
    between = [norm()] if norm else []
    between += [random(0.4)] if random else []
    model = kind([*first, hidden, *between, layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    return model


def examples(*, num_examples=24, weighted=False, masked=False, drop_remainder=False):
    """Returns batches of 12 examples, with equally many unmasked steps on two replicas."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(num_examples, 6)).astype(np.float32)
    y = generator.normal(size=(num_examples, 2)).astype(np.float32)
    if masked:
        x = generator.integers(1, 9, (num_examples, 4))
        x[:, 3] = 0
        y = np.repeat(y[:, None], 4, axis=1)
    arrays = [x, y]
    if weighted:
        weights = generator.uniform(0.5, 1.5, num_examples).astype(np.float32)
        arrays.append(weights[:, None] if masked else weights)
    dataset = tf.data.Dataset.from_tensor_slices(tuple(arrays))
    return dataset.batch(12, drop_remainder=drop_remainder)


def found_after(*remedies):
    """Trains the program after some remedies, and returns the findings."""
    settings = {key: value for name in remedies for key, value in REMEDIES[name][1].items()}
    policy = settings.pop("policy", "float32")
    names = "num_examples", "weighted", "masked", "drop_remainder"
    of_data = {name: settings[name] for name in names if name in settings}
    of_model = {k: v for k, v in settings.items() if k not in of_data or k == "masked"}
    keras.config.set_dtype_policy(policy)
    try:
        program = Program(lambda: network(**of_model), lambda: examples(**of_data))
        return zoo.search(program, 2).findings
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize(
    "remedies",
    [*TOGETHER, *(pytest.param((remedy,), marks=pytest.mark.slow) for remedy in REMEDIES)],
    ids="-".join,
)
def test_the_program_after_remedies_is_clean(remedies):
    assert not (found := found_after(*remedies)), "\n".join(map(str, found))


@pytest.mark.slow
def test_masked_inputs_are_not_normalised_over_the_whole_batch():
    found = found_after("masks", "norm")
    assert {(each.status, each.detail) for each in found} == {("fault", "local_statistics")}


def test_every_remedy_for_keras_has_a_program():
    tried = {cause for causes, _ in REMEDIES.values() for cause in causes}
    tried |= {case.detail for case in CASES.values()}
    tried |= {"diverged_replicas"}  # All programs create their variables in the strategy's scope.
    assert tried <= DETAILS.keys()
    assert IN_FRAMEWORK["keras"].keys() <= tried


# --- Random numbers and BatchNorm in other places ------------------------------------------------


class Block(keras.layers.Layer):
    """A layer with random layers inside."""

    def __init__(self):
        super().__init__()
        self.dense, self.dropout = keras.layers.Dense(8), NAMESPACE["ReplicaDropout"](0.3)

    def call(self, inputs, training=False):
        return inputs + self.dropout(self.dense(inputs), training=training)


class DrawsInCall(keras.Model):
    """A model that draws random numbers itself, before a layer that may synchronise."""

    def __init__(self, is_synchronised, num_seeds):
        super().__init__()
        self.num_seeds, self.seed_generator = num_seeds, keras.random.SeedGenerator(1)
        self.dense, self.out = keras.layers.Dense(6), keras.layers.Dense(2)
        self.norm = NAMESPACE["synchronised_norm"]() if is_synchronised else None

    def call(self, inputs, training=False):
        outputs = self.dense(inputs)
        if training:
            seed = tf.cast(self.seed_generator.next(), tf.int32)
            seed += tf.stack([0, replica_id() % self.num_seeds])
            outputs = tf.nn.experimental.stateless_dropout(outputs, 0.3, seed)
        return self.out(self.norm(outputs, training=training) if self.norm else outputs)


class DrawsInStep(OwnStep):
    """A training step that draws random numbers itself."""

    def loss_of(self, x, y):
        x += tf.random.stateless_normal(tf.shape(x), tf.stack([1, replica_id()]))
        return tf.reduce_mean(self.losses_of(x, y)) / num_replicas()


def draws_in_call(is_synchronised, num_seeds):
    model = DrawsInCall(is_synchronised, num_seeds)
    model.compile("sgd", "mse")
    return model


def two_norms():
    norm, layer = keras.layers.BatchNormalization, keras.layers.Dense
    return dense(layer(6), norm(synchronized=True), layer(6), norm())


JOINED = ("forward", "not compared", "random_layers")
EQUAL = ("random numbers", "fault", "same_random_numbers")
LOCAL = ("forward", "by design", "local_statistics")
PLACES = {
    "in a block": (lambda: dense(Block(), NAMESPACE["synchronised_norm"]()), []),
    "equal masks": (
        lambda: dense(NAMESPACE["synchronised_norm"](), keras.layers.Dropout(0.4, seed=1)), [EQUAL],
    ),
    "one of two norms": (two_norms, [LOCAL]),
    "in call": (lambda: draws_in_call(False, 2), []),
    "in call, with a norm": (lambda: draws_in_call(True, 2), [JOINED]),
    "equal in call, with a norm": (lambda: draws_in_call(True, 1), [EQUAL, JOINED]),
    "in the step, with a norm": (
        lambda: dense(NAMESPACE["synchronised_norm"](), kind=DrawsInStep),
        [("gradients", "not compared", "random_layers")],
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_random_numbers_in_other_places(place):
    build, expected = PLACES[place]
    found = zoo.search(Program(build), 2).findings
    assert [(each.stage, each.status, each.detail) for each in found] == expected, found
