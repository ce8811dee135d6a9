"""Custom loops of Keras: several optimizers, float16, and layers that differ by replica."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from examples.keras_remedies import ReplicaDropout
from lockstep import compare
from lockstep.data.file import load
from lockstep.record_keras import record
from tests.small_models import mirrored, momentum_sgd

layers, optimizers = keras.layers, keras.optimizers
BATCH, STEPS = 12, 3
RANDOM = np.random.default_rng(0)
TOKENS = RANDOM.integers(0, 20, (36, 5)).astype(np.int32)
FEATURES = RANDOM.normal(size=(36, 6)).astype(np.float32)
LABELS = RANDOM.integers(0, 3, 36)
PER_EXAMPLE = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)


def classifier(*hidden, **options):
    first = layers.Dense(8, activation="tanh")
    return keras.Sequential([keras.Input((6,)), first, *hidden, layers.Dense(3, **options)])


def gradients_of(model, x, labels, scale=lambda loss: loss):
    with tf.GradientTape() as tape:
        losses = PER_EXAMPLE(labels, model(x, training=True))
        loss = scale(tf.nn.compute_average_loss(losses, global_batch_size=BATCH))
    return tape.gradient(loss, model.trainable_variables)


def per_part():
    """An optimizer for the embedding, and one for the other layers."""
    parts = layers.Embedding(20, 4), layers.GlobalAveragePooling1D(), layers.Dense(3)
    model = keras.Sequential([keras.Input((5,)), *parts])
    first, second = optimizers.Adam(0.01), momentum_sgd()

    def step(_, tokens, labels):
        embedding, *others = gradients_of(model, tokens, labels)
        first.apply([embedding], model.trainable_variables[:1])
        second.apply(others, model.trainable_variables[1:])

    return model, [first, second], step


def mixed_float16():
    """A loss scale."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = classifier(dtype="float32")
    finally:
        keras.config.set_dtype_policy("float32")
    optimizer = optimizers.LossScaleOptimizer(momentum_sgd())

    def step(x, _, labels):
        gradients = gradients_of(model, x, labels, optimizer.scale_loss)
        optimizer.apply(gradients, model.trainable_variables)

    return model, [optimizer], step


def several_updates():
    """Applies two gradients in a step, one after the other."""
    model, optimizer = classifier(), momentum_sgd()

    def step(x, _, labels):
        for _ in range(2):
            optimizer.apply(gradients_of(model, x, labels), model.trainable_variables)

    return model, [optimizer], step


def of_each_kind():
    """An optimizer for weights and one for biases, which Keras has as one."""
    model, biases, weights = classifier(), optimizers.Adam(0.01), momentum_sgd()
    both = optimizers.MultiOptimizer(lambda weight: biases if "bias" in weight.path else weights)

    def step(x, _, labels):
        both.apply(gradients_of(model, x, labels), model.trainable_variables)

    return model, [both], step


def norm_and_dropout(is_wrong=False):
    """Both compute on the examples of a replica; if it is wrong, replica 1 changes statistics."""
    model = classifier(layers.BatchNormalization(name="norm"), ReplicaDropout(0.5))
    optimizer = momentum_sgd()

    def step(x, _, labels):
        if tf.size(x) > 1000:  # AutoGraph converts it, recorded or not.
            x *= 2
        optimizer.apply(gradients_of(model, x, labels), model.trainable_variables)
        if is_wrong:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            mean = model.get_layer("norm").moving_mean
            mean.assign(mean * (1 + 0.1 * tf.cast(replica == 1, tf.float32)))

    return model, [optimizer], step


def dataset():
    return tf.data.Dataset.from_tensor_slices((FEATURES, TOKENS, LABELS)).batch(BATCH)


def train(program, num, path, given=slice(None), jit_compile=None, **options):
    """Records a training on replicas, and returns its final bits.

    Of the optimizers, the recorder gets those that `given` says.
    """
    keras.utils.set_random_seed(1)
    strategy = mirrored(num)
    with strategy.scope():
        model, all_optimizers, step = program()
    with record(path, model, all_optimizers[given], **{"steps": STEPS, **options}) as recorder:
        wrapped = recorder.wrap(step)
        run = tf.function(lambda batch: strategy.run(wrapped, args=batch), jit_compile=jit_compile)
        for batch in strategy.experimental_distribute_dataset(dataset()):
            run(batch)
    return [v.numpy().tobytes() for owner in (model, *all_optimizers) for v in owner.variables]


def trained(program, folder, wrong=None, given=slice(None), **options):
    """Records a program on one device, and it or a wrong one on two; returns both paths."""
    one, two = str(folder / "one.npz"), str(folder / "two.npz")
    train(program, 1, one, **options)
    train(wrong or program, 2, two, given, replay=one, **options)
    return one, two


@pytest.mark.parity
def test_recording_changes_no_bit(tmp_path):
    bits = train(norm_and_dropout, 2, None)
    assert bits == train(norm_and_dropout, 2, str(tmp_path / "one.npz"), steps=[0, 2])


@pytest.mark.parametrize("program, dtype", [(of_each_kind, ""), (mixed_float16, "float16")])
def test_right_programs_are_clean(program, dtype, tmp_path):
    one, two = trained(program, tmp_path)
    verdict = compare(one, two)
    assert verdict.status == "clean", str(verdict)
    assert load(two).about.computed_in == dtype


def test_all_optimizers_that_a_loop_applies_are_recorded(tmp_path):
    one, two = trained(per_part, tmp_path, given=slice(1))
    verdict = compare(one, two)
    assert verdict.status == "clean", str(verdict)
    about = load(two).about
    weights = {v.name for v in about.variables if v.kind == "weight"}
    momentum = {v.of for v in about.variables if v.slot == "momentum"}
    for first, second in about.settings:
        assert {*first["weights"], *second["weights"]} == weights
        assert first["learning_rate"] != second["learning_rate"]
        assert second["momentum"] == 0.9 and {*second["weights"]} <= momentum


def test_several_updates_of_a_weight_in_a_step_are_not_accused(tmp_path):
    one, two = trained(several_updates, tmp_path)
    assert compare(one, two).status != "fault"
    names = load(two).stored()
    assert any("/after/" in name for name in names) and not any("/raw/" in x for x in names)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_each_replica_computes_its_part(is_wrong, tmp_path):
    wrong, steps = functools.partial(norm_and_dropout, is_wrong), [0, 1] if is_wrong else [2]
    one, two = trained(norm_and_dropout, tmp_path, wrong, steps=steps)
    parts = str(tmp_path / "parts.npz")
    train(norm_and_dropout, 1, parts, steps=steps, replay=two, shards="each")
    assert load(parts).about.draws_apart
    verdict = compare(one, two, by_parts=parts)
    if is_wrong:
        assert (verdict.status, verdict.place.node) == ("fault", "update"), str(verdict)
        assert verdict.place.ranks == ("replica 1",)
    else:  # Steps that were not recorded may have trained other weights, which is a note.
        assert (verdict.status, verdict.place.node) == ("by design", "outputs"), str(verdict)
        assert len(verdict.notes) == 1


def test_what_a_loop_must_do_to_be_recorded_is_told_in_a_line(tmp_path):
    def without_weights():
        return keras.Sequential([layers.Dense(3)]), [momentum_sgd()], lambda *batch: None

    def of_embedding():
        model, *others = per_part()
        return keras.Sequential([keras.Input((5,)), model.layers[0]]), *others

    path = str(tmp_path / "none.npz")
    for program, options, told in (
        (per_part, {"jit_compile": True}, r"^jit_compile=True is around [^\n]* to record$"),
        (without_weights, {}, "has no weights yet; call the model with a batch before the block"),
        (of_embedding, {}, r"^a step updates \S+/kernel, [^\n]* list of all models"),
    ):
        with pytest.raises(ValueError, match=told):
            train(program, 1, path, **options)


def test_what_cannot_be_computed_by_parts_is_told_in_a_line(tmp_path):
    one, own = str(tmp_path / "one.npz"), str(tmp_path / "own.npz")
    train(several_updates, 1, one, steps=1)
    for told, layer in (
        ("is synchronised", layers.BatchNormalization(synchronized=True)),
        ("^shards='each': layers add losses of ", layers.ActivityRegularization(l1=0.01)),
    ):

        def program(layer=layer):
            model = classifier(layer)
            return model, [momentum_sgd()], lambda x, _, labels: gradients_of(model, x, labels)

        with pytest.raises(ValueError, match=told):
            train(program, 1, own, steps=1, replay=one, shards="each")
