"""Lists the remedies: one sentence for each cause."""

REMEDIES = {
    "same_random_numbers": "use a different seed on each replica: derive it from"
    " `tf.distribute.get_replica_context().replica_id_in_sync_group`",
    "clipped_before_the_sum": "clip after the sum: remove clipnorm, global_clipnorm and clipvalue"
    " from the optimizer, and clip in a custom train_step after"
    " `tf.distribute.get_replica_context().all_reduce`",
    "scalar_loss_not_divided": "return one loss per example, of shape (batch,), which Keras divides"
    " by the number of replicas; or divide the scalar loss by the number of replicas",
    "weighted_mean_of_means": "divide by the weights of the whole batch: use the default reduction"
    " with sample_weight, or reduction='sum' divided by a constant that all replicas share; with"
    " masks, use batches that have equally many unmasked steps on each replica",
    "mean_of_means": "use batch sizes that are divisible by the number of replicas"
    " (drop_remainder=True for the last batch), or reduction='sum' divided by the global batch"
    " size",
    "regulariser_repeated": "divide regularisation losses by the number of replicas"
    " (`tf.nn.scale_regularization_loss`)",
    "regulariser_missing": "add `model.losses` to the loss of the step",
    "not_all_reduced": "sum the gradients over the replicas before the update: call"
    " `optimizer.apply` within `strategy.run`, which all-reduces them, or all-reduce them in the"
    " step",
    "mean_instead_of_sum": "sum the gradients of losses that are divided by the global batch size;"
    " do not average the gradients again",
    "lost_replica": "include every replica in the all-reduce of every variable",
    "stale_gradient": "send the gradients of the current step: clear buffers with gradients of the"
    " previous step",
    "reduced_precision": "all-reduce the gradients in float32",
    "sparsified": "send all elements of each gradient, or accept that this is a different training",
    "quantised": "send gradients without quantisation, or accept that this is a different training",
    "scaled_gradient": "divide the loss by the global batch size exactly once",
    "labels_shifted": "shuffle and batch inputs and targets together, in one dataset",
    "predictions_out_of_order": "join predictions in the order in which the batch was split",
    "same_examples": "give each replica a different part of the batch: shard the data set by"
    " replica",
    "lost_examples": "split each batch so that every example reaches exactly one replica",
    "repeated_examples": "split each batch so that every example reaches exactly one replica",
    "other_examples": "use the same data set, seed and order in all runs",
    "inference_mode": "call the model with training=True in the training step",
    "frozen": "make the loss depend on the variable, or set trainable=False on every replica",
    "other_learning_rate": "use one learning rate on all replicas, and advance its schedule once"
    " per step",
    "clipped_on_one_replica": "clip on all replicas, after the sum",
    "overflow_not_skipped": "use mixed_bfloat16, which needs no loss scaling; Keras checks only the"
    " gradients of replica 0 for overflow",
    "not_finite": "look at the first step with numbers that are NaN or infinite: its examples, the"
    " loss, the learning rate",
    "weight_decay_on_top": "apply weight decay once: in the optimizer or in the loss",
    "schedule_stepped_too_often": "advance `optimizer.iterations` once per update",
    "rows_summed_first": "accept that this is a different training, or use an optimizer that is"
    " linear in the gradient, such as SGD",
    "not_updated": "apply the summed gradients on every replica",
    "update_not_seen": "apply gradients with `model.optimizer.apply`",
    "other_loss": "compile the same loss in all runs",
    "other_metric": "sum totals and counts over all replicas in the metric, and divide afterwards",
    "other_evaluation": "count every example once: do not pad batches, and average over examples",
    "random_evaluation": "draw random numbers only in training: use the `training` argument of"
    " `call`",
    "diverged_replicas": "create and restore variables within the strategy's scope, so that they"
    " have equal values on all replicas",
    "not_restored": "save every variable, and restore it on every replica",
    "changed_on_its_own": "look for code that assigns to the variable outside the update; if there"
    " is none, test the memory of the machine",
    "local_statistics": "normalise over the whole batch with"
    " `BatchNormalization(synchronized=True)`, and average its moving statistics over the replicas",
    "not_a_sum_over_examples": "gather the model's outputs from all replicas before the loss is"
    " computed, or accept that this is a different training",
    "mixes_examples": "gather the layer's inputs from all replicas, or accept that this is a"
    " different training",
    "unexplained": "compare the arrays of the saved recording with those of one device",
}
