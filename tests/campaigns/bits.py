"""Flips random bits in memory, and looks whether they are noticed and named.

One bit of a weight or of the optimizer state, before a verified step of two replicas. Bits of files
are flipped in `test_checkpoint.py`.
"""

import math
import random

import numpy as np
import tensorflow as tf

from app.devices.setup import Devices
from app.errors import LockstepError
from app.options import Config
from app.training.build import TrainingRun
from app.training.checks import check_copies
from app.verification.step_check import StepCheck
from models import MODELS
from tests.conftest import CPUS, generated

from . import check

REPLICAS = 2
KINDS = {"weights": "model/", "optimizer": "optimizer/"}


class Memory:
    """A training of two replicas, whose every step is verified."""

    def __init__(self, choices: random.Random):
        self._random, self._step = choices, 0
        config = Config.of(global_batch_size=64, recipe="fast", epochs=1000, verify_every=1)
        devices = Devices(CPUS[:REPLICAS], simulated=True)
        run = TrainingRun(config, devices, generated(128, 70))
        self._strategy, self._check = run.strategy, StepCheck(run)
        self._weights = {f"model/{v.path}" for v in self._strategy.model.trainable_variables}
        self._iterator = self._strategy.distribute(run.batches())
        for _ in range(3):  # The learning rate begins at 0.
            assert self._train_step() == "", "a correct step has a mismatch"

    def flip(self, kind: str) -> tuple[str, str]:
        """Flips a bit, trains and checks a step; returns what is to be named, and what was said."""
        before = self._strategy.states.per_copy()
        expected = self._flip_variable(KINDS[kind])
        found = self._train_step() or self._compare_copies()
        for copy, values in zip(self._strategy.copies(), before, strict=True):
            for name, variable in copy.items():
                variable.assign(values[name])
        left = self._compare_copies()
        assert left == "", f"the flip was not undone: {left}"
        return expected, found

    def _train_step(self) -> str:
        """Trains a verified step; returns what is wrong with it, "" if nothing is."""
        self._step += 1
        try:
            totals, _ = self._check.train_step(self._iterator, self._step)
        except LockstepError as error:
            return str(error)
        # A training ends with code 7.
        return "" if math.isfinite(totals.loss_sum) else f"the loss is {totals.loss_sum}"

    def _compare_copies(self) -> str:
        """Returns what a comparison says, as at the end of an epoch; "" if replicas are equal."""
        try:
            check_copies(self._strategy)
        except LockstepError as error:
            return str(error)
        return ""

    def _flip_variable(self, prefix: str) -> str:
        copy = self._random.choice(self._strategy.copies())
        names = [
            name
            for name, variable in copy.items()
            if name.startswith(prefix) and variable.dtype == tf.float32
            if prefix == "optimizer/" or name in self._weights
        ]
        name = self._random.choice(names)
        value = copy[name].numpy()
        flat = value.reshape(-1).view(np.uint8)
        flat[self._random.randrange(flat.size)] ^= 1 << self._random.randrange(8)
        copy[name].assign(value)
        return name.partition("/")[2]


def run(folder, options, counts):
    """Flips bits; yields what was noticed and not named."""
    own_lenet = MODELS["lenet"]
    MODELS["lenet"] = "tests.dense_network:build_conv_norm_network"
    try:
        memory = Memory(random.Random(options.seed))
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
