"""Small trainings that are recorded once, arrays of them to edit, and their verification."""

import copy
import dataclasses
import functools
import pathlib
import tempfile

import keras
import numpy as np

from app.data.input_pipeline import train_batch, train_dataset
from app.options.fault import Fault
from app.training.fault_injection import inject_data_fault, inject_fault
from app.verification.diagnosis import explain
from app.verification.measurement import first_mismatch
from app.verification.memory_trace import MemoryTrace
from app.verification.recorder import Recorder
from app.verification.reference import Reference
from app.verification.split import KINDS_OF_A_SHARD, Split
from app.verification.step_context import StepContext
from app.verification.step_start import find_shards, state_before
from app.verification.straggler import find_straggler
from app.verification.trace import KINDS, PARTS, Trace, hash_examples
from app.verification.trace_checker import TraceChecker
from app.verification.verdict import StrategyVerdict
from conftest import CPUS
from models.resnet import build_resnet
from small_models import seeded
from strategies import load_strategy_class

NUM_STEPS = 3
SEED = 3
GLOBAL_BATCH_SIZE = 15  # Uneven shards for 2 and 4 replicas; 40 examples leave 10 in step 3.
IMAGES = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 1), dtype=np.uint8)
LABELS = (np.arange(40) % 10).astype(np.uint8)

# Name → strategy, number of devices and options.
SPLITS = {
    "single": ("single", 1, {}),
    "manual": ("manual", 2, {}),
    "mirrored": ("mirrored", 3, {}),
    "multi_worker": ("multi_worker", 2, {}),
    "sharded": ("sharded", 3, {}),
    "sharded gradients": ("sharded", 2, {"shard": "gradients"}),
    "sharded state": ("sharded", 3, {"shard": "optimizer"}),
    "pipeline": ("pipeline", 2, {"micro_batches": 4}),
    "pipeline 2 × 2": ("pipeline", 4, {"micro_batches": 2, "model_parallel": 2}),
    "tensor": ("tensor", 3, {}),
    "tensor 2 × 2": ("tensor", 4, {"model_parallel": 2}),
    "accumulation": ("single", 1, {"accumulate_steps": 4}),
    "accumulation 2 × 2": ("manual", 2, {"accumulate_steps": 2}),
    "mirrored accumulation": ("mirrored", 2, {"accumulate_steps": 2}),
    "weighted": ("manual", 2, {"shard_weights": (3, 1)}),
    "bfloat16": ("manual", 2, {"communication_dtype": "bfloat16"}),
    "sync manual": ("manual", 2, {"batch_norm": "sync"}),
    "sync mirrored": ("mirrored", 3, {"batch_norm": "sync"}),
    "sync sharded": ("sharded", 2, {"batch_norm": "sync"}),
}


def plain():
    """Builds a backward pass that goes through a gather of channels, and of flat channels."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1), dtype="uint8"),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(4, 3, strides=2, activation="relu", name="conv1"),
            keras.layers.Conv2D(5, 2, activation="relu", name="conv2"),
            keras.layers.Flatten(),
            keras.layers.Dense(10, name="logits"),
        ],
        name="plain",
    )


def norm():
    """Builds a network with BatchNorm, so that shards have their own statistics."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1), dtype="uint8"),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(4, 3, strides=2, use_bias=False, name="conv"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.ReLU(name="relu"),
            keras.layers.Flatten(name="flat"),
            keras.layers.Dense(10, name="logits"),
        ],
        name="norm",
    )


def residual():
    """Builds one residual block, whose tolerance is wide: rounding tips over its ReLUs."""
    images = keras.Input((8, 8, 1), dtype="uint8")
    options = {"stage_widths": (4,), "blocks_per_stage": 1, "num_classes": 10}
    network = build_resnet(name="one_block", image_shape=(8, 8, 1), **options)
    return keras.Model(images, network(keras.layers.Rescaling(1 / 255)(images)))


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)


@functools.cache
def reference(build, dtype, *, mean_of_squares=False):
    return Reference(seeded(build), sgd, dtype, mean_of_squares=mean_of_squares)


@functools.cache
def batch(step):
    """Returns the global batch of a step."""
    return train_batch(
        IMAGES, LABELS, seed=SEED, global_batch_size=GLOBAL_BATCH_SIZE, step=step - 1
    )


def batches(seed=SEED):
    return train_dataset(IMAGES, LABELS, seed=seed, global_batch_size=GLOBAL_BATCH_SIZE)


@dataclasses.dataclass
class Training:
    """What a training has recorded.

    Attributes:
        build: builds its network.
        split: its numbers of replicas, shards and copies.
        arrays: step and kind → for each shard, or copy of the weights, name → array.
        times: when each replica sent its gradients.
    """

    build: object
    split: Split
    arrays: dict
    times: list

    @property
    def num_steps(self):
        return max(step for step, _ in self.arrays)

    @property
    def parts(self):
        """Shapes of each device's parts of the weights."""
        return self.trace().parts()

    def edited(self, edit):
        """Returns a copy with some arrays changed."""
        changed = dataclasses.replace(self, arrays=copy.deepcopy(self.arrays))
        edit(changed)
        return changed

    def trace(self):
        trace = MemoryTrace(self.num_steps, self.split)
        trace.first_step = 1
        for (step, kind), per_item in self.arrays.items():
            trace.write(step, kind, per_item)
        return trace

    def state_before(self, step):
        return state_before(self.trace(), step)

    def shards(self, step):
        """Returns the rows of each shard in the batch of a step."""
        return find_shards(self.trace(), step, *batch(step))[0]

    def compute(self, step, *, state=(), rows=None, forward=None):
        """Computes the contributions of shards in float32, on one device.

        Args:
            step: number of the step.
            state: changes to the state before the step.
            rows: the rows of each shard; None for those of the training.
            forward: see `Reference.gradients`.
        """
        before = {**self.state_before(step), **dict(state)}
        shards = self.shards(step) if rows is None else rows
        return reference(self.build, "float32").gradients(
            before, *batch(step), shards, forward=forward
        )

    def check(self, *, last_step=NUM_STEPS, communication_dtype="float32", references=None):
        """Verifies the steps up to a last one, by default with the references of its network."""
        trace = self.trace()
        reference64, reference32 = references or (
            reference(self.build, dtype) for dtype in ("float64", "float32")
        )
        synchronized = None
        if self.split.syncs_batch_norm:
            synchronized = reference(self.build, "float32", mean_of_squares=True)
        checker = TraceChecker(
            reference64,
            reference32,
            mean_of_squares=synchronized,
            communication_dtype=communication_dtype,
        )
        measurements = checker.check(trace, map(batch, range(1, last_step + 1)))
        mismatch = first_mismatch(measurements)
        context = StepContext(
            trace, measurements, batch, lambda: hash_examples(IMAGES, LABELS), reference64
        )
        diagnosis = mismatch and explain(context, mismatch)
        straggler = find_straggler(self.times)
        return StrategyVerdict("x", measurements, mismatch, diagnosis, straggler, self.split)


def create(split):
    name, num_devices, options = SPLITS[split]
    strategy = load_strategy_class(name)(CPUS[:num_devices], **options)
    assert strategy.num_devices == num_devices
    return strategy


@functools.cache
def recorded(split, build=plain):
    """Records a training without a fault, once."""
    return record(split, build)


def record(split, build, *, fault="", num_steps=NUM_STEPS):
    """Records a training."""
    strategy, dataset, observer = create(split), batches(), None
    declared = Split.of(strategy)
    strategy.build(seeded(build), sgd)
    if fault:
        fault = Fault.parse(fault)
        observer = inject_fault(
            fault, strategy, batch_sizes={GLOBAL_BATCH_SIZE, 10}, num_steps=num_steps
        )
        observer.begin()
        dataset = inject_data_fault(fault, batches, strategy, seed=SEED)
    recorder = Recorder(strategy, observer)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "trace"
        times = recorder.record(strategy.distribute(dataset), num_steps=num_steps, path=path)
        with Trace(path, syncs_batch_norm=declared.syncs_batch_norm) as trace:
            assert trace.split == declared
            return Training(build, trace.split, read_all(trace), times)


def read_all(trace):
    """Returns step and kind → for each shard, or copy of the weights, name → array."""
    arrays = {}
    for step in range(trace.first_step - 1, trace.num_steps + 1):
        for kind in KINDS.keys() - {"updates", "agreement"}:
            count = trace.num_shards if kind in KINDS_OF_A_SHARD else trace.num_copies
            if tensors := trace.tensors(step, kind):
                arrays[step, kind] = [
                    {tensor: trace.read(step, kind, i, tensor) for tensor in tensors}
                    for i in range(1 if kind == "statistics" else count)
                ]
    parts = [{name: np.array(shape) for name, shape in part.items()} for part in trace.parts()]
    return arrays | ({(trace.first_step, PARTS): parts} if parts else {})
