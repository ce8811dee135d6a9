"""Recordings of Keras loops with several optimizers, float16, XLA and averages of weights.

Each program is right, or has a bug of that name when it runs on several replicas.
"""

import contextlib
import functools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from lockstep import compare
from lockstep.data import file as trace_file
from lockstep.record_keras import record
from tests.small_models import mirrored
from tests.verifier.recorder_scripts.recording import node_of

layers, optimizers = keras.layers, keras.optimizers
BATCH, STEPS = 12, 3
RANDOM = np.random.default_rng(0)
TOKENS = RANDOM.integers(0, 20, (36, 5)).astype(np.int32)
FEATURES = RANDOM.normal(size=(36, 6)).astype(np.float32)
LABELS = RANDOM.integers(0, 3, 36)
PER_EXAMPLE = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)


class NotReduced(optimizers.SGD):
    """Does not reduce the gradients."""

    def _all_reduce_sum_gradients(self, grads_and_vars):
        return grads_and_vars


def classifier(inputs=(6,), **options):
    return keras.Sequential(
        [keras.Input(inputs), layers.Dense(8, activation="tanh"), layers.Dense(3, **options)]
    )


def apply(optimizer, gradients, weights):
    optimizer.apply_gradients(zip(gradients, weights, strict=True))


def per_part(num, bug):
    """An optimizer for the embedding, and one for the other layers."""
    model = keras.Sequential(
        [layers.Embedding(20, 4), layers.GlobalAveragePooling1D(), layers.Dense(3)]
    )
    model.build((None, 5))
    first = optimizers.Adam(0.01)
    kind = NotReduced if bug == "not reduced" else optimizers.SGD
    second = kind(0.1 * (num if bug == "rate" else 1), momentum=0.9)

    def step(tokens, _, labels):
        with tf.GradientTape() as tape:
            losses = PER_EXAMPLE(labels, model(tokens, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
        embedding, *others = tape.gradient(loss, model.trainable_variables)
        apply(first, [embedding], model.trainable_variables[:1])
        apply(second, others, model.trainable_variables[1:])
        return loss

    return model, [first, second], step


class Stages(keras.Model):
    """Keeps the features of its stages; `build` marks it as built, and creates no weights."""

    def __init__(self):
        super().__init__()
        self.parts = [layers.Dense(6, "tanh") for _ in range(2)]
        self.norms = [layers.BatchNormalization(synchronized=True) for _ in range(2)]
        self.head = layers.Dense(3)

    def call(self, x, training=False):
        self.kept = []
        for part, norm in zip(self.parts, self.norms, strict=True):
            x = x + part(norm(x, training=training))  # Waits for the other replicas.
            self.kept.append(x)
        return self.head(x)


def built_in_a_step(num, bug):
    """A model whose weights the first step creates, on all replicas at once."""
    model, optimizer = Stages(), optimizers.SGD(0.1, momentum=0.9)
    with warnings.catch_warnings(action="ignore"):
        model.build((None, 6))

    def step(_, features, labels):
        with tf.GradientTape() as tape:
            losses = PER_EXAMPLE(labels, model(features, training=True))
            size = BATCH // num if bug == "mean" else BATCH
            loss = tf.nn.compute_average_loss(losses, global_batch_size=size)
        apply(optimizer, tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return model, [optimizer], step


def gan(num, bug):
    """Two models with an optimizer each; both train on the same examples."""
    noise, data = 4, 6
    generator = keras.Sequential(
        [keras.Input((noise,)), layers.Dense(8, activation="tanh"), layers.Dense(data)],
        name="generator",
    )
    discriminator = keras.Sequential(
        [keras.Input((data,)), layers.Dense(8, activation="tanh"), layers.Dense(1)],
        name="discriminator",
    )
    of_discriminator = optimizers.SGD(0.1)
    of_generator = optimizers.SGD(0.05, momentum=0.9)
    loss_function = keras.losses.BinaryCrossentropy(from_logits=True, reduction=None)

    def loss_of(labels, logits):
        return tf.nn.compute_average_loss(loss_function(labels, logits), global_batch_size=BATCH)

    def step(_, real, labels):
        drawn = real[:, :noise]  # In place of random numbers.
        with tf.GradientTape(persistent=True) as tape:
            fake = generator(drawn, training=True)
            judged, true = discriminator(fake, training=True), discriminator(real, training=True)
            ones, zeros = tf.ones_like(true), tf.zeros_like(true)
            of_d = loss_of(ones, true) + loss_of(zeros, judged)
            of_g = loss_of(ones, judged)
        gradients = tape.gradient(of_d, discriminator.trainable_variables)
        apply(of_discriminator, gradients, discriminator.trainable_variables)
        gradients = tape.gradient(of_g, generator.trainable_variables)
        apply(of_generator, gradients, generator.trainable_variables)
        return of_d

    return [generator, discriminator], [of_discriminator, of_generator], step


def mixed_float16(num, bug):
    """A loss scale; the bug is a larger loss on one replica."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = classifier(dtype="float32")
    finally:
        keras.config.set_dtype_policy("float32")
    optimizer = optimizers.LossScaleOptimizer(optimizers.SGD(0.1, momentum=0.9))

    def step(_, x, labels):
        with tf.GradientTape() as tape:
            losses = PER_EXAMPLE(labels, model(x, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
            if bug:
                number = tf.distribute.get_replica_context().replica_id_in_sync_group
                loss *= tf.where(number == 1, 1.05, 1.0)
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        apply(optimizer, gradients, model.trainable_variables)
        return loss

    return model, [optimizer], step


def compiled_gradients(num, bug):
    """XLA compiles what computes the gradients."""
    model, optimizer = classifier(), optimizers.SGD(0.1, momentum=0.9)

    @tf.function(jit_compile=True)
    def gradients_of(x, labels):
        with tf.GradientTape() as tape:
            losses = PER_EXAMPLE(labels, model(x, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=num if bug else BATCH)
        return tape.gradient(loss, model.trainable_variables)

    def step(_, x, labels):
        apply(optimizer, gradients_of(x, labels), model.trainable_variables)

    return model, [optimizer], step


def several_updates(num, bug):
    """Applies two gradients in a step, one after the other."""
    model, optimizer = classifier(), optimizers.SGD(0.1, momentum=0.9)

    def step(_, x, labels):
        for scale in (1.0, num if bug else 1.0):
            with tf.GradientTape() as tape:
                losses = PER_EXAMPLE(labels, model(x, training=True))
                loss = scale * tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
            gradients = tape.gradient(loss, model.trainable_variables)
            apply(optimizer, gradients, model.trainable_variables)

    return model, [optimizer], step


class Averaged(keras.Model):
    """Has averages of its weights, and an optimizer that has others; a bug updates one twice."""

    def __init__(self, bug):
        super().__init__()
        self.network, self.bug = classifier(), bug
        self.averages = [
            self.add_weight(
                shape=w.shape, name=f"average_{i}", trainable=False, aggregation="mean",
                initializer="zeros",
            )
            for i, w in enumerate(self.network.weights)
        ]  # fmt: skip

    def call(self, x, training=False):
        return self.network(x, training=training)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        self.optimizer.apply(
            tape.gradient(loss, self.trainable_variables), self.trainable_variables
        )
        for _ in range(2 if self.bug == "twice in the step" else 1):
            for average, weight in zip(self.averages, self.network.weights, strict=True):
                average.assign(0.9 * average + 0.1 * weight)
        if self.bug == "twice in the optimizer":
            self.optimizer._update_model_variables_moving_average(self.trainable_variables)
        return {"loss": loss}


class Gan(keras.Model):
    """As in the guides of Keras: two optimizers as attributes; that of `compile` is not used."""

    def compile(self, first, second):
        super().compile()
        self.first, self.second = first, second

    def __init__(self, program):
        super().__init__()
        self.parts, (first, second), self.own_step = program
        self.built = True
        self.compile(first, second)

    def train_step(self, data):
        return {"loss": self.own_step(None, *data)}


def fit(build, num, path, **options):
    """Trains a compiled model by `fit` and records it if there is a path; returns its bits."""
    keras.utils.set_random_seed(1)
    with mirrored(num).scope():
        model = build()
    data = dataset().map(lambda tokens, features, labels: (features, labels))
    recording = record(path, model, steps=STEPS, **options)
    with recording if path else contextlib.nullcontext():
        model.fit(data, verbose=0)
    return [v.numpy().tobytes() for v in model.variables]


def dataset():
    return tf.data.Dataset.from_tensor_slices((TOKENS, FEATURES, LABELS)).batch(BATCH)


def train(program, num, path=None, bug="", given=None, jit_compile=None, **options):
    """Trains a program on replicas and returns its final bits; records it if there is a path.

    Args:
        given: which of the optimizers the recorder is given; all by default.
    """
    keras.utils.set_random_seed(1)
    strategy = mirrored(num)
    with strategy.scope():
        model, all_optimizers, step = program(num, bug)
    given = all_optimizers if given is None else [all_optimizers[i] for i in given]
    with record(path, model, given, steps=STEPS, **options) as recorder:
        wrapped = recorder.wrap(step)

        @tf.function(jit_compile=jit_compile)
        def distributed(batch):
            return strategy.run(wrapped, args=batch)

        for batch in strategy.experimental_distribute_dataset(dataset()):
            distributed(batch)
    models = model if isinstance(model, list) else [model]
    owners = [*models, *all_optimizers]
    return [v.numpy().tobytes() for owner in owners for v in owner.variables]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Returns a function that returns the recording of a program on one device."""
    folder, found = tmp_path_factory.mktemp("one"), {}

    def recording(program):
        path = str(folder / f"{program.__name__}.npz")
        if path not in found and program in (from_gan, with_multi_optimizer, with_averages):
            found[path] = fit(functools.partial(program, 1), 1, path)
        elif path not in found:
            found[path] = train(program, 1, path)
        return path

    recording(from_gan)  # Its graphs are more than a test may trace in addition to its own.
    return recording


@pytest.fixture
def verdict_of(one, tmp_path):
    """Returns a function that compares a program on two replicas with that on one."""

    def verdict(program, bug="", **options):
        first = one(program)
        train(program, 2, str(tmp_path / "two.npz"), bug, replay=first, **options)
        return compare(first, str(tmp_path / "two.npz"))

    return verdict


@pytest.mark.parametrize("program, bug, node", [
    (per_part, "rate", "update"), (per_part, "not reduced", "sum"),
    (mixed_float16, "", ""), (mixed_float16, "other loss", "loss"),
    (compiled_gradients, "", ""), (compiled_gradients, "sum", "loss"),
    pytest.param(several_updates, "scaled", "update", marks=pytest.mark.slow),
])  # fmt: skip
def test_right_programs_are_clean_and_bugs_have_a_place(program, bug, node, verdict_of):
    verdict = verdict_of(program, bug)
    assert node_of(verdict) == node, str(verdict)


def test_a_model_that_a_step_builds_is_refused(tmp_path):
    told = "has no weights yet; call the model with a batch before the block"
    with pytest.raises(ValueError, match=told):
        train(built_in_a_step, 2, str(tmp_path / "two.npz"))


@pytest.mark.parametrize("program, given", [(per_part, [0]), (gan, None)])
def test_all_optimizers_that_a_loop_applies_are_recorded(program, given, tmp_path, verdict_of):
    verdict = verdict_of(program, given=given)
    assert verdict.status == "clean", str(verdict)
    about = trace_file.load(tmp_path / "two.npz").about
    weights = {v.name for v in about.variables if v.kind == "weight"}
    momentum = {v.of for v in about.variables if v.slot == "momentum"}
    for groups in about.settings:
        assert {name for group in groups for name in group["weights"]} == weights
        assert len({group["learning_rate"] for group in groups}) == len(groups) == 2
        of_second = {n for g in groups if g.get("momentum") for n in g["weights"]}
        assert of_second and of_second <= momentum


@pytest.mark.slow
@pytest.mark.parametrize("program", [per_part, mixed_float16, compiled_gradients])
def test_recording_changes_nothing(program, tmp_path):
    plain = train(program, 2)
    assert plain == train(program, 2, str(tmp_path / "two.npz"), given=[0])


def test_several_updates_of_a_weight_in_a_step_are_not_accused(one, verdict_of, tmp_path):
    assert verdict_of(several_updates).status != "fault"
    names = trace_file.load(tmp_path / "two.npz").stored()
    assert any("/sums/" not in name for name in names) and not any("/raw/" in x for x in names)


def test_the_computed_dtype_is_recorded(one):
    assert trace_file.load(one(mixed_float16)).about.computed_in == "float16"
    assert trace_file.load(one(per_part)).about.computed_in == ""


def test_xla_around_a_step_and_missing_models_are_errors_of_one_line(tmp_path):
    def of_generator(num, bug):
        models, *others = gan(num, bug)
        return models[0], *others

    path = str(tmp_path / "none.npz")
    with pytest.raises(ValueError, match=r"^jit_compile=True is around [^\n]* to record$"):
        train(per_part, 1, path, jit_compile=True)
    with pytest.raises(
        ValueError, match=r"^a step updates discriminator/[^\n]* list of all models"
    ):
        train(of_generator, 1, path)


def from_gan(num, bug=""):
    return Gan(gan(num, bug))


def with_multi_optimizer(num, bug=""):
    weights = optimizers.SGD(0.1 * (num if bug else 1), momentum=0.9)
    biases = optimizers.Adam(0.01)
    model = classifier()
    model.compile(
        optimizers.MultiOptimizer(lambda weight: biases if "bias" in weight.path else weights),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def with_averages(num, bug=""):
    model = Averaged(bug)
    optimizer = optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize("build, bug, node", [
    (from_gan, "", ""),
    (with_multi_optimizer, "", ""),
    (with_multi_optimizer, "rate", "update"),
    (with_averages, "", ""),
    (with_averages, "twice in the step", "update"),
    (with_averages, "twice in the optimizer", "update"),
])  # fmt: skip
def test_fit(build, bug, node, one, tmp_path):
    first, second = one(build), str(tmp_path / "two.npz")
    fit(functools.partial(build, 2, bug), 2, second, replay=first)
    verdict = compare(first, second)
    assert node_of(verdict) == node, str(verdict)
