"""Reported bugs in losses, gradients, their sum and the update."""

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from .small import Case, OwnStep, Program, dense, num_replicas, regression_data, replica_id

layers, optimizers = keras.layers, keras.optimizers
L2 = keras.regularizers.L2
RIGHT = Program(dense)


# --- Losses --------------------------------------------------------------------------------------


def mean_absolute(y: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.abs(y - y_pred))


def absolute_of_each(y: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.abs(y - y_pred), axis=-1)


class LossOfExamples(keras.losses.Loss):
    def call(self, y: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(y - y_pred), axis=-1)


class ShareOfGlobalBatch(LossOfExamples):
    def call(self, y: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        return super().call(y, y_pred) / num_replicas()


def contrastive(y: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """Returns how badly each prediction finds its own target among all of them."""
    similarities = tf.matmul(y_pred, y, transpose_b=True) / 0.5
    own = tf.range(tf.shape(y)[0])
    return tf.nn.sparse_softmax_cross_entropy_with_logits(own, similarities)


def language_model(reduction: str, learning_rate: float) -> keras.Model:
    network = keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(12, 8, mask_zero=True, name="embedding"),
            layers.LSTM(6, return_sequences=True, name="lstm"),
            layers.Dense(12, name="logits"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    network.compile(optimizer=optimizers.SGD(learning_rate), loss=loss)
    return network


def padded_tokens() -> tf.data.Dataset:
    generator = np.random.default_rng(0)
    tokens = generator.integers(1, 12, (24, 7))
    lengths = generator.integers(1, 7, len(tokens))
    tokens[np.arange(7) > lengths[:, None]] = 0  # Padding.
    return tf.data.Dataset.from_tensor_slices((tokens[:, :-1], tokens[:, 1:])).batch(12)


class AddsAllLosses(keras.Sequential):
    def compute_loss(
        self, x: object, y: object, y_pred: object, sample_weight: object, training: bool = True
    ) -> tf.Tensor:
        data_loss = keras.losses.MeanSquaredError()(y, y_pred, sample_weight)
        return data_loss + self.share_of(tf.add_n(self.losses))

    def share_of(self, regularisation: tf.Tensor) -> tf.Tensor:
        return regularisation


class AddsItsShare(AddsAllLosses):
    def share_of(self, regularisation: tf.Tensor) -> tf.Tensor:
        return tf.nn.scale_regularization_loss(regularisation)


LOSSES = {
    # The mean over the batch is a scalar, which Keras does not divide by the number of replicas;
    # it divides losses of single examples. Also in libraries: tensorflow/similarity#200.
    "scalar_loss": Case(
        "tensorflow/tensorflow/issues/42446", "loss", "scalar_loss_not_divided",
        wrong=Program(lambda: dense(loss=mean_absolute)),
        right=Program(lambda: dense(loss=absolute_of_each)), num_replicas=3,
    ),
    # A loss class divides by the number of replicas, as tutorials of custom loops do, and `fit`
    # divides once more: "distributed training on x GPUs makes the loss 1/x".
    "loss_divided_twice": Case(
        "keras-team/keras/issues/16285", "loss", "scaled_gradient",
        wrong=Program(lambda: dense(loss=ShareOfGlobalBatch())),
        right=Program(lambda: dense(loss=LossOfExamples())),
    ),
    # With a batch of 1024 on 8 GPUs, each example is compared with 128 others. No division makes
    # it the training of one device. The twin has a loss for each example.
    "local_negatives": Case(
        "Spijkervet/SimCLR/issues/13", "loss", "not_a_sum_over_examples", status="by design",
        wrong=Program(lambda: dense(loss=contrastive)),
        right=Program(lambda: dense(loss="cosine_similarity")),
    ),
    # The mean over the unmasked tokens of the batch is not the mean of the replicas' means. The
    # twin sums, and leaves the division to the learning rate.
    "token_weights": Case(
        "huggingface/transformers/issues/34242", "loss", "weighted_mean_of_means",
        wrong=Program(lambda: language_model("sum_over_batch_size", 0.5), padded_tokens),
        right=Program(lambda: language_model("sum", 0.01), padded_tokens),
    ),
    # Where a replica gets fewer examples than the others, the mean of means is another number.
    "uneven_last_batch": Case(
        "tensorflow/tensorflow/issues/36224", "loss", "mean_of_means", steps=(2,),
        wrong=Program(dense, lambda: regression_data(29)),
        right=Program(
            dense, lambda: regression_data(29).unbatch().batch(12, drop_remainder=True)
        ),
    ),
    # A `compute_loss` that adds `sum(self.losses)` on each replica; Keras itself was fixed.
    "regulariser_repeated": Case(
        "keras-team/keras/pull/20609", "regularisation", "regulariser_repeated",
        wrong=Program(lambda: dense(loss=None, kind=AddsAllLosses, kernel_regularizer=L2(0.1))),
        right=Program(lambda: dense(loss=None, kind=AddsItsShare, kernel_regularizer=L2(0.1))),
    ),
}  # fmt: skip


# --- Custom steps --------------------------------------------------------------------------------


class MeanOverOwnExamples(OwnStep):
    def loss_of(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(y - self(x, training=True))) / num_replicas()


class SumOverConstant(OwnStep):
    def loss_of(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.square(y - self(x, training=True))) / 24


class MeanOfReplica(OwnStep):
    def loss_of(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(self.losses_of(x, y))


class RegularisedStep(OwnStep):
    def loss_of(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(self.losses_of(x, y)) / 12 + tf.add_n(self.losses)


class StepWithShare(OwnStep):
    def loss_of(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        share = tf.nn.scale_regularization_loss(tf.add_n(self.losses))
        return tf.reduce_sum(self.losses_of(x, y)) / 12 + share


class Accumulates(keras.Sequential):
    """Adds up the gradients of two micro-batches."""

    def loss_of(self, losses: tf.Tensor, weights: tf.Tensor, num_labels: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(losses * weights) / tf.reduce_sum(weights) / (2 * num_replicas())

    def train_step(self, data: tuple) -> dict:
        x, y, weights = data
        context = tf.distribute.get_replica_context()
        num_labels = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(weights))
        total = [tf.zeros(variable.shape) for variable in self.trainable_weights]
        for part in range(2):
            mine = slice(part, None, 2)
            with tf.GradientTape() as tape:
                errors = tf.square(y[mine] - self(x[mine], training=True))
                losses = tf.reduce_mean(errors, axis=-1)
                loss = self.loss_of(losses, weights[mine], num_labels)
            gradients = tape.gradient(loss, self.trainable_weights)
            total = [a + b for a, b in zip(total, gradients, strict=True)]
        self.optimizer.apply(total, self.trainable_weights)
        return {"loss": loss}


class AccumulatesSums(Accumulates):
    def loss_of(self, losses: tf.Tensor, weights: tf.Tensor, num_labels: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(losses * weights) / num_labels


def labelled_data() -> tf.data.Dataset:
    num_labels = np.random.default_rng(1).integers(1, 9, 24).astype("float32")
    weights = tf.data.Dataset.from_tensor_slices(num_labels).batch(12)
    batches = tf.data.Dataset.zip(regression_data(), weights)
    return batches.map(lambda pair, weight: (*pair, weight))


class ClipsTheSum(keras.Sequential):
    """Clips after its all-reduce, and divides, since the optimizer sums once more."""

    def train_step(self, data: tuple) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)
        context = tf.distribute.get_replica_context()
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        clipped = [tf.clip_by_norm(gradient, 0.05) for gradient in summed]
        share = 1 / context.num_replicas_in_sync
        self.optimizer.apply([gradient * share for gradient in clipped], self.trainable_weights)
        return {"loss": loss}


class ClipsOnFirstRank(optimizers.SGD):
    def _clip_gradients(self, grads: Sequence) -> Sequence:
        clipped = super()._clip_gradients(grads)
        is_first = replica_id() == 0
        return [tf.where(is_first, c, g) for c, g in zip(clipped, grads, strict=True)]


STEPS = {
    # Means of the replicas are added, not averaged: like a larger learning rate.
    "summed_means": Case(
        "tensorflow/benchmarks/pull/190", "gradients", "scalar_loss_not_divided",
        wrong=Program(lambda: dense(kind=MeanOfReplica)),
        right=Program(lambda: dense(kind=MeanOverOwnExamples)),
    ),
    # A replica without an example in the last batch has the mean over none: its loss is NaN, and
    # the update is half as large. A sum over the examples, divided by a constant, is 0 for none.
    "empty_shard": Case(
        "tensorflow/tensorflow/issues/52053", "gradients", "mean_of_means", steps=(2,),
        wrong=Program(lambda: dense(kind=MeanOverOwnExamples), lambda: regression_data(25)),
        right=Program(lambda: dense(kind=SumOverConstant), lambda: regression_data(25)),
    ),
    # The data loss is divided by the global batch, the regularisation is not divided.
    "regulariser_in_own_step": Case(
        "tensorflow/tensorflow/issues/48875", "gradients", "regulariser_repeated",
        tensors="hidden/kernel",
        wrong=Program(lambda: dense(kind=RegularisedStep, kernel_regularizer=L2(0.1))),
        right=Program(lambda: dense(kind=StepWithShare, kernel_regularizer=L2(0.1))),
    ),
    # Each micro-batch divides by its own number of labels, so that the step is not that of one
    # large batch. The twin divides by the labels of the global batch.
    "gradient_accumulation": Case(
        "huggingface/transformers/pull/34191", "gradients", "not_a_sum_over_examples",
        status="by design",
        wrong=Program(lambda: dense(kind=Accumulates), labelled_data),
        right=Program(lambda: dense(kind=AccumulatesSums), labelled_data),
    ),
    # `clipnorm` clips the gradients of each replica before they are summed. TensorFlow refused it
    # under a strategy for that reason; Keras 3 accepts it again and clips too early.
    "clip_before_sum": Case(
        "tensorflow/tensorflow/issues/33929", "clipping", "clipped_before_the_sum",
        wrong=Program(lambda: dense(optimizer=optimizers.SGD(0.1, clipnorm=0.05))),
        right=Program(lambda: dense(kind=ClipsTheSum)),
    ),
    # The clipping stands in a branch that only the first rank takes.
    "clipped_on_one_rank": Case(
        "deepspeedai/DeepSpeed/pull/1801", "clipping", "clipped_on_one_replica",
        wrong=Program(lambda: dense(optimizer=ClipsOnFirstRank(0.1, clipnorm=0.05))),
        right=RIGHT,
    ),
}  # fmt: skip


# --- The all-reduce and the update ---------------------------------------------------------------


class LocalSGD(optimizers.SGD):
    """SGD as in the first versions of Keras 3."""

    def _all_reduce_sum_gradients(self, grads_and_vars: Sequence) -> Sequence:
        return grads_and_vars


class PastTheWrapper(optimizers.Adam):
    def _all_reduce_sum_gradients(self, grads_and_vars: Sequence) -> Sequence:
        pairs = list(grads_and_vars)
        reduced = super()._all_reduce_sum_gradients(pairs)
        return [
            pair if "critic" in pair[1].name or "critic" in getattr(pair[1], "path", "") else summed
            for pair, summed in zip(pairs, reduced, strict=True)
        ]


def actor_critic(optimizer: optimizers.Optimizer) -> keras.Model:
    state = keras.Input((6,), name="state")
    features = layers.Dense(8, activation="tanh", name="trunk")(state)
    heads = {name: layers.Dense(2, name=name)(features) for name in ("actor", "critic")}
    network = keras.Model(state, heads, name="network")
    network.compile(optimizer=optimizer, loss={"actor": "mse", "critic": "mae"})
    return network


def two_targets() -> tf.data.Dataset:
    return regression_data().map(lambda x, y: (x, {"actor": y, "critic": -y}))


class OverlapsTooFar(optimizers.SGD):
    def build(self, variables: Sequence) -> None:
        super().build(variables)
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        self.bucket = tf.Variable(tf.zeros((6, 8)), trainable=False, aggregation=first)

    def _all_reduce_sum_gradients(self, grads_and_vars: Sequence) -> Sequence:
        (gradient, variable), *others = super()._all_reduce_sum_gradients(grads_and_vars)
        if num_replicas() > 1:
            stale = tf.where(tf.equal(self.iterations.value, 0), gradient, self.bucket)
            self.bucket.assign(gradient)
            gradient = stale
        return [(gradient, variable), *others]


class PlateauOnOneRank(optimizers.SGD):
    """SGD whose second rank has seen a plateau."""

    def _backend_update_step(
        self, grads: Sequence, trainable_variables: Sequence, learning_rate: tf.Tensor
    ) -> None:
        lowered = tf.where(replica_id() == 1, 0.1 * learning_rate, learning_rate)
        super()._backend_update_step(grads, trainable_variables, lowered)


class StepsScheduleForEachProcess(keras.Sequential):
    def train_step(self, data: tuple) -> dict:
        logs = super().train_step(data)
        self.optimizer.iterations.assign_add(num_replicas() - 1)
        return logs


def decaying() -> optimizers.Optimizer:
    return optimizers.SGD(optimizers.schedules.ExponentialDecay(0.1, 10, 0.5))


UPDATES = {
    # Under `MirroredStrategy`, Keras 3 applied each replica's gradients to its own copy of the
    # weights. The copies drift apart.
    "no_all_reduce": Case(
        "keras-team/keras/issues/19891", "all-reduce", "not_all_reduced", replicas=(0, 1),
        wrong=Program(lambda: dense(optimizer=LocalSGD(0.1))), right=RIGHT,
    ),
    # PPO runs the forward pass of one head past the wrapper that arms the all-reduce.
    "head_not_reduced": Case(
        "jingyaogong/minimind/issues/853", "all-reduce", "partly_all_reduced", replicas=(0, 1),
        tensors="critic",
        wrong=Program(lambda: actor_critic(PastTheWrapper(0.01)), two_targets),
        right=Program(lambda: actor_critic(optimizers.Adam(0.01)), two_targets),
    ),
    # With ZeRO-2 and `overlap_comm`, a bucket is read before the new sum has arrived in it.
    "stale_bucket": Case(
        "deepspeedai/DeepSpeed/issues/5294", "all-reduce", "stale_gradient", steps=(1, 2),
        tensors="hidden/kernel",
        wrong=Program(
            lambda: dense(optimizer=OverlapsTooFar(0.1)), lambda: regression_data(36)
        ),
        right=Program(dense, lambda: regression_data(36)),
    ),
    # `ReduceLROnPlateau` looks at the loss of its own rank.
    "learning_rate_by_rank": Case(
        "rmchurch/disruptcnn/issues/3", "update", "other_learning_rate", replicas=(1,),
        wrong=Program(lambda: dense(optimizer=PlateauOnOneRank(0.1))), right=RIGHT,
    ),
    # A schedule is stepped once for every process. In Keras, `iterations` is its clock.
    "scheduler_stepped_too_often": Case(
        "huggingface/accelerate/issues/2142", "update", "schedule_stepped_too_often",
        tensors="iteration", num_replicas=3,
        wrong=Program(lambda: dense(optimizer=decaying(), kind=StepsScheduleForEachProcess)),
        right=Program(lambda: dense(optimizer=decaying())),
    ),
}  # fmt: skip

CASES = LOSSES | STEPS | UPDATES
