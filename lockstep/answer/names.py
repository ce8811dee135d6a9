"""The one table of names that a verdict may give: what each means, and what to do about it.

A name joins mistakes that are said in the same way and repaired in the same place.
"""

from typing import NamedTuple

from lockstep.engine.verdict import FAULT, GRADIENT, NOT_COMPARED, OUTPUTS, Verdict


class Name(NamedTuple):
    """A mistake.

    Attributes:
        title: in words, as a part of a sentence.
        sentence: what was found.
        remedy: what to do, without a full stop.
        also: what the same arrays may come from as well; "" for nothing.
    """

    title: str
    sentence: str
    remedy: str
    also: str = ""


NAMES = {  # In the order of the nodes at which they are found.
    "other_start": Name(
        "other initial values",
        "Before the first step, weights, statistics or optimizer state are not the reference's.",
        "load the same initial weights into both trainings, or record the second with replay=;"
        " create optimizer and statistics anew on every rank",
        "a checkpoint that restores only a part, or a generator without the trainer's weights",
    ),
    "other_tying": Name(
        "weights tied in one training only",
        "A weight that one training uses twice is two weights in the other.",
        "tie the same weights in both scripts, after every call that makes new ones, as"
        " `to_empty`, `fully_shard` or loading a checkpoint",
    ),
    "frozen": Name(
        "weights trained in one training only",
        "A weight has a gradient in one training, and none in the other or on some ranks.",
        "freeze the same weights in both scripts, and let the loss depend on all others",
        "`detach`, `no_grad` or a checkpointed block that cuts the graph",
    ),
    "diverged_replicas": Name(
        "ranks that differ",
        "Ranks that must hold copies have different weights, statistics or sums.",
        "broadcast one rank's weights and buffers before the first step, and apply the same update"
        " on every rank",
        "gradients that are not all-reduced, or added in another order on each rank",
    ),
    "batch_not_split": Name(
        "batch not split over the ranks",
        "Examples of the batch are on several ranks, or on none.",
        "shard the data by rank, so that each example reaches exactly one",
    ),
    "other_examples": Name(
        "other examples",
        "A step has other examples than the reference's, or those of another step.",
        "use the same data, seed and order of examples in both trainings; after a restart, restore"
        " the sampler or skip the examples of the steps before",
    ),
    "not_reshuffled": Name(
        "epochs in the same order",
        "A rank has the examples of an earlier epoch again, in the same order.",
        "reshuffle in each epoch, as `sampler.set_epoch(epoch)` does",
    ),
    "other_batch_size": Name(
        "other batch size",
        "The batch has another number of examples, in all steps or at the end of the data.",
        "give each rank the global batch size divided by the number of ranks, and treat the last"
        " batch alike in both scripts: `drop_last`, `drop_remainder`, or a sampler that fills it",
    ),
    "other_preprocessing": Name(
        "other preprocessing",
        "The examples are the reference's, and their inputs are scaled, laid out or augmented in"
        " another way.",
        "preprocess in the same way, and draw the augmentation of an example from its id, the epoch"
        " and one seed; or record both without augmentation",
    ),
    "other_targets": Name(
        "other targets",
        "Inputs are the reference's, and their targets are not.",
        "shuffle, shift and batch inputs and targets together, in one data set",
        "targets that are changed after they were loaded, as by smoothing or masking",
    ),
    "other_examples_in_a_replica": Name(
        "different examples in one replica",
        "Ranks that compute one replica together have different examples.",
        "seed and shard the data by the position on the data axes of the mesh alone; if another"
        " axis splits the inputs, record with dims=",
    ),
    "same_random_numbers": Name(
        "same random numbers on ranks",
        "Ranks draw the same random numbers: their masks or noise repeat each other.",
        "derive the seed from the rank",
    ),
    "random_numbers_repeated": Name(
        "random numbers of an earlier step",
        "A step draws the random numbers of an earlier one.",
        "advance the generator, or split the key, once per step",
    ),
    "other_random_numbers": Name(
        "other random numbers",
        "Ranks draw other random numbers than the reference.",
        "give ranks equal seeds where the reference draws once for all of them, or broadcast what"
        " one of them draws; or set the rate of random layers to 0 while you verify",
    ),
    "inference_mode": Name(
        "layers in evaluation mode",
        "Layers such as dropout or BatchNorm run as in an evaluation, or only here as in training.",
        "set the same modes: a training step calls the model in training mode",
    ),
    "local_statistics": Name(
        "layers that normalise each rank's examples",
        "BatchNorm normalises the examples of each rank on their own.",
        "synchronise BatchNorm over the ranks, or accept that this is another training",
    ),
    "other_layer_settings": Name(
        "other settings of layers",
        "A layer has other settings, such as padding, epsilon, momentum or order of axes.",
        "set them explicitly in both scripts: defaults of frameworks differ",
    ),
    "reduced_precision": Name(
        "fewer digits",
        "An array has the few digits of a 16-bit dtype, or was sent with less than all it holds.",
        "compute in the same dtype in both trainings, and all-reduce gradients in float32",
    ),
    "other_outputs": Name(
        "other outputs",
        "The model gives other outputs for the same inputs and weights.",
        "compare the forward pass in both scripts: functions, masks, positions, the order of parts,"
        " and what is summed over ranks, as a bias that each of them adds",
    ),
    "mean_of_means": Name(
        "mean of means",
        "Means of unequal parts are averaged, so that examples of small parts count more.",
        "divide the sums of all ranks by the number of examples, tokens or weights of all",
    ),
    "other_loss": Name(
        "other loss",
        "From equal outputs, the gradient of the loss is another one.",
        "compute the same loss of the whole batch in both scripts: function, averaged axes,"
        " weights, smoothing",
        "a loss that is no sum over examples, as a contrastive one, whose outputs must be gathered"
        " first",
    ),
    "other_loss_scale": Name(
        "other loss scale",
        "Ranks multiply their losses by different scales.",
        "use the same loss scale on all ranks while gradients are summed",
    ),
    "wrong_factor": Name(
        "wrong factor",
        "Values are the reference's times a number.",
        "divide exactly once, by what the reference divides by: N times as large on N ranks is a"
        " sum in place of a mean, and 1/N of it a mean in place of a sum",
        "undivided losses of micro-batches, a part that counts twice, or a loss scale",
    ),
    "regularisation_count": Name(
        "regularisation not counted once",
        "A regularisation loss counts once for each rank, or not at all.",
        "divide regularisation losses by the number of ranks whose losses are summed, and add them"
        " to the loss of each step",
    ),
    "other_backward": Name(
        "other backward pass",
        "Outputs and loss are right, and the gradients are not.",
        "compare the backward pass in both scripts: hooks, custom gradients, detached tensors, and"
        " sums over ranks",
    ),
    "partial_not_reduced": Name(
        "parts of a sum not added",
        "Each rank holds a summand of an array, and they were not added.",
        "all-reduce it over the ranks that hold its summands: outputs of a layer that is split by"
        " its inputs, and in the backward pass gradients of what several ranks used",
    ),
    "stale_gradient": Name(
        "gradient of an earlier step",
        "A gradient contains that of an earlier step, or was computed with its weights.",
        "clear gradients and buffers in each step, and compute it with the weights of the last"
        " update",
    ),
    "lost_part": Name(
        "part of the batch lost",
        "The gradient of a rank or of a micro-batch is missing from the sum.",
        "include every rank in the all-reduce of every weight, accumulate all micro-batches before"
        " the update, the last one not under `no_sync()`, and clear gradients only after it",
    ),
    "not_all_reduced": Name(
        "not all-reduced",
        "Ranks use their own gradients of these weights, not the sum over all ranks.",
        "all-reduce the gradients of all weights before the update; with DDP, call `ddp(x)`, not"
        " `ddp.module(x)`, and the last backward pass of a step not under `no_sync()`",
    ),
    "reduced_over_other_axis": Name(
        "reduced over another axis",
        "Gradients are added over ranks that the reference does not add.",
        "reduce the gradients over the data axes of the mesh only, and over all of these",
    ),
    "overflow_not_skipped": Name(
        "overflow not skipped",
        "Gradients are infinite or NaN, and the step is not skipped on all ranks.",
        "skip the step on every rank if the gradient of any overflows",
    ),
    "not_finite": Name(
        "NaN or infinite values",
        "Values are NaN or infinite, and the reference's are not.",
        "look at the first step that has them: examples, loss and learning rate",
    ),
    "clipped_too_early": Name(
        "clipped too early",
        "Gradients are clipped before they are the gradient of the whole batch.",
        "clip once per step, after the last micro-batch, the all-reduce and the division by the"
        " loss scale",
    ),
    "other_clipping": Name(
        "other clipping",
        "Gradients are clipped by another factor, or not on all ranks.",
        "clip to the same norm on every rank: add the squares of the norms of different parts over"
        " all ranks before the root, and count copies once",
    ),
    "not_updated": Name(
        "not updated",
        "Values stay as they were, and the reference's change.",
        "give the optimizer every weight, and apply the summed gradients on every rank",
    ),
    "other_learning_rate": Name(
        "other learning rate",
        "The update has another learning rate than the reference's.",
        "use one learning rate on all ranks, and advance its schedule once per update",
        "gradients that are scaled where the optimizer is not recorded",
    ),
    "other_weight_decay": Name(
        "other weight decay",
        "Weights decay by another amount, or in another place.",
        "apply weight decay once, of the same amount and in the same place: the loss, the gradient"
        " (SGD and Adam of PyTorch) or the weights (AdamW, Keras)",
    ),
    "other_optimizer": Name(
        "other optimizer",
        "The update follows another rule, or other settings of the same rule.",
        "use the same optimizer with the same settings, and set them explicitly: defaults of"
        " frameworks differ, as the epsilon of Adam",
    ),
    "state_lost": Name(
        "state lost",
        "State of the optimizer or of a generator that the last step left is not in its place.",
        "keep every state from step to step; save all of it, with generators and loss scale, and"
        " restore it on every rank",
    ),
    "other_average": Name(
        "other average of weights",
        "An average of weights is updated with old values, too often, or with another decay.",
        "update it once per step, after the weights, with the same decay whatever the number of"
        " ranks and micro-batches",
    ),
    "statistics_not_averaged": Name(
        "statistics not averaged",
        "The mean over the ranks' moving statistics is right, and each rank keeps its own.",
        "average moving statistics over the ranks, each with its share of the examples, before they"
        " are evaluated or saved",
    ),
    "other_statistics": Name(
        "other moving statistics",
        "Moving statistics follow other values.",
        "compare in both scripts what changes them: the layer, what ranks send each other, changes"
        " by the script",
        "a framework that keeps the unbiased variance of a batch, as PyTorch, beside one that does"
        " not, as Keras",
    ),
    "changed_on_its_own": Name(
        "changed on its own",
        "Values change, and not by the update.",
        "look for code that assigns to them outside of the update, and for forward passes in"
        " training mode, which move statistics; if there is none, test the memory of the machine",
    ),
}

# Name → the details of version 3 of the JSON that it joins, where they are not this name alone.
WAS = {
    "other_start": "other_initial_weights other_initial_state other_initialiser not_replayed"
    " weights_not_synchronised",
    "frozen": "frozen not_frozen",
    "diverged_replicas": "diverged_replicas unequal_sums",
    "batch_not_split": "same_examples repeated_examples lost_examples",
    "other_examples": "other_examples other_order examples_restarted",
    "other_batch_size": "other_batch_size last_batch_dropped sampler_padding",
    "other_preprocessing": "other_augmentation other_normalisation other_layout",
    "other_targets": "other_targets labels_shifted",
    "other_random_numbers": "other_random_numbers random_layers",
    "other_layer_settings": "other_layer_settings other_padding flatten_order"
    " other_batch_norm_epsilon other_batch_norm_momentum",
    "reduced_precision": "reduced_precision quantised sparsified",
    "other_outputs": "other_outputs other_temperature other_positions swapped_parts repeated_bias",
    "mean_of_means": "mean_of_means wrong_count",
    "other_loss": "other_loss other_loss_reduction label_smoothing not_a_sum_over_examples",
    "wrong_factor": "scaled_gradient sum_instead_of_mean mean_instead_of_sum repeated_gradient"
    " micro_batches_not_averaged loss_scale_left",
    "regularisation_count": "regulariser_repeated regulariser_missing",
    "partial_not_reduced": "partial_not_reduced own_gradient_only forgotten_backward_sum",
    "stale_gradient": "stale_gradient stale_weights",
    "lost_part": "lost_replica lost_micro_batch",
    "not_all_reduced": "not_all_reduced partly_all_reduced",
    "clipped_too_early": "clipped_before_the_sum clipped_before_unscale clipped_in_each_micro_batch"
    " unscaled_between_micro_batches",
    "other_clipping": "other_clipping clipped_by_local_norm clipped_on_one_replica",
    "other_learning_rate": "other_learning_rate schedule_stepped_too_often",
    "other_weight_decay": "other_weight_decay weight_decay_on_top weight_decay_placement"
    " regularisation_in_the_loss",
    "other_optimizer": "other_optimizer other_momentum other_nesterov other_dampening other_beta_1"
    " other_beta_2 other_epsilon bias_not_corrected epsilon_placement rounded_betas"
    " learning_rate_in_velocity",
    "state_lost": "reset_state zeroed_state shifted_state not_restored",
    "other_average": "stale_average doubled_average other_average_decay",
    "statistics_not_averaged": "statistics_not_averaged weighted_average",
    "other_statistics": "other_statistics unbiased_variance",
}
CODE = {  # Framework → name → a line to remove, and one to add; "" for none.
    "keras": {
        "local_statistics": ("BatchNormalization()", "BatchNormalization(synchronized=True)"),
        "mean_of_means": ("dataset.batch(size)", "dataset.batch(size, drop_remainder=True)"),
        "inference_mode": ("model(x)", "model(x, training=True)"),
    },
    "torch": {
        "not_reshuffled": ("", "sampler.set_epoch(epoch)  # At the start of each epoch."),
        "same_random_numbers": ("torch.manual_seed(seed)", "torch.manual_seed(seed + rank)"),
        "inference_mode": ("model.eval()", "model.train()"),
        "local_statistics": ("DDP(model)", "DDP(SyncBatchNorm.convert_sync_batchnorm(model))"),
        "stale_gradient": ("", "optimizer.zero_grad()  # Before the first backward of a step."),
        "not_all_reduced": ("", "dist.all_reduce(weight.grad, op=dist.ReduceOp.AVG)"),
    },
    "jax": {
        "not_all_reduced": ("grad(loss)(params, x)", "lax.pmean(grad(loss)(params, x), axis)"),
        "partial_not_reduced": ("x @ w", "lax.psum(x @ w, axis)"),
        "random_numbers_repeated": ("", "key, step_key = jax.random.split(key)"),
        "same_random_numbers": ("", "key = jax.random.fold_in(key, lax.axis_index(axis))"),
    },
}

FROM = {  # Node → where to look, if no name fits.
    "start": "compare how both scripts create and load these values",
    "examples": "compare the inputs and targets that both scripts load in this step",
    "random": "compare the seeds and generators of both scripts, and where they are advanced",
    "outputs": "compare the forward pass in both scripts: functions, masks, dtypes, and what ranks"
    " send each other",
    "loss": "compare the losses of both scripts: the function, what they average over, and weights"
    " of examples",
    "gradient": "compare what both scripts do between the loss and these gradients: detached"
    " tensors, custom gradients, hooks, and sums over ranks",
    "sum": "look at what the script and its wrapper do with these gradients after the backward"
    " pass: hooks, buckets, groups of ranks, factors",
    "clipping": "compare what both scripts do with these gradients before the update: norms, the"
    " weights and ranks that these cover, and changes by the script",
    "update": "compare the update of these values in both scripts: the optimizer and its settings,"
    " dtypes, sums over ranks, and changes by the script",
    "between": "look for code that changes these values after the update, or before the next step",
}
MODULES = "record modules (`lockstep run --modules`, or `modules=True`) to see the first wrong one"
GENERIC = "", "other_outputs", "other_backward"  # Names that say no more than their node.


def details_of(name: str) -> list[str]:
    """Returns what version 3 of the JSON called a name: its details."""
    return WAS.get(name, name).split()


def title_of(verdict: Verdict) -> str:
    """Returns the name of a verdict in words; without one "unexplained"."""
    return NAMES[verdict.name].title if verdict.name else "unexplained"


def advice_of(verdict: Verdict) -> str:
    """Returns what to do about a verdict, or how to compare; "" if there is nothing to do."""
    if verdict.place is None:
        return ""
    if verdict.status == NOT_COMPARED:
        return _comparison(verdict)
    advice = NAMES[verdict.name].remedy if verdict.name else FROM[verdict.place.node]
    return f"{advice}; {MODULES}" if needs_module(verdict) else advice


def _comparison(verdict: Verdict) -> str:
    """Returns how to compare layers that mix examples or draw for each rank."""
    if verdict.framework in ("torch", "keras"):
        return (
            "record the reference once more, in one process, with"
            f' replay="{verdict.training}", shards="each": it then computes the part of each rank'
            " as the rank does; `lockstep run` does so itself"
        )
    return (
        "while you verify, normalise over the whole batch, and set the rate of random layers to 0,"
        " in both scripts"
    )


def needs_module(verdict: Verdict) -> bool:
    """Returns whether the first wrong module, which PyTorch can record, would say more."""
    place = verdict.place
    is_in_pass = place is not None and place.node in (OUTPUTS, GRADIENT) and not place.module
    return is_in_pass and verdict.framework == "torch" and verdict.name in GENERIC


def code_of(verdict: Verdict) -> dict[str, str]:
    """Returns an example: "-" → a line to remove, "+" → the one to write instead; or neither."""
    known = CODE.get(verdict.framework, {}) if verdict.status == FAULT else {}
    code = known.get(verdict.name, ("", ""))
    return {sign: line for sign, line in zip("-+", code, strict=True) if line}
