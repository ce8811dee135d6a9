"""Keras models that normalise or draw for each replica, beside a reference by parts."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from examples.keras_remedies import ReplicaDropout
from lockstep import compare
from lockstep.data.file import load
from lockstep.record_keras import record
from tests.small_models import mirrored
from tests.verifier.recorder_scripts.recording import node_of

BATCH, STEPS = 12, 2
RANDOM = np.random.default_rng(0)
FEATURES = RANDOM.normal(size=(36, 6)).astype(np.float32)
LABELS = RANDOM.integers(0, 3, 36)
PER_EXAMPLE = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
FIT_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def model_of(*parts):
    hidden = {"norm": keras.layers.BatchNormalization, "equal": lambda: keras.layers.Dropout(0.5),
              "own": lambda: ReplicaDropout(0.5),
              "penalty": lambda: keras.layers.ActivityRegularization(0.01)}  # fmt: skip
    layers = [hidden[part]() for part in parts]
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8), *layers, keras.layers.Dense(3)]
    )


def changed(model, bug, replica):
    """Makes mistakes after the update of a step."""
    for variable in model.non_trainable_variables:
        is_seed = "seed" in variable.path
        if bug.startswith("statistics") and "moving_mean" in variable.path:
            is_wrong = replica == int(bug.removeprefix("statistics of "))
            variable.assign(variable * (1 + 0.1 * tf.cast(is_wrong, tf.float32)))
        elif bug == "repeated" and is_seed:
            variable.assign(tf.zeros_like(variable))


def train(path, num, parts, bug="", with_fit=False, **options):
    """Trains and records a model on replicas; `bug` is made where there are several."""
    keras.utils.set_random_seed(1)
    strategy = mirrored(num)
    with strategy.scope():
        model, optimizer = model_of(*parts), keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)
        model.compile(optimizer, FIT_LOSS)
    data = tf.data.Dataset.from_tensor_slices((FEATURES, LABELS)).batch(BATCH)

    def step(features, labels):
        with tf.GradientTape() as tape:
            losses = PER_EXAMPLE(labels, model(features, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
            loss *= 2.0 if bug == "loss" and num > 1 else 1.0
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        if num > 1:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            changed(model, bug, replica)
        return loss

    with record(path, model, optimizer, **{"steps": STEPS, **options}) as recorder:
        if with_fit:
            model.fit(data, verbose=0, shuffle=False)
            return
        wrapped = recorder.wrap(step)

        @tf.function
        def distributed(batch):
            return strategy.run(wrapped, args=batch)

        for batch in strategy.experimental_distribute_dataset(data):
            distributed(batch)


@pytest.mark.parametrize("parts, bug, with_fit, status, node", [
    (("norm", "own"), "", False, "by design", ""),
    (("norm",), "", True, "by design", ""),
    (("own",), "", True, "clean", ""),
    (("norm", "own"), "loss", False, "fault", "loss"),
    (("norm",), "statistics of 0", False, "fault", "update"),
    (("norm", "own"), "statistics of 1", False, "fault", "update"),
    (("equal",), "", True, "fault", "random"),
    (("own",), "repeated", False, "fault", "random"),
])  # fmt: skip
def test_each_replica_computes_its_part(parts, bug, with_fit, status, node, tmp_path):
    one, two, of_parts = (str(tmp_path / f"{name}.npz") for name in ("one", "two", "parts"))
    train(one, 1, parts, with_fit=with_fit)
    train(two, 2, parts, bug, with_fit, replay=one)
    assert bug or compare(one, two).status == "not compared"
    train(of_parts, 1, parts, with_fit=with_fit, replay=two, shards="each")
    assert load(of_parts).about.draws_apart == ("own" in parts)
    verdict = compare(one, two, by_parts=of_parts)
    assert verdict.status == status, str(verdict)
    assert not node or node_of(verdict) == node, str(verdict)
    assert not any("statistics of other ranks" in note for note in verdict.notes)
    if bug == "statistics of 1":
        assert verdict.place.ranks == ("replica 1",)


def test_steps_that_were_not_recorded_may_have_trained_other_weights(tmp_path):
    one, two, of_parts = (str(tmp_path / f"{name}.npz") for name in ("one", "two", "parts"))
    train(one, 1, ("norm",), steps=[2])
    train(two, 2, ("norm",), replay=one, steps=[2])
    train(of_parts, 1, ("norm",), replay=two, shards="each", steps=[2])
    verdict = compare(one, two, by_parts=of_parts)
    assert verdict.status == "by design", str(verdict)
    assert verdict.notes[0].startswith("the start of step 2: layers that mix or draw")
    assert len(verdict.notes) == 1


def test_a_counter_is_no_generator(tmp_path):
    class Counted(keras.layers.Layer):
        def build(self, shape):
            self.steps = self.add_weight(shape=(), dtype="int32", trainable=False)

        def call(self, x):
            self.steps.assign(self.steps + 1)
            return x

    for number in (1, 2):
        keras.utils.clear_session()  # In a process of its own, names begin anew.
        strategy = mirrored(number)
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), Counted(), keras.layers.Dense(3)])
            model.compile("sgd", FIT_LOSS)
        data = tf.data.Dataset.from_tensor_slices((FEATURES, LABELS)).batch(BATCH)
        replay = {"replay": str(tmp_path / "1.npz")} if number > 1 else {}
        with record(str(tmp_path / f"{number}.npz"), model, steps=STEPS, **replay):
            model.fit(data, verbose=0, shuffle=False)
    verdict = compare(str(tmp_path / "1.npz"), str(tmp_path / "2.npz"))
    assert verdict.status == "clean", str(verdict)


def test_what_cannot_be_computed_by_parts_is_refused(tmp_path):
    one = str(tmp_path / "one.npz")
    train(one, 2, ("norm",))
    synchronised = keras.Sequential(
        [keras.Input((6,)), keras.layers.BatchNormalization(synchronized=True)]
    )
    synchronised.compile("sgd", "mse")
    several = [model_of("norm"), keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])]
    for told, model, given in (
        ("shards='each': must be 'each', with replay=", model_of("norm"), {}),
        ("shards='each': batch_normalization.* is synchronised", synchronised, {"replay": one}),
        ("shards='each': needs one model, .*; record without shards=", several, {"replay": one}),
    ):
        options = {"steps": STEPS, "shards": "each", **given}
        with pytest.raises(ValueError, match=told):
            record(str(tmp_path / "x.npz"), model, keras.optimizers.SGD(), **options).__enter__()
    options = {"with_fit": True, "replay": one, "shards": "each"}
    with pytest.raises(ValueError, match=r"^shards='each': layers add losses of [^\n]* shards=$"):
        train(str(tmp_path / "x.npz"), 1, ("norm", "penalty"), **options)
