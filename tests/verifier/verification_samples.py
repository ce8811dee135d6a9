"""Small trainings with our strategies, recorded once, whose arrays tests edit."""

import dataclasses
import functools
import types

import keras
import numpy as np

from app.data.input_pipeline import batch_of_step, train_dataset
from app.options import Config
from app.options.fault import Fault
from app.training.fault_injection import inject_fault
from app.verification.recorder import StepRecorder
from app.verification.strategy_oracle import StrategyOracle
from lockstep.data.trace import Trace
from lockstep.run import check
from models.resnet import build_resnet
from tests.small_models import new_strategy, seeded

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
    "weighted": ("manual", 2, {"shard_weights": (3, 1), "label_smoothing": 0.1}),
    "bfloat16": ("manual", 2, {"communication_dtype": "bfloat16"}),
    "compiled": ("manual", 2, {"jit_compile": True}),
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
def batch(step):
    """Returns the global batch of a step, from 0."""
    return list(
        batch_of_step(IMAGES, LABELS, seed=SEED, global_batch_size=GLOBAL_BATCH_SIZE, step=step)
    )


def batches(seed=SEED):
    return train_dataset(IMAGES, LABELS, seed=seed, global_batch_size=GLOBAL_BATCH_SIZE)


ORACLES: dict[tuple, StrategyOracle] = {}


@dataclasses.dataclass
class Training:
    """A recorded training.

    Attributes:
        trace: its trace.
        build: builds its network.
        optimizer: creates its optimizer.
        precision: its dtype policy.
        label_smoothing: of its loss.
    """

    trace: Trace
    build: object
    optimizer: object = sgd
    precision: str = "float32"
    label_smoothing: float = 0.0

    def edited(self, edit, **about):
        """Returns a copy with some arrays or some of the description changed."""
        description = dataclasses.replace(self.trace.about, **about)
        trace = Trace(description, dict(self.trace.stored()))
        edit(trace)
        return dataclasses.replace(self, trace=trace)

    def oracle(self):
        """Returns the oracle, which trainings with the same network and split share."""
        about = self.trace.about
        key = (
            *(self.build, self.optimizer, self.precision, self.label_smoothing),
            *(about.shards, about.syncs_batch_norm, str(about.parts)),
        )
        if key not in ORACLES:
            spec = types.SimpleNamespace(
                build_model=seeded(self.build), create_optimizer=self.optimizer,
                label_smoothing=self.label_smoothing, augmentation="none",
                dataset=types.SimpleNamespace(train_images=IMAGES, train_labels=LABELS),
                config=Config.of(precision=self.precision),
            )  # fmt: skip
            ORACLES[key] = StrategyOracle(spec, self.trace)
        return ORACLES[key]

    def check(self, num_steps=NUM_STEPS):
        """Verifies the first steps, by default all."""
        trace = self.trace
        if num_steps < len(trace.steps):
            about = dataclasses.replace(trace.about, steps=trace.steps[:num_steps])
            trace = Trace(about, dict(trace.stored()))
        return check(trace, self.oracle(), batches=list(map(batch, trace.steps)), name="x")


@functools.cache
def recorded(split, build=plain, **options):
    """Records a training without a fault, once."""
    return record(split, build, **options)


def record(
    split, build=plain, *, fault="", observer=None, num_steps=NUM_STEPS, precision="float32",
    optimizer=sgd, begin=lambda strategy: None,
):  # fmt: skip
    """Records a training, with an injected fault or another observer."""
    name, num_devices, options = SPLITS[split]
    strategy = new_strategy(name, num_devices, **options)
    dataset = batches()
    assert strategy.num_devices == num_devices
    keras.config.set_dtype_policy(precision)
    try:
        strategy.build(seeded(build), optimizer)
    finally:
        keras.config.set_dtype_policy("float32")
    dtype = options.get("communication_dtype", "")
    recorder = StepRecorder(strategy, observer, communication_dtype=dtype)
    begin(strategy)
    if fault:
        fault = Fault.parse(fault)
        sizes = {GLOBAL_BATCH_SIZE, 10}
        inner = inject_fault(fault, strategy, batch_sizes=sizes, num_steps=num_steps)
        inner.begin()
        recorder.inner = inner
        dataset = inner.batches(batches, SEED)
    strategy.observer = recorder
    trace = Trace(recorder.about(range(num_steps)))
    iterator = strategy.distribute(dataset)
    for position in range(num_steps):
        recorder.record_step(trace, position, lambda: strategy.train_steps(iterator, 1))
    trace = Trace(recorder.about(range(num_steps)), trace.stored())
    return Training(trace, build, optimizer, precision, options.get("label_smoothing", 0.0))
