"""A recording of PyTorch becomes a trace with the names of Keras, which one device confirms."""

import dataclasses

import keras
import numpy as np
import pytest

from app.runtime.errors import DataError
from app.verification.framework_trace import convert
from lockstep.data import file as trace_file
from lockstep.data.trace import STATISTIC, WEIGHT, Trace, Variable
from tests.verifier.verification_samples import Training, norm, record

TORCH_NAMES = {
    "kernel": "weight", "bias": "bias", "gamma": "weight", "beta": "bias",
    "moving_mean": "running_mean", "moving_variance": "running_var",
}  # fmt: skip
AXES = {4: (3, 2, 0, 1), 2: (1, 0)}
LAYOUTS = {4: "OIHW", 2: "OI", 1: ""}


def plain_sgd():
    return keras.optimizers.SGD(0.1)


def torch_name(name):
    *_, layer, last = name.split("/")
    return f"{layer}.{TORCH_NAMES[last]}"


def keras_variables(trace):
    return [v for v in trace.about.variables if v.kind in (WEIGHT, STATISTIC)]


def as_torch(arrays):
    return [np.transpose(a, AXES[a.ndim]) if a.ndim in AXES else a for a in arrays]


def as_recorded_by_torch(own):
    """Returns a trace of our own with the names, layouts and means of DistributedDataParallel."""
    before, kept = own.named(0, "before", 0), keras_variables(own)
    variables = [Variable(torch_name(v.name), v.kind, LAYOUTS[before[v.name].ndim]) for v in kept]
    about = dataclasses.replace(
        own.about, framework="torch", shards=(), num_copies=0, variables=tuple(variables),
        gradients=tuple(map(torch_name, own.about.gradients)), reduction="mean",
        data_layout="NCHW", settings=tuple([[{"learning_rate": 0.1}]] * len(own.steps)),
    )  # fmt: skip
    trace = Trace(about)
    for step, replica in ((s, r) for s in range(len(own.steps)) for r in own.shards):
        images, labels = own.arrays(step, "data", replica)
        trace.put(step, "data", replica, [np.transpose(images, (0, 3, 1, 2)), labels])
        trace.put(step, "loss", replica, [2 * own.arrays(step, "loss", replica)[0]])
        raw = [2 * gradient for gradient in own.arrays(step, "raw", replica)]
        trace.put(step, "raw", replica, as_torch(raw))
        trace.put(step, "sums", replica, as_torch(own.arrays(step, "sums", replica)))
        for when in ("before", "after"):
            state = own.named(step, when, replica) | own.named(step, f"own_{when}", replica)
            trace.put(step, when, replica, as_torch([state[v.name] for v in kept]))
    return trace


@pytest.fixture(scope="module")
def own():
    return record("manual", norm, optimizer=plain_sgd).trace


def test_a_recording_of_pytorch_is_that_of_a_strategy(own, tmp_path):
    before, names = own.named(0, "before", 0), {v.name for v in keras_variables(own)}
    start = {name: array for name, array in before.items() if name in names}
    path = tmp_path / "torch_ddp.npz"
    convert(as_recorded_by_torch(own), path, start, syncs_batch_norm=False)
    verdict = Training(trace_file.load(path), norm, plain_sgd).check()
    assert verdict.status == "clean", str(verdict)
    assert {"examples", "loss", "gradients", "update", "statistics"} <= set(verdict.checked)


def test_a_recording_of_another_model_is_one_line(own, tmp_path):
    start = {"other/kernel": np.zeros((5, 7), np.float32)}
    with pytest.raises(DataError, match="has no variable other/kernel; record the same model"):
        convert(as_recorded_by_torch(own), tmp_path / "x.npz", start, syncs_batch_norm=False)
