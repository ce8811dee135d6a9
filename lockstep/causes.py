"""Lists every cause of a difference, with what to do about it."""

from typing import NamedTuple


class Cause(NamedTuple):
    """A cause of a difference.

    Attributes:
        remedy: what to do about it, in any framework.
        keras, torch, lockstep: the same for one framework, where it can be said more precisely;
            "lockstep" stands for our own strategies.
    """

    remedy: str
    keras: str = ""
    torch: str = ""
    lockstep: str = ""


_ONE_SHARD_EACH = "split each batch so that every example reaches exactly one replica"
_ONE_RATE = "use one learning rate on all replicas, and advance its schedule once per step"
_SAME_DATA = "use the same data, seed and order of examples in all trainings"
_OTHER_TRAINING = "or accept that this is a different training"

CAUSES: dict[str, Cause] = {
    # Before the step.
    "other_initial_weights": Cause(
        "load the same initial weights into both models, or record the second script with replay=",
        lockstep="build the model with the seed of the training on every replica",
    ),
    "other_initial_state": Cause(
        "start every replica from newly created optimizer state and statistics"
    ),
    "other_initialiser": Cause(
        "set the initialisers of all layers explicitly, or load the same initial weights into both"
        " models"
    ),
    "not_replayed": Cause("record the second script with replay= and the file of the first"),
    "not_restored": Cause("save every variable, and restore it on every replica"),
    "changed_on_its_own": Cause(
        "look for code that assigns to the variable outside the update; if there is none, test the"
        " memory of the machine"
    ),
    "diverged_replicas": Cause(
        "broadcast the weights of one replica to all replicas before the first step, and apply the"
        " same update on each",
        keras="create and restore variables within the strategy's scope, so that they have equal"
        " values on all replicas",
    ),
    "not_finite": Cause(
        "look at the first step with NaN or infinite values: its examples, loss and learning rate"
    ),
    # Random numbers.
    "same_random_numbers": Cause(
        "derive the seed from the rank of the replica",
        keras="use a different seed on each replica: derive it from"
        " `tf.distribute.get_replica_context().replica_id_in_sync_group`",
    ),
    "random_numbers_repeated": Cause("advance the generator, or split the key, once per step"),
    "random_layers": Cause("set the rate of random layers to 0 to compare gradients"),
    # Examples.
    "same_examples": Cause(
        "give each replica a different part of the batch: shard the data set by replica",
        torch="give each replica a different part of the batch: use a DistributedSampler",
    ),
    "repeated_examples": Cause(_ONE_SHARD_EACH),
    "lost_examples": Cause(_ONE_SHARD_EACH),
    "other_examples": Cause(_SAME_DATA),
    "other_order": Cause(_SAME_DATA),
    "labels_shifted": Cause("shuffle and batch inputs and targets together, in one data set"),
    "row_of_two_parts": Cause("let each part of a batch begin where the part before it ends"),
    "other_normalisation": Cause("scale the inputs in both scripts in the same way"),
    "other_layout": Cause(
        "order the axes of the inputs in the same way in both scripts: NHWC or NCHW"
    ),
    "not_reshuffled": Cause(
        "reshuffle the data set in each epoch",
        torch="call sampler.set_epoch(epoch) at the start of each epoch",
    ),
    "last_batch_dropped": Cause("use the same drop_last (drop_remainder) in both scripts"),
    # Predictions and loss.
    "inference_mode": Cause("call the model in training mode (training=True) in the training step"),
    "local_statistics": Cause(
        "synchronise BatchNorm over the replicas, and average its moving statistics",
        keras="normalise over the whole batch with `BatchNormalization(synchronized=True)`, and"
        " average its moving statistics over the replicas",
        torch="synchronise BatchNorm over the replicas: SyncBatchNorm",
        lockstep="normalise over the whole batch with --batch_norm=sync",
    ),
    "wrong_count": Cause("divide the sums of all replicas by the number of examples of all"),
    "mixes_examples": Cause(f"gather the layer's inputs from all replicas, {_OTHER_TRAINING}"),
    "not_a_sum_over_examples": Cause(
        "gather the model's outputs from all replicas before the loss is computed,"
        f" {_OTHER_TRAINING}"
    ),
    "predictions_out_of_order": Cause("join predictions in the order in which the batch was split"),
    "other_loss": Cause("compute the same loss in all trainings"),
    "label_smoothing": Cause("use the same label smoothing on all replicas"),
    "other_loss_reduction": Cause(
        "average the loss over the same axes in both scripts, and divide weighted losses by the"
        " same: the sum of the weights (PyTorch) or the number (Keras)"
    ),
    "scalar_loss_not_divided": Cause(
        "divide a scalar loss by the number of replicas",
        keras="return one loss per example, of shape (batch,), which Keras divides by the number of"
        " replicas; or divide the scalar loss by the number of replicas",
    ),
    "mean_of_means": Cause(
        "weight each replica's gradient by its number of examples, or give all replicas equally"
        " many",
        keras="use batch sizes that are divisible by the number of replicas (drop_remainder=True"
        " for the last batch), or reduction='sum' divided by the global batch size",
    ),
    "weighted_mean_of_means": Cause(
        "divide by the weights of the whole batch: use the default reduction with sample_weight, or"
        " reduction='sum' divided by a constant that all replicas share; with masks, use batches"
        " that have equally many unmasked steps on each replica"
    ),
    "regulariser_repeated": Cause(
        "divide regularisation losses by the number of replicas",
        keras="divide regularisation losses by the number of replicas"
        " (`tf.nn.scale_regularization_loss`)",
    ),
    "regulariser_missing": Cause(
        "add the regularisation losses to the loss of the step",
        keras="add `model.losses` to the loss of the step",
    ),
    "regularisation_in_the_loss": Cause(
        "apply weight decay in both scripts in the same place: the loss or the optimizer"
    ),
    # Gradients of a replica.
    "scaled_gradient": Cause("divide the loss by the global batch size exactly once"),
    "loss_scale_left": Cause("divide the gradients by the loss scale before they are summed"),
    "stale_gradient": Cause(
        "send the gradients of the current step: clear buffers with those of the previous step"
    ),
    "stale_weights": Cause("compute each step with the weights that the last update gave"),
    "stale_stage": Cause("let a stage wait for its update before it computes the next step"),
    "frozen": Cause(
        "make the loss depend on the variable, and train it on every replica",
        keras="make the loss depend on the variable, or set trainable=False on every replica",
    ),
    "own_gradient_only": Cause(
        "add the gradients of all parts where a layer, a stage or a part receives several"
    ),
    "forgotten_backward_sum": Cause(
        "sum the gradient of a gathered input over the devices that use it"
    ),
    "repeated_bias": Cause("add a bias once, on one of the devices that compute a layer"),
    "swapped_parts": Cause("put the parts together in the order in which they were split"),
    "other_order_of_parts": Cause("gather parts in the order of the devices that hold them"),
    "sparsified": Cause(f"send all elements of each gradient, {_OTHER_TRAINING}"),
    "quantised": Cause(f"send gradients without quantisation, {_OTHER_TRAINING}"),
    "flatten_order": Cause(
        "flatten in the same order of axes: for example Permute((3, 1, 2)) before Flatten in Keras"
    ),
    "other_padding": Cause(
        "pad strided convolutions explicitly: 'same' pads more at the end, padding=n equally on"
        " both sides; in Keras, ZeroPadding2D(n) before padding='valid'"
    ),
    "other_batch_norm_epsilon": Cause(
        "set the epsilon of BatchNorm explicitly: PyTorch's is 1e-5, that of Keras 1e-3"
    ),
    "other_layer_settings": Cause("use the same settings of layers in both scripts"),
    # Sums.
    "not_all_reduced": Cause(
        "sum the gradients over the replicas before the update",
        keras="sum the gradients over the replicas before the update: call `optimizer.apply` within"
        " `strategy.run`, which all-reduces them, or all-reduce them in the step",
        torch="call the wrapped model, ddp(x) and not ddp.module(x), or all-reduce the gradients"
        " before the update",
    ),
    "lost_replica": Cause("include every replica in the all-reduce of every variable"),
    "repeated_gradient": Cause("add the gradient of each replica once"),
    "lost_micro_batch": Cause("accumulate the gradients of all micro-batches before the update"),
    "sum_instead_of_mean": Cause("divide the sum of the gradients by the number of replicas once"),
    "mean_instead_of_sum": Cause(
        "do not average gradients of losses that are divided by the global batch size"
    ),
    "unequal_sums": Cause("add the gradients in the same order on all replicas, or broadcast"),
    "reduced_precision": Cause("all-reduce the gradients in float32"),
    "rows_summed_first": Cause(
        "accept that this is a different training, or use an optimizer that is linear in the"
        " gradient, such as SGD"
    ),
    "clipped_before_the_sum": Cause(
        "clip after the all-reduce",
        keras="clip after the sum: remove clipnorm, global_clipnorm and clipvalue from the"
        " optimizer, and clip in a custom train_step after"
        " `tf.distribute.get_replica_context().all_reduce`",
    ),
    "clipped_on_one_replica": Cause("clip on all replicas, after the all-reduce"),
    "other_clipping": Cause("clip to the same norm in both trainings, after the all-reduce"),
    "overflow_not_skipped": Cause(
        "skip the step on all replicas if the gradient of any replica overflows",
        keras="use mixed_bfloat16, which needs no loss scaling; Keras checks only the gradients of"
        " replica 0 for overflow",
    ),
    # Update.
    "not_updated": Cause("apply the summed gradients on every replica"),
    "update_not_seen": Cause("apply gradients with `model.optimizer.apply`"),
    "updated_twice": Cause("apply the summed gradients once per step"),
    "other_learning_rate": Cause(_ONE_RATE),
    "schedule_stepped_too_often": Cause(
        "advance the schedule once per update",
        keras="advance `optimizer.iterations` once per update",
    ),
    "reset_state": Cause("keep the optimizer's state from step to step"),
    "zeroed_state": Cause("keep the optimizer's state of every weight from step to step"),
    "shifted_state": Cause("give each weight its own part of the optimizer's state"),
    "other_optimizer": Cause("use the same optimizer in both scripts"),
    "other_momentum": Cause("use the same momentum in both scripts"),
    "other_dampening": Cause("use the same dampening in both scripts"),
    "other_nesterov": Cause("use the same form of momentum in both scripts"),
    "other_weight_decay": Cause("use the same weight decay in all trainings"),
    "weight_decay_on_top": Cause("apply weight decay once: in the optimizer or in the loss"),
    "weight_decay_placement": Cause(
        "add weight decay in the same place: to the gradient (SGD and Adam of PyTorch; in Keras L2"
        " regularizers with half the value) or to the weights (AdamW, Keras)"
    ),
    "learning_rate_in_velocity": Cause(
        "accept the difference when the learning rate changes: Keras keeps the learning rate within"
        " the velocity, PyTorch does not"
    ),
    "other_beta_1": Cause("use the same beta_1 in both scripts"),
    "other_beta_2": Cause("use the same beta_2 in both scripts"),
    "other_epsilon": Cause(
        "set the epsilon of Adam explicitly: PyTorch's is 1e-8, that of Keras 1e-7"
    ),
    "epsilon_placement": Cause(
        "scale epsilon: Keras adds it before bias correction, PyTorch after it"
    ),
    "bias_not_corrected": Cause("correct the bias of Adam's moments in both scripts"),
    # Moving statistics.
    "statistics_not_averaged": Cause(
        "average the moving statistics of all shards before they are evaluated or saved"
    ),
    "weighted_average": Cause("give every shard its share of the examples in the average"),
    "doubled_average": Cause("update moving statistics once per step"),
    "whole_batch_norm": Cause("let BatchNorm normalise each shard, as the training defines it"),
    "other_batch_norm_momentum": Cause(
        "set the momentum of BatchNorm explicitly: PyTorch's 0.1 is 0.9 in Keras, whose default is"
        " 0.99"
    ),
    "unbiased_variance": Cause(
        "accept the difference: PyTorch keeps the unbiased variance of a batch, Keras the biased"
        " one"
    ),
    "other_statistics": Cause("compare the arrays of the moving statistics in both recordings"),
    # Evaluation and time.
    "other_metric": Cause(
        "sum totals and counts over all replicas in the metric, and divide afterwards"
    ),
    "other_evaluation": Cause(
        "count every example once: do not pad batches, and average over examples"
    ),
    "random_evaluation": Cause(
        "draw random numbers only in training: use the `training` argument of `call`"
    ),
    "slow_replica": Cause(
        "look for what delays the replica: another program, a slower device, a larger shard"
    ),
    # No prediction fits.
    "unexplained": Cause("compare the arrays of the recording with those of the reference"),
}


def remedy_of(cause: str, framework: str = "") -> str:
    """Returns what to do about a cause.

    Args:
        cause: a key of `CAUSES`.
        framework: that of the trace, as in `About.framework`.
    """
    found = CAUSES[cause]
    return str(getattr(found, framework, "") or found.remedy)


def title_of(cause: str) -> str:
    """Returns a cause in words, as in "clipped before the sum"."""
    return cause.replace("_", " ")
