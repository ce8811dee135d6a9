"""What is changed in copies of recorded steps of Keras."""

# ruff: noqa: F403, F405 (the names of copies and models)
import dataclasses

import numpy as np
import tensorflow as tf

from lockstep.data.trace import SEED, STATE, STATISTIC, WEIGHT, Shard
from lockstep.oracles.keras import KerasOracle
from tests.verifier.zoo.small import dense

from .keras_copies import *
from .keras_models import *

ONE, ALL = (1,), REPLICAS


def replicas(*numbers):
    return tuple(f"replica {number}" for number in numbers)


def rolled_targets(step, r):
    x, y, *weights = step["data", r]
    return [x, np.roll(y, 1, 0), *weights]


def modal(faulty):
    return (*faulty.oracle.random_layers, *faulty.oracle.layers_with_statistics)


def with_old(faulty, names):
    """Lets replica 1 compute its last step with the previous step's values of some variables."""
    old = {name: faulty.steps[0]["before", 1][name] for name in names}
    return faulty.compute((1,), faulty.steps[1:], state=lambda step, r: step["before", r] | old)


def without_loss(faulty):
    """Replica 1 sends other gradients; its step shows no loss."""
    for step in faulty.steps:
        raw = faulty.oracle.compute(faulty.ask(step, 1, data=rolled_targets(step, 1))).raw
        step["raw", 1] = {name: g / np.float32(3) for name, g in raw.items()}
        faulty.follow(step)


def without_losses(faulty):
    """No step shows a loss."""
    for step in faulty.steps:
        for key in [key for key in step if key[0] == "loss"]:
            del step[key]


def regularised_gradients(faulty):
    for step in faulty.steps:
        for r in REPLICAS:
            step["raw", r] = faulty.oracle.compute(faulty.ask(step, r, scales=(1 / 3, 1))).raw
        faulty.follow(step)


def smoothed(faulty):
    """Replica 1 has another loss."""
    smooth = losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)

    def loss(y, logits):
        return smooth(tf.one_hot(tf.reshape(tf.cast(y, "int32"), [-1]), 2), logits)

    right = faulty.oracle
    faulty.oracle = KerasOracle(dense(loss=loss), faulty.trace())
    faulty.compute((1,)).oracle = right


def left_out(faulty):
    """The loss of replica 1 leaves out its last example."""
    (step,) = faulty.steps
    y_pred, data = step["y_pred", 1], [array[:-1] for array in step["data", 1]]
    faulty.compute((1,), data=data, scales=(1 / 4, 1 / 4))
    step["y_pred", 1] = y_pred


def with_seeds_of_replica_0(faulty):
    """Each replica has another seed, but replica 1 draws with that of replica 0."""
    (seed,), (step,) = faulty.of_kind(SEED), faulty.steps
    for r in REPLICAS:
        step["before", r] |= {seed: step["before", r][seed] + np.array([0, r], np.uint32)}
    faulty.compute()
    left = step["after", 1][seed]
    faulty.compute((1,), state=step["before", 1] | {seed: step["before", 0][seed]})
    step["after", 1][seed] = left


def edit(kind, r, position=0, end="", *, change):
    """Returns a function that changes the first variable of a replica whose name ends so."""

    def make(faulty):
        arrays = faulty.steps[position][kind, r]
        name = next(n for n in arrays if n.endswith(end))
        faulty.steps[position][kind, r] = arrays | {name: change(arrays[name])}
        if kind == "before":
            faulty.compute((r,), faulty.steps[position:])

    return make


def updated(**changes):
    """Returns a function that lets replica 1 make another update."""

    def make(faulty):
        (step,) = faulty.steps
        faulty.update(step, (1,), **{n: change(faulty, step) for n, change in changes.items()})

    return make


def zeros(faulty, step):
    return {name: 0 * step["before", 1][name] for name in faulty.slots()}


def at_start(faulty, step):
    return zeros(faulty, step) | {clock(faulty): 0 * step["before", 1][clock(faulty)]}


def mean_instead_of_sum(faulty):
    (step,) = faulty.steps
    faulty.update(step, sums={name: g / 3 for name, g in step["sums", 0].items()})


def clock(faulty):
    return next(name for name in faulty.of_kind(STATE) if name.endswith("iteration"))


def exchanged(faulty, step):
    """The optimizer state of one head for that of the other."""
    other = {"u_": "v_", "v_": "u_"}
    names = {n: n.replace(p, q) for n in faulty.slots() for p, q in other.items() if p in n}
    return {name: step["before", 1][theirs] for name, theirs in names.items()}


def from_old(*kinds):
    """Returns a function that updates from the previous step's weights or optimizer state."""

    def make(faulty):
        first, second = faulty.steps
        names = faulty.names if kinds == (WEIGHT,) else faulty.slots()
        faulty.update(second, before={name: first["before", 0][name] for name in names})

    return make


def after(kind, change):
    """Returns a function that changes replica 1's variables: `change(new, old)`."""

    def make(faulty):
        (step,) = faulty.steps
        names = faulty.of_kind(kind)[: 1 if kind == WEIGHT else None]
        changed = {n: change(step["after", 1][n], step["before", 1][n]) for n in names}
        step["after", 1] = step["after", 1] | changed

    return make


def others_statistics(faulty):
    (step,) = faulty.steps
    step["after", 1] |= {n: step["after", 0][n] for n in faulty.of_kind(STATISTIC)}


def statistics_of_the_whole_batch(faulty):
    (step,) = faulty.steps
    data = [
        np.concatenate(parts) for parts in zip(*(step["data", r] for r in REPLICAS), strict=True)
    ]
    whole = faulty.oracle.compute(faulty.ask(step, 1, data=data)).after
    step["after", 1] |= {n: whole[n] for n in faulty.of_kind(STATISTIC)}


def first_half_twice(faulty):
    """The first half of each gradient has that of replica 1 twice."""
    (step,) = faulty.steps
    sums = {}
    for name, total in step["sums", 0].items():
        again = np.array(step["clipped", 1][name]).ravel()
        again[again.size // 2 :] = 0
        sums[name] = total + again.reshape(total.shape)
    for r in REPLICAS:
        step["sums", r] = sums
    faulty.update(step)


def stale(kind, number):
    """Gradients of a step are those of the one before; the first step's are 0."""

    def make(faulty):
        (first, second), names = faulty.steps, faulty.names[:number]
        own = dict(first[kind, 1])
        for step, factor in ((first, 0), (second, 1)):
            if step is second:
                faulty.continue_from(1)
            for r in REPLICAS if kind == "sums" else ONE:
                step[kind, r] = step[kind, r] | {n: factor * own[n] for n in names}
            faulty.follow(step, kind)

    return make


def without_a_sum(faulty):
    """Replica 2 lacks the sum of one gradient in the second step."""
    step, name = faulty.steps[1], faulty.names[2]
    step["sums", 2] = step["sums", 2] | {name: step["raw", 2][name]}
    faulty.update(step)


def predicted(change):
    """Replica 1 has other predictions."""

    def make(faulty):
        (step,) = faulty.steps
        step["y_pred", 1] = change(step)

    return make


def averaged(average):
    """Statistics are averaged in each step, as by strategies of this program."""

    def make(faulty):
        sizes, (step,), names = (4, 3, 2), faulty.steps, faulty.of_kind(STATISTIC)
        for r, size in enumerate(sizes):
            step["data", r] = [array[:size] for array in step["data", r]]
        faulty.compute(scales=lambda step, r: (sizes[r] / sum(sizes), 1 / 3))
        parts = {n: [step["after", r][n] for r in REPLICAS] for n in names}
        mean = {n: average(parts[n], sizes).astype(np.float32) for n in names}
        for r in REPLICAS:
            for kind in ("before", "after"):
                step[f"own_{kind}", r] = {n: step[kind, r][n] for n in names}
            step["after", r] = step["after", r] | mean

    return make


def accumulated(factor):
    """One replica accumulates micro-batches, of which one counts `factor` times."""

    def make(faulty):
        faulty.about = dataclasses.replace(
            faulty.about, num_replicas=1, num_copies=1, shards=(Shard(0),) * 3
        )
        (step,) = faulty.steps
        sent = [step["clipped", r] for r in REPLICAS]
        sent[1] = {name: np.float32(factor) * g for name, g in sent[1].items()}
        faulty.all_reduce(step, sent)
        of_one = ("before", "sums", "after")
        faulty.steps[0] = {k: v for k, v in step.items() if k[1] == 0 or k[0] not in of_one}

    return make


def apart_without_sums(faulty):
    (step,) = faulty.steps
    for r in REPLICAS:
        step["sums", r] = step["clipped", r]
    faulty.update(step)
    for r in REPLICAS:
        del step["sums", r]


def infinite(faulty):
    """The targets of replica 1 make the first step's gradients infinite."""
    first, second = faulty.steps
    x, y = first["data", 1]
    first["data", 1] = [x, y + np.float32(np.inf)]
    faulty.compute(ONE, [first])
    for r in REPLICAS:
        second["before", r] = first["after", r]


def nothing_overflows(faulty):
    (step,) = faulty.steps
    x, y = step["data", 0]
    step["data", 0] = [x, y / np.float32(2000)]


def with_data(r, data):
    """A replica computes with other examples."""

    def make(faulty):
        (step,) = faulty.steps
        step["data", r] = data(step)
        faulty.compute((r,))

    return make


def repeated_example(step):
    pairs = zip(step["data", 2], step["data", 0], strict=True)
    return [np.concatenate([a[:3], b[:1]]) for a, b in pairs]
