"""Compiled Keras models on our strategies: every split is the training of one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from objective_samples import (
    MODELS,
    AddsLoss,
    OwnStep,
    TwoUpdates,
    X,
    Y,
    compiled,
    dense,
    differing,
    start,
)

from app.runtime.errors import ConfigError
from app.training.case_model_checks import check_case_model
from recorders.keras_comparison import compare_evaluation
from strategies.one_device import seed_of_replica

layers, optimizers = keras.layers, keras.optimizers
QUICK = {
    "plain",
    "two heads",
    "mask",
    "weighted mean",
    "contrastive",
    "regularisers",
    "own step",
    "dropout",
}
NAMES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


def assert_near(state, expected):
    """Three steps in another order of summation, where weights change by about 0.1."""
    for name, array in expected.items():
        np.testing.assert_allclose(state[name], array, rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_trains_as_one_device_does(name):
    build, data, is_same = MODELS[name]
    trained, totals = {}, {}
    for strategy in ("single", "manual", "mirrored"):
        training = start(strategy, build, data)
        before = training.strategy.state()
        totals[strategy] = training.train()
        trained[strategy] = training.strategy.state()
        assert differing(before, trained[strategy])
        copies = training.strategy.copy_states()
        for other in copies[1:]:
            assert set(differing(other, copies[0])) <= {n for n in other if "moving" in n}
        assert totals[strategy].examples == 29
    assert differing(trained["manual"], trained["mirrored"]) == []
    assert totals["manual"].loss_sum == totals["mirrored"].loss_sum
    if is_same:
        assert_near(trained["manual"], trained["single"])
        assert totals["manual"].loss == pytest.approx(totals["single"].loss, rel=1e-5)
    else:
        kernel = next(name for name in trained["single"] if name.endswith("kernel"))
        assert np.abs(trained["manual"][kernel] - trained["single"][kernel]).max() > 1e-3


def with_sgd(build):
    def build_and_compile():
        return compiled(build(), optimizer=optimizers.SGD(0.05))

    return build_and_compile


@pytest.mark.parametrize("name", NAMES)
def test_one_device_trains_as_keras_does(name):
    """Random numbers included: replica 0 draws those of one device."""
    build, data, _ = MODELS[name]
    if name == "embedding":  # Keras' Adam squares each row of a sparse gradient by itself.
        build = with_sgd(build)
    training = start("single", build, data)
    training.train()
    state = training.strategy.state()
    model = training.model_fn()
    for batch in training.dataset:  # `fit` ends with the averaged weights of `use_ema`.
        model.train_on_batch(*batch)
    expected = {f"model/{v.path}": v.numpy() for v in model.trainable_variables}
    assert expected
    assert_near(state, expected)


@pytest.mark.parametrize("name", ["contrastive", "regularisers", "add_loss alone"])
def test_the_loss_is_that_of_the_whole_batch(name):
    """It compares examples with each other, or holds what layers add, as `compute_loss` does."""
    training = start("manual", *MODELS[name][:2])
    model = training.strategy.model
    expected = float(model.compute_loss(X[:12], Y[:12], model(X[:12], training=True)))
    assert training.train(1).loss == pytest.approx(expected, rel=1e-5)


def test_weights_without_a_gradient_stay():
    training = start("manual", *MODELS["partly used"][:2])
    before = training.strategy.state()
    training.train()
    changed = {n for n in differing(before, training.strategy.state()) if n.startswith("model/")}
    assert {name.rpartition("/")[0] for name in changed} == {"model/partly_used/dense_1"}
    assert training.objective.trained == [0, 1]


def test_gradients_are_accumulated_on_several_replicas():
    def build():
        optimizer = optimizers.Adam(0.01, epsilon=1e-3, gradient_accumulation_steps=2)
        return compiled(dense(), optimizer=optimizer)

    states = []
    for strategy in ("single", "manual"):
        training = start(strategy, build, (X, Y))
        before = training.strategy.state()
        training.train(1)
        changed = differing(before, training.strategy.state())
        assert not [name for name in changed if name.startswith("model/")]
        training.train(3, skip=1)
        states.append(training.strategy.state())
    assert_near(states[1], states[0])


@pytest.mark.parametrize(
    ("one", "other"),
    [("manual", "mirrored"), pytest.param("mirrored", "manual", marks=pytest.mark.slow)],
)
def test_a_strategy_resumes_from_the_state_of_another(one, other):
    def build():
        return compiled(dense(layers.Dropout(0.5)), optimizer=optimizers.Adam(0.01))

    first = start(one, build, (X, Y))
    first.train(2)
    second = start(other, build, (X, Y))
    second.strategy.load_state(first.strategy.state())
    assert differing(second.strategy.state(), first.strategy.state()) == []
    first.train(2, skip=2)
    second.train(2, skip=2)
    assert differing(second.strategy.state(), first.strategy.state()) == []


# --- Random numbers ------------------------------------------------------------------------------


class Draws(keras.Model):
    """Writes the random numbers of each replica into its weight's gradient."""

    def __init__(self):
        super().__init__(name="draws")
        self.seeds = keras.random.SeedGenerator(7)

    def build(self, shape):
        self.drawn = self.add_weight(shape=(29,), name="drawn", initializer="zeros")
        self.built = True

    def call(self, x, training=False):
        numbers = keras.random.uniform((tf.shape(x)[0],), seed=self.seeds)
        chosen = tf.gather(self.drawn, tf.cast(x[:, 0], tf.int32))
        return (chosen * numbers)[:, tf.newaxis]


def sum_of_predictions(y, y_pred):
    return -tf.reduce_sum(y_pred)


def drawn(strategy):
    """Returns what each of 29 examples was multiplied by, in steps of 12."""
    numbers = np.arange(29, dtype=np.float32)[:, np.newaxis]
    training = start(
        strategy,
        lambda: compiled(Draws(), sum_of_predictions, optimizers.SGD(1.0)),
        (numbers, numbers),
    )
    training.train()
    return training, training.strategy.model.trainable_variables[0].numpy()


def test_random_numbers_are_those_of_seed_step_and_replica():
    training, manual = drawn("manual")
    _, mirrored = drawn("mirrored")
    assert manual.tobytes() == mirrored.tobytes()
    bounds = [[(0, 6), (6, 12)], [(12, 18), (18, 24)], [(24, 27), (27, 29)]]
    for step, per_replica in enumerate(bounds):
        for replica, (begin, end) in enumerate(per_replica):
            seed = seed_of_replica(tf.constant([7, step], tf.int64), replica)
            generator = keras.random.SeedGenerator(0)
            generator.state.assign(tf.cast(seed, generator.state.dtype))
            expected = keras.random.uniform((end - begin,), seed=generator)
            np.testing.assert_array_equal(manual[begin:end], expected, f"{step}, {replica}")
    assert len(set(manual)) == 29
    np.testing.assert_array_equal(training.seeds, [[7, 3]])


def test_seeds_of_replicas():
    state = tf.constant([2**32 - 1, 5], tf.uint32)
    seeds = [seed_of_replica(state, replica).numpy() for replica in range(64)]
    assert seeds[0].tolist() == [2**32 - 1, 5] and seeds[1].dtype == np.uint32
    assert len({seed[0] for seed in seeds}) == 64 and {seed[1] for seed in seeds} == {5}


# --- Evaluation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("strategy", ["manual", pytest.param("mirrored", marks=pytest.mark.slow)])
def test_evaluation_is_that_of_keras_on_one_device(strategy, name):
    build, data, _ = MODELS[name]

    def with_metrics():
        model = build()
        if not isinstance(model, OwnStep) and name not in ("two heads", "add_loss alone"):
            loss, optimizer = model.loss, model.optimizer
            weighted = ["mse"] if len(data) == 3 else None
            model.compile(optimizer, loss, metrics=["mae"], weighted_metrics=weighted)
        return model

    training = start(strategy, with_metrics, data)
    training.train()
    before = training.strategy.state()
    totals = training.evaluate()
    assert totals.examples == 29 and differing(training.strategy.state(), before) == []
    one = start("single", with_metrics, data).strategy.model
    logs = {"loss": totals.loss, **training.objective.metrics}
    assert compare_evaluation(logs, one, [list(before.values())], training.dataset) == []
    again = training.evaluate()
    assert {"loss": again.loss, **training.objective.metrics} == logs


def test_each_number_of_a_metric_is_named():
    def build():
        metrics = [keras.metrics.F1Score(threshold=0.5, name="f1"), "mae"]
        return compiled(dense(), metrics=metrics)

    positive = (X, (Y > 0).astype(np.float32))
    training = start("manual", build, positive)
    totals = training.evaluate()
    assert set(training.objective.metrics) == {"f1[0]", "f1[1]", "mae"}
    one, state = start("single", build, positive).strategy, training.strategy.state()
    logs = {"loss": totals.loss, **training.objective.metrics}
    compared = [list(state.values())], training.dataset
    assert compare_evaluation(logs, one.model, *compared) == []
    logs["f1[1]"] += 0.1
    (finding,) = compare_evaluation(logs, one.model, *compared)
    assert (finding.cause, finding.tensors) == ("other_metric", ("f1[1]",))


# --- Data and models of other kinds --------------------------------------------------------------


def test_none_in_a_batch_is_left_out():
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(12)
    states = []
    for data in (dataset, dataset.map(lambda x, y: (x, y, None))):
        training = start("manual", MODELS["plain"][0], data)
        training.train()
        states.append(training.strategy.state())
    assert differing(*states) == []


def test_synchronized_batch_norm_on_one_device():
    """It sums over the replicas in its backward pass, too."""
    states = []
    for synchronized in (False, True):
        normal = layers.BatchNormalization(synchronized=synchronized, name="normal")
        training = start("single", lambda layer=normal: compiled(dense(layer)), (X, Y))
        training.train()
        states.append(training.strategy.state())
    assert_near(states[1], states[0])


class OtherRows(AddsLoss):
    """Predicts something else than a row for each example."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def call(self, x):
        return self.change(super().call(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (tf.reduce_mean, "model adds_loss returns a scalar; a strategy joins the predictions"),
        (lambda p: tf.repeat(p, 2, axis=0), "returns a prediction without a row for each example"),
    ],
)
def test_predictions_without_a_row_for_each_example(change, message):
    def build():
        return compiled(OtherRows(change), lambda y, y_pred: tf.reduce_mean(y_pred))

    training = start("manual", build, (X, Y))
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=message):
        training.train(1)


# --- Refusals ------------------------------------------------------------------------------------


def test_a_weight_that_a_call_assigns_to():
    def build():
        return compiled(keras.Sequential([layers.SpectralNormalization(layers.Dense(2))]))

    for strategy in ("manual", "mirrored"):
        with pytest.raises(ValueError, match=r"assigns to its weight .*kernel when it is called"):
            start(strategy, build, (X, Y)).train(1)


class NoUpdate(OwnStep):
    """Never updates its weights."""

    def train_step(self, data):
        return {"loss": tf.reduce_mean(self(data[0]))}


@pytest.mark.parametrize(("model", "calls"), [(NoUpdate, 0), (TwoUpdates, 2)])
def test_a_step_that_does_not_call_its_optimizer_once(model, calls):
    with pytest.raises(ValueError, match=rf"calls optimizer.apply {calls} times"):
        start("manual", lambda: compiled(model()), (X, Y)).train(1)


def accumulates():
    return compiled(dense(), optimizer=optimizers.SGD(0.1, gradient_accumulation_steps=2))


@pytest.mark.parametrize(
    ("strategy", "build", "message"),
    [
        (
            "manual",
            lambda: compiled(dense(), optimizer=optimizers.LossScaleOptimizer(optimizers.SGD())),
            "strategy manual has no loss scale; use mixed_bfloat16",
        ),
        (
            "manual",
            lambda: compiled(dense(layers.BatchNormalization(synchronized=True))),
            "strategy manual does not synchronize batch_normalization",
        ),
        ("mirrored", accumulates, "gradient_accumulation_steps=2 of the optimizer fails"),
    ],
)
def test_what_strategies_refuse(strategy, build, message):
    training = start(strategy, build, (X, Y))
    with pytest.raises(ConfigError, match=f"^--case=my_case.py: .*{message}"):
        check_case_model(training.strategy, "my_case.py")
    if strategy == "mirrored":
        check_case_model(start("single", build, (X, Y)).strategy, "my_case.py")
