"""Defines the findings of a recording's verification: stages, causes and remedies."""

import dataclasses
from collections.abc import Sequence

from lockstep.verdict import FAULT

STAGES = {
    "start": "weights and optimizer state before a step: equal on all replicas and in both"
    " recordings",
    "random numbers": "random states: no two replicas and no two steps draw the same numbers",
    "examples": "each example of a step once, and the same examples in both recordings",
    "loss": "the loss of each step, in both recordings",
    "all-reduce": "what each replica receives is the sum or mean of what the replicas sent",
    "gradients": "the gradient of the whole batch from the same state, in both recordings",
    "clipping": "all replicas apply the same gradient",
    "update": "each weight after the step follows the optimizer's rule; the same rule in both"
    " recordings",
    "statistics": "moving statistics of BatchNorm after the step, in both recordings",
    "agreement": "weights and optimizer state after the step: equal on all replicas",
}

REMEDIES = {
    "other_initial_weights": "load the same initial weights into both models, or record the second"
    " script with replay=",
    "other_initialiser": "set the initialisers of all layers explicitly, or load the same initial"
    " weights into both models",
    "not_replayed": "record the second script with replay= and the file of the first",
    "diverged_replicas": "broadcast the weights of one replica to all replicas before the first"
    " step, and apply the same update on each",
    "same_random_numbers": "derive the seed from the rank of the replica",
    "random_numbers_repeated": "advance the generator, or split the key, once per step",
    "random_layers": "set the rate of random layers to 0 to compare gradients",
    "same_examples": "give each replica a different part of the batch: a DistributedSampler, or a"
    " shard of the data set",
    "repeated_examples": "split each batch so that every example reaches exactly one replica",
    "lost_examples": "split each batch so that every example reaches exactly one replica",
    "other_examples": "use the same data, seed and order of examples in both scripts",
    "other_normalisation": "scale the inputs in both scripts in the same way",
    "other_layout": "order the axes of the inputs in the same way in both scripts: NHWC or NCHW",
    "other_order": "use the same order of examples in both scripts",
    "not_reshuffled": "call sampler.set_epoch(epoch) at the start of each epoch, or reshuffle the"
    " data set in each epoch",
    "last_batch_dropped": "use the same drop_last (drop_remainder) in both scripts",
    "other_loss": "compute the same loss in both scripts",
    "other_loss_reduction": "average the loss over the same axes in both scripts, and divide"
    " weighted losses by the same: the sum of the weights (PyTorch) or the number (Keras)",
    "not_finite": "look at the first step with NaN or infinite values: its examples, loss and"
    " learning rate",
    "not_all_reduced": "call the wrapped model, ddp(x) and not ddp.module(x), or all-reduce the"
    " gradients before the update",
    "sum_instead_of_mean": "divide the sum of the gradients by the number of replicas once",
    "mean_instead_of_sum": "do not average gradients of losses that are divided by the global batch"
    " size",
    "lost_replica": "include every replica in the all-reduce of every gradient",
    "reduced_precision": "all-reduce gradients in float32",
    "other_sum": "compare the arrays raw and sums of the recording",
    "mean_of_means": "weight each replica's gradient by its number of examples, or give all"
    " replicas equally many",
    "scaled_gradient": "divide the loss by the global batch size exactly once",
    "local_statistics": "synchronize BatchNorm over the replicas: SyncBatchNorm, or"
    " BatchNormalization(synchronized=True)",
    "regularisation_in_the_loss": "apply weight decay in both scripts in the same place: the loss"
    " or the optimizer",
    "frozen": "make the weight trainable in both scripts, and a part of the loss",
    "flatten_order": "flatten in the same order of axes: for example Permute((3, 1, 2))"
    " before Flatten in Keras",
    "other_batch_norm_epsilon": "set the epsilon of BatchNorm explicitly: PyTorch's is 1e-5, that"
    " of Keras 1e-3",
    "other_padding": "pad strided convolutions explicitly: 'same' pads more at the end, padding=n"
    " equally on both sides; in Keras, ZeroPadding2D(n) before padding='valid'",
    "other_layer_settings": "use the same settings of layers in both scripts",
    "unexplained_gradient": "compare the arrays of both recordings, from the last layer to the"
    " first",
    "clipped_on_one_replica": "clip on all replicas, after the all-reduce",
    "clipped_before_the_sum": "clip after the all-reduce",
    "other_clipping": "clip to the same norm in both scripts, after the all-reduce",
    "not_updated": "apply the gradient on every replica",
    "other_learning_rate": "use the same learning rate in both scripts, and advance its schedule"
    " once per step",
    "other_momentum": "use the same momentum in both scripts",
    "other_dampening": "use the same dampening in both scripts",
    "other_nesterov": "use the same form of momentum in both scripts",
    "other_weight_decay": "use the same weight decay in both scripts",
    "weight_decay_placement": "add weight decay in the same place: to the gradient (SGD and Adam of"
    " PyTorch; in Keras L2 regularizers with half the value) or to the weights (AdamW, Keras)",
    "learning_rate_in_velocity": "accept the difference when the learning rate changes: Keras keeps"
    " the learning rate within the velocity, PyTorch does not",
    "other_beta_1": "use the same beta_1 in both scripts",
    "other_beta_2": "use the same beta_2 in both scripts",
    "other_epsilon": "set the epsilon of Adam explicitly: PyTorch's is 1e-8, that of Keras 1e-7",
    "epsilon_placement": "scale epsilon: Keras adds it before bias correction, PyTorch after it",
    "other_optimizer": "use the same optimizer in both scripts",
    "bias_not_corrected": "correct the bias of Adam's moments in both scripts",
    "unexplained_update": "compare the arrays clipped, before and after of the recording",
    "other_batch_norm_momentum": "set the momentum of BatchNorm explicitly: PyTorch's 0.1 is 0.9 in"
    " Keras, whose default is 0.99",
    "unbiased_variance": "accept the difference: PyTorch keeps the unbiased variance of a batch,"
    " Keras the biased one",
    "other_statistics": "compare the arrays of the moving statistics in both recordings",
}


@dataclasses.dataclass(frozen=True)
class TraceFinding:
    """A difference in one stage.

    Attributes:
        stage: a key of `STAGES`.
        status: `BY_DESIGN` or `FAULT`.
        cause: a key of `REMEDIES`.
        text: one sentence with the numbers.
        steps: numbers of the steps with this difference in the script, from 0.
        replicas: replicas with this difference; empty for all replicas together.
        tensors: names of the affected weights; empty without any.
        distance: largest relative difference.
        allowed: largest relative difference that rounding can cause.
    """

    stage: str
    status: str
    cause: str
    text: str
    steps: tuple[int, ...]
    replicas: tuple[int, ...] = ()
    tensors: tuple[str, ...] = ()
    distance: float = 0.0
    allowed: float = 0.0

    @property
    def remedy(self) -> str:
        """How to fix it."""
        return REMEDIES[self.cause]


def fault(stage: str, cause: str, text: str, step: int, **where: object) -> TraceFinding:
    """Returns a fault in one step."""
    return TraceFinding(stage, FAULT, cause, text, (step,), **where)  # type: ignore[arg-type]


def merged(findings: Sequence[TraceFinding]) -> list[TraceFinding]:
    """Merges findings of equal stage, status and cause over the steps, in order of the stages."""
    same: dict[tuple[str, str, str], list[TraceFinding]] = {}
    for finding in findings:
        same.setdefault((finding.stage, finding.status, finding.cause), []).append(finding)
    joined = [
        dataclasses.replace(
            max(group, key=lambda each: each.distance),
            steps=tuple(dict.fromkeys(step for each in group for step in each.steps)),
            replicas=tuple(sorted({r for each in group for r in each.replicas})),
            tensors=tuple(dict.fromkeys(name for each in group for name in each.tensors)),
        )
        for group in same.values()
    ]
    order = list(STAGES)
    return sorted(joined, key=lambda each: order.index(each.stage))


def explained_by(
    gradients: list[TraceFinding] | None, others: list[TraceFinding] | None, unexplained: str
) -> list[TraceFinding] | None:
    """Returns findings with the cause of different gradients, if it is known and theirs is not."""
    if not gradients or not others or gradients[0].cause == "unexplained_gradient":
        return others
    (found, *_) = gradients
    return [
        dataclasses.replace(each, status=found.status, cause=found.cause)
        if each.cause == unexplained
        else each
        for each in others
    ]
