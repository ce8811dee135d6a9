"""Trainings, and what is changed in a second one: right ones, and what is said of wrong ones.

The second one has two replicas, and starts each step from the state of the first.
"""
# ruff: noqa: F403, F405 (the names of the options)

import numpy as np

from lockstep.data.trace import STATE, Variable
from tests.verifier.trainer import WEIGHTS, batch_of

from .changes import *

NAN_WEIGHT = scaled(np.nan, "before after", index=0)
NO_BIAS = without("before after", index=1)
RAISED = {"about": {"ended_with": "RuntimeError: out of memory"}}
SKIPPED = {"about": {"asked": range(5), "trained": 4, "skipped": 1}}
HEAD = with_head(lambda at, r, later: at + later)
STILL = with_head(lambda *_: 1)
SECOND_OPTIMIZER = with_head(lambda at, r, _: 0.9 + 0.1 * at)  # It updates between the steps.
# Without BatchNorm, behind which units may turn over.
IN_TF32 = {"about": {"layers": (), "computed_in": "tensorfloat32"}}
GPU = {"about": {"layers": (), "device": "cuda"}}
TWO_PASSES = {"about": {"micro_batches": (2,) * 4}}
GROUP = in_each_step({"weights": [*WEIGHTS]})
FEW_DIGITS = {"update": in_few_digits}
OF_CLASSES = {"about": MUON, "gradient": over_classes, "update": orthogonalised}
BIAS_LATE = bias_times(lambda step, r: step == 3)
IN_OPTIMIZER, NOT_CLIPPED = {"update": clipping}, without("clipped")
NO_GRADIENT = zero_in(0, 1, 2, 3)
DRAWN = random_states(lambda step, r: [step] * 4, 1)

RIGHT = {
    **{f"{n} replicas": ({}, {"replicas": n}) for n in (1, 2, 3, 4)},
    # Optimizers.
    "Adam": (ADAM, {}),
    "AdamW": ({**ADAM, **settings(weight_decay=0.01), "about": {"optimizer": ADAMW}}, {}),
    "AMSGrad, which the recorder does not compute": (ADAM, settings(amsgrad=True)),
    "Adam of Keras": (KERAS_ADAM, {}),
    "fused Adam of a GPU in one": (ADAM, FUSED),
    "Nesterov": (settings(nesterov=True, weight_decay=0.1), {}),
    "plain SGD": (settings(momentum=0.0, weight_decay=0.01), {}),
    "SGD by an unknown rule, small weights": ({**UNKNOWN, "initial_scale": 1e-3}, {"replicas": 4}),
    "Adam by an unknown rule": ({**UNKNOWN, **ADAM, "initial_scale": 10}, {"replicas": 4}),
    "Muon, whose gradient has no part over all classes": (OF_CLASSES, {"replicas": 3}),
    "state of few digits": (FEW_DIGITS, {}),
    "dampening that a rule does not have": ({}, in_each_step(
        {"learning_rate": 0.1, "momentum": 0.9, "dampening": 0.5})),
    "weights that no optimizer has": ({**KERNEL_ONLY, "update": of_kernel_only}, {}),
    "two optimizers of each weight": ({**TWO_OF_EACH, "update": twice}, {}),
    "the optimizer reduces gradients": (UNKNOWN, averaged_by_optimizer(1)),
    # Gradients.
    "large gradients that cancel": (DROPOUT,
        {"gradient": lambda s, r, g: [a + np.float32(1000 - 2000 * r) for a in g]}),
    "weighted shards": ({}, {"shard": three_quarters}),
    "gradients in float64": ({}, edit(np.double, "raw", index=0)),
    "other sums, which nothing uses": ({}, flip("sums")),
    "a weight after the update": (left(1.01), left(1.01)),
    "products in TF32 in the reference": (IN_TF32, moved(2.0**-10)),
    "units that turn over on a GPU": (GPU, moved(5e-4)),
    "units that turn over after outputs of other rounding": (
        {**GPU, **with_outputs(1)}, {**moved(5e-4), **with_outputs(1 + 1e-5)}),
    # Clipping.
    "clipping after the sum": ({"clip": clip}, {}),
    "a constant in clipping": (small_clip(0.0), small_clip(1e-6)),
    "no constant in clipping": (small_clip(1e-6), small_clip(0.0)),
    # Data.
    "scaled by the model": ({}, scaled(255, "data")),
    "a loss of other rounding": ({}, scaled(1 + 1e-6, "loss")),
    # Random numbers.
    "not drawn": (DROPOUT, random_states(lambda step, r: [step] * 4, 0)),
    "other states": (DROPOUT, random_states(lambda step, r: [step, r])),
    # In JAX, scripts say themselves what they keep.
    "divided after the sum": (JAX, scaled(6, "raw")),
    "divided and clipped later": (CLIPPED, scaled(6, "raw sums")),
    "only clipped": (CLIPPED, without("raw sums")),
    "a mask of decay": ({**DECAYED, "update": with_mask}, {}),
    "no decay, against the settings": ({**DECAYED, **with_settings(weight_decay=0.0)}, {}),
    # Statistics and further state.
    "variance of frameworks": ({"framework": "keras", **settings(momentum=0.0)},
        {"framework": "torch", "unbiased": True}),
    "rows of state that its rank owns": (UNKNOWN, halves()),
    "state of one replica": ({}, without("before", 1, (4, 5), 1)),
    "residuals of each replica": (residuals(), residuals()),
    "a weight that none trains": (bias_times(lambda step, r: 0), STILL),
    "weights that one ties": ({"about": {"tied": [[*WEIGHTS]]}}, {"about": {}}),
    # Where a step starts, and what changes between the steps.
    "state at a resume": ({"steps": (1, 2)}, replaced(lambda a: a, 4) | REPLAYED),
    "replayed from the first step": ({}, {**ONE, **resumed_from(0), **REPLAYED}),
    "a second optimizer": ({**SECOND_OPTIMIZER, **GROUP}, both(SECOND_OPTIMIZER,
        own_states(lambda a, at, r, index: a + np.float32(0.1 * (index == 6))))),
}  # fmt: skip

WRONG = {  # Name → what is said, both trainings, and the step, if it is not 0.
    "every gradient is 0": ("nothing to verify", NO_GRADIENT, {}),
    "nothing is trained": ("nothing to verify",
        {**settings(learning_rate=0.0), **WITHOUT_GRADIENTS}, WITHOUT_GRADIENTS),
    "ended with an exception": ("not verified", {}, RAISED),
    "ended before its last steps": ("not verified", {}, {"about": {"asked": range(6)}}),
    "the second skips an update": ("not verified", {}, SKIPPED),
    "a reference that ended with an exception": ("not verified", RAISED, {"about": {}}),
    "no common step": ("not verified", {"steps": (0, 1)}, {"steps": (2, 3)}),
    "no compared step updates a weight": ("not verified", {**UNKNOWN, **BIAS_LATE}, OWN),
    "no step has the state after it": ("not verified",
        {**UNKNOWN, **without("after")}, without("after")),
    "a weight of the first": ("not verified", HEAD, {"more_variables": ()}),
    "a weight that neither has": ("not verified", NO_BIAS, NO_BIAS),
    "gradients of NaN in both": ("not verified", times(np.nan), {}),
    "parts of a model without a mesh": ("not verified",
        {}, {"shard": lambda rows, r, n: rows, "weighted": False,
        "gradient": lambda s, r, g: [2 * (r == i) * a for i, a in enumerate(g)]}),
    "flipped before": ("not verified", {}, flip("before")),
    "resumed at a later step": ("not verified", {}, {**ONE, **resumed_from(2), **REPLAYED}),
    "a kept state after an unknown one": ("not verified",
        {}, {**both(last_bits(2, 1, 0), without("after", position=1)), **REPLAYED}),
    "NaN in a weight of both": ("not verified", NAN_WEIGHT, NAN_WEIGHT),
    "other weights in later steps": ("start: other_start",
        {"steps": (1, 2)}, replaced(lambda a: a + 1, 0, 1), 1),
    "no state at a resume": ("start: other_start",
        {"steps": (1, 2)}, replaced(lambda a: a * 0, 4, 5) | REPLAYED, 1),
    "copies apart in later steps": ("start: diverged_replicas", {"steps": (1, 2)},
        own_states(lambda a, at, r, index: a + np.float32(1e-3 * (r and index == 1)), (1,)), 1),
    "a weight that the optimizer does not have": ("start: not_updated",
        {}, {**KERNEL_ONLY, "update": of_kernel_only}),
    "padded to equal shards": ("by design: examples: other_batch_size",
        {}, {"replicas": 3, **padded(1)}, 2),
    "padded in the second epoch": ("examples: other_examples",
        {"steps": (4, 5)}, {"replicas": 3, **padded(1)}, 5),
    "others, before a larger batch": ("examples: other_examples",
        {}, {"inputs": lambda x: x**3, **padded(2, step=1)}),
    "padded in a full batch": ("examples: other_batch_size", {}, padded(2, step=1), 1),
    "the whole batch on both": ("examples: batch_not_split",
        {}, {"shard": lambda rows, r, n: rows, "weighted": False}),
    "observations on both, which the loss uses": ("examples: other_batch_size",
        TWO_PASSES | acting(1), NOISY | acting(1)),
    "observations on both, which no loss uses": ("gradient: other_backward",
        TWO_PASSES | acting(0), NOISY | acting(0)),
    "reshuffled": ("examples: not_reshuffled", {}, {"batch": lambda step: batch_of(step % 3)}, 3),
    "equal before replay": ("random: same_random_numbers",
        DROPOUT, random_states(lambda step, r: [step, r], own_of=lambda step, r: [step, 9])),
    "repeated": ("random: random_numbers_repeated", DROPOUT, random_states(lambda step, r: [r]), 1),
    "uneven": ("loss: mean_of_means", {}, {"shard": three_quarters, "weighted": False}),
    "a loss that is not finite": ("loss: other_loss",
        {}, ONE | scaled(np.nan, "loss", position=2), 1),
    "other shards of the reference": ("not compared: loss",
        {**layers(NORM), **of_shards()}, {**NOISY, "shard": three_quarters}),
    "random layers": ("not compared: gradient: other_backward", DROPOUT, NOISY),
    "random layers on one replica": ("gradient: other_backward",
        {**DROPOUT, **DRAWN}, {**ONE, **NOISY, **DRAWN}),
    "shards of the reference": ("gradient", {**layers(NORM), **of_shards()}, NOISY),
    "layers compute in another dtype": ("gradient",
        {}, {**NOISY, "about": {"computed_in": "bfloat16"}}),
    "outputs in place of zeros": ("outputs: other_outputs",
        with_outputs(0), {**moved(1e-2), **with_outputs(1e-3)}),
    "outputs that are no rounding on a GPU": ("outputs: other_outputs",
        {**GPU, **with_outputs(1)}, {**moved(5e-4), **with_outputs(1 + 1e-4)}),
    "units that turn over too far on a GPU": ("gradient: other_backward", GPU, moved(1e-2)),
    "raw gradients of NaN that nothing uses": ("gradient: other_backward",
        {}, scaled(np.nan, "raw")),
    "epsilon": ("gradient: other_backward",
        layers(NORM), {**ONE, **NOISY, **layers({**NORM, "epsilon": 1e-3})}),
    "beside numbers of groups, which begin anew on each replica": ("gradient: wrong_factor",
        in_groups(),
        {**in_groups(), **times(1.1), "shard": lambda rows, r, n: np.array_split(rows, n)[r]}),
    "larger beside products in TF32": ("gradient: wrong_factor", IN_TF32, times(1.1)),
    "sum hidden by an optimizer that clips": ("sum: wrong_factor",
        {**IN_OPTIMIZER, **NOT_CLIPPED}, {**SUMMED, **NOT_CLIPPED}),
    "sum hidden by clipping": ("gradient: wrong_factor", CLIPPED, {**SUMMED, **scaled(2, "raw")}),
    "frozen": ("gradient: frozen", {}, bias_times(lambda step, r: 0)),
    "no gradient": ("gradient: frozen", {}, without("raw sums clipped", index=1)),
    "a gradient of 0 in the reference": ("gradient: frozen",
        NO_GRADIENT, {"gradient": lambda s, r, g: g}),
    "local norms": ("not compared: gradient", layers(NORM), NOISY),
    "ended with an exception, not reduced": ("sum: not_all_reduced",
        {}, {**RAISED, "reduce": None}),
    "without the last": ("sum: lost_part",
        {}, {"replicas": 3, "reduce": lambda sent: mean_of(sent[:2] * 3)[:3]}),
    "sum in JAX": ("sum: wrong_factor", JAX, SUMMED),
    "no gradient is recorded, summed": ("sum: wrong_factor",
        WITHOUT_GRADIENTS, {**WITHOUT_GRADIENTS, **SUMMED}),
    "sum by an optimizer": ("sum", UNKNOWN, averaged_by_optimizer(2)),
    "parts of state that do not fit together": ("update",
        UNKNOWN, both(halves(), edit(lambda a: a[:, :2], "before after", 1, 4))),
    "a row is 0 after the sum": ("sum",
        {}, after_sum(lambda g: g * (np.arange(12) != 2)[:, None] if g.ndim == 2 else g)),
    "bfloat16": ("sum: reduced_precision",
        {}, after_sum(lambda a: (a.view(np.uint32) & 0xFFFF0000).view(np.float32))),
    "clipped": ("clipping: other_clipping", {}, {"clip": lambda r, g: [a / 2 for a in g]}),
    "flipped clipped": ("clipping: other_clipping", {}, flip("clipped"), 1),
    "another state on one rank before a step": ("update: other_learning_rate",
        {}, scaled(1.5, "before", position=2, replica=1, index=4), 1),
    "rate": ("update: other_learning_rate", {}, settings(learning_rate=0.2)),
    "rate by an unknown rule": ("update: other_learning_rate",
        UNKNOWN, {**UNKNOWN, **with_settings(learning_rate=0.2)}),
    "rate of Muon": ("update: other_learning_rate",
        OF_CLASSES, {**OF_CLASSES, **with_settings(orthogonalised, learning_rate=0.1001)}),
    "SGD is applied twice": ("update: other_learning_rate", {}, {"update": twice}),
    "optimizer": ("update: other_learning_rate",
        ADAM, {**OWN, "optimizer": "SGD", "steps": (0, 1)}),
    "other epsilon": ("update: other_optimizer",
        {**KERAS_ADAM, **settings(epsilon=1e-4)}, {"framework": "torch", **settings(epsilon=1e-8)}),
    "beta_2 of one replica": ("update: other_optimizer",
        ADAM, {"of_replica": {1: {"beta_2": 0.9}}}),
    "AMSGrad": ("update: other_optimizer",
        {**ADAM, **settings(amsgrad=False)}, settings(amsgrad=True)),
    "decay": ("update: other_weight_decay", {}, settings(weight_decay=0.1)),
    "no mask of decay": ("update: other_weight_decay",
        {**DECAYED, "update": with_mask}, {"update": sgd}, 1),
    "no weight on one": ("update", {}, without("after", 1, 0)),
    "NaN in a weight of one": ("update: not_finite",
        {}, scaled(np.nan, "after", replica=1, index=0, position=2), 1),
    "flipped after": ("update: diverged_replicas", {}, flip("after"), 1),
    "norm momentum": ("update: other_statistics", {}, {"norm_momentum": 0.01}),
    "local norm": ("not compared: update: diverged_replicas", {}, {"local_norm": True}),
    "a weight of one after the update": ("between: diverged_replicas", {}, left(1.01, 1)),
    "a weight after the update": ("between: changed_on_its_own", {}, left(1.01)),
    "a weight that is left alone": ("between: changed_on_its_own", left(1.01), {}),
    "residuals of replica 0": ("between: changed_on_its_own",
        residuals(), {**OWN, **residuals(3)}, 1),
    "beside an infinite element": ("between: changed_on_its_own",
        masked(9), {**OWN, **masked(3)}, 1),
    "a bit of the momentum changes": ("between: changed_on_its_own", {}, last_bits(3, 1, 4), 1),
    "momentum is 0 again": ("between: state_lost",
        {}, own_states(lambda a, at, r, index: a * ((at, index) != (3, 4))) | REPLAYED, 1),
}  # fmt: skip

SQUARE = Variable("dense/bias/square", STATE, of="dense/bias", slot="square")
NOTES = {  # Name → both trainings, and what is noted.
    "nothing": ({}, {}, ""),
    "steps without a change": ({**zero_in(1, 3), "settings": {"momentum": 0.0}}, {},
        "nothing to verify in steps 1, 3: no weight changes"),
    "a weight without a change": ({"clip": lambda replica, g: [g[0], 0 * g[1]]}, {},
        "1 of 2 weights change in no step: dense/bias"),
    "no gradients": (WITHOUT_GRADIENTS, WITHOUT_GRADIENTS, "gradients are not compared: they are"),
    "time first": (edit(np.transpose, "data"), edit(np.transpose, "data"),
        "examples are not compared: they are the second axis of the inputs"),
    "further steps": ({"steps": (0, 1)}, {"steps": (0, 1, 2)}, "the reference lacks steps 2"),
    "skipped updates": (SKIPPED, {}, "1 updates are skipped, as gradients"),
    "not loaded": ({}, {"about": {**REPLAYED["about"], "not_loaded": ("norm/moving_mean",)}},
        "not loaded by replay=: norm/moving_mean"),
    "state that one recording has": ({}, with_variable(SQUARE, lambda *place: sum(place)),
        "state of optimizers that only one recording has: square"),
    "weights that drift in steps before": ({"steps": (1, 2)},
        replaced(lambda a: a + np.float32(1e-3), 1), "the start of step 1: rounding"),
    "left out": ({}, {"about": {"left_out": ("a queue",)}}, "not compared: a queue"),
}  # fmt: skip
