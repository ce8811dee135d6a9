"""Flips random bits in memory and on disk, and looks what notices them: `make bit-flips`.

In memory: one bit of a weight, of the optimizer state, of a gradient on its way into the sum, or of
a training example, before a verified step of two replicas. On disk: one bit of a checkpoint, of a
trace or of a record. A flip that changes a result beyond rounding must be noticed and named.
"""

import argparse
import collections
import ctypes
import dataclasses
import math
import pathlib
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np
import tensorflow as tf

from app.config import TrainConfig
from app.data.synthetic import generate_synthetic
from app.devices.device_setup import Devices
from app.records.checkpoint import find_newest_checkpoint
from app.records.run_directory import RunDirectory
from app.runtime.errors import CheckpointError, LockstepError
from app.runtime.run_context import RunContext
from app.training.loop import Training
from app.training.replica_divergence import check_replica_divergence
from app.training.training_spec import TrainingSpec
from app.verification.measurement import SMALLEST
from app.verification.step_verifier import StepVerifier, create_step_verifier
from app.verification.trace import Trace
from conftest import CPUS
from models import MODELS
from strategies.observer import Observer, Shard

REPLICAS = 2
PREFETCHED = 4  # Batches that the input pipeline may have prepared.
# A flip in a gradient is within rounding if it changes the sum by at most this part of its terms: a
# sum of two numbers is rounded once.
ROUNDING = 2.0**-23
IN_MEMORY = ("weights", "optimizer", "gradients", "images", "labels")
FILES = {
    "checkpoint": "checkpoints/step-*/state.safetensors",
    "manifest": "checkpoints/step-*/MANIFEST.json",
    "trace": "mismatch/**/*",
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What was seen of a flip.

    Attributes:
        what: what must be named.
        found: what was said.
        is_noticed: whether anything was said.
        is_named: whether it names the place.
        is_harmless: whether the flip changes nothing, or nothing beyond rounding.
    """

    what: str
    found: str
    is_noticed: bool
    is_named: bool
    is_harmless: bool


class FlippingObserver(Observer):
    """Flips a bit of one gradient on its way from one replica into the sum.

    Args:
        variables: trainable variables.
    """

    def __init__(self, variables: list[tf.Variable]):
        self._mask = tf.Variable(0, dtype=tf.int32)  # 0: no bit is flipped.
        self._where = tf.Variable([0, 0, 0])  # Replica, variable, position.
        self._terms = [tf.Variable(0.0) for _ in range(REPLICAS)]  # What the replicas have there.
        self.variables = variables

    def set(self, replica: int, index: int, position: int, bit: int) -> None:
        self._where.assign([replica, index, position])
        self._mask.assign(np.uint32(1 << bit).astype(np.int32))

    def clear(self) -> None:
        self._mask.assign(0)

    def change(self) -> float:
        """Returns by how much the flip has changed the sum, relative to its terms."""
        terms = np.array([term.numpy() for term in self._terms])
        right = terms[int(self._where.numpy()[0])]
        bits = right.view(np.int32) ^ self._mask.numpy()
        change = abs(float(bits.view(np.float32)) - float(right))
        return max(0.0, change - SMALLEST) / (float(np.abs(terms).sum()) or 1.0)

    def on_shard(
        self, shard_id: int | tf.Tensor, shard: Shard, loss: tf.Tensor, gradients: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        return [self._flipped(shard_id, i, gradient) for i, gradient in enumerate(gradients)]

    def _flipped(self, shard_id: int | tf.Tensor, index: int, gradient: tf.Tensor) -> tf.Tensor:
        flat, position = tf.reshape(gradient, [-1]), self._where[2]
        is_variable, is_replica = self._where[1] == index, self._where[0] == shard_id
        term = self._terms[int(shard_id)]
        term.assign(tf.where(is_variable, flat[tf.minimum(position, tf.size(flat) - 1)], term))
        mask = tf.where(is_variable & is_replica, self._mask, 0)
        masks = mask * tf.one_hot(position, tf.size(flat), dtype=tf.int32)
        bits = tf.bitwise.bitwise_xor(tf.bitcast(flat, tf.int32), masks)
        return tf.reshape(tf.bitcast(bits, tf.float32), tf.shape(gradient))


class Memory:
    """A training of two replicas, whose every step is verified.

    Args:
        choose: random choices.
    """

    def __init__(self, choose: random.Random):
        self._random = choose
        config = TrainConfig(
            strategy="manual", global_batch_size=64, recipe="fast", epochs=1000, verify_every=1
        )
        data = generate_synthetic(num_train=128, num_test=70)
        self._spec = TrainingSpec(config, data)
        self._strategy = self._spec.build_strategy(Devices(CPUS[:REPLICAS], simulated=True))
        self._weights = [v.path for v in self._strategy.model.trainable_variables]
        self._observer = FlippingObserver(self._strategy.model.trainable_variables)
        self._strategy.observer = self._observer
        verifier = create_step_verifier(config, self._spec, self._strategy)
        assert isinstance(verifier, StepVerifier)
        self._verifier = verifier
        self._iterator = iter(self._strategy.distribute(self._spec.batches()))
        self._strategy.train_steps(self._iterator, 0)
        self._verifier.compile(self._iterator)
        self._step = 0
        for _ in range(8):  # The tolerances are learned from the first steps.
            assert self._train_step() == "", "a correct step has a mismatch"

    def flip(self, kind: str) -> Outcome:
        """Flips a bit, and trains and checks a step."""
        before = [
            {name: variable.numpy() for name, variable in copy.items()}
            for copy in self._strategy.copies()
        ]
        expected = getattr(self, f"_flip_{kind}")()
        try:
            found = self._train_step()
        except tf.errors.OpError as error:
            found = str(error)
        # As at the end of an epoch; an error is explained by changed examples.
        found = _said(self._spec.check_examples) or found or self._compare_replicas()
        change = self._observer.change() if kind == "gradients" else math.inf
        self._observer.clear()
        for copy, values in zip(self._strategy.copies(), before, strict=True):
            for name, variable in copy.items():
                variable.assign(values[name])
        if self._undo:
            self._undo()
            for _ in range(PREFETCHED):  # They may have the changed example.
                next(self._iterator)
                self._step += 1
        left = _said(self._spec.check_examples) or self._compare_replicas()
        assert left == "", f"the flip was not undone: {left}"
        what = f"{expected}, a change of {change:.3g}"
        return Outcome(what, found, bool(found), expected in found, change <= ROUNDING)

    def _train_step(self) -> str:
        self._step += 1
        totals, _ = self._verifier.train_step(self._iterator, self._step)
        if not np.isfinite(totals.loss_sum):
            return f"the loss is {totals.loss_sum}"  # A training ends with code 7.
        finding = self._verifier.check(self._step - 1)
        return finding.text if finding else ""

    def _compare_replicas(self) -> str:
        return _said(lambda: check_replica_divergence(self._strategy))

    _undo: Callable[[], None] | None = None

    def _flip_variable(self, prefix: str) -> str:
        replica = self._random.randrange(REPLICAS)
        copy = self._strategy.copies()[replica]
        names = [
            name
            for name, variable in copy.items()
            if name.startswith(prefix) and variable.dtype == tf.float32
            if prefix != "model/" or name.removeprefix(prefix) in self._weights
        ]
        name = self._random.choice(names)
        value = copy[name].numpy()
        _flip_bit(value, self._random)
        copy[name].assign(value)
        return name.partition("/")[2]

    def _flip_weights(self) -> str:
        return self._flip_variable("model/")

    def _flip_optimizer(self) -> str:
        return self._flip_variable("optimizer/")

    def _flip_gradients(self) -> str:
        index = self._random.randrange(len(self._weights))
        size = int(np.prod(self._observer.variables[index].shape))
        replica, position = self._random.randrange(REPLICAS), self._random.randrange(size)
        self._observer.set(replica, index, position, self._random.randrange(32))
        return self._weights[index]

    def _flip_images(self) -> str:
        return self._flip_example(0)

    def _flip_labels(self) -> str:
        return self._flip_example(1)

    def _flip_example(self, part: int) -> str:
        """Flips a bit of the copy that is trained on, or of the one that it is compared with."""
        data = self._spec.dataset
        tensor = np.asarray(memoryview(self._spec._examples[part]))  # Not a copy, as `numpy()` is.
        array = (data.train_images, data.train_labels)[part]
        own = tensor if self._random.random() < 0.5 else array
        address, size = own.ctypes.data, own.nbytes
        offset, bit = self._random.randrange(size), self._random.randrange(8)
        byte = ctypes.c_uint8.from_address(address + offset)

        def flip() -> None:
            byte.value ^= 1 << bit

        flip()

        def undo() -> None:
            flip()
            self._undo = None

        self._undo = undo
        return f"example {offset // (size // len(own))}"


def _said(check: Callable[[], object]) -> str:
    """Returns the message with which a check fails; empty if it does not."""
    try:
        check()
    except LockstepError as error:
        return str(error)
    return ""


class Disk:
    """A finished training, and the trace of a mismatch, of which files are damaged.

    Args:
        folder: folder for the run.
        choose: random choices.
    """

    def __init__(self, folder: pathlib.Path, choose: random.Random):
        self._random, self._whole, self._run = choose, folder / "whole", folder / "run"
        self._whole.mkdir()
        data = generate_synthetic(num_train=300, num_test=70)
        config = TrainConfig(
            strategy="manual", global_batch_size=64, recipe="fast", epochs=2, verify_every=2,
            inject="scale_gradient:factor=2", on_mismatch="warn",
        )  # fmt: skip
        with RunContext():
            loop = Training(
                config, Devices(CPUS[:REPLICAS], simulated=True), data, self._whole,
                lambda: None, create_step_verifier,
            )  # fmt: skip
            loop.start(from_scratch=True)
            loop.run()
        RunDirectory(self._whole, config.result_fields()).start(overwrite=False)
        shutil.copytree(self._whole, self._run)
        self._readers: dict[str, Callable[[], object]] = {
            "checkpoint": self._newest,
            "manifest": self._newest,
            "trace": self._trace,
        }
        self._right = {kind: read() for kind, read in self._readers.items()}

    def flip(self, kind: str) -> Outcome:
        """Flips a bit of a file, and reads it as the program does."""
        paths = [path for path in sorted(self._run.glob(FILES[kind])) if path.is_file()]
        path = paths[-1] if kind in ("checkpoint", "manifest") else self._random.choice(paths)
        content = np.frombuffer(bytearray(path.read_bytes()), np.uint8)
        _flip_bit(content, self._random)
        whole = path.read_bytes()
        path.write_bytes(content.tobytes())
        try:
            read, said = self._readers[kind](), ""
        except LockstepError as error:
            read, said = None, str(error)
        finally:
            path.write_bytes(whole)
        is_same = _equal(read, self._right[kind])
        if kind in ("checkpoint", "manifest", "trace"):  # A directory with several files.
            path = path.parent
        return Outcome(path.name, said, bool(said), path.name in said, is_same)

    def _newest(self) -> object:
        found = find_newest_checkpoint(self._run)
        if found is None:
            raise CheckpointError("no checkpoint is left")
        if found.damaged:  # A training resumes from the one before, after a warning.
            raise CheckpointError(str(found.damaged))
        return found.checkpoint.state

    def _trace(self) -> object:
        with Trace(self._run / "mismatch") as trace:
            return {
                (step, kind, replica, tensor): trace.read(step, kind, replica, tensor)
                for step in (trace.first_step - 1, trace.first_step)
                for kind in ("weights", "gradients", "sums", "slots", "loss", "examples")
                for tensor in trace.tensors(step, kind)
                for replica in trace.replicas(step, kind, tensor)
            }


def _flip_bit(array: np.ndarray, choose: random.Random) -> None:
    """Flips a random bit of an array."""
    flat = array.reshape(-1).view(np.uint8)
    flat[choose.randrange(flat.size)] ^= 1 << choose.randrange(8)


def _equal(a: object, b: object) -> bool:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        # The name of the check value may have changed: one more field, which is refused or ignored.
        return a.keys() >= b.keys() and all(_equal(a[key], b[key]) for key in b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return bool(a == b)


def run(num_flips: int, seed: int, folder: pathlib.Path) -> collections.Counter:
    """Flips bits; returns how many there were of each kind and result.

    Raises:
        AssertionError: a flip changed something and was not noticed.
    """
    choose = random.Random(seed)
    memory, disk = Memory(choose), Disk(folder, choose)
    counts: collections.Counter = collections.Counter()
    kinds = [*IN_MEMORY, *FILES]
    for number in range(num_flips):
        kind = kinds[number % len(kinds)]
        outcome = (memory if kind in IN_MEMORY else disk).flip(kind)
        assert outcome.is_noticed or outcome.is_harmless, f"{kind}: {outcome}"
        result = "not noticed, harmless"
        if outcome.is_noticed:
            result = "noticed, named" if outcome.is_named else "noticed"
        if outcome.is_noticed and not outcome.is_named:
            print(f"{kind}: {outcome.what}: {outcome.found:.300}")
        counts[kind, result] += 1
    return counts


def main() -> int:
    """Flips the requested number of bits; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    print(f"bit flips: {options.flips}, --seed={options.seed}", flush=True)
    MODELS["lenet"] = "dense_network:build_conv_norm_network"
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bit-flips-") as folder:
        counts = run(options.flips, options.seed, pathlib.Path(folder))
    for kind in (*IN_MEMORY, *FILES):
        own = {result: count for (k, result), count in counts.items() if k == kind}
        print(f"{kind}: {own}")
    print(f"{sum(counts.values())} flips in {time.monotonic() - start:.0f} s, none unnoticed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
