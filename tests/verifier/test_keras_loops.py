"""Recordings of Keras with several optimizers, float16 and several updates in a step.

Each program is right, or has a bug of that name when it runs on several replicas.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from lockstep import compare
from lockstep.data import file as trace_file
from lockstep.record_keras import record
from tests.small_models import mirrored
from tests.verifier.recorder_scripts.recording import node_of

layers, optimizers = keras.layers, keras.optimizers
BATCH, STEPS = 12, 3
RANDOM = np.random.default_rng(0)
TOKENS = RANDOM.integers(0, 20, (36, 5)).astype(np.int32)
FEATURES = RANDOM.normal(size=(36, 6)).astype(np.float32)
LABELS = RANDOM.integers(0, 3, 36)
PER_EXAMPLE = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)


def classifier(**options):
    hidden = layers.Dense(8, activation="tanh")
    return keras.Sequential([keras.Input((6,)), hidden, layers.Dense(3, **options)])


def momentum_sgd():
    return optimizers.SGD(0.1, momentum=0.9)


def gradients_of(model, x, labels, factor=1.0, scale=lambda loss: loss):
    with tf.GradientTape() as tape:
        losses = PER_EXAMPLE(labels, model(x, training=True))
        loss = scale(factor * tf.nn.compute_average_loss(losses, global_batch_size=BATCH))
    return tape.gradient(loss, model.trainable_variables)


def per_part(num, bug):
    """An optimizer for the embedding, and one for the other layers."""
    parts = layers.Embedding(20, 4), layers.GlobalAveragePooling1D(), layers.Dense(3)
    model = keras.Sequential([keras.Input((5,)), *parts])
    first = optimizers.Adam(0.01)
    second = optimizers.SGD(0.1 * (num if bug else 1), momentum=0.9)

    def step(tokens, _, labels):
        embedding, *others = gradients_of(model, tokens, labels)
        first.apply([embedding], model.trainable_variables[:1])
        second.apply(others, model.trainable_variables[1:])

    return model, [first, second], step


def mixed_float16(num, bug):
    """A loss scale; the bug is a larger loss on one replica."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = classifier(dtype="float32")
    finally:
        keras.config.set_dtype_policy("float32")
    optimizer = optimizers.LossScaleOptimizer(momentum_sgd())

    def step(_, x, labels):
        factor = 1.0
        if bug:
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            factor = tf.where(number == 1, 1.05, 1.0)
        gradients = gradients_of(model, x, labels, factor, optimizer.scale_loss)
        optimizer.apply(gradients, model.trainable_variables)

    return model, [optimizer], step


def several_updates(num, bug):
    """Applies two gradients in a step, one after the other."""
    model, optimizer = classifier(), momentum_sgd()

    def step(_, x, labels):
        for _ in range(2):
            optimizer.apply(gradients_of(model, x, labels), model.trainable_variables)

    return model, [optimizer], step


def of_each_kind(num, bug):
    """An optimizer for weights and one for biases, which Keras has as one."""
    model, biases, weights = classifier(), optimizers.Adam(0.01), momentum_sgd()
    both = optimizers.MultiOptimizer(lambda weight: biases if "bias" in weight.path else weights)

    def step(_, x, labels):
        both.apply(gradients_of(model, x, labels), model.trainable_variables)

    return model, [both], step


def dataset():
    return tf.data.Dataset.from_tensor_slices((TOKENS, FEATURES, LABELS)).batch(BATCH)


def train(program, num, path, bug="", given=slice(None), jit_compile=None, **options):
    """Records a training on replicas; `given` says which of the optimizers the recorder gets."""
    keras.utils.set_random_seed(1)
    strategy = mirrored(num)
    with strategy.scope():
        model, all_optimizers, step = program(num, bug)
    with record(path, model, all_optimizers[given], steps=STEPS, **options) as recorder:
        wrapped = recorder.wrap(step)

        @tf.function(jit_compile=jit_compile)
        def distributed(batch):
            strategy.run(wrapped, args=batch)

        for batch in strategy.experimental_distribute_dataset(dataset()):
            distributed(batch)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Returns a function that returns the recording of a program on one device."""
    folder = tmp_path_factory.mktemp("one")

    def recording(program):
        path = folder / f"{program.__name__}.npz"
        if not path.exists():
            train(program, 1, str(path))
        return str(path)

    return recording


@pytest.mark.parametrize("program, bug, node", [
    (per_part, "rate", "update"), (of_each_kind, "", ""),
    (mixed_float16, "", ""), (mixed_float16, "other loss", "loss"),
])  # fmt: skip
def test_right_programs_are_clean_and_bugs_have_a_place(program, bug, node, one, tmp_path):
    train(program, 2, str(tmp_path / "two.npz"), bug, replay=one(program))
    verdict = compare(one(program), str(tmp_path / "two.npz"))
    assert node_of(verdict) == node, str(verdict)
    about = trace_file.load(one(program)).about
    assert about.computed_in == ("float16" if program is mixed_float16 else "")


def test_all_optimizers_that_a_loop_applies_are_recorded(tmp_path, one):
    train(per_part, 2, str(tmp_path / "two.npz"), given=slice(1), replay=one(per_part))
    verdict = compare(one(per_part), str(tmp_path / "two.npz"))
    assert verdict.status == "clean", str(verdict)
    about = trace_file.load(tmp_path / "two.npz").about
    weights = {v.name for v in about.variables if v.kind == "weight"}
    momentum = {v.of for v in about.variables if v.slot == "momentum"}
    for groups in about.settings:
        first, second = groups
        assert {*first["weights"], *second["weights"]} == weights
        assert first["learning_rate"] != second["learning_rate"]
        assert second["momentum"] == 0.9 and {*second["weights"]} <= momentum


def test_several_updates_of_a_weight_in_a_step_are_not_accused(one, tmp_path):
    train(several_updates, 2, str(tmp_path / "two.npz"), replay=one(several_updates))
    assert compare(one(several_updates), str(tmp_path / "two.npz")).status != "fault"
    names = trace_file.load(tmp_path / "two.npz").stored()
    assert any("/after/" in name for name in names) and not any("/raw/" in x for x in names)


def test_what_a_loop_must_do_to_be_recorded_is_told_in_a_line(tmp_path):
    def without_weights(num, bug):
        return keras.Sequential([layers.Dense(3)]), [momentum_sgd()], lambda *batch: None

    def of_embedding(num, bug):
        model, *others = per_part(num, bug)
        return keras.Sequential([keras.Input((5,)), model.layers[0]]), *others

    path = str(tmp_path / "none.npz")
    for program, options, told in (
        (per_part, {"jit_compile": True}, r"^jit_compile=True is around [^\n]* to record$"),
        (without_weights, {}, "has no weights yet; call the model with a batch before the block"),
        (of_embedding, {}, r"^a step updates \S+/kernel, [^\n]* list of all models"),
    ):
        with pytest.raises(ValueError, match=told):
            train(program, 1, path, **options)
