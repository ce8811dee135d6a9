"""Copies of recorded steps of Keras, as if a replica had computed or received something else."""

import dataclasses

import numpy as np
import tensorflow as tf

import lockstep
from lockstep.data.trace import OF_GRADIENTS, OF_VARIABLES, SEED, STATE, STATISTIC, WEIGHT, Trace
from lockstep.numeric.arrays import add_named
from lockstep.oracles import Ask
from lockstep.oracles.keras import KerasOracle

from .keras_models import one_device, recorded

KINDS = ("data", "before", "y_pred", "mask", "loss", "raw", "clipped", "sums", "after")
NAMED = OF_VARIABLES + OF_GRADIENTS
REPLICAS = (0, 1, 2)


def copied(trace, position):
    """Returns the arrays of a step: (kind, item) → arrays, by name where they have names."""
    return {
        (kind, item): (trace.named if kind in NAMED else trace.arrays)(position, kind, item)
        for kind in KINDS
        for item in trace.items(kind)
        if trace.has(position, kind)
    }


class Copy:
    """A copy of steps of a trace, to be changed as if replicas had done something else.

    Attributes:
        steps: the arrays; see `copied`.
        oracle: the model on one device, which computes what follows from a change.
        names: the weights with gradients.
    """

    def __init__(self, name="plain", positions=(0,), model=None, whole=None):
        whole = whole or recorded(name)
        pick = {"steps": whole.steps, "settings": whole.about.settings}
        pick = {key: tuple(values[p] for p in positions) for key, values in pick.items()}
        self.about = dataclasses.replace(whole.about, **pick)
        self.steps = [copied(whole, position) for position in positions]
        self.model = model or one_device(name)
        self.oracle = KerasOracle(self.model, self.trace())
        self.names = whole.about.gradients

    def trace(self):
        trace = Trace(self.about)
        for position, step in enumerate(self.steps):
            for (kind, item), values in step.items():
                if kind in NAMED:
                    names = trace.keys if kind in OF_VARIABLES else self.about.gradients
                    values = [values.get(name) for name in names]
                trace.put(position, kind, item, values)
        return trace

    def verdict(self, model=None, **options):
        return lockstep.compare(self.trace(), model=model or self.model, **options)

    def of_kind(self, *kinds):
        return [variable.name for variable in self.about.variables if variable.kind in kinds]

    def slots(self):
        """Returns the names of momenta and the like."""
        return [v.name for v in self.about.variables if v.of]

    def change(self, kind, change, tensors=None, replicas=REPLICAS):
        """Changes arrays, and what follows from them; "sent" are gradients in the sum only."""

        def changed(values, r):
            if r not in replicas:
                return values
            if isinstance(values, list):
                return [change(array) for array in values]
            chosen = [n for i, n in enumerate(values) if tensors is None or i in tensors]
            return values | {name: change(values[name]) for name in chosen}

        for step in self.steps:
            if kind == "sent":
                self.all_reduce(step, [changed(step["clipped", r], r) for r in REPLICAS])
                continue
            for r in REPLICAS:
                step[kind, r] = changed(step[kind, r], r)
            self.follow(step, kind)
        return self

    def follow(self, step, kind="raw"):
        """Computes what follows from other gradients."""
        for r in REPLICAS if kind == "raw" else ():
            step["clipped", r] = self.oracle.clip(step["raw", r])
        if kind in ("raw", "clipped"):
            self.all_reduce(step, [step["clipped", r] for r in REPLICAS])
        elif kind == "sums":
            self.update(step)

    def all_reduce(self, step, sent):
        for r in REPLICAS:
            step["sums", r] = add_named(sent)
        self.update(step)

    def update(self, step, replicas=REPLICAS, *, before=None, sums=None, **changes):
        """Replicas update their weights; see `KerasOracle.update`."""
        for r in replicas:
            state, total = step["before", r] | (before or {}), sums or step["sums", r]
            updated = self.oracle.update(state, total, **changes)
            step["after", r] = step["after", r] | {
                n: updated[n] for n in self.of_kind(WEIGHT, STATE)
            }
        return self

    def ask(self, step, r, **changes):
        usual = {"state": step["before", r], "data": step["data", r], "scales": (1 / 3, 1 / 3)}
        usual["replica"] = r
        return Ask(**(usual | changes))

    def compute(self, replicas=REPLICAS, steps=None, **changes):
        """Replicas compute with other examples, states or factors; see `Ask`.

        A change is a value, or a function of step and replica that returns it.
        """
        for step in self.steps if steps is None else steps:
            for r in replicas:
                values = {n: v(step, r) if callable(v) else v for n, v in changes.items()}
                ask = self.ask(step, r, **values)
                result = self.oracle.compute(ask)
                step["y_pred", r], step["raw", r] = result.y_pred, result.raw
                data_loss, regular = (s * x for s, x in zip(ask.scales, result.loss, strict=True))
                step["loss", r] = [np.float32(data_loss + regular), np.float32(regular)]
                own = {n: result.after[n] for n in self.of_kind(STATISTIC, SEED)}
                step["after", r] = step["after", r] | own
            self.follow(step)
        return self

    def continue_from(self, position):
        """Lets a step start from the state that the step before has left."""
        for r in REPLICAS:
            self.steps[position]["before", r] = self.steps[position - 1]["after", r]
        return self.compute(steps=self.steps[position : position + 1])


def rounded(array, dtype=tf.bfloat16):
    return tf.cast(tf.cast(array, dtype), tf.float32).numpy()


def top_k(array):
    limit = np.sort(np.abs(array), axis=None)[-max(1, array.size // 4)]
    return np.where(np.abs(array) >= limit, array, np.float32(0))


def int8(array):
    scale = np.max(np.abs(array)) / np.float32(127)
    return np.round(array / scale) * scale


def coarse(array):
    """Returns whole multiples of a scale that is not that of some bits."""
    scale = np.float32(0.3) * np.max(np.abs(array))
    return np.round(array / scale) * scale


def signs(array):
    return np.sign(array) * np.mean(np.abs(array))


def clipped_values(array):
    limit = np.median(np.abs(array))
    return np.clip(array, -limit, limit)


def noisy(array):
    noise = np.random.default_rng(1).normal(0, 0.1, array.shape)
    return (array * (1 + noise)).astype(array.dtype)


def one_nan(array):
    return np.where(np.arange(array.size).reshape(array.shape) == 1, np.float32(np.nan), array)


def one_more(array):
    return array + np.eye(1, array.size, 3, dtype=np.float32).reshape(array.shape)


def next_up(array):
    changed = array.copy()
    changed.flat[1] = np.nextafter(changed.flat[1], np.float32(9))
    return changed


def times(factor):
    return lambda array: (factor * array).astype(array.dtype)


def to_norm(array):
    return array * np.float32(0.1 / np.linalg.norm(array))
