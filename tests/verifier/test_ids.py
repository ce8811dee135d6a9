"""Identities of examples that a script notes, and what they tell of two trainings."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import lockstep
from lockstep import record_keras
from lockstep.recorders.notes import Notes, note, numbers_of
from tests.verifier import shown


def test_identities_are_numbers_or_hashes():
    assert numbers_of([3, 1]).tolist() == numbers_of(np.array([3, 1])).tolist() == [3, 1]
    rows = np.arange(6.0).reshape(3, 2)
    for values in (["a", "b", "a"], [b"a", b"b", b"a"], rows[[0, 1, 0]], tf.constant(rows)[:2]):
        first, second, *third = numbers_of(values).tolist()
        assert first != second and third in ([], [first]) and min(first, second) >= 0
    assert numbers_of(["a"]) == numbers_of([b"a"])
    with pytest.raises(ValueError, match="unknown kind 'id'; use 'ids'"):
        note("id", [1])


def test_a_note_belongs_to_the_step_that_gets_the_examples():
    note("ids", [1])  # Nothing is recorded.
    is_ended = False
    with Notes(lambda: is_ended) as notes:
        note("ids", [1])
        lockstep.note("ids", [2])
        is_ended = True
        note("ids", [3])
        assert np.concatenate(notes.take()).tolist() == [1, 2]
    note("ids", [4])
    assert np.concatenate(notes.take()).tolist() == [3] and not notes.take()


def test_ids_of_keras(tmp_path):
    def record(name, seed, steps, **options):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(0.1)
        path = tmp_path / name
        data, random = np.random.default_rng(1).normal(size=(12, 4)), np.random.default_rng(seed)
        with record_keras.record(path, model, optimizer, steps=steps, **options) as recorder:

            def step(x):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(model(x, training=True)))
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

            recorded = tf.function(recorder.wrap(step))
            for number in range(3):
                rows = np.arange(4 * number, 4 * number + 4)
                record_keras.note("ids", rows)
                x = data[rows] + 0.1 * random.normal(size=(4, 4))
                recorded(tf.constant(x, tf.float32))
        return str(path)

    one, two = record("one.npz", 0, [0, 2]), record("two.npz", 1, [0, 2])
    with np.load(two) as file:
        assert file["1/ids/0/0"].tolist() == [0, 1, 2, 3] and "3/ids/0/0" not in file
        assert file["2/ids/0/0"].tolist() == [8, 9, 10, 11]
    with np.load(record("resumed.npz", 0, 1, first_step=7)) as file:
        assert file["1/ids/0/0"].tolist() == [0, 1, 2, 3]
    assert shown(lockstep.compare(one, two)).startswith("fault: random: ")
