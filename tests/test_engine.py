"""Tests the engine: recorded steps of Keras' `fit`, compared with one device.

Each kind of model is recorded once. Faults are then made in copies of the arrays, as if a replica
had computed, sent or received something else; everything that follows from it is computed again.
That the same faults are found in real trainings is shown by the zoo.
"""

import dataclasses
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import lockstep
from lockstep.answer.verdict import BY_DESIGN, FAULT, NOT_COMPARED, NOTHING, STAGES
from lockstep.data.file import from_parts
from lockstep.data.trace import (
    OF_GRADIENTS,
    OF_VARIABLES,
    SEED,
    STATE,
    STATISTIC,
    WEIGHT,
    Shard,
    Trace,
)
from lockstep.explain.tensors import why_tensor
from lockstep.numeric.arrays import add_named
from lockstep.oracles import Ask
from lockstep.oracles.keras import KerasOracle
from lockstep.record_keras import Recorder
from lockstep.stages.evaluation import check_evaluation
from small_models import mirrored
from zoo.small import OwnStep, dense, num_replicas, regression_arrays, replica_id

layers, losses, optimizers = keras.layers, keras.losses, keras.optimizers
RANDOM = np.random.default_rng(0)
X, Y = regression_arrays(48)
WEIGHTS = RANDOM.uniform(0.1, 2, 48).astype(np.float32)
IMAGES = RANDOM.normal(size=(48, 8, 8, 3)).astype(np.float32)
CLASSES = RANDOM.integers(0, 2, 48)
TOKENS = RANDOM.integers(0, 20, (48, 7))
TOKENS[:, 5:] = TOKENS[::3, 3:] = 0
OF_TOKENS = np.repeat(Y[:, None], 7, 1)
KINDS = ("data", "before", "y_pred", "mask", "loss", "raw", "clipped", "sums", "after")
NAMED = OF_VARIABLES + OF_GRADIENTS
REPLICAS = (0, 1, 2)


# --- Models --------------------------------------------------------------------------------------


def of_classes(model):
    model.compile(optimizers.SGD(0.1), losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def convolution(*between):
    pool = [layers.ReLU(), layers.GlobalAveragePooling2D(), layers.Dense(2)]
    return of_classes(keras.Sequential([layers.Conv2D(8, 3), *between, *pool]))


def sequences(*, mask_zero):
    model = keras.Sequential([layers.Embedding(20, 8, mask_zero=mask_zero), layers.Dense(2)])
    model.compile(optimizers.SGD(0.1), "mse")
    return model


def two_heads():
    """Inputs and outputs are dicts, some weights are unused, and the optimizer keeps averages."""
    a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
    hidden = layers.Dense(5, activation="relu", activity_regularizer="l2")
    joined = hidden(layers.Concatenate()([a, b]))
    heads = {name: layers.Dense(2, name=name)(joined) for name in ("u", "v")}
    model = keras.Model({"a": a, "b": b}, heads)
    model.spare = layers.Dense(3)
    model.spare.build((None, 6))
    kinds = {"u": losses.MeanSquaredError, "v": losses.MeanAbsoluteError}
    sums = {head: kind(reduction="sum") for head, kind in kinds.items()}
    model.compile(optimizers.Adam(1e-3, use_ema=True), sums)
    return model


class MeanOfEach(OwnStep):
    """Has a custom training step, which shows no loss."""

    def loss_of(self, x, y):
        return tf.reduce_mean(self.losses_of(x, y)) / num_replicas()


class TwoFactors(OwnStep):
    """Divides the data loss by the batch, and regularisation by the number of replicas."""

    def loss_of(self, x, y):
        return tf.reduce_sum(self.losses_of(x, y)) / 12 + tf.add_n(self.losses) / num_replicas()


class ClipsTheSum(TwoFactors):
    """Sums gradients in its training step, and clips the sum."""

    divisor = property(lambda self: num_replicas())

    def apply(self, gradients):
        super().apply([tf.clip_by_norm(g, 0.05) / self.divisor for g in summed(gradients)])


class ClipsTheSumOnly(ClipsTheSum):
    divisor = 1


class WithoutOptimizer(TwoFactors):
    """Changes its weights itself."""

    def apply(self, gradients):
        for gradient, variable in zip(summed(gradients), self.trainable_weights, strict=True):
            variable.assign_sub(0.1 * gradient)


class NumberedDropout(layers.Layer):
    """Dropout whose seed holds the number of the replica."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, x, training=False):
        if not training:
            return x
        seed = tf.cast(self.seed_generator.next(), "int32") + tf.stack([0, replica_id()])
        return tf.nn.experimental.stateless_dropout(x, 0.5, seed)


class MixesALittle(layers.Layer):
    def call(self, x):
        return x + 1e-4 * tf.reduce_mean(x, axis=0, keepdims=True)


class OnlyFloat32(keras.Sequential):
    """Adds a constant in float32, which fails in float64."""

    def call(self, x, training=None):
        return super().call(x, training=training) + tf.constant([0.0, 0.0], tf.float32)


def summed(gradients):
    return tf.distribute.get_replica_context().all_reduce("SUM", gradients)


def regularised(kind):
    model = dense(kind=kind, kernel_regularizer=keras.regularizers.L2(1e-3))
    model.layers[-1].kernel_regularizer = keras.regularizers.L1(0.01)
    return model


def in_dtype(policy, build):
    """Builds a model in another dtype."""
    keras.config.set_dtype_policy(policy)
    try:
        return build()
    finally:
        keras.config.set_dtype_policy("float32")


def plain(**limit):
    return dense(optimizer=optimizers.SGD(0.1, **limit))


def momentum():
    return dense(optimizer=optimizers.SGD(0.05, momentum=0.9))


def adamw():
    rate = optimizers.schedules.ExponentialDecay(0.01, 1, 0.9)
    return dense(optimizer=optimizers.AdamW(rate, weight_decay=0.1))


def normalised():
    return dense(layers.BatchNormalization(), kernel_regularizer=keras.regularizers.L2(0.1))


def dropped():
    return dense(layers.Dropout(0.5, seed=3))


SAME_NUMBERS = [("random numbers", FAULT, "same_random_numbers")]
LOCAL = [("forward", BY_DESIGN, "local_statistics")]
OF_MASKS = [("loss", FAULT, "weighted_mean_of_means")]
MIXED = [("forward", BY_DESIGN, "mixes_examples")]
NOT_A_SUM = [("gradients", BY_DESIGN, "not_a_sum_over_examples")]
# Name: builder, data, expected findings as (stage, status, cause).
MODELS = {
    "plain": (plain, (X, Y), []),
    "momentum": (momentum, (X, Y, WEIGHTS), []),
    "adamw": (adamw, (X, Y), []),
    "classes": (lambda: of_classes(dense()), (X, CLASSES), []),
    "two heads": (two_heads, ({"a": X, "b": X[::-1].copy()}, {"u": Y, "v": Y}), []),
    "own step": (lambda: dense(kind=MeanOfEach), (X, Y), []),
    "sums in the step": (lambda: regularised(ClipsTheSum), (X, Y), []),
    "two factors": (lambda: regularised(TwoFactors), (X, Y), []),
    "synchronized": (
        lambda: convolution(layers.BatchNormalization(synchronized=True)), (IMAGES, CLASSES), [],
    ),
    "numbered dropout": (lambda: dense(NumberedDropout()), (X, Y), []),
    "embedding": (lambda: sequences(mask_zero=False), (TOKENS, OF_TOKENS), []),
    "masked sequence": (lambda: sequences(mask_zero=True), (TOKENS, OF_TOKENS), OF_MASKS),
    "normalised": (normalised, (X, Y), LOCAL),
    "dropped": (dropped, (X, Y), SAME_NUMBERS),
    "scaled in the step": (
        lambda: regularised(ClipsTheSumOnly), (X, Y), [("gradients", FAULT, "scaled_gradient")],
    ),
    "without an optimizer": (
        lambda: regularised(WithoutOptimizer), (X, Y),
        [("update", NOT_COMPARED, "update_not_seen")],
    ),
    "mixes a little": (lambda: dense(MixesALittle()), (X, Y), MIXED + NOT_A_SUM),
}  # fmt: skip
COPIED = (  # On 3 replicas.
    "plain", "momentum", "adamw", "classes", "two heads", "own step", "normalised", "dropped",
)  # fmt: skip


# --- Recording -----------------------------------------------------------------------------------


def batches_of(data):
    return tf.data.Dataset.from_tensor_slices(data).batch(12)


def record(build, data, *, steps=2, num=3, **options):
    """Trains under a strategy, and returns what was recorded."""
    keras.utils.set_random_seed(1)
    with mirrored(num).scope():
        model = build()
    with Recorder(model, steps=steps) as recorder:
        model.fit(batches_of(data), verbose=0, **options)
    return from_parts(recorder.about, recorder.arrays)


@functools.cache
def recorded(name):
    build, data, _ = MODELS[name]
    options = {"validation_data": batches_of(data).take(1)} if name == "two heads" else {}
    options |= {"class_weight": {0: 2.0, 1: 0.5}} if name == "synchronized" else {}
    steps, num = (3, 3) if name in COPIED else (2, 2)
    return record(build, data, steps=steps, num=num, **options)


@functools.cache
def one_device(name):
    return MODELS[name][0]()


def replicas(*numbers):
    return tuple(f"replica {number}" for number in numbers)


def found(verdict):
    return [(f.stage, f.status, f.detail) for f in verdict.findings]


def only(verdict, stage, cause, but=()):
    """Returns the one fault of a verdict besides known ones, and asserts what it is."""
    faults = [f for f in verdict.faults if (f.stage, f.status, f.detail) not in but]
    assert [(f.stage, f.detail) for f in faults] == [(stage, cause)], str(verdict)
    assert verdict.status_of(stage) == FAULT
    return faults[0]


@pytest.mark.parametrize("name", MODELS)
def test_models_of_all_kinds(name):
    build, _, expected = MODELS[name]
    trace = recorded(name)
    verdict = lockstep.compare(trace, model=build)  # In float64, if possible.
    assert found(verdict) == expected, str(verdict)
    assert verdict.num_replicas == len(trace.copies) and verdict.steps == trace.steps
    assert "update" in verdict.checked and set(verdict.checked) <= STAGES.keys()
    wrong = {finding.stage for finding in verdict.findings}
    measured = [each for each in verdict.measurements if each.stage not in wrong]
    assert all(np.isfinite(each.distance) and each.is_within for each in measured)
    assert {"all-reduce", "update"} <= {each.stage for each in measured} or "update" in wrong
    assert (keras.config.floatx(), keras.config.dtype_policy().name) == ("float32", "float32")


# --- Copies with a fault -------------------------------------------------------------------------


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


STAGE_OF = {"raw": "gradients", "clipped": "clipping", "sent": "all-reduce", "sums": "all-reduce"}
# What is changed, how, cause; tensors and replicas, None for all (of the finding: for any tensors).
GRADIENT_FAULTS = [
    ("sums", times(1 / 3), "mean_instead_of_sum", range(4), REPLICAS),
    ("sums", times(1 / 3), "mean_instead_of_sum", (0,), REPLICAS),
    ("sums", times(1 / 3), "mean_instead_of_sum", None, (1, 2)),
    ("sent", np.zeros_like, "lost_replica", range(4), (1,)),
    ("sent", np.zeros_like, "lost_replica", (2,), (1,)),
    ("sent", times(2), "repeated_gradient", range(4), (2,)),
    ("sent", times(2), "repeated_gradient", (0,), (2,)),
    ("sent", times(1.5), "scaled_gradient", range(4), (2,)),
    ("sent", rounded, "reduced_precision", None, REPLICAS),
    ("sums", rounded, "reduced_precision", None, REPLICAS),
    ("sent", lambda g: rounded(g, tf.float16), "reduced_precision", None, REPLICAS),
    ("sent", top_k, "sparsified", None, REPLICAS),
    ("sent", int8, "quantised", None, REPLICAS),
    ("sent", int8, "quantised", (0,), REPLICAS),
    ("sent", signs, "quantised", None, REPLICAS),
    ("sums", noisy, "unexplained", (2,), REPLICAS),
    ("sums", one_nan, "not_finite", (2,), REPLICAS),
    ("raw", np.zeros_like, "frozen", (0,), (1,)),
    ("raw", one_nan, "not_finite", (2,), (1,)),
    ("raw", times(np.float32(np.inf)), "not_finite", range(4), (2,)),
    ("raw", times(3), "scaled_gradient", (2,), REPLICAS),
    ("raw", rounded, "reduced_precision", None, (2,)),
    ("raw", top_k, "sparsified", None, (0,)),
    ("raw", int8, "quantised", (1,), (0,)),
    ("raw", signs, "quantised", (1,), (0,)),
    ("raw", coarse, "unexplained", (0,), (0,)),
    ("raw", clipped_values, "clipped_before_the_sum", (2,), REPLICAS),
    ("raw", noisy, "unexplained", (2,), REPLICAS),
    ("clipped", to_norm, "clipped_on_one_replica", None, (1,)),
    ("clipped", lambda g: np.clip(g, -0.02, 0.02), "clipped_on_one_replica", None, (1,)),
    ("clipped", noisy, "unexplained", (2,), REPLICAS),
]


@pytest.mark.parametrize(("kind", "change", "cause", "tensors", "numbers"), GRADIENT_FAULTS)
def test_faults_of_gradients(kind, change, cause, tensors, numbers):
    faulty = Copy().change(kind, change, tensors, numbers)
    finding = only(faulty.verdict(), STAGE_OF[kind], cause)
    assert finding.items == replicas(*numbers) and finding.steps == (0,)
    assert finding.tensors and set(finding.tensors) <= set(faulty.names)
    assert tensors is None or set(finding.tensors) == {faulty.names[i] for i in tensors}


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
    assert not [f for f in faulty.verdict().faults if f.stage in ("random numbers", "forward")]
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


def test_one_number_is_a_multiple_of_any_other():
    one, two = np.array([0.3, 0.0]), np.array([0.3, 0.2])
    assert why_tensor(1.7 * two, two, 0.0, 3)[0] == "scaled_gradient"
    assert why_tensor(1.7 * one, one, 0.0, 3)[0] == why_tensor(0.9 * one, one, 0.0, 3)[0]
    assert why_tensor(0.9 * one, one, 0.0, 3)[0] == "unexplained"
    assert why_tensor(one / 3, one, 0.0, 3)[0] == "scaled_gradient"  # A number that is known.


ONE, ALL = (1,), REPLICAS
# Model, positions of the copied steps, what is changed, stage, cause, replicas, part of the text.
FAULTS = [
    ("plain", (0,), lambda f: f.compute(ONE, data=rolled_targets),
     "loss", "labels_shifted", ONE, ""),
    ("own step", (0,), without_loss, "gradients", "labels_shifted", ONE, "shifted by one"),
    ("classes", (0,), smoothed, "loss", "label_smoothing", ONE, "smoothing of 0.1"),
    ("plain", (0,), left_out, "loss", "lost_examples", ONE, "example 4 of 4"),
    ("plain", (0,), lambda f: f.compute(scales=(1 / 9, 1 / 9)), "loss", "scaled_gradient", (),
     "divided by the number of replicas twice"),
    ("normalised", (0,), lambda f: f.compute(scales=(1 / 3, 1)),
     "regularisation", "regulariser_repeated", (), "3 times"),
    ("normalised", (0,), lambda f: f.compute(scales=(1 / 3, 0)),
     "regularisation", "regulariser_missing", (), "0 times"),
    ("normalised", (0,), regularised_gradients,
     "gradients", "regulariser_repeated", ALL, "3 times"),
    *(
        (name, (0,), lambda f: f.compute(ONE, off=modal(f)), "forward", "inference_mode", ONE, "")
        for name in ("normalised", "dropped")
    ),
    ("dropped", (0,), with_seeds_of_replica_0, "forward", "same_random_numbers", ONE, "replica 0"),
    ("plain", (0, 1), lambda f: with_old(f, f.names), "forward", "stale_weights", ONE, ""),
    ("plain", (0, 1), lambda f: with_old(f, f.names[2:]),
     "forward", "stale_weights", ONE, "weights of network/out"),
    ("momentum", (0, 1), edit("before", 1, 1, change=next_up),
     "start", "changed_on_its_own", ONE, ""),
    ("momentum", (0, 1), edit("before", 1, 1, "momentum", change=next_up),
     "start", "changed_on_its_own", ONE, "momentum"),
    ("plain", (0,), edit("before", 2, change=one_more), "start", "diverged_replicas", (2,), ""),
    ("plain", (0,), edit("after", 2, change=next_up), "agreement", "diverged_replicas", (2,), ""),
    *(
        (name, (1,), updated(rate=lambda *_: 2.0), "update", "other_learning_rate", ONE, "2 times")
        for name in ("plain", "momentum", "adamw")
    ),
    ("momentum", (1,), updated(momentum=lambda *_: 0.45),
     "update", "other_momentum", ONE, "momentum of 0.45"),
    ("momentum", (1,), updated(nesterov=lambda *_: True),
     "update", "other_nesterov", ONE, "with the look-ahead"),
    ("momentum", (1,), updated(before=zeros), "update", "zeroed_state", ONE, ""),
    ("adamw", (1,), updated(before=at_start), "update", "reset_state", ONE, "first step"),
    ("two heads", (1,), updated(before=exchanged), "update", "shifted_state", ONE, "other weights"),
    ("adamw", (1,), updated(before=lambda f, s: f.oracle.update(s["before", 1], s["sums", 1])),
     "update", "updated_twice", ONE, ""),
    ("plain", (1,), updated(sums=lambda f, step: step["raw", 1]),
     "update", "not_all_reduced", ONE, ""),
    ("plain", (1,), mean_instead_of_sum, "update", "mean_instead_of_sum", ALL, "0.3333 times"),
    ("momentum", (1, 2), from_old(STATE), "update", "shifted_state", ALL, "previous step"),
    ("momentum", (1, 2), from_old(WEIGHT), "update", "stale_weights", ALL, "previous step"),
    ("momentum", (1,), after(WEIGHT, lambda new, old: new - np.float32(0.01) * old),
     "update", "weight_decay_on_top", ONE, "0.01"),
    ("momentum", (1,), after(WEIGHT, lambda new, old: old),
     "update", "not_updated", ONE, "not change"),
    ("momentum", (0,), after(WEIGHT, lambda new, old: noisy(new)),
     "update", "unexplained", ONE, "different update"),
    ("momentum", (0,), after(WEIGHT, lambda new, old: one_more(new)),
     "update", "changed_on_its_own", ONE, "1 elements"),
    ("adamw", (0,), lambda f: edit("after", 1, end=clock(f), change=lambda i: i + 1)(f),
     "update", "schedule_stepped_too_often", ONE, "by 2"),
    ("adamw", (0,), updated(sums=lambda f, step: {n: 0.37 * g for n, g in step["sums", 1].items()}),
     "update", "scaled_gradient", ONE, "by 0.37, to norm"),
    ("plain", (0,), first_half_twice, "all-reduce", "row_of_two_parts", ALL, "added twice"),
    ("normalised", (0,), statistics_of_the_whole_batch,
     "statistics", "whole_batch_norm", ONE, "over the whole batch"),
    ("normalised", (0,), after(STATISTIC, lambda new, old: new + (new - old)),
     "statistics", "doubled_average", ONE, ""),
    ("normalised", (0,),
     after(STATISTIC, lambda new, old: old + np.float32(4 / 3) * (new - old)),
     "statistics", "wrong_count", ONE, "n / (n - 1)"),
    ("normalised", (0,), after(STATISTIC, lambda new, old: old),
     "statistics", "inference_mode", ONE, ""),
    ("normalised", (0,), after(STATISTIC, lambda new, old: noisy(new)),
     "statistics", "unexplained", ONE, ""),
    ("normalised", (0,), others_statistics, "statistics", "same_examples", ONE, "replica 0"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "at", "make", "stage", "cause", "numbers", "text"), FAULTS)
def test_faults(name, at, make, stage, cause, numbers, text):
    faulty = Copy(name, at)
    make(faulty)
    known = [] if make is with_seeds_of_replica_0 else MODELS[name][2]
    finding = only(faulty.verdict(), stage, cause, known)
    assert finding.items == replicas(*numbers) and text in finding.text
    assert finding.steps == faulty.about.steps[-1:]


@pytest.mark.parametrize("kind", ["sums", "raw"])
@pytest.mark.parametrize("tensors", [1, 4])
def test_gradients_of_the_step_before(kind, tensors):
    """They are 0 in the first step; the next step tells why."""
    faulty = Copy(positions=(0, 1))
    (first, second), names = faulty.steps, faulty.names[:tensors]
    own = dict(first[kind, 1])
    for step, old in (
        (first, {n: 0 * own[n] for n in names}),
        (second, {n: own[n] for n in names}),
    ):
        if step is second:
            faulty.continue_from(1)
        for r in REPLICAS if kind == "sums" else (1,):
            step[kind, r] = step[kind, r] | old
        faulty.follow(step, kind)
    finding = only(faulty.verdict(), STAGE_OF[kind], "stale_gradient")
    assert finding.steps == (0, 1) and set(finding.tensors) == set(names)
    assert finding.items == replicas(*(REPLICAS if kind == "sums" else (1,)))


def test_a_sum_that_one_replica_lacks_in_one_step():
    faulty = Copy(positions=(0, 1))
    step, name = faulty.steps[1], faulty.names[2]
    step["sums", 2] = step["sums", 2] | {name: step["raw", 2][name]}
    finding = only(faulty.update(step).verdict(), "all-reduce", "not_all_reduced")
    assert (finding.steps, finding.items, finding.tensors) == ((1,), replicas(2), (name,))


@pytest.mark.parametrize(
    "limit", [{"clipnorm": 0.1}, {"global_clipnorm": 0.1}, {"clipvalue": 0.01}]
)
def test_clipping_before_the_sum(limit):
    faulty = Copy(model=plain(**limit))
    faulty.follow(faulty.steps[0])
    ((name, value),) = limit.items()
    text = only(faulty.verdict(), "clipping", "clipped_before_the_sum").text
    assert f"{name}={value}" in text


def test_clipping_that_clips_nothing():
    verdict = lockstep.compare(recorded("plain"), model=plain(global_clipnorm=1e9))
    assert not verdict.findings and verdict.status_of("clipping") == "clean"


@pytest.mark.parametrize("cause", ["same_examples", "unexplained"])
def test_predictions_for_other_examples(cause):
    faulty = Copy()
    (step,) = faulty.steps
    step["y_pred", 1] = (
        step["y_pred", 0] if cause == "same_examples" else [noisy(*step["y_pred", 1])]
    )
    faults = [f for f in faulty.verdict().faults if f.stage == "forward"]
    assert [(f.detail, f.items) for f in faults] == [(cause, replicas(1))]


def test_another_loss():
    verdict = lockstep.compare(recorded("plain"), model=dense(loss="mae"))
    assert only(verdict, "loss", "other_loss").items == replicas(*REPLICAS)


def test_a_weighted_mean_of_each_replica():
    mean = losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model = dense(loss=mean, optimizer=optimizers.SGD(0.05, momentum=0.9))
    only(Copy("momentum", model=model).compute().verdict(), "loss", "weighted_mean_of_means")


def test_a_last_batch_that_does_not_divide():
    trace = record(plain, (X[:16], Y[:16]))
    finding = only(lockstep.compare(trace, model=one_device("plain")), "loss", "mean_of_means")
    assert finding.steps == (1,) and "2/2/0" in finding.text


def test_two_faults_at_once_are_both_named():
    faulty = Copy().compute(scales=(1.0, 1.0)).change("sent", np.zeros_like, replicas=(1,))
    causes = [("loss", "scalar_loss_not_divided"), ("all-reduce", "lost_replica")]
    assert [(f.stage, f.detail) for f in faulty.verdict().findings] == causes


# --- Averaged statistics, micro-batches, and arrays that were not recorded -----------------------


@pytest.mark.parametrize(
    ("average", "cause"),
    [
        (lambda parts, sizes: np.mean(parts, axis=0), ""),
        (lambda parts, sizes: parts[1], "statistics_not_averaged"),
        (lambda parts, sizes: np.average(parts, axis=0, weights=sizes), "weighted_average"),
        (lambda parts, sizes: np.average(parts, axis=0, weights=(1, 2, 1)), "weighted_average"),
        (lambda parts, sizes: np.sum(parts, axis=0), "doubled_average"),
        (lambda parts, sizes: noisy(parts[0]), "unexplained"),
    ],
)
def test_statistics_that_are_averaged_in_each_step(average, cause):
    """As by strategies of this program."""
    faulty, sizes = Copy("normalised"), (4, 3, 2)
    (step,), names = faulty.steps, faulty.of_kind(STATISTIC)
    for r, size in enumerate(sizes):
        step["data", r] = [array[:size] for array in step["data", r]]
    faulty.compute(scales=lambda step, r: (sizes[r] / sum(sizes), 1 / 3))
    mean = {
        n: average([step["after", r][n] for r in REPLICAS], sizes).astype(np.float32) for n in names
    }
    for r in REPLICAS:
        step["own_before", r], step["own_after", r] = (
            {n: step[kind, r][n] for n in names} for kind in ("before", "after")
        )
        step["after", r] = step["after", r] | mean
    verdict = faulty.verdict()
    if cause:
        assert set(only(verdict, "statistics", cause).tensors) == set(names)
    else:
        assert found(verdict) == LOCAL and "statistics" in verdict.checked


@pytest.mark.parametrize(
    ("factor", "cause"), [(1, ""), (0, "lost_micro_batch"), (2, "repeated_gradient")]
)
def test_one_replica_that_accumulates_micro_batches(factor, cause):
    faulty = Copy()
    faulty.about = dataclasses.replace(
        faulty.about, num_replicas=1, num_copies=1, shards=(Shard(0),) * 3
    )
    (step,) = faulty.steps
    sent = [step["clipped", r] for r in REPLICAS]
    sent[1] = {name: np.float32(factor) * g for name, g in sent[1].items()}
    faulty.all_reduce(step, sent)
    faulty.steps[0] = {
        (kind, item): values
        for (kind, item), values in step.items()
        if item == 0 or kind not in ("before", "sums", "after")
    }
    verdict = faulty.verdict()
    if cause:
        finding = only(verdict, "all-reduce", cause)
        assert finding.items == ("micro-batch 1",) and set(finding.tensors) == set(faulty.names)
    else:
        assert not verdict.findings and "all-reduce" in verdict.checked


# Kind → the stages that need it.
NEEDED_BY = {
    "y_pred": {"forward"}, "mask": set(), "loss": {"loss", "regularisation"},
    "raw": {"gradients", "clipping"}, "clipped": {"clipping"}, "sums": {"all-reduce"},
    "after": {"update", "statistics", "agreement"}, "data": {"examples", "gradients"},
    "before": {"start", "gradients", "update"},
}  # fmt: skip


@pytest.mark.parametrize("kind", NEEDED_BY)
@pytest.mark.parametrize("lacking", [REPLICAS, (1,)])
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


def test_replicas_that_move_apart_without_recorded_sums():
    faulty = Copy()
    (step,) = faulty.steps
    for r in REPLICAS:
        step["sums", r] = step["clipped", r]
    faulty.update(step)
    for r in REPLICAS:
        del step["sums", r]
    finding = only(faulty.verdict(), "all-reduce", "not_all_reduced")
    assert set(finding.tensors) == set(faulty.names)


# --- Numbers that are not finite -----------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_step_that_is_not_finite_on_one_device_either_has_nothing_to_verify(bad):
    faulty = Copy("adamw", (0, 1))
    x, y = faulty.steps[0]["data", 1]
    faulty.steps[0]["data", 1] = [x, y + np.float32(bad)]
    faulty.compute((1,), faulty.steps[:1])
    for r in REPLICAS:
        faulty.steps[1]["before", r] = faulty.steps[0]["after", r]
    verdict = faulty.verdict()
    assert verdict.status == NOTHING and not verdict.ok
    assert "gradients are NaN or infinite, on one device too" in str(verdict).splitlines()[0]
    one, other = verdict.findings
    assert (one.stage, one.steps) == ("start", (1,))
    assert (other.stage, other.steps, other.items) == ("gradients", (0,), replicas(1))
    assert {(f.status, f.detail) for f in (one, other)} == {(NOTHING, "not_finite")}


def float16():
    return in_dtype("mixed_float16", momentum)


@functools.cache
def overflowing(number):
    """A training in float16 whose gradients overflow on a replica in the first step."""
    y = Y.copy()
    y[4 * number : 4 * number + 4] *= 2000
    return record(float16, (X, y))


def test_a_step_that_overflows_is_skipped():
    trace = overflowing(0)
    assert [trace.has(position, "raw") for position in range(2)] == [False, True]
    verdict = lockstep.compare(trace, model=float16())
    assert not verdict.findings and verdict.status_of("all-reduce") == "clean"


@pytest.mark.parametrize(
    ("kind", "cause", "items"),
    [("after", "changed_on_its_own", replicas(2)), ("data", "not_updated", ())],
)
def test_a_skipped_step_with_a_fault(kind, cause, items):
    faulty = Copy(model=float16(), whole=overflowing(0))
    (step,) = faulty.steps
    if kind == "after":  # A weight changes.
        edit("after", 2, change=one_more)(faulty)
    else:  # Nothing overflows.
        x, y = step["data", 0]
        step["data", 0] = [x, y / np.float32(2000)]
    fault = next(f for f in faulty.verdict().faults if f.stage == "update")
    assert (fault.detail, fault.items) == (cause, items)


def test_an_overflow_on_another_replica_than_the_first():
    """Keras looks at the gradients of replica 0 only, and applies the infinite ones of others."""
    verdict = lockstep.compare(overflowing(1), model=float16())
    fault = only(verdict, "update", "overflow_not_skipped")
    assert (fault.items, fault.steps) == (replicas(1), (0,))
    others = [(f.detail, f.steps) for f in verdict.findings if f != fault]
    assert others == [("not_finite", (1,))]


# --- Batches that the data set defines, and evaluations ------------------------------------------


def test_examples_of_the_batch():
    faulty, x, y = Copy(), X[:12], Y[:12]
    (step,) = faulty.steps

    def verdict(*batch):
        return faulty.verdict(batches=[batch])

    assert not verdict(x, y).findings and "examples" in verdict(x, y).checked
    only(verdict(x, np.roll(y, 1, 0)), "examples", "labels_shifted")
    only(verdict(X[:16], Y[:16]), "examples", "lost_examples")
    only(verdict(x + 1, y), "examples", "other_examples")
    own, other = step["data", 2], step["data", 0]
    step["data", 2] = [np.concatenate([a[:3], b[:1]]) for a, b in zip(own, other, strict=True)]
    only(faulty.compute((2,)).verdict(batches=[(x, y)]), "examples", "repeated_examples")
    step["data", 2] = step["data", 1]
    finding = only(faulty.compute((2,)).verdict(batches=[(x, y)]), "examples", "same_examples")
    assert finding.items == replicas(1, 2)
    step["data", 0] = step["data", 1]
    finding = only(faulty.compute((0,)).verdict(batches=[(x, y)]), "examples", "same_examples")
    assert finding.items == replicas(*REPLICAS)


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


# --- Small changes, and tolerances ---------------------------------------------------------------

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


# --- Errors --------------------------------------------------------------------------------------


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
