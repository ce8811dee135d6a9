"""Trainings, and what is changed in a second one: right ones, and what is said of wrong ones.

The second one has two replicas, and starts each step from the state of the first.
"""
# ruff: noqa: F403, F405 (the names of the options)

import numpy as np

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
GROUP = in_each_step({"weights": [*WEIGHTS]})
BIAS_LATE = bias_times(lambda step, r: step == 3)
NO_GRADIENT = zero_in(0, 1, 2, 3)
USUAL, MIXED = np.arange(12), np.random.default_rng(0).permutation(12)

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
    "wrapped": (UNKNOWN, {"about": {"optimizer": {"class": "ZeRO"}}}),
    "dampening that a rule does not have": ({}, in_each_step(
        {"learning_rate": 0.1, "momentum": 0.9, "dampening": 0.5})),
    "weights that no optimizer has": ({**KERNEL_ONLY, "update": of_kernel_only}, {}),
    "two optimizers of each weight": ({**TWO_OF_EACH, "update": twice}, {}),
    "the optimizer reduces gradients": (UNKNOWN, averaged_by_optimizer(1)),
    # Gradients.
    "large gradients that cancel": (DROPOUT,
        {"gradient": lambda s, r, g: [a + np.float32(1000 - 2000 * r) for a in g]}),
    "weighted shards": ({}, {"shard": three_quarters}),
    "an overflow that all skip": (OVERFLOW, {}),
    "rows": ({}, as_rows()),
    "no gradient is recorded": (WITHOUT_GRADIENTS, WITHOUT_GRADIENTS),
    "gradients in float64": ({}, edit(np.double, "raw", index=0)),
    "other sums, which nothing uses": ({}, flip("sums")),
    "a weight after the update": (left(1.01), left(1.01)),
    "products in TF32 in the reference": (IN_TF32, moved(2.0**-10)),
    "units that turn over on a GPU": (GPU, moved(5e-4)),
    # Clipping.
    "clipping after the sum": ({"clip": clip}, {}),
    "clipping by value": (by_value(), by_value()),
    "zeros after the sum": (without_bias(0, 1), {}),
    # Data.
    "layouts": (images("NHWC"), images("NCHW")),
    "scaled by the model": ({}, scaled(255, "data")),
    "outputs": (with_outputs(USUAL), with_outputs(USUAL)),
    "a loss of other rounding": ({}, scaled(1 + 1e-6, "loss")),
    "augmented in the same way": (augmented(0), augmented(0)),
    # Random numbers.
    "not drawn": (DROPOUT, random_states(lambda step, r: [step] * 4, 0)),
    "other states": (DROPOUT, random_states(of_each)),
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
    "own states": ({}, OWN),
    "kept states": ({}, own_states() | REPLAYED),
    "state at a resume": ({"steps": (1, 2)}, replaced(lambda a: a, 4) | REPLAYED),
    "replayed from the first step": ({}, {**ONE, **resumed_from(0), **REPLAYED}),
    "not loaded": ({}, not_loaded(("kernel/momentum",))),
    "a second optimizer": ({**SECOND_OPTIMIZER, **GROUP}, both(SECOND_OPTIMIZER,
        own_states(lambda a, at, r, index: a + np.float32(0.1 * (index == 6))))),
    "both skip an update": (SKIPPED, {}),
}  # fmt: skip

WRONG = {  # What is said → the rows; their step, if it is not 0.
    "nothing to verify": {
        "every gradient is 0": (NO_GRADIENT, {}),
        "nothing is trained": ({**settings(learning_rate=0.0), **WITHOUT_GRADIENTS},
            WITHOUT_GRADIENTS),
    },
    "not verified": {
        "ended with an exception": ({}, RAISED),
        "ended before its last steps": ({}, {"about": {"asked": range(6)}}),
        "the second skips an update": ({}, SKIPPED),
        "a reference that ended with an exception": (RAISED, {"about": {}}),
        "no common step": ({"steps": (0, 1)}, {"steps": (2, 3)}),
        "no compared step updates a weight": ({**UNKNOWN, **BIAS_LATE}, OWN),
        "no step has the state after it": ({**UNKNOWN, **without("after")}, without("after")),
        "a weight of the first": (HEAD, {"more_variables": ()}),
        "a weight that neither has": (NO_BIAS, NO_BIAS),
        "gradients of NaN in both": (times(np.nan), {}),
        "parts of a model without a mesh": ({}, {"shard": whole_batch, "weighted": False,
            "gradient": lambda s, r, g: [2 * (r == i) * a for i, a in enumerate(g)]}),
        "flipped before": ({}, flip("before")),
        "resumed at a later step": ({}, {**ONE, **resumed_from(2), **REPLAYED}),
        "a kept state after an unknown one": ({},
            {**both(last_bits("2/1/0"), without("after", position=1)), **REPLAYED}),
        "NaN in a weight of both": (NAN_WEIGHT, NAN_WEIGHT),
    },
    "start: other_start": {
        "other weights in later steps": ({"steps": (1, 2)}, replaced(lambda a: a + 1, 0, 1), 1),
        "no state at a resume": ({"steps": (1, 2)}, replaced(lambda a: a * 0, 4, 5) | REPLAYED, 1),
    },
    "start: diverged_replicas": {
        "copies apart in later steps": ({"steps": (1, 2)},
            own_states(lambda a, at, r, index: a + np.float32(1e-3 * (r and index == 1)), (1,)), 1),
    },
    "start: not_updated": {
        "a weight that the optimizer does not have": ({},
            {**KERNEL_ONLY, "update": of_kernel_only}),
    },
    "by design: examples: other_batch_size": {
        "padded to equal shards": ({}, {"replicas": 3, **padded(1)}, 2),
    },
    "examples: other_examples": {
        "padded in the second epoch": ({"steps": (4, 5)}, {"replicas": 3, **padded(1)}, 5),
        "others, before a larger batch": ({}, {"inputs": lambda x: x**3, **padded(2, step=1)}),
        "layout": (images("NHWC"), {**images("NHWC", "NCHW"), **times(1.5)}),
        "other examples, by the ids": (augmented(0),
            {**augmented(1), "ids": lambda rows: rows + 50}),
    },
    "examples: other_batch_size": {
        "padded in a full batch": ({}, padded(2, step=1), 1),
    },
    "examples: batch_not_split": {
        "the whole batch on both": ({}, {"shard": whole_batch, "weighted": False}),
    },
    "examples: not_reshuffled": {"reshuffled": ({}, {"batch": lambda step: batch_of(step % 3)}, 3)},
    "random: other_preprocessing": {"augmented in another way": (augmented(0), augmented(1))},
    "random: same_random_numbers": {
        "equal before replay": (DROPOUT, random_states(of_each, own_of=lambda step, r: [step, 9])),
    },
    "random: random_numbers_repeated": {
        "repeated": (DROPOUT, random_states(lambda step, r: [r]), 1),
    },
    "outputs: other_outputs": {
        "features in another order, gradients of outputs in one": (
            {**with_outputs(USUAL), **both(with_outputs(USUAL), without("y_grad"))},
            with_outputs(MIXED)),
    },
    "outputs: inference_mode": {
        "evaluation mode in the second": (in_modes(), {**NOISY, **in_modes("drop")}),
    },
    "loss: mean_of_means": {
        "uneven": ({}, {"shard": three_quarters, "weighted": False}),
    },
    "loss: other_loss": {
        "a loss that is not finite": ({}, ONE | scaled(np.nan, "loss", position=2), 1),
    },
    "not compared: loss": {
        "other shards of the reference": ({**layers(NORM), **of_shards()},
            {**NOISY, "shard": three_quarters}),
    },
    "not compared: gradient: other_backward": {
        "random layers": (DROPOUT, NOISY),
    },
    "gradient": {
        "shards of the reference": ({**layers(NORM), **of_shards()}, NOISY),
        "layers compute in another dtype": ({}, {**NOISY, "about": {"computed_in": "bfloat16"}}),
    },
    "gradient: other_backward": {
        "units that turn over too far on a GPU": (GPU, moved(1e-2)),
        "raw gradients of NaN that nothing uses": ({}, scaled(np.nan, "raw")),
        "epsilon": (layers(NORM), {**ONE, **NOISY, **layers({**NORM, "epsilon": 1e-3})}),
    },
    "gradient: wrong_factor": {
        "larger beside products in TF32": (IN_TF32, times(1.1)),
        "sum hidden by clipping": (CLIPPED, {**SUMMED, **scaled(2, "raw")}),
    },
    "gradient: frozen": {
        "frozen": ({}, bias_times(lambda step, r: 0)),
        "no gradient": ({}, without("raw sums clipped", index=1)),
        "a gradient of 0 in the reference": (NO_GRADIENT, {"gradient": as_it_is}),
    },
    "gradient: overflow_not_skipped": {
        "another gradient beside an overflow": (OVERFLOW, {"gradient": lambda s, r, g:
            [overflow(s, r, g)[0], g[1] * np.float32(1 + 0.5 * (len(s.states) == 2))]}, 1),
    },
    "not compared: gradient": {
        "local norms": (layers(NORM), NOISY),
        "other norms": (layers({**NORM, "class": "SyncBatchNorm"}), {**NOISY, **layers(NORM)}),
    },
    "sum: not_all_reduced": {
        "ended with an exception, not reduced": ({}, {**RAISED, "reduce": None}),
    },
    "sum: lost_part": {
        "without the last": ({}, {"replicas": 3, "reduce": lambda sent: mean_of(sent[:2] * 3)[:3]}),
    },
    "sum: stale_gradient": {"sum of the step before": ({}, {"reduce": late()}, 1)},
    "sum: wrong_factor": {
        "sum in JAX": (JAX, SUMMED),
        "no gradient is recorded, summed": (WITHOUT_GRADIENTS, {**WITHOUT_GRADIENTS, **SUMMED}),
    },
    "sum": {
        "sum by an optimizer": (UNKNOWN, averaged_by_optimizer(2)),
        "a row is 0 after the sum": ({}, after_sum(in_rows([2], lambda g: 0 * g))),
    },
    "sum: reduced_precision": {"bfloat16": ({}, after_sum(in_16_bits))},
    "clipping: other_clipping": {
        "clipped": ({}, {"clip": lambda r, g: [a / 2 for a in g]}),
        "flipped clipped": ({}, flip("clipped"), 1),
    },
    "clipping: clipped_too_early": {
        "clipped by value before unscale_": (by_value(), by_value(1024, "unscale")),
    },
    "update: other_learning_rate": {
        "another state on one rank before a step": ({},
            scaled(1.5, "before", position=2, replica=1, index=4), 1),
        "rate": ({}, settings(learning_rate=0.2)),
        "SGD is applied twice": ({}, {"update": twice}),
        "optimizer": (ADAM, {**OWN, "optimizer": "SGD", "steps": (0, 1)}),
        "hidden rate of an unknown optimizer": (UNKNOWN, with_settings(learning_rate=0.2)),
    },
    "update: other_optimizer": {
        "other epsilon": ({**KERAS_ADAM, **settings(epsilon=1e-4)},
            {"framework": "torch", **settings(epsilon=1e-8)}),
        "beta_2 of one replica": (ADAM, {"of_replica": {1: {"beta_2": 0.9}}}),
        "AMSGrad": ({**ADAM, **settings(amsgrad=False)}, settings(amsgrad=True)),
    },
    "update: other_weight_decay": {
        "decay": ({}, settings(weight_decay=0.1)),
        "no mask of decay": ({**DECAYED, "update": with_mask}, {"update": sgd}, 1),
    },
    "update": {
        "no weight on one": ({}, without("after", 1, 0)),
    },
    "update: overflow_not_skipped": {
        "an overflow that only the reference skips": (OVERFLOW, {"update": UPDATES["SGD"]}, 1),
    },
    "update: diverged_replicas": {
        "flipped after": ({}, flip("after"), 1),
    },
    "update: other_statistics": {
        "norm momentum": ({}, {"norm_momentum": 0.01}),
    },
    "not compared: update: diverged_replicas": {"local norm": ({}, {"local_norm": True})},
    "between: diverged_replicas": {"a weight of one after the update": ({}, left(1.01, 1))},
    "between: changed_on_its_own": {
        "a weight after the update": ({}, left(1.01)),
        "a weight that is left alone": (left(1.01), {}),
        "residuals of replica 0": (residuals(), {**OWN, **residuals(3)}, 1),
        "a second optimizer, times 1.001": ({**SECOND_OPTIMIZER, **GROUP}, both(SECOND_OPTIMIZER,
            own_states(lambda a, at, r, index: a + np.float32(0.1001 * (index == 6))))),
        "a bit of the momentum changes": ({}, last_bits("3/1/4"), 1),
    },
    "between: state_lost": {
        "momentum is 0 again": ({},
            own_states(lambda a, at, r, index: a * ((at, index) != (3, 4))) | REPLAYED, 1),
    },
}  # fmt: skip
