"""The private names that recorders use: a missing one is told, and they are in one file."""

import re

import keras
import pytest
import tensorflow as tf

from lockstep.recorders.common import Hooks
from lockstep.recorders.keras import private
from tests.conftest import ROOT

# JAX is recorded by its public names alone.
FILES = [ROOT / "lockstep" / "recorders" / each / "private.py" for each in ("torch", "keras")]
FRAMEWORK = r"\b(?:torch|jax|keras|tensorflow)\b[\w.]*"
USES = (  # Of a name of a framework's module, of an attribute, of one that is asked for by a text.
    rf"({FRAMEWORK}\._[a-z]\w*)",
    rf"from ({FRAMEWORK} import .*\b_[a-z]\w*)",
    r"(\bkeras\.src\b|\btensorflow\.python\b)",
    r"\.(_[a-z]\w*)",
    r'(?:getattr|hasattr|setattr|hook|private|attribute|method)\([^()"]*"(_[a-z]\w*)"',
)
DEFINES = r"(?:\bdef |\bclass |\bself\.(?=[^=(]*=[^=])|^ *|, )(_[a-z]\w*)"
OF_TUPLES = {"_replace", "_asdict", "_fields"}


def uses_in(text):
    return [name for use in USES for name in re.findall(use, text)]


def test_only_one_file_for_each_framework_uses_private_names():
    texts = {path: path.read_text("utf-8") for path in (ROOT / "lockstep").rglob("*.py")}
    known = {name for path in FILES for name in uses_in(texts.pop(path))}
    assert {"_fsdp_param_group", "_flatten_layers", "torch.utils import _pytree"} <= known
    own = {name for text in texts.values() for name in re.findall(DEFINES, text, re.M)}
    found = [(path, name) for path in texts for name in uses_in(texts[path])]
    left = [(path, name) for path, name in found if name not in own | OF_TUPLES]
    assert not left, f"move to private.py: {left}"


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
