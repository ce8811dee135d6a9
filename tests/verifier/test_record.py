"""`lockstep.record`: finds the framework, and records only when a variable says so."""

import json

import keras
import numpy as np
import pytest

import lockstep
from lockstep.data.file import load
from tests.conftest import assert_ok, run_python


@pytest.fixture
def model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


def fit(model):
    model.fit(np.ones((8, 3), "float32"), np.ones((8, 2), "float32"), batch_size=4, verbose=0)


def ask(monkeypatch, path, **given):
    options = {"path": str(path), "steps": [0], "replay": None, "permute": None, **given}
    monkeypatch.setenv("LOCKSTEP_RECORD", json.dumps(options))


def test_without_the_command_nothing_is_recorded_and_nothing_is_changed(model, tmp_path):
    before = dict(vars(model))
    with lockstep.record(model, steps=3) as recorder:
        assert vars(model) == before
        assert recorder.wrap(fit) is fit  # What a custom loop calls.
        fit(model)


@pytest.mark.parametrize("has_block", [True, False])
def test_with_the_command_a_model_of_keras_is_recorded(has_block, model, monkeypatch, tmp_path):
    ask(monkeypatch, tmp_path / "one.npz", modules=False)
    recorder = lockstep.record(model, steps=3)
    if has_block:
        with recorder:
            fit(model)
    else:
        recorder.start()
        with pytest.raises(RuntimeError, match="has begun already"), recorder:
            pass
        fit(model)
        recorder.stop()
    trace = load(tmp_path / "one.npz")
    assert trace.about.framework == "keras" and tuple(trace.steps) == (0,)


@pytest.mark.parametrize(
    "arguments, options, told",
    [
        ((), {}, "model: None cannot be recorded"),
        ((3, 4), {}, "model: an object of the type int cannot be recorded"),
        ((fit,), {}, "model: an object of the type function cannot be recorded"),
        ((), {"path": "one.npz"}, "path: is given by `python -m lockstep run`"),
    ],
)
def test_a_wrong_argument_is_told_in_one_line(arguments, options, told):
    with pytest.raises(ValueError, match=told) as raised:
        lockstep.record(*arguments, **options)
    assert "\n" not in str(raised.value)


def test_another_backend_of_keras_is_told(model, monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ValueError, match="model: Keras has the backend jax"):
        lockstep.record(model)


def test_no_framework_is_imported():
    code = (
        "import sys, lockstep\n"
        "try: lockstep.record(3)\n"
        "except ValueError:\n"
        "    assert not {'numpy', 'tensorflow', 'keras', 'torch', 'jax'} & {*sys.modules}"
    )
    assert_ok(run_python("-c", code))
