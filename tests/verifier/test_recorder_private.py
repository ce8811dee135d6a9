"""The private names that recorders use: they exist, do what is relied on, and are in one file."""

import ast
import re

import keras
import pytest
import tensorflow as tf

from lockstep.recorders.common import Hooks
from lockstep.recorders.keras import private
from tests.conftest import ROOT

# JAX is recorded by its public names alone.
FILES = [ROOT / "lockstep" / "recorders" / each / "private.py" for each in ("torch", "keras")]


def missing(function, *arguments, **options):
    with pytest.raises(RuntimeError) as raised:
        function(*arguments, **options)
    versions = f"record_keras: Keras {keras.__version__} on TensorFlow {tf.__version__}"
    text = str(raised.value)
    assert text.startswith(f"{versions} has no ") and "\n" not in text, text


def names_of(tree):
    """Yields line and private name of what a module imports, reads, or asks an object for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Attribute):
            is_module = ast.unparse(node).startswith(("keras.src", "tf.python"))
            names = [f"keras.src.{node.attr}" if is_module else f".{node.attr}"]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(ASKS):
            names = [f".{x.value}" for x in node.args if isinstance(x, ast.Constant)]
        else:
            continue
        yield from ((node.lineno, name) for name in names if re.search(PRIVATE, name))


def defined_in(tree):
    """Yields the names that a module defines, of which some are attributes of its objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield ast.unparse(node).removeprefix("self.")


ASKS = ("getattr", "hasattr", "setattr", "hook", "private", "attribute", "method")
PRIVATE = r"^(torch|jax|keras|tensorflow)\..*\b_[a-z]|\bkeras\.src\b|tensorflow\.python|^\._[a-z]"
OF_TUPLES = {"_replace", "_asdict", "_fields"}


def test_only_one_file_for_each_framework_uses_private_names():
    trees = {path: ast.parse(path.read_text("utf-8")) for path in (ROOT / "lockstep").rglob("*.py")}
    others = {path: tree for path, tree in trees.items() if path not in FILES}
    own = {f".{name}" for tree in others.values() for name in defined_in(tree)}
    own |= {f".{name}" for name in OF_TUPLES}
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name.removeprefix('.')}; move it to private.py"
        for path, tree in others.items() for line, name in names_of(tree) if name not in own
    ]  # fmt: skip
    assert not found, "\n".join(found)
    known = {name for path in FILES for _, name in names_of(trees[path])}
    assert {"._fsdp_param_group", "._flatten_layers", "torch.utils._pytree"} <= known


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
