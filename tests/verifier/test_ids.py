"""Identities of examples that a script notes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import lockstep
from lockstep import record_keras
from lockstep.recorders.notes import Notes, note, numbers_of


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
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    optimizer, path = keras.optimizers.SGD(0.1), tmp_path / "one.npz"

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True)))
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    with record_keras.record(path, model, optimizer, steps=[7, 9], first_step=7) as recorder:
        recorded = tf.function(recorder.wrap(step))
        for number in range(3):
            record_keras.note("ids", np.arange(4 * number, 4 * number + 4))
            recorded(tf.ones((4, 4)))
    with np.load(path) as file:
        assert file["1/ids/0/0"].tolist() == [0, 1, 2, 3] and "3/ids/0/0" not in file
        assert file["2/ids/0/0"].tolist() == [8, 9, 10, 11]
