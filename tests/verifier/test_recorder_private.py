"""The private names that recorders use: they exist, do what is relied on, and are in one file."""

import re

import keras
import pytest
import tensorflow as tf

from lockstep.recorders.common import Hooks
from lockstep.recorders.keras import private
from tests.conftest import ROOT
from tests.verifier.recorder_scripts import FOLDER, needs, run_script

FILES = [
    ROOT / "lockstep" / "recorders" / each / "private.py" for each in ("torch", "jax", "keras")
]


def missing(function, *arguments, **options):
    with pytest.raises(RuntimeError) as raised:
        function(*arguments, **options)
    versions = f"record_keras: Keras {keras.__version__} on TensorFlow {tf.__version__}"
    text = str(raised.value)
    assert text.startswith(f"{versions} has no ") and "\n" not in text, text


def test_only_one_file_for_each_framework_uses_private_names():
    names = {x for path in FILES for x in re.findall(r'[."](_[a-z]\w+)\b', path.read_text("utf-8"))}
    assert {"_buffers", "_src", "_flatten_layers", "_clip_gradients"} <= names
    of_framework = "|".join(sorted(names))
    used = re.compile(
        rf'(?<!self)\._({of_framework.replace("|_", "|").removeprefix("_")})\b|"({of_framework})"'
        r"|keras\.src|tensorflow\.python|jax\._src|torch\.utils\._"
    )
    for path in (ROOT / "lockstep").rglob("*.py"):
        if path not in FILES:
            assert not used.search(path.read_text("utf-8")), path


@pytest.mark.slow
@pytest.mark.parametrize(
    "framework", [pytest.param(name, marks=needs(name)) for name in ("torch", "jax")]
)
def test_names_of_torch_and_jax(framework):
    done = run_script(framework, FOLDER / "private_names.py", framework)
    assert done.stdout == "checked\n", done.stdout + done.stderr


def test_names_of_models_and_layers():
    dropout = keras.layers.Dropout(0.5)
    dense = keras.layers.Dense(2, kernel_regularizer=keras.regularizers.L2(0.5))
    model = keras.Sequential([keras.Input((3,)), dense, dropout])
    assert private.layers_of(model, include_self=False)[-2:] == [dense, dropout]
    assert not private.layers_in(dense) and dense in private.layers_in(model)
    expected = 0.5 * tf.reduce_sum(tf.square(dense.kernel.value))
    assert float(private.regularisation(model)) == pytest.approx(float(expected))
    for function in (private.layers_of, private.layers_in, private.weights_of):
        missing(function, object())


def test_names_of_optimizers():
    weights = [keras.Variable([1.0], name=name) for name in ("a", "b")]
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay([weights[1]])
    optimizer.build(weights)
    assert [w is own for w, own in zip(private.weights_of(optimizer), weights, strict=True)]
    assert [private.weight_decay_of(optimizer, weight) for weight in weights] == [0.5, 0.0]
    seen = []

    def note(inner, *arguments):
        seen.append(inner.__name__)
        return inner(*arguments)

    with Hooks() as hooks:
        private.hook_update(hooks, optimizer, note, note, note)
        optimizer.apply([tf.ones(1), tf.ones(1)])
    # Gradients are reduced under a strategy only, where the tests of the recorder see it.
    assert seen[:2] == ["_backend_apply_gradients", "_clip_gradients"], seen
    missing(private.hook_update, Hooks(), object(), note, note, note)


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
