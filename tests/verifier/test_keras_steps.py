"""Recorded steps of Keras' `fit`: each row of the table, and what has no row."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import lockstep
from app.verification.case_evaluation import compare_evaluation
from lockstep.answer.verdict import BY_DESIGN, FAULT, NOT_COMPARED, STAGES
from lockstep.explain.tensors import why_tensor
from lockstep.record_keras import Recorder
from lockstep.stages.evaluation import check_evaluation
from tests.small_models import mirrored
from tests.verifier import check, shown
from tests.verifier.keras_copies import NAMED, REPLICAS, Copy
from tests.verifier.keras_faults import replicas
from tests.verifier.keras_models import (
    MODELS,
    OnlyFloat32,
    X,
    Y,
    batches_of,
    dropped,
    in_dtype,
    normalised,
    of_classes,
    one_device,
    plain,
    recorded,
)
from tests.verifier.keras_steps import ROWS
from tests.verifier.zoo.small import dense

layers = keras.layers


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_verdict(row):
    check(row)


@pytest.mark.parametrize("name", MODELS)
def test_models_of_all_kinds(name):
    build, _, expected = MODELS[name]
    trace = recorded(name)
    verdict = lockstep.compare(trace, model=build)  # In float64, if possible.
    assert shown(verdict) == "; ".join(expected), str(verdict)
    assert verdict.num_replicas == len(trace.copies) and verdict.steps == trace.steps
    assert "update" in verdict.checked and set(verdict.checked) <= STAGES.keys()
    wrong = {finding.stage for finding in verdict.findings}
    measured = [each for each in verdict.measurements if each.stage not in wrong]
    assert all(np.isfinite(each.distance) and each.is_within for each in measured)
    assert {"all-reduce", "update"} <= {each.stage for each in measured} or "update" in wrong
    assert (keras.config.floatx(), keras.config.dtype_policy().name) == ("float32", "float32")


def test_one_number_is_a_multiple_of_any_other():
    one, two = np.array([0.3, 0.0]), np.array([0.3, 0.2])
    assert why_tensor(1.7 * two, two, 0.0, 3)[0] == "scaled_gradient"
    assert why_tensor(1.7 * one, one, 0.0, 3)[0] == why_tensor(0.9 * one, one, 0.0, 3)[0]
    assert why_tensor(0.9 * one, one, 0.0, 3)[0] == "unexplained"
    assert why_tensor(one / 3, one, 0.0, 3)[0] == "scaled_gradient"  # A number that is known.


ONE = (1,)
# Kind → the stages that need it.
NEEDED_BY = {
    "y_pred": {"forward"}, "mask": set(), "loss": {"loss", "regularisation"},
    "raw": {"gradients", "clipping"}, "clipped": {"clipping"}, "sums": {"all-reduce"},
    "after": {"update", "statistics", "agreement"}, "data": {"examples", "gradients"},
    "before": {"start", "gradients", "update"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "lacking"),
    [*((kind, REPLICAS) for kind in NEEDED_BY), *((k, ONE) for k in ("data", "before", "raw"))],
)
def test_arrays_that_were_not_recorded(kind, lacking):
    """They make stages unchecked, not wrong."""
    faulty = Copy("normalised", (0, 1))
    for step, r in ((step, r) for step in faulty.steps for r in lacking):
        del step[kind, r]
    if kind in ("data", "before") and lacking == REPLICAS:
        with pytest.raises(ValueError, match="no examples or no state"):
            faulty.verdict()
        return
    verdict = faulty.verdict()
    assert verdict.ok, str(verdict)
    assert not NEEDED_BY[kind] & set(verdict.checked)


@pytest.mark.parametrize(
    ("logs", "options", "expected"),
    [
        ({}, {}, []),
        ({"mae": 1.01}, {}, [(FAULT, "other_metric", ("mae",))]),
        ({"loss": np.nan}, {}, [(FAULT, "other_evaluation", ("loss",))]),
        ({"loss": 2.1}, {"drawn": ["seed"]}, [(NOT_COMPARED, "random_evaluation", ("loss",))]),
        (
            {"loss": 2.1}, {"loss_of_local_states": lambda: 2.1},
            [(BY_DESIGN, "local_statistics", ("loss",))],
        ),
    ],
)  # fmt: skip
def test_evaluations(logs, options, expected):
    right = {"loss": 2.0, "mae": 1.0}
    findings = check_evaluation(right | logs, right, **options)
    assert [(f.status, f.detail, f.tensors) for f in findings] == expected
    assert all(f.stage == "evaluation" for f in findings)


def test_an_evaluation_is_that_of_the_first_state_and_prints_nothing(capsys):
    """Replicas have random states of their own; an evaluation draws from none."""
    model = keras.Sequential([layers.Input((4,)), layers.Dropout(0.5), layers.Dense(1)])
    model.compile("sgd", "mse")
    batches = tf.data.Dataset.from_tensor_slices((np.ones((8, 4)), np.ones((8, 1)))).batch(3)
    own = [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]
    seeds = [variable.path for variable in model.non_trainable_variables]
    assert len(seeds) == 1
    states = [own, [own[i] + (v.path in seeds) for i, v in enumerate(model.variables)]]
    states[1] += own[len(model.variables) :]
    loss = model.evaluate(batches, verbose=0)
    found = [compare_evaluation({"loss": n * loss}, model, states, batches) for n in (1, 1.1)]
    assert [[(f.status, f.detail) for f in own] for own in found] == [
        [], [(FAULT, "other_evaluation")],
    ]  # fmt: skip
    assert capsys.readouterr().out == ""


# Stage, kind and number of the array, replica.
SMALL = [
    ("forward", "y_pred", 0, 0), ("loss", "loss", 0, 1), ("regularisation", "loss", 1, 1),
    ("gradients", "raw", 0, 2), ("clipping", "clipped", 0, 0), ("all-reduce", "sums", 0, 1),
    ("update", "after", 0, 2), ("statistics", "after", 4, 0),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "kind", "number", "r"), SMALL)
def test_a_change_of_one_in_ten_thousand_is_found_on_its_replica(stage, kind, number, r):
    faulty = Copy("normalised")
    arrays = faulty.steps[0][kind, r]
    name = list(arrays)[number] if kind in NAMED else number
    arrays[name] = (arrays[name] * 1.0001).astype(np.float32)
    verdict = faulty.verdict(normalised)
    assert verdict.tolerance.startswith("float64 on one device")
    faults = [f for f in verdict.faults if f.stage == stage]
    expected = () if stage == "regularisation" else replicas(r)
    assert faults and {f.items for f in faults} == {expected}, str(verdict)
    if kind == "sums":
        assert faults[0].detail == "scaled_gradient" and "1.0001" in faults[0].text


@pytest.mark.parametrize(
    ("name", "build", "why_not"),
    [
        ("dropped", dropped, "random layers"),
        ("plain", lambda: dense(kind=OnlyFloat32), "in float64"),
        ("plain", lambda: in_dtype("mixed_bfloat16", plain), "does not compute in float32"),
        ("plain", lambda: dense(dtype="float32"), "sets its own dtype"),
    ],
)
def test_models_that_cannot_be_in_float64(name, build, why_not):
    verdict = Copy(name).verdict(build)
    assert "not float64" in verdict.tolerance and why_not in verdict.tolerance
    assert keras.config.floatx() == "float32"


def test_one_device_is_as_itself():
    model = plain()
    with Recorder(model, steps=2) as recorder:
        model.fit(batches_of((X, Y)), verbose=0)
    verdict = lockstep.compare(recorder, model=one_device("plain"))
    assert not verdict.findings and verdict.num_replicas == 1
    assert "only one replica" in verdict.notes[0]
    with mirrored(3).scope():
        other = plain()
    for wrong, message in {
        one_device("momentum"): r"the recording has .* variables",
        of_classes(keras.Sequential([layers.Dense(8), layers.Dense(3)])): "variable .* has shape",
        other: "outside of the strategy's scope",
        keras.Sequential([layers.Dense(2)]): "is not compiled",
    }.items():
        with pytest.raises(ValueError, match=message):
            lockstep.compare(recorder, model=wrong)
    with pytest.raises(ValueError, match="not both"):
        lockstep.compare(recorder, recorder, model=model)
    with Recorder(model) as recorder:
        pass
    with pytest.raises(ValueError, match="nothing was recorded"):
        lockstep.compare(recorder, model=plain())
