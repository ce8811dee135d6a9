"""Lists every cause of a difference, with what to do about it, in words and in code.

A check emits a detail, the most exact name that it has confirmed. A cause is the kind that
the detail belongs to: other values of beta_1 and of beta_2 are both `other_optimizer`. What to do
depends on the detail.
"""

DETAILS = {  # Detail → remedy, in any framework.
    # Before the step.
    "other_initial_weights": "load the same initial weights into both models, or record the second"
    " script with replay=",
    "other_initial_state": "start every replica from newly created optimizer state and statistics",
    "other_initialiser": "set the initialisers of all layers explicitly, or load the same initial"
    " weights into both models",
    "other_tying": "tie the same weights in both scripts, after every call that makes new ones, as"
    " `to_empty`, `fully_shard` or loading a checkpoint",
    "weights_not_synchronised": "send the trainer's weights to the generator after each update, and"
    " before it generates",
    "not_replayed": "record the second script with replay= and the file of the first",
    "not_restored": "save every variable, the state of random number generators and the loss scale,"
    " and restore them on every replica",
    "changed_on_its_own": "look for code that assigns to the variable outside the update; if there"
    " is none, test the memory of the machine",
    "diverged_replicas": "broadcast the weights of one replica to all replicas before the first"
    " step, and apply the same update on each",
    "not_finite": "look at the first step with NaN or infinite values: its examples, loss and"
    " learning rate",
    # Random numbers.
    "same_random_numbers": "derive the seed from the rank of the replica",
    "random_numbers_repeated": "advance the generator, or split the key, once per step",
    "other_random_numbers": "give ranks equal seeds where the reference draws once for all of them,"
    " or broadcast what one of them draws",
    "random_layers": "set the rate of random layers to 0 to compare gradients",
    # Examples.
    "same_examples": "give each replica a different part of the batch: shard the data set by"
    " replica",
    "repeated_examples": "split each batch so that every example reaches exactly one replica",
    "lost_examples": "split each batch so that every example reaches exactly one replica",
    "other_examples": "use the same data, seed and order of examples in all trainings",
    "other_examples_in_a_replica": "give the ranks that compute one replica together the same"
    " examples: seed and shard the data by the position on the data axes alone",
    "other_order": "use the same data, seed and order of examples in all trainings",
    "examples_restarted": "save epoch and place, and continue there: restore the state"
    " of the sampler, or skip the examples of the steps before",
    "other_augmentation": "draw the augmentations of an example from its id, the epoch and one seed"
    " in both scripts, and preprocess in the same way; or record both without augmentation",
    "other_batch_size": "give each replica the global batch size divided by the number of replicas,"
    " or record the first script with the larger batch",
    "sampler_padding": "accept the difference, or drop the last batch in both scripts",
    "labels_shifted": "shuffle and batch inputs and targets together, in one data set",
    "other_normalisation": "scale the inputs in both scripts in the same way",
    "other_layout": "order the axes of the inputs in the same way in both scripts: NHWC or NCHW",
    "not_reshuffled": "reshuffle the data set in each epoch",
    "last_batch_dropped": "use the same drop_last (drop_remainder) in both scripts",
    # Predictions and loss.
    "inference_mode": "set the same modes of layers in both: a training step calls the model in"
    " training mode (training=True)",
    "local_statistics": "synchronise BatchNorm over the replicas, and average its moving averages",
    "wrong_count": "divide the sums of all replicas by the number of examples of all",
    "mixes_examples": "gather the layer's inputs from all replicas, or accept that this is a"
    " different training",
    "not_a_sum_over_examples": "gather the model's outputs from all replicas before the loss is"
    " computed, or accept that this is a different training",
    "other_loss": "compute the same loss in all trainings",
    "other_temperature": "divide the logits by the temperature of sampling in both programs, or in"
    " none, before their log-probabilities are compared",
    "other_positions": "give each token the number of its place, without padding, in both programs,"
    " and pair each log-probability with its own token",
    "other_outputs": "compare the forward pass in both scripts: functions, masks and dtypes",
    "other_backward": "compare the backward pass in both scripts: hooks, custom gradients, detached"
    " tensors, and sums over devices",
    "other_targets": "use the same target for each example in all trainings",
    "label_smoothing": "use the same label smoothing on all replicas",
    "other_loss_reduction": "average the loss over the same axes in both scripts, and divide"
    " weighted losses by the same: the sum of the weights (PyTorch) or the number (Keras)",
    "scalar_loss_not_divided": "divide a scalar loss by the number of replicas",
    "mean_of_means": "weight each replica's gradient by its number of examples, or give all"
    " replicas equally many",
    "weighted_mean_of_means": "divide by the weights of the whole batch: use the default reduction"
    " with sample_weight, or reduction='sum' divided by a constant that all replicas share; with"
    " masks, use batches that have equally many unmasked steps on each replica",
    "regulariser_repeated": "divide regularisation losses by the number of replicas",
    "regulariser_missing": "add the regularisation losses to the loss of the step",
    "regularisation_in_the_loss": "apply weight decay in both scripts in the same place: the loss"
    " or the optimizer",
    # Gradients of a replica.
    "scaled_gradient": "divide the loss by the global batch size exactly once; where only some"
    " gradients have the factor, look for code that multiplies them",
    "loss_scale_left": "divide the gradients by the loss scale before they are applied: in PyTorch,"
    " call scaler.step(optimizer)",
    "other_loss_scale": "use the same loss scale on all replicas while gradients are summed",
    "micro_batches_not_averaged": "divide the loss of each micro-batch once, by the number of"
    " micro-batches that a replica accumulates in a step",
    "stale_gradient": "send the gradients of the current step: clear buffers with those of the"
    " previous step",
    "stale_weights": "compute each step with the weights that the last update gave",
    "stale_stage": "let a stage wait for its update before it computes the next step",
    "frozen": "make the loss depend on the variable, and train it on every replica",
    "not_frozen": "freeze the same weights in both scripts",
    "own_gradient_only": "add the gradients of all parts where a layer, a stage or a part receives"
    " several",
    "forgotten_backward_sum": "sum the gradient of a gathered input over the devices that use it",
    "repeated_bias": "add a bias once, on one of the devices that compute a layer",
    "swapped_parts": "put the parts together in the order in which they were split",
    "other_order_of_parts": "gather parts in the order of the devices that hold them",
    "sparsified": "send all elements of each gradient, or accept that this is a different training",
    "quantised": "send gradients without quantisation, or accept that this is a different training",
    "flatten_order": "flatten in the same order of axes: for example Permute((3, 1, 2)) before"
    " Flatten in Keras",
    "other_padding": "pad strided convolutions explicitly: 'same' pads more at the end, padding=n"
    " equally on both sides; in Keras, ZeroPadding2D(n) before padding='valid'",
    "other_batch_norm_epsilon": "set the epsilon of BatchNorm explicitly: PyTorch's is 1e-5, that"
    " of Keras 1e-3",
    "other_layer_settings": "use the same settings of layers in both scripts",
    # Sums.
    "partial_not_reduced": "reduce it over the axis on which each rank holds a part of the sum: in"
    " the forward pass after a layer split by its inputs, in the backward pass before the update",
    "not_all_reduced": "sum the gradients over the replicas before the update",
    "partly_all_reduced": "all-reduce the gradients of all weights: look at the condition that"
    " excludes these",
    "reduced_over_other_axis": "reduce the gradients over the data axes only",
    "lost_replica": "include every replica in the all-reduce of every variable",
    "repeated_gradient": "add the gradient of each replica once",
    "lost_micro_batch": "accumulate the gradients of all micro-batches before the update, and clear"
    " them only after it",
    "sum_instead_of_mean": "divide the sum of the gradients once, by the number of replicas, or of"
    " ranks along an axis, that it adds",
    "mean_instead_of_sum": "do not average gradients of losses that are divided by the global batch"
    " size, nor parts of a sum",
    "unequal_sums": "add the gradients in the same order on all replicas, or broadcast",
    "reduced_precision": "compute in the same dtype on all replicas and in both trainings, and"
    " all-reduce the gradients in float32",
    "clipped_before_the_sum": "clip after the all-reduce",
    "clipped_by_local_norm": "sum the squares of the norms of different parts over all ranks before"
    " the root, and count copies once",
    "clipped_on_one_replica": "clip on all replicas, after the all-reduce",
    "other_clipping": "clip to the same norm in both trainings, after the all-reduce",
    "clipped_before_unscale": "call scaler.unscale_(optimizer) before the gradients are clipped",
    "unscaled_between_micro_batches": "call scaler.unscale_(optimizer) once per step, after the"
    " last micro-batch",
    "clipped_in_each_micro_batch": "clip once per step, after the last micro-batch: with"
    " Accelerate, if accelerator.sync_gradients",
    "overflow_not_skipped": "skip the step on all replicas if the gradient of any overflows",
    # Update.
    "not_updated": "apply the summed gradients on every replica",
    "update_not_seen": "apply gradients with `model.optimizer.apply`",
    "updated_twice": "apply the summed gradients once per step",
    "other_learning_rate": "use one learning rate on all replicas, and advance its schedule once"
    " per step",
    "schedule_stepped_too_often": "advance the schedule once per update",
    "reset_state": "keep the optimizer's state from step to step",
    "zeroed_state": "keep the optimizer's state of every weight from step to step",
    "shifted_state": "give each weight its own part of the optimizer's state",
    "other_optimizer": "use the same optimizer in both scripts",
    "other_momentum": "use the same momentum in both scripts",
    "other_dampening": "use the same dampening in both scripts",
    "other_nesterov": "use the same form of momentum in both scripts",
    "other_weight_decay": "use the same weight decay in all trainings",
    "weight_decay_on_top": "apply weight decay once: in the optimizer or in the loss",
    "weight_decay_placement": "add weight decay in the same place: to the gradient (SGD and Adam of"
    " PyTorch; in Keras L2 regularizers with half the value) or to the weights (AdamW, Keras)",
    "learning_rate_in_velocity": "accept the difference when the learning rate changes: Keras keeps"
    " the learning rate within the velocity, PyTorch does not",
    "other_beta_1": "use the same beta_1 in both scripts",
    "other_beta_2": "use the same beta_2 in both scripts",
    "other_epsilon": "set the epsilon of Adam explicitly: PyTorch's is 1e-8, that of Keras 1e-7",
    "epsilon_placement": "scale epsilon: Keras adds it before bias correction, PyTorch after it",
    "bias_not_corrected": "correct the bias of Adam's moments in both scripts",
    "updated_from_a_part": "gather the gradient of a whole weight before an optimizer such as Muon,"
    " whose update of an element depends on the others, and give each rank its part of the update",
    "rounded_betas": "accept the difference, or pass fused=False: PyTorch's fused Adam of a GPU"
    " computes with betas of float32",
    # Moving statistics.
    "statistics_not_averaged": "average the moving statistics of all shards before they are"
    " evaluated or saved",
    "weighted_average": "give every shard its share of the examples in the average",
    "doubled_average": "update moving statistics and averages of weights once per step",
    "whole_batch_norm": "let BatchNorm normalise each shard, as the training defines it",
    "other_batch_norm_momentum": "set the momentum of BatchNorm explicitly: PyTorch's 0.1 is 0.9 in"
    " Keras, whose default is 0.99",
    "unbiased_variance": "accept the difference: PyTorch keeps the unbiased variance of a batch,"
    " Keras the biased one",
    "other_statistics": "compare the arrays of the moving statistics in both recordings",
    "stale_average": "update an average after the weights, with their new values",
    "other_average_decay": "use one decay of averages in both scripts, whatever the number of"
    " replicas or micro-batches",
    # Evaluation and time.
    "other_metric": "sum totals and counts over all replicas in the metric, and divide afterwards",
    "other_evaluation": "count every example once: do not pad batches, and average over examples",
    "random_evaluation": "draw random numbers only in training: use the `training` argument of"
    " `call`",
    "slow_replica": "look for what delays the replica: another program, a slower device, a larger"
    " shard",
    # No prediction fits.
    "unexplained": "compare the arrays of the recording with those of the reference",
}

MEANINGS = {  # Cause → what it means.
    "other_start": "Before the first step, weights or optimizer state are not those of the"
    " reference.",
    "other_tying": "A weight that one script uses twice is two weights in the other.",
    "weights_not_synchronised": "The program that generates has other weights than the trainer.",
    "not_replayed": "The step did not start from the reference's state, so that differences add"
    " up.",
    "state_lost": "State that the last step left is not there, or not in its place, in the next"
    " one.",
    "changed_on_its_own": "Few elements changed, and no update gives their values.",
    "ranks_disagree": "Replicas that must be copies have different weights or moving statistics, or"
    " got different sums.",
    "not_finite": "A loss, gradient or weight is NaN or infinite.",
    "same_random_numbers": "Replicas draw the same random numbers: their masks or noise repeat each"
    " other.",
    "random_numbers_repeated": "A step draws the random numbers of an earlier one.",
    "other_random_numbers": "Ranks draw other random numbers than the reference, or than those"
    " with which they compute one replica.",
    "random_layers": "Random layers draw other numbers on each replica than on one device, so that"
    " gradients were not compared.",
    "batch_not_split": "Examples of the batch are on several replicas, or on none.",
    "other_examples": "A step has other examples than the reference, or the same ones in another"
    " step.",
    "other_augmentation": "The examples are those of the reference, by their ids, and their inputs"
    " are not: they are augmented or preprocessed in another way.",
    "other_examples_in_a_replica": "Ranks that compute one replica together got different"
    " examples.",
    "other_batch": "The batch has another size: that of a replica, or filled or dropped at the"
    " end.",
    "labels_shifted": "Inputs are paired with the targets of other inputs.",
    "other_input_format": "The same examples are scaled or laid out in another way.",
    "not_reshuffled": "Each epoch has the same order of examples.",
    "inference_mode": "Layers such as dropout or BatchNorm ran as in an evaluation.",
    "local_statistics": "BatchNorm normalises each replica's examples on their own: another"
    " training by design, or a fault where it should synchronise.",
    "mean_of_means": "Averages of parts of unequal size are averaged: examples of small parts"
    " count more.",
    "mixes_examples": "The result of a layer for one example depends on the others of its replica.",
    "not_a_sum_over_examples": "The loss of the batch is no sum over examples, so that the parts"
    " of the replicas do not add up to it, as a contrastive loss.",
    "other_loss": "The gradient starts from another loss function.",
    "other_temperature": "Logits are divided by a temperature in one program only.",
    "other_positions": "Tokens have other numbers of positions, or log-probabilities belong to the"
    " tokens beside.",
    "other_outputs": "A layer gives other outputs for the same inputs and weights.",
    "other_backward": "Outputs are right and their gradients are not.",
    "other_targets": "The loss was computed with other targets than those recorded.",
    "other_loss_reduction": "Losses are summed, averaged or weighted over other axes.",
    "sum_instead_of_mean": "Gradients are a sum where the reference has the mean: N replicas, N"
    " times as large.",
    "regularisation_count": "A regularisation loss counts once for each replica, or not at all.",
    "weight_decay_placement": "Weight decay is in the loss, in the gradient or in the weights, or"
    " in two of them.",
    "scaled_gradient": "Gradients are the right ones times a number that no other cause explains.",
    "loss_scale": "The factor that protects small gradients in float16 is still in them, or"
    " differs.",
    "micro_batches_not_averaged": "Accumulated gradients are a sum over micro-batches, not their"
    " mean.",
    "stale_gradient": "The gradient contains one of an earlier step.",
    "stale_weights": "A gradient was computed with the weights of an earlier step.",
    "frozen": "A weight that is trained in one script got no gradient in the other, or on some"
    " replicas.",
    "partial_not_reduced": "Each rank holds a summand of an array, and they were not added.",
    "repeated_part": "A summand is in a sum twice.",
    "swapped_parts": "Parts of an array were put together in another order.",
    "lossy_communication": "Gradients were sent with fewer elements or digits.",
    "flatten_order": "Axes are flattened in another order before a dense layer.",
    "other_layer_settings": "A layer has other settings: padding, epsilon, momentum.",
    "not_all_reduced": "Replicas update with their own gradients, not with those of all.",
    "reduced_over_other_axis": "Gradients were added over ranks that hold different parts of a"
    " weight.",
    "lost_part": "A sum of gradients lacks a replica or a micro-batch.",
    "mean_instead_of_sum": "Gradients are a mean where the reference has the sum.",
    "reduced_precision": "An array has the few digits of a 16-bit dtype.",
    "other_clipping": "Gradients are clipped to another norm, at another time, or on some"
    " replicas.",
    "changed_between_micro_batches": "Accumulated gradients are clipped or divided before all are"
    " added.",
    "overflow_not_skipped": "A replica applied gradients that are not finite.",
    "not_updated": "A weight stayed as it was, although it has a gradient; or a moving statistic"
    " did.",
    "update_not_seen": "The optimizer ran where the recorder does not see it.",
    "updated_twice": "An update, or its schedule, was applied more than once in a step.",
    "other_learning_rate": "The update has another learning rate than the reference.",
    "other_optimizer": "The update follows another rule, or other settings of the same rule.",
    "updated_from_a_part": "An optimizer that mixes the elements of a weight, as Muon, computed the"
    " update of each rank's part alone.",
    "other_weight_decay": "The update decays the weights by another amount.",
    "framework_rule": "Two frameworks define the same setting differently; both are right.",
    "statistics_not_averaged": "The moving statistics that are saved are not the average of the"
    " replicas'.",
    "whole_batch_norm": "BatchNorm normalises the whole batch where each shard was asked for.",
    "other_statistics": "Moving statistics, or averages of weights, follow other values, or with"
    " another decay, or no known rule gives them.",
    "other_evaluation": "An evaluation counts examples twice, or averages over replicas.",
    "slow_replica": "Numbers are right; the others wait for one replica.",
    "unexplained": "The arrays differ, and no known mistake gives what was recorded.",
}

IN_FRAMEWORK = {  # Framework → remedies that can be said more precisely for it.
    "keras": {
        "diverged_replicas": "create and restore variables within the strategy's scope, so that"
        " they have equal values on all replicas",
        "same_random_numbers": "use a different seed on each replica: derive it from"
        " `tf.distribute.get_replica_context().replica_id_in_sync_group`",
        "local_statistics": "normalise over the whole batch with"
        " `BatchNormalization(synchronized=True)`, and average its moving statistics over the"
        " replicas",
        "scalar_loss_not_divided": "return one loss per example, of shape (batch,), which Keras"
        " divides by the number of replicas; or divide the scalar loss by the number of replicas",
        "mean_of_means": "use batch sizes that are divisible by the number of replicas"
        " (drop_remainder=True for the last batch), or reduction='sum' divided by the global batch"
        " size",
        "regulariser_repeated": "divide regularisation losses by the number of replicas"
        " (`tf.nn.scale_regularization_loss`)",
        "regulariser_missing": "add `model.losses` to the loss of the step",
        "frozen": "make the loss depend on the variable, or set trainable=False on every replica",
        "not_all_reduced": "sum the gradients over the replicas before the update: call"
        " `optimizer.apply` within `strategy.run`, which all-reduces them, or all-reduce them in"
        " the step",
        "sum_instead_of_mean": "divide the loss by the number of replicas, as"
        " `tf.nn.compute_average_loss` does: `optimizer.apply` sums the gradients of all replicas",
        "clipped_before_the_sum": "clip after the sum: remove clipnorm, global_clipnorm and"
        " clipvalue from the optimizer, and clip in a custom train_step after"
        " `tf.distribute.get_replica_context().all_reduce`",
        "overflow_not_skipped": "use mixed_bfloat16, which needs no loss scaling; Keras checks only"
        " the gradients of replica 0 for overflow",
        "schedule_stepped_too_often": "advance `optimizer.iterations` once per update",
    },
    "torch": {
        "same_examples": "give each replica a different part of the batch: a DistributedSampler",
        "other_examples_in_a_replica": "give the ranks that compute one replica together the same"
        " examples; or, if an axis of the mesh splits the inputs, record with dims=, as in"
        ' "b[ep] s[cp]"',
        "not_reshuffled": "call sampler.set_epoch(epoch) at the start of each epoch",
        "local_statistics": "synchronise BatchNorm over the replicas: SyncBatchNorm",
        "not_all_reduced": "call the wrapped model, ddp(x) and not ddp.module(x), or all-reduce the"
        " gradients before the update",
    },
    "lockstep": {
        "other_initial_weights": "build the model with the seed of the training on every replica",
        "local_statistics": "normalise over the whole batch with --batch_norm=sync",
    },
}

OF_WEIGHTS = "modules are right"
_AT_WEIGHTS = {
    OF_WEIGHTS: (
        "compare what both scripts do with these gradients as they reach the weights, and"
        " afterwards: hooks, sums over devices, and changes by the script",
        ("", ""),
    )
}

IF_SEEN = {  # Detail → what the recorder saw → remedy, and an example as in `CODE`.
    "not_all_reduced": {
        "no_sync": (
            "do not run the last micro-batch of a step under `no_sync()`: DDP reduces in the"
            " backward pass after it",
            ("", "with contextlib.nullcontext() if is_last else ddp.no_sync():"),
        ),
        "module": (
            "call the wrapped model, ddp(x) and not ddp.module(x)",
            ("output = ddp.module(x)", "output = ddp(x)"),
        ),
        "ddp": (
            "use gradients after the backward pass, at whose end DDP has reduced them, and not in"
            " hooks of weights",
            ("", ""),
        ),
        "mesh": (
            "reduce the gradients over all axes of the mesh that split the examples, in the last"
            " backward pass of each step",
            (
                'fully_shard(model, mesh=mesh["dp_shard"])',
                'fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"])',
            ),
        ),
        "no wrapper": (
            "all-reduce the gradients before the update, or wrap the model in"
            " DistributedDataParallel",
            ("", "dist.all_reduce(weight.grad, op=dist.ReduceOp.AVG)"),
        ),
    },
    "unexplained": _AT_WEIGHTS,
    "other_backward": _AT_WEIGHTS,
}

UNEXPLAINED = {  # Stage → what to look at, where no known mistake gives what was recorded.
    "forward": "compare the forward pass in both scripts, up to these outputs: functions, masks,"
    " dtypes, and what devices send each other",
    "gradients": "compare what both scripts do between the loss and these gradients: detached"
    " tensors, custom gradients, hooks, and sums over devices",
    "all-reduce": "look at what the script and its wrapper do with these gradients after the"
    " backward pass: hooks, buckets, groups of devices, factors",
    "clipping": "compare what both scripts do with these gradients before the update: norms, the"
    " weights and devices that these cover, and changes by the script",
    "update": "compare the update of these weights in both scripts: class and settings of the"
    " optimizer, dtypes, sums over devices, and changes by the script",
    "statistics": "compare in both scripts what changes these statistics: their layers, what"
    " devices send each other, and changes by the script",
}
MODULES = (
    "; record modules (`lockstep run --modules`, or `modules=True`): the first wrong one is named"
)
OF_MODULES = "other_outputs", "other_backward", "unexplained"  # Details; in a pass of the model.

CODE = {  # Framework → detail → an example: a line to remove, and one to add; "" for none.
    "keras": {
        "diverged_replicas": ("", "with strategy.scope(): model = build_model()"),
        "inference_mode": ("model(x)", "model(x, training=True)"),
        "local_statistics": ("BatchNormalization()", "BatchNormalization(synchronized=True)"),
        "mean_of_means": ("dataset.batch(size)", "dataset.batch(size, drop_remainder=True)"),
        "scalar_loss_not_divided": ("return tf.reduce_mean(losses)", "return losses"),
        "sum_instead_of_mean": (
            "loss = tf.reduce_mean(losses)",
            "loss = tf.nn.compute_average_loss(losses, global_batch_size=size)",
        ),
        "regulariser_missing": ("", "loss += tf.add_n(model.losses)"),
        "regulariser_repeated": ("", "penalty = tf.nn.scale_regularization_loss(penalty)"),
        "flatten_order": ("Flatten()", "Permute((3, 1, 2)), Flatten()"),
        "other_padding": ("Conv2D(n, 3, 2, 'same')", "ZeroPadding2D(1), Conv2D(n, 3, 2)"),
    },
    "torch": {
        "not_all_reduced": ("output = ddp.module(x)", "output = ddp(x)"),
        "forgotten_backward_sum": (
            "dist.all_gather(parts, z)",
            "parts = torch.distributed.nn.functional.all_gather(z)  # With its gradient.",
        ),
        "reduced_over_other_axis": ("all_reduce(g)", "all_reduce(g, group=mesh['dp'].get_group())"),
        "same_examples": ("shuffle=True", "sampler=DistributedSampler(dataset)"),
        "other_examples_in_a_replica": ("sampler(world_size, rank)", "sampler(dp_size, dp_rank)"),
        "not_reshuffled": ("", "sampler.set_epoch(epoch)  # At the start of each epoch."),
        "same_random_numbers": ("torch.manual_seed(seed)", "torch.manual_seed(seed + rank)"),
        "diverged_replicas": (
            "",
            "for p in model.parameters(): dist.broadcast(p.data, 0)  # But not parts of weights.",
        ),
        "inference_mode": ("model.eval()", "model.train()"),
        "local_statistics": ("DDP(model)", "DDP(SyncBatchNorm.convert_sync_batchnorm(model))"),
        "micro_batches_not_averaged": ("loss.backward()", "(loss / num_micro_batches).backward()"),
        "stale_gradient": ("", "optimizer.zero_grad()  # Before the first backward of a step."),
        "sum_instead_of_mean": ("", "gradient /= group.size()  # After dist.all_reduce(gradient)."),
        "loss_scale_left": ("optimizer.step()", "scaler.step(optimizer)"),
        "clipped_before_unscale": ("", "scaler.unscale_(optimizer)  # Before clip_grad_norm_."),
        "clipped_in_each_micro_batch": ("clip(model)", "if is_last_micro_batch: clip(model)"),
    },
    "jax": {
        "not_all_reduced": ("grad(loss)(params, x)", "lax.pmean(grad(loss)(params, x), axis)"),
        "sum_instead_of_mean": ("lax.psum(gradients, axis)", "lax.pmean(gradients, axis)"),
        "mean_instead_of_sum": ("lax.pmean(gradients, axis)", "lax.psum(gradients, axis)"),
        "partial_not_reduced": ("x @ w", "lax.psum(x @ w, axis)"),
        "random_numbers_repeated": ("", "key, step_key = jax.random.split(key)"),
        "same_random_numbers": ("", "key = jax.random.fold_in(key, lax.axis_index(axis))"),
    },
}

# Cause → its details → the words that tell them apart. Any other detail is a cause of its own.
MERGED = {
    "other_start": {
        "other_initial_weights": "initial weights",
        "other_initial_state": "initial state",
        "other_initialiser": "initialiser",
    },
    "state_lost": {
        "reset_state": "reset",
        "zeroed_state": "zeroed",
        "not_restored": "not restored",
        "shifted_state": "shifted",
    },
    # Sums that differ between replicas are weights that do, one stage earlier.
    "ranks_disagree": {"diverged_replicas": "", "unequal_sums": "sums"},
    "batch_not_split": {
        "same_examples": "same examples",
        "repeated_examples": "repeated examples",
        "lost_examples": "lost examples",
    },
    # In another order, each step and each replica has other examples.
    "other_examples": {
        "other_examples": "",
        "other_order": "other order",
        "examples_restarted": "begun again",
    },
    "other_batch": {
        "other_batch_size": "size",
        "last_batch_dropped": "last batch dropped",
        "sampler_padding": "sampler padding",
    },
    "other_input_format": {"other_normalisation": "normalisation", "other_layout": "layout"},
    "other_loss": {"other_loss": "", "label_smoothing": "label smoothing"},
    "mean_of_means": {
        "mean_of_means": "",
        "weighted_mean_of_means": "weighted",
        "wrong_count": "wrong count",
    },
    "sum_instead_of_mean": {"sum_instead_of_mean": "", "scalar_loss_not_divided": "scalar loss"},
    "loss_scale": {
        "loss_scale_left": "left in the gradients",
        "other_loss_scale": "not equal on all replicas",
    },
    "regularisation_count": {
        "regulariser_repeated": "repeated",
        "regulariser_missing": "missing",
    },
    "weight_decay_placement": {
        "weight_decay_placement": "",
        "weight_decay_on_top": "in both places",
        "regularisation_in_the_loss": "in the loss",
    },
    "stale_weights": {"stale_weights": "", "stale_stage": "of a stage"},
    "frozen": {"frozen": "", "not_frozen": "in the first recording only"},
    "not_all_reduced": {"not_all_reduced": "", "partly_all_reduced": "some weights"},
    "partial_not_reduced": {
        "partial_not_reduced": "",
        "own_gradient_only": "own gradient only",
        "forgotten_backward_sum": "backward sum",
    },
    "lost_part": {"lost_replica": "replica", "lost_micro_batch": "micro-batch"},
    "repeated_part": {"repeated_gradient": "gradient", "repeated_bias": "bias"},
    "swapped_parts": {"swapped_parts": "", "other_order_of_parts": "order of devices"},
    "lossy_communication": {"sparsified": "sparsified", "quantised": "quantised"},
    "other_clipping": {
        "other_clipping": "",
        "clipped_before_the_sum": "before the sum",
        "clipped_by_local_norm": "by the local norm",
        "clipped_on_one_replica": "on one replica",
        "clipped_before_unscale": "before the loss scale is removed",
    },
    "changed_between_micro_batches": {
        "unscaled_between_micro_batches": "unscaled",
        "clipped_in_each_micro_batch": "clipped",
    },
    "updated_twice": {
        "updated_twice": "",
        "schedule_stepped_too_often": "schedule",
        "doubled_average": "averages",  # Moving statistics, or averages of weights.
    },
    "other_optimizer": {
        "other_optimizer": "",
        "other_momentum": "momentum",
        "other_dampening": "dampening",
        "other_nesterov": "Nesterov",
        "other_beta_1": "beta 1",
        "other_beta_2": "beta 2",
        "other_epsilon": "epsilon",
        "bias_not_corrected": "bias correction",
    },
    "framework_rule": {
        "epsilon_placement": "placement of epsilon",
        "learning_rate_in_velocity": "learning rate in the velocity",
        "rounded_betas": "betas of float32",
        "unbiased_variance": "unbiased variance",
    },
    "other_layer_settings": {
        "other_layer_settings": "",
        "other_padding": "padding",
        "other_batch_norm_epsilon": "epsilon of BatchNorm",
        "other_batch_norm_momentum": "momentum of BatchNorm",
    },
    "statistics_not_averaged": {
        "statistics_not_averaged": "",
        "weighted_average": "weighted",
    },
    "other_statistics": {
        "other_statistics": "",
        "stale_average": "old values in an average",
        "other_average_decay": "decay of an average",
    },
    "other_evaluation": {
        "other_evaluation": "",
        "other_metric": "metric",
        "random_evaluation": "random numbers",
    },
}

_CAUSE_OF = {detail: cause for cause, details in MERGED.items() for detail in details}
CAUSES = tuple(dict.fromkeys(_CAUSE_OF.get(detail, detail) for detail in DETAILS))
_TITLES = {  # Causes whose names do not read as words.
    "changed_between_micro_batches": "changed between micro-batches",
    "framework_rule": "rule of the framework",
    "loss_scale": "wrong loss scale",
    "micro_batches_not_averaged": "micro-batches not averaged",
    "not_all_reduced": "not all-reduced",
    "other_backward": "other backward pass",
    "other_tying": "weights tied in one script only",
    "reduced_over_other_axis": "reduced over another axis",
    "regularisation_count": "regularisation not counted once",
    "whole_batch_norm": "BatchNorm over the whole batch",
}


def cause_of(detail: str) -> str:
    """Returns the cause that a detail belongs to.

    Raises:
        KeyError: the detail is not in `DETAILS`.
    """
    if detail not in DETAILS:
        raise KeyError(f"{detail!r} is not a detail that lockstep/answer/causes.py lists")
    return _CAUSE_OF.get(detail, detail)


def remedy_of(
    detail: str, framework: str = "", seen: str = "", stage: str = "", module: str = ""
) -> str:
    """Returns what to do about a difference; without a known mistake, where to look.

    Args:
        detail: a key of `DETAILS`.
        framework: that of the trace, as in `About.framework`; "lockstep" for our own strategies.
        seen: `Finding.seen`.
        stage: a key of `verdict.STAGES`.
        module: the first module that differs; "" if it is unknown.
    """
    if seen in IF_SEEN.get(detail, {}):
        return IF_SEEN[detail][seen][0]
    found = IN_FRAMEWORK.get(framework, {}).get(detail) or DETAILS[detail]
    if detail == "unexplained":
        found = UNEXPLAINED.get(stage, found)
    return found if module or not needs_module(detail, stage, framework) else found + MODULES


def needs_module(detail: str, stage: str, framework: str) -> bool:
    """Returns whether the first wrong module says more than the detail of a fault."""
    is_in_pass = framework == "torch" and stage in ("forward", "gradients")
    return is_in_pass and detail in OF_MODULES


def comparison_of(detail: str, framework: str, file: str) -> str:
    """Returns how to compare what was not, as its layers mix examples or draw per replica.

    Args:
        detail: a key of `DETAILS`.
        framework: that of the trace; see `remedy_of`.
        file: name of the recording, as in "two.npz".
    """
    if detail not in ("local_statistics", "random_layers"):
        return remedy_of(detail, framework)
    if framework == "torch":
        return (
            f'record the first script again, in one process, with replay="{file}", shards="each",'
            " which computes each replica's part of the batch as the replica does; `lockstep run`"
            " does so itself"
        )
    if framework == "keras" and detail == "local_statistics":
        return (
            f'`lockstep.compare("{file}", model=build_model)` computes each replica\'s step; or'
            " synchronise BatchNorm in both scripts"
        )
    return (
        "while you verify, normalise over the whole batch, and set the rate of random layers to 0,"
        " in both scripts"
    )


def title_of(cause: str) -> str:
    """Returns a cause in words, as in "state lost"."""
    return _TITLES.get(cause, cause.replace("_", " "))


def words_of(detail: str) -> str:
    """Returns the cause in words, with what the detail adds, as in "state lost (shifted)"."""
    cause = cause_of(detail)
    more = MERGED.get(cause, {}).get(detail)
    return title_of(cause) + (f" ({more})" if more else "")


def code_of(detail: str, framework: str, seen: str = "") -> dict[str, str]:
    """Returns an example of the remedy: "-" → a line to remove, "+" → the one to write instead."""
    code = CODE.get(framework, {}).get(detail, ("", ""))
    if seen in IF_SEEN.get(detail, {}):
        code = IF_SEEN[detail][seen][1]
    lines = zip("-+", code, strict=True)
    return {sign: line for sign, line in lines if line}
