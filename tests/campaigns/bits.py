"""Flips random bits in memory and on disk, and looks whether they are noticed and named.

In memory: one bit of a weight, of the optimizer state or of a training example, before a verified
step of two replicas. On disk: one bit of a checkpoint, of a trace or of a record. A flip that has
an effect must be noticed; records other than checkpoints and traces can be rebuilt, and must be
read, or refused in one line.
"""

import collections
import ctypes
import dataclasses
import pathlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from app.data.synthetic import generate_synthetic
from app.devices.device_setup import Devices
from app.options import Config
from app.records.checkpoint import find_newest_checkpoint
from app.records.history import load_history, load_summary
from app.records.run_directory import load_run_config
from app.runtime.errors import CheckpointError, LockstepError
from app.training.replica_divergence import check_replica_divergence
from app.training.training_spec import TrainingSpec
from app.verification.step_verifier import StepVerifier, create_step_verifier
from app.verification.trace import Trace
from conftest import CPUS
from models import MODELS

from .harness import MAIN, TRAIN, Program, check, write_data

REPLICAS = 2
PREFETCHED = 4  # Batches that the input pipeline may have prepared.
IN_MEMORY = ("weights", "optimizer", "images", "labels")
FILES = {
    "checkpoint": "checkpoints/step-*/state.safetensors",
    "manifest": "checkpoints/step-*/MANIFEST.json",
    "trace": "mismatch/**/*",
    "history": "history.jsonl",
    "summary": "summary.json",
    "config": "config.json",
}
MUST_BE_NOTICED = (*IN_MEMORY, "checkpoint", "manifest", "trace")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The name that must be said, the words about a flip, and whether it has no effect."""

    what: str
    found: str
    is_harmless: bool


class Memory:
    """A training of two replicas, whose every step is verified.

    Args:
        choose: random choices.
    """

    def __init__(self, choose: random.Random):
        self._random = choose
        config = Config.of(global_batch_size=64, recipe="fast", epochs=1000, verify_every=1)
        data = generate_synthetic(num_train=128, num_test=70)
        self._spec = TrainingSpec(config, data)
        self._strategy = self._spec.build_strategy(Devices(CPUS[:REPLICAS], simulated=True))
        self._weights = [v.path for v in self._strategy.model.trainable_variables]
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
        if kind in ("weights", "optimizer"):
            expected, undo = self._flip_variable(kind), None
        else:
            expected, undo = self._flip_example(kind == "labels")
        try:
            found = self._train_step()
        except tf.errors.OpError as error:
            found = str(error)
        # As at the end of an epoch; an error is explained by changed examples.
        found = _said(self._spec.check_examples) or found or self._compare_replicas()
        for copy, values in zip(self._strategy.copies(), before, strict=True):
            for name, variable in copy.items():
                variable.assign(values[name])
        if undo:
            undo()
            for _ in range(PREFETCHED):  # They may have the changed example.
                next(self._iterator)
                self._step += 1
        left = _said(self._spec.check_examples) or self._compare_replicas()
        assert left == "", f"the flip was not undone: {left}"
        return Outcome(expected, found, is_harmless=False)

    def _train_step(self) -> str:
        self._step += 1
        totals, _ = self._verifier.train_step(self._iterator, self._step)
        if not np.isfinite(totals.loss_sum):
            return f"the loss is {totals.loss_sum}"  # A training ends with code 7.
        finding = self._verifier.check(self._step - 1)
        return finding.text if finding else ""

    def _compare_replicas(self) -> str:
        return _said(lambda: check_replica_divergence(self._strategy))

    def _flip_variable(self, kind: str) -> str:
        prefix = "model/" if kind == "weights" else "optimizer/"
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

    def _flip_example(self, part: int) -> tuple[str, Callable[[], None]]:
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
        return f"example {offset // (size // len(own))}", flip


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
        self._random, self._run = choose, folder / "run"
        data = f"--data_dir={write_data(folder / 'data')}"
        fault = ("--inject=scale_gradient:factor=2", "--verify_every=2", "--on_mismatch=warn")
        words = [*MAIN, *TRAIN, "--num_devices=2", "--epochs=2", data, *fault, f"--out={self._run}"]
        program = Program(words, folder / "output.txt", {})
        check(program.wait() == 0, program.text()[-3000:])
        self._readers: dict[str, Callable[[], object]] = {
            "checkpoint": self._newest,
            "manifest": self._newest,
            "trace": self._trace,
            "history": lambda: load_history(self._run),
            "summary": lambda: load_summary(self._run),
            "config": lambda: load_run_config(self._run),
        }
        self._right = {kind: read() for kind, read in self._readers.items()}

    def flip(self, kind: str) -> Outcome:
        """Flips a bit of a file, and reads it as the program does."""
        paths = [path for path in sorted(self._run.glob(FILES[kind])) if path.is_file()]
        path = paths[-1] if kind in ("checkpoint", "manifest") else self._random.choice(paths)
        whole = path.read_bytes()
        content = np.frombuffer(bytearray(whole), np.uint8)
        _flip_bit(content, self._random)
        path.write_bytes(content.tobytes())
        try:
            read, said = self._readers[kind](), ""
        except LockstepError as error:
            read, said = None, str(error)
        finally:
            path.write_bytes(whole)
        # A directory with several files is named as a whole.
        named = path.parent.name if kind in ("checkpoint", "manifest", "trace") else path.name
        return Outcome(named, said, _equal(read, self._right[kind]))

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
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in b)
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return bool(a == b)


def run(
    folder: pathlib.Path, cycles: int, seed: int, only: Sequence[str], counts: collections.Counter
) -> Iterator[str]:
    """Flips bits; yields what was noticed and not named."""
    choose, own_lenet = random.Random(seed), MODELS["lenet"]
    disk = Disk(folder, choose)
    MODELS["lenet"] = "dense_network:build_conv_norm_network"
    try:
        memory = Memory(choose)
        kinds = [kind for kind in (*IN_MEMORY, *FILES) if kind in (only or kind)]
        for number in range(cycles):
            kind = kinds[number % len(kinds)]
            outcome = (memory if kind in IN_MEMORY else disk).flip(kind)
            is_allowed = outcome.found or outcome.is_harmless or kind not in MUST_BE_NOTICED
            check(is_allowed, f"{kind}: not noticed: {outcome}")
            is_named = outcome.what in outcome.found
            result = "named" if is_named else "noticed" if outcome.found else "without effect"
            if not outcome.found and not outcome.is_harmless:
                result = "not noticed"
            counts[f"{kind} {result}"] += 1
            if outcome.found and not is_named:
                yield f"{kind}: {outcome.what}: {outcome.found:.300}"
    finally:
        MODELS["lenet"] = own_lenet
