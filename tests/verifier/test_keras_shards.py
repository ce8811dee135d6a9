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

BATCH, STEPS = 12, 2
RANDOM = np.random.default_rng(0)
FEATURES = RANDOM.normal(size=(36, 6)).astype(np.float32)
LABELS = RANDOM.integers(0, 3, 36)
PER_EXAMPLE = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
FIT_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Counted(keras.layers.Layer):
    def build(self, shape):
        self.steps = self.add_weight(shape=(), dtype="int32", trainable=False)

    def call(self, x):
        self.steps.assign(self.steps + 1)
        return x


HIDDEN = {
    "norm": (keras.layers.BatchNormalization, {}),
    "synchronised": (keras.layers.BatchNormalization, {"synchronized": True}),
    "own": (ReplicaDropout, {"rate": 0.5}),
    "penalty": (keras.layers.ActivityRegularization, {"l1": 0.01}),
    "counted": (Counted, {}),
}


def model_of(*parts):
    hidden = [kind(**options) for kind, options in (HIDDEN[part] for part in parts)]
    first, last = keras.layers.Dense(8), keras.layers.Dense(3)
    return keras.Sequential([keras.Input((6,)), first, *hidden, last])


def changed(model, bug, replica):
    """Makes mistakes after the update of a step."""
    for variable in model.non_trainable_variables:
        if bug == "statistics" and "moving_mean" in variable.path:
            variable.assign(variable * (1 + 0.1 * tf.cast(replica == 1, tf.float32)))
        elif bug == "repeated" and "seed" in variable.path:
            variable.assign(tf.zeros_like(variable))


def batches():
    return tf.data.Dataset.from_tensor_slices((FEATURES, LABELS)).batch(BATCH)


def train(path, num, parts, bug="", **options):
    """Trains and records a model on replicas; `bug` is made where there are several."""
    keras.utils.set_random_seed(1)
    strategy = mirrored(num)
    with strategy.scope():
        model, optimizer = model_of(*parts), keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(model.trainable_variables)

    def step(features, labels):
        with tf.GradientTape() as tape:
            losses = PER_EXAMPLE(labels, model(features, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        if num > 1:
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            changed(model, bug, replica)

    with record(path, model, optimizer, **{"steps": STEPS, **options}) as recorder:
        wrapped = recorder.wrap(step)

        @tf.function
        def distributed(batch):
            strategy.run(wrapped, args=batch)

        for batch in strategy.experimental_distribute_dataset(batches()):
            distributed(batch)


def fit(path, num, parts, **options):
    keras.utils.clear_session()  # In a process of its own, names begin anew.
    keras.utils.set_random_seed(1)
    with mirrored(num).scope():
        model = model_of(*parts)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), FIT_LOSS)
    with record(path, model, steps=STEPS, **options):
        model.fit(batches(), verbose=0, shuffle=False)


def three(folder, parts, bug="", **options):
    """Records one device, two, and one that computes the parts of these two."""
    one, two, of_parts = (str(folder / f"{name}.npz") for name in ("one", "two", "parts"))
    train(one, 1, parts, **options)
    train(two, 2, parts, bug, replay=one, **options)
    train(of_parts, 1, parts, replay=two, shards="each", **options)
    return one, two, of_parts


@pytest.mark.parametrize("parts, bug, status, node, ranks", [
    (("norm", "own"), "", "by design", "outputs", ()),
    (("norm", "own"), "statistics", "fault", "update", ("replica 1",)),
    (("own",), "repeated", "fault", "random", ()),
])  # fmt: skip
def test_each_replica_computes_its_part(parts, bug, status, node, ranks, tmp_path):
    one, two, of_parts = three(tmp_path, parts, bug)
    assert bug or compare(one, two).status == "not compared"
    assert load(of_parts).about.draws_apart == ("own" in parts)
    verdict = compare(one, two, by_parts=of_parts)
    assert (verdict.status, verdict.place.node) == (status, node), str(verdict)
    assert not ranks or verdict.place.ranks == ranks


def test_steps_that_were_not_recorded_may_have_trained_other_weights(tmp_path):
    one, two, of_parts = three(tmp_path, ("norm",), steps=[2])
    verdict = compare(one, two, by_parts=of_parts)
    assert verdict.status == "by design" and len(verdict.notes) == 1, str(verdict)


def test_a_counter_is_no_generator(tmp_path):
    one, two = str(tmp_path / "one.npz"), str(tmp_path / "two.npz")
    fit(one, 1, ["counted"])
    fit(two, 2, ["counted"], replay=one)
    verdict = compare(one, two)
    assert verdict.status == "clean", str(verdict)


def test_what_cannot_be_computed_by_parts_is_refused(tmp_path):
    one = str(tmp_path / "one.npz")
    fit(one, 2, ["norm"])
    several = [model_of("norm"), keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])]
    for told, model, replay in (
        ("shards='each': must be 'each', with replay=", model_of("norm"), None),
        ("shards='each': batch_norm.* is synchronised", model_of("synchronised"), one),
        ("shards='each': needs one model, .*; record without shards=", several, one),
    ):
        options = {"steps": STEPS, "shards": "each", "replay": replay}
        with pytest.raises(ValueError, match=told):
            record(str(tmp_path / "x.npz"), model, keras.optimizers.SGD(), **options).__enter__()
    with pytest.raises(ValueError, match=r"^shards='each': layers add losses of [^\n]* shards=$"):
        fit(str(tmp_path / "x.npz"), 1, ("norm", "penalty"), replay=one, shards="each")
