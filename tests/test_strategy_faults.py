"""Tests faults in the project's strategies: `compare` finds and names each in a recording."""

import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf
from objective_samples import MODELS, X, Y, compiled, dense, start

from app.config import Config
from app.devices.device_setup import Devices
from app.training.case_file import CaseFile
from app.verification.case_check import CaseCheck
from app.verification.case_phases import CaseData
from app.verification.case_training import StrategyTraining
from conftest import CPUS
from recorders.keras_comparison import FAULT
from strategies import one_device, whole_batch
from strategies.keras_objective import KerasObjective
from strategies.manual import ManualStrategy
from strategies.mirrored import MirroredStrategy
from strategies.shard_step import ShardStep

layers, optimizers = keras.layers, keras.optimizers


def plain():
    return compiled(dense())


def clipped():
    return compiled(dense(), optimizer=optimizers.SGD(0.05, global_clipnorm=0.1))


def regularised():
    return compiled(dense(kernel_regularizer="l2"))


def normalised():
    return compiled(dense(layers.BatchNormalization()))


def dropped():
    return compiled(dense(layers.Dropout(0.5)))


def number(replica):
    """Returns the number of a replica as an int."""
    return int(tf.get_static_value(tf.convert_to_tensor(replica.replica_id)))


def change(monkeypatch, owner, name, function):
    """Replaces a function by `function(inner, ...)`."""
    inner = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: function(inner, *args, **kwargs))


def in_sum(before=lambda lists: lists, after=lambda lists, sums: sums):
    """Injects a fault into the all-reduce of `manual`: into what goes in, or what comes out."""

    def inject(monkeypatch, training):
        def all_reduce(inner, strategy, lists):
            return after(lists, inner(strategy, before(lists)))

        change(monkeypatch, ManualStrategy, "all_reduce", all_reduce)

    return inject


def zeros_of_1(lists):
    return [lists[0], [tf.zeros_like(g) for g in lists[1]]]


def first_not_summed(lists, sums):
    return [[own[0], *total[1:]] for own, total in zip(lists, sums, strict=True)]


def stale(monkeypatch, training):
    """Sends the gradients of the step before."""
    shapes = [v.shape for v in training.strategy.model.trainable_variables]
    kept = [[tf.Variable(tf.zeros(shape)) for shape in shapes] for _ in range(2)]

    def delayed(lists):
        old = [[tf.identity(v) for v in own] for own in kept]
        with tf.control_dependencies([v for own in old for v in own]):
            for own, gradients in zip(kept, lists, strict=True):
                for variable, gradient in zip(own, gradients, strict=True):
                    variable.assign(gradient)
        return old

    in_sum(before=delayed)(monkeypatch, training)


def in_later_steps(first):
    """Averages from a step on, counted from 0."""

    def inject(monkeypatch, training):
        step = training.strategy.optimizer.iterations.value
        in_sum(
            after=lambda lists, sums: [
                [tf.where(step >= first, s / 2, s) for s in total] for total in sums
            ]
        )(monkeypatch, training)

    return inject


def same_seeds(monkeypatch, training):
    monkeypatch.setattr(one_device, "seed_of_replica", lambda state, replica_id: state)


def loss_of_shards(monkeypatch, training):
    """Computes the loss of each shard, times its share of the batch."""

    def gradients(strategy, replicas, shards, batch, gather):
        results, totals = [], []
        for replica, shard in zip(replicas, shards, strict=True):
            with tf.device(replica.device):
                share = tf.cast(tf.shape(shard[0])[0] / tf.shape(batch[0])[0], tf.float32)
                forward = strategy.objective.forward(replica, shard, share)
                loss, starts = strategy.objective.loss(
                    replica, shard, forward.predictions, forward.masks
                )
                own = strategy.objective.backward(replica, forward, [share * s for s in starts])
                part = share * loss + forward.regular
                strategy.observer.on_predictions(
                    replica.replica_id,
                    whole_batch.Predicted(
                        shard, forward.predictions, forward.masks, part, forward.regular
                    ),
                )
                results.append(strategy.observer.on_gradients(replica.replica_id, own))
            totals.append(whole_batch._totals(part, tf.shape(batch[0])[0], shard))
        return results, totals

    monkeypatch.setattr("strategies.manual.gradients_of_whole_batch", gradients)


def with_share(function):
    """Changes the part of a replica in what layers add to the loss."""

    def inject(monkeypatch, training):
        def forward(inner, objective, replica, examples, share):
            return inner(objective, replica, examples, function(share))

        change(monkeypatch, KerasObjective, "forward", forward)

    return inject


def clip_before_sum(monkeypatch, training):
    in_sum(before=lambda lists: [tf.clip_by_global_norm(own, 0.1)[0] for own in lists])(
        monkeypatch, training
    )


def other_threshold(monkeypatch, training):
    training.strategy.replicas[1].optimizer.global_clipnorm = 0.05


def other_rate(monkeypatch, training):
    optimizer = training.strategy.replicas[1].optimizer
    inner = optimizer._get_current_learning_rate
    object.__setattr__(optimizer, "_get_current_learning_rate", lambda: 1.5 * inner())


def decay_on_top(monkeypatch, training):
    def apply(inner, strategy, replica, sums):
        inner(strategy, replica, sums)
        kernel = replica.model.trainable_variables[0]
        kernel.assign(0.99 * kernel)

    change(monkeypatch, ShardStep, "apply_gradients", apply)


def shifted_labels(monkeypatch, training):
    def loss(inner, objective, replica, batch, *rest):
        return inner(objective, replica, [batch[0], tf.roll(batch[1], 1, 0), *batch[2:]], *rest)

    change(monkeypatch, KerasObjective, "loss", loss)


def shifted_examples(monkeypatch, training):
    def distribute(inner, strategy, dataset):
        return inner(strategy, dataset.map(lambda x, y: (x, tf.roll(y, 1, 0))))

    for strategy in (ManualStrategy, MirroredStrategy):
        change(monkeypatch, strategy, "distribute", distribute)


def wrong_order(monkeypatch, training):
    def gather(lists):
        return [tf.concat(parts[::-1], 0) for parts in zip(*lists, strict=True)]

    monkeypatch.setattr("strategies.manual.gather_by_hand", gather)


def in_inference(monkeypatch, training):
    model = training.strategy.replicas[1].model
    inner = model.call

    def call(*args, **kwargs):
        return inner(*args, **{**kwargs, "training": False})

    object.__setattr__(model, "call", call)


def flipped_weight(monkeypatch, training):
    def apply(inner, strategy, replica, sums):
        inner(strategy, replica, sums)
        if number(replica) == 1:
            replica.model.trainable_variables[0].value.scatter_nd_add([[1, 2]], [0.01])

    change(monkeypatch, ShardStep, "apply_gradients", apply)


def equal_shares(monkeypatch, training):
    """Weighs replicas alike, which is right while shards are of one size."""
    monkeypatch.setattr(
        whole_batch, "_shares", lambda shards, batch: [tf.constant(0.5)] * len(shards)
    )


def mirrored_keeps_own(monkeypatch, training):
    monkeypatch.setattr(training.strategy, "_sum_over_replicas", lambda tensors: tensors)


def mirrored_mean(monkeypatch, training):
    def mean(tensors):
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.MEAN, tensors)

    monkeypatch.setattr(training.strategy, "_sum_over_replicas", mean)


# Name: strategy, builder, data, injection, (stage, cause) of each fault, steps that have them.
FAULTS = {
    "lost replica": (
        "manual", plain, (X, Y), in_sum(before=zeros_of_1), [("all-reduce", "lost_replica")],
        (0, 1, 2),
    ),
    "mean": (
        "manual", plain, (X, Y),
        in_sum(after=lambda _, sums: [[g / 2 for g in total] for total in sums]),
        [("all-reduce", "mean_instead_of_sum")], (0, 1, 2),
    ),
    "mean, mirrored": (
        "mirrored", plain, (X, Y), mirrored_mean, [("all-reduce", "mean_instead_of_sum")],
        (0, 1, 2),
    ),
    "own gradients": (
        "manual", plain, (X, Y), in_sum(after=lambda lists, _: lists),
        [("all-reduce", "not_all_reduced")], (0, 1, 2),
    ),
    "own gradients, mirrored": (
        "mirrored", plain, (X, Y), mirrored_keeps_own, [("all-reduce", "not_all_reduced")],
        (0, 1, 2),
    ),
    "stale": (
        "manual", plain, (X, Y), stale,
        [("all-reduce", "lost_replica"), ("all-reduce", "stale_gradient")], (0, 1, 2),
    ),
    "one tensor not summed": (
        "manual", plain, (X, Y), in_sum(after=first_not_summed),
        [("all-reduce", "not_all_reduced")], (0, 1, 2),
    ),
    "same random numbers": (
        "manual", dropped, (X, Y), same_seeds, [("forward", "same_random_numbers")], (0, 1, 2),
    ),
    "same random numbers, mirrored": (
        "mirrored", dropped, (X, Y), same_seeds, [("forward", "same_random_numbers")], (0, 1, 2),
    ),
    "weighted mean of shards": (
        "manual", *MODELS["weighted mean"][:2], loss_of_shards,
        [("loss", "weighted_mean_of_means")], (0, 1, 2),
    ),
    "contrastive loss of shards": (
        "manual", *MODELS["contrastive"][:2], loss_of_shards,
        [("loss", "not_a_sum_over_examples")], (0, 1, 2),
    ),
    "regulariser twice": (
        "manual", regularised, (X, Y), with_share(lambda share: 1.0),
        [("regularisation", "regulariser_repeated")], (0, 1, 2),
    ),
    "no regulariser": (
        "mirrored", regularised, (X, Y), with_share(lambda share: 0.0),
        [("regularisation", "regulariser_missing")], (0, 1, 2),
    ),
    "clipped before the sum": (
        "manual", clipped, (X, Y), clip_before_sum, [("all-reduce", "clipped_before_the_sum")],
        (0, 1, 2),
    ),
    "another threshold": (
        "manual", clipped, (X, Y), other_threshold, [("clipping", "clipped_on_one_replica")],
        (0, 1, 2),
    ),
    "another learning rate": (
        "manual", plain, (X, Y), other_rate, [("update", "other_learning_rate")], (0, 1, 2),
    ),
    "weight decay on top": (
        "manual", plain, (X, Y), decay_on_top, [("update", "weight_decay_on_top")], (0, 1, 2),
    ),
    "labels shifted in the loss": (
        "manual", plain, (X, Y), shifted_labels, [("loss", "labels_shifted")], (0, 1, 2),
    ),
    "labels shifted in the data": (
        "mirrored", plain, (X, Y), shifted_examples, [("examples", "labels_shifted")], (0, 1, 2),
    ),
    "predictions in another order": (
        "manual", plain, (X, Y), wrong_order, [("loss", "predictions_out_of_order")], (0, 1, 2),
    ),
    "inference mode": (
        "manual", normalised, (X, Y), in_inference, [("forward", "inference_mode")], (0, 1, 2),
    ),
    "a flipped weight": (
        "manual", plain, (X, Y), flipped_weight, [("update", "changed_on_its_own")], (0, 1, 2),
    ),
    "a short last batch": (
        "manual", lambda: compiled(dense(activity_regularizer="l2")), (X, Y), equal_shares,
        [("regularisation", "mean_of_means")], (2,),
    ),
    "a short last batch, step of its own": (
        "manual", *MODELS["own step"][:2], equal_shares, [("gradients", "mean_of_means")], (2,),
    ),
    "the second epoch": (
        "manual", plain, (X, Y), in_later_steps(3), [("all-reduce", "mean_instead_of_sum")], (3,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_strategy_is_named(name, monkeypatch):
    strategy, build, data, inject, expected, steps = FAULTS[name]
    training = start(strategy, build, data)
    inject(monkeypatch, training)
    report = training.report((0, 1, 2, 3) if 3 in steps else (0, 1, 2))
    found = [(f.stage, f.cause) for f in report.faults]
    assert found == expected, str(report)
    assert tuple(sorted({s for f in report.faults for s in f.steps})) == steps
    assert all(f.status == FAULT for f in report.faults)


CLEAN = ("plain", "weighted mean", "contrastive", "regularisers", "own step, compute_loss")


@pytest.mark.parametrize(
    "name", [n if n in CLEAN else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
@pytest.mark.parametrize("strategy", ["manual", pytest.param("mirrored", marks=pytest.mark.slow)])
def test_no_fault_is_found_without_one(strategy, name):
    build, data, _ = MODELS[name]
    report = start(strategy, build, data).report((1, 2, 3, 4))
    assert report.faults == [], str(report)
    by_design = [f.cause for f in report.findings]
    causes = {"BatchNorm": ["local_statistics"], "embedding": ["rows_summed_first"]}
    assert by_design == causes.get(name, [])
    stages = {"start", "gradients", "all-reduce", "update", "agreement"}
    if "own step" not in name:
        stages |= {"forward", "loss"}
    if "clip" in name:
        stages.add("clipping")
    assert stages <= set(report.checked)


@pytest.mark.parametrize("optimizer, causes", [("sgd", []), ("adam", ["rows_summed_first"])])
def test_rows_of_an_embedding_are_summed_before_the_update(optimizer, causes):
    def build():
        pooled = [layers.Embedding(20, 8), layers.GlobalAveragePooling1D(), layers.Dense(2)]
        return compiled(keras.Sequential(pooled), optimizer=optimizer)

    report = start("manual", build, (np.full((len(X), 4), 3), Y)).report((1, 2))
    assert [f.cause for f in report.findings] == causes and not report.faults


@pytest.fixture
def case_training(tmp_path):
    """A small case with momentum, trained by `manual` on two replicas."""
    path = tmp_path / "my_case.py"
    path.write_text(
        textwrap.dedent("""
            import keras
            import numpy as np
            import tensorflow as tf

            def model():
                network = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
                network.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
                return network

            def data(global_batch_size):
                x = np.arange(30, dtype=np.float32).reshape(10, 3) / 30
                return tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(global_batch_size)
        """),
        encoding="utf-8",
    )
    config = Config.of("verify", case=str(path), global_batch_size=4, strategies=("manual",))
    case = CaseFile(config.case_path, model_fn="model", data_fn="data")
    data = CaseData(case, 4, 2)
    training = StrategyTraining(case, data, config, Devices(CPUS[:2], simulated=True), "manual")
    return CaseCheck(case, data, config, training)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_state_that_is_not_restored(case_training, monkeypatch, is_wrong):
    def load(inner, strategy, state):
        lost = {name: np.zeros_like(a) if "momentum" in name else a for name, a in state.items()}
        return inner(strategy, lost if is_wrong else state)

    change(monkeypatch, ManualStrategy, "load_state", load)
    found = {phase.place: report.faults for phase, _, report in case_training.phases()}
    assert list(found) == ["first", "last_batch", "second_epoch", "resume"]
    causes = [(f.stage, f.cause, f.tensors) for f in found.pop("resume")]
    assert not any(found.values())
    if is_wrong:
        assert [(stage, cause) for stage, cause, _ in causes] == [("start", "not_restored")]
        assert len(causes[0][2]) == 2 and all("momentum" in name for name in causes[0][2])
    else:
        assert causes == []
