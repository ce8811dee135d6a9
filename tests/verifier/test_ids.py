"""Identities of examples that a script notes; `rows.py` has what they tell."""

import numpy as np
import pytest
import tensorflow as tf

import lockstep
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
