"""The private names of Keras and TensorFlow that its recorder uses; ruff keeps them in one file."""

import keras
import pytest
import tensorflow as tf

from lockstep.recorders.common import Hooks
from lockstep.recorders.keras import private


def test_a_name_that_keras_does_not_have_is_told_with_its_version():
    versions = f"record_keras: Keras {keras.__version__} on TensorFlow {tf.__version__}"
    for function, *arguments in (
        (private.layers_of, object()), (private.layers_in, object()),
        (private.weights_of, object()),
        (private.hook_update, Hooks(), object(), print, print, print),
    ):  # fmt: skip
        with pytest.raises(RuntimeError) as raised:
            function(*arguments)
        text = str(raised.value)
        assert text.startswith(f"{versions} has no ") and "\n" not in text, text


def test_names_of_traced_functions():
    seen = []

    def note():
        seen.append((private.is_in_xla(), private.is_in_branch()))
        return tf.zeros(())

    tf.function(note, jit_compile=True)()
    tf.function(lambda: tf.cond(tf.random.uniform(()) > 0.5, note, lambda: tf.zeros(())))()
    body = tf.function(lambda: tf.while_loop(lambda i: i < 1.0, lambda i: i + 1 + note(), [0.0]))
    body()
    assert seen == [(True, False), (False, True), (False, True)]
