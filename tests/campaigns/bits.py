"""Flips random bits in memory, and looks whether they are noticed and named.

One bit of a weight or of the optimizer state, before a verified step of two replicas. Bits of files
are flipped in `test_checkpoint.py`.
"""

import collections
import pathlib
import random
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from app.data.synthetic import generate_synthetic
from app.devices.device_setup import Devices
from app.options import Config
from app.records.run_metadata import Progress
from app.runtime.errors import LockstepError
from app.training.replica_divergence import check_replica_divergence
from app.training.training_spec import TrainingSpec
from app.verification.step_verifier import StepVerifier
from models import MODELS
from tests.conftest import CPUS

from . import Options, check

REPLICAS = 2
KINDS = ("weights", "optimizer")


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
        self._verifier = StepVerifier(self._spec, self._strategy)
        self._iterator = iter(self._strategy.distribute(self._spec.batches()))
        self._strategy.train_steps(self._iterator, 0)
        self._verifier.compile(self._iterator)
        self._step = 0
        for _ in range(8):  # The tolerances are learned from the first steps.
            assert self._train_step() == "", "a correct step has a mismatch"

    def flip(self, kind: str) -> tuple[str, str]:
        """Flips a bit, trains and checks a step; returns what is to be named, and what was said."""
        before = self._strategy.states.per_copy()
        expected = self._flip_variable(kind)
        found = self._train_step() or self._compare_replicas()
        for copy, values in zip(self._strategy.copies(), before, strict=True):
            for name, variable in copy.items():
                variable.assign(values[name])
        left = self._compare_replicas()
        assert left == "", f"the flip was not undone: {left}"
        self._train_step()  # It reports that the state has changed on its own, as it was undone.
        return expected, found

    def _train_step(self) -> str:
        self._step += 1
        totals, _ = self._verifier.record_step(self._iterator, self._step)
        if not np.isfinite(totals.loss_sum):
            return f"the loss is {totals.loss_sum}"  # A training ends with code 7.
        finding = self._verifier.check(Progress(self._step - 1, epoch_step=self._step - 1))
        return finding.text if finding else ""

    def _compare_replicas(self) -> str:
        """Returns what a comparison says, as at the end of an epoch; "" if replicas are equal."""
        try:
            check_replica_divergence(self._strategy)
        except LockstepError as error:
            return str(error)
        return ""

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
        flat = value.reshape(-1).view(np.uint8)
        flat[self._random.randrange(flat.size)] ^= 1 << self._random.randrange(8)
        copy[name].assign(value)
        return name.partition("/")[2]


def run(folder: pathlib.Path, options: Options, counts: collections.Counter) -> Iterator[str]:
    """Flips bits; yields what was noticed and not named."""
    choose, own_lenet = random.Random(options.seed), MODELS["lenet"]
    MODELS["lenet"] = "tests.dense_network:build_conv_norm_network"
    try:
        memory = Memory(choose)
        kinds = [kind for kind in KINDS if options.wants(kind)]
        for number in range(options.cycles):
            kind = kinds[number % len(kinds)]
            named, found = memory.flip(kind)
            check(found, f"{kind}: not noticed: {named}")
            counts[f"{kind} {'named' if named in found else 'noticed'}"] += 1
            if named not in found:
                yield f"{kind}: {named}: {found:.300}"
    finally:
        MODELS["lenet"] = own_lenet
