"""Rows about states: from which a step starts, what it does to them, what happens between steps."""
# ruff: noqa: F403, F405 (the names of the tables)

import functools

import numpy as np

from lockstep.engine.verdict import NOT_VERIFIED
from tests.verifier.script_samples import NORM as STATISTICS
from tests.verifier.script_samples import WEIGHTS

from .changes import *
from .edits import *

ALL, KERNEL, BIAS = (0, 1, 2, 3), ("dense/kernel",), ("dense/bias",)
FIRST, SECOND, BOTH = ("replica 0",), ("replica 1",), ("replica 0", "replica 1")
REPLAYED = {"about": {"replayed": "one.npz"}}
RAISED = {"about": {"ended_with": "RuntimeError: out of memory"}}
SKIPPED = {"about": {"asked": range(5), "trained": 4, "skipped": 1}}
WRONG_STATE = edit(lambda array: array * np.float32(1.01), "after", index=4, position=2)
GROUP = {"about": {"settings": [[{"weights": list(WEIGHTS)}]] * 4}}
TWO_OF_EACH = {"about": {"settings": [[
    {"weights": list(WEIGHTS), "optimizer": "SGD", "learning_rate": rate, "momentum": 0.9}
    for rate in (0.1, 0.2)
]] * 4}}  # fmt: skip
ALL_STATE = {**UNKNOWN, "about": {**LION, "layers": ({**VQ, "weights": list(STATISTICS)},)}}
MOVING = {"initial_state": 0.01}  # Of the optimizer.
SECOND_OPTIMIZER = with_head(lambda at, r, _: 0.9 + 0.1 * at)  # It updates between the steps.
STILL = with_head(lambda *_: 1)
CHANGED = "between"
BIAS_LATE = bias_times(lambda step, r: step == 3)
HEAD = with_head(lambda at, r, later: at + later)
ROUNDED = edit(lambda a: np.nextafter(a, np.float32(9)), "before", None, 0, 2)
MOVED = edit(lambda a: a * np.float32(1.01), "before", None, 0, 2)
STATES = {
    # What a step does to all state, on each copy.
    **{
        f"variable {index} changes differently on replica {replica}": (
            ALL_STATE, edit(lambda a: a * np.float32(1.001) + np.float32(1e-3), "after", replica,
            index, 2), "update")
        for index in (0, 4, 2)
        for replica in (0, 1)
    },
    "a codebook": (codes(), codes(), ""),
    "a codebook that differs on one": (codes(), codes(far=0.1), "update"),
    "a codebook that differs on both": (codes(), codes(far=0.1, first=0.2),
        "update"),
    "a codebook whose mean is right": (codes(), codes(far=0.1, first=-0.1),
        "update"),
    "a codebook that is right at the end of the step": (codes(), codes_left(0.1, 0), ""),
    "a codebook that is wrong at the end of the step": (codes(), codes_left(0.1, 0.1),
        "update"),
    "two optimizers of each weight": ({**TWO_OF_EACH, "update": twice},
        {**TWO_OF_EACH, "update": twice}, ""),
    "two optimizers of each weight, and one in the reference": (TWO_OF_EACH,
        {**TWO_OF_EACH, "update": twice}, "update"),
    "a codebook that does not change": (codes(), codes(drift=-1.0), "update"),
    **{
        f"an average{name}": (with_average_of(0), with_average_of(0, update), found)
        for name, update, found in (
            ("", lambda own, old, new: 0.25 * new + 0.75 * own, ""),
            (" of the weights before the step", lambda own, old, new: 0.75 * own + 0.25 * old,
             "update"),
            (" that is updated twice", lambda own, old, new: 0.75**2 * own + (1 - 0.75**2) * new,
             "update"),
            (" that is updated before and after the step",
             lambda own, old, new: 0.75 * (0.75 * own + 0.25 * old) + 0.25 * new,
             "update"),
            (" with another decay", lambda own, old, new: 0.5 * own + 0.5 * new,
             "update"),
            (" that stays", lambda own, old, new: own, "update"),
            (" of half the weights", lambda own, old, new: 0.75 * own + 0.125 * new,
             "update"))
    },
    "a codebook that differs": (codes(), codes(drift=0.1), "update"),
    "a queue": (queue(), queue(), ""),
    "a queue of each replica": (queue(), queue(far=0.1), "update"),
    "another queue": (queue(), queue(drift=0.1), "update"),
    "SGD is applied twice": ({}, {"update": twice}, "update"),
    "state that its rank owns": (UNKNOWN, owned(), ""),
    "rows of state that its rank owns": (UNKNOWN, halves(), ""),
    "other state that its rank owns": (UNKNOWN, both(WRONG_STATE, owned()),
        "start"),
    "other rows of state that its rank owns": (UNKNOWN, both(WRONG_STATE, halves()),
        "start"),
    "state that no rank owns": (UNKNOWN, both(
        edit(lambda a: a * np.float32(0.5), "after", 0, 4, 2),
        edit(lambda a: a * np.float32(1.5), "after", 1, 4, 2)), "update"),
    "resumed with the state of another replica": (UNKNOWN, {
        **both(owned(), resumed()), "about": {**LION, "replayed": "one.npz"}},
        "between"),
    "resumed at a later step": ({}, {**ONE, **resumed_from(2), **REPLAYED}, "",
        {"status": NOT_VERIFIED}),
    "replayed from the first step": ({}, {**ONE, **resumed_from(0), **REPLAYED}, ""),
    "the optimizer reduces gradients": (UNKNOWN, {**not_reduced(), **averaged_by_optimizer(1)}, ""),
    "the optimizer sums gradients": (UNKNOWN, {**not_reduced(), **averaged_by_optimizer(2)},
        "sum"),
    # Where a step starts, and what changes between the steps.
    "own states": ({}, OWN, ""),
    "own states, not reduced": ({}, {**OWN, "reduce": None}, "sum"),
    "kept states": ({}, own_states() | REPLAYED, ""),
    "a kept state of both": ({}, last_bits("2/0/0", "2/1/0") | REPLAYED,
        CHANGED),
    "a kept state that rounding changes in both trainings": (ROUNDED,
        {**both(ROUNDED, last_bits("2/0/0", "2/1/0")), **REPLAYED}, ""),
    "a kept state that rounding changes on one replica": (ROUNDED,
        {**both(ROUNDED, last_bits("2/1/0")), **REPLAYED}, CHANGED),
    "a kept state that changes in the second training": (ROUNDED,
        {**both(ROUNDED, last_bits("2/0/0", "2/1/0", times=1.01)), **REPLAYED}, CHANGED),
    "a kept state that changes by more than rounding in both trainings": (MOVED,
        {**both(MOVED, own_states(lambda a, *at: a * np.float32(
            1.01 if (at[0], at[2]) == (2, 0) else 1))), **REPLAYED}, CHANGED),
    "a kept state after an unknown one": ({}, {
        **both(last_bits("2/1/0"), without("after", position=1)), **REPLAYED},
        "start"),
    "equal weights before replay": ({}, replaced(lambda a: a, 0, 1), ""),
    "other weights before replay": ({}, replaced(lambda a: a + 1, 0, 1),
        "start"),
    "other statistics before replay": ({}, replaced(lambda a: a + 1, 3),
        "start"),
    "a buffer that scripts fill, before replay": (queue(),
        {**queue(), **both(queue(), replaced(lambda a: a, 6))}, ""),
    "a buffer that one fills differently before replay": (queue(),
        {**queue(), **both(queue(), replaced(lambda a: a + 1, 6))},
        "start"),
    "other weights and statistics before replay": ({}, replaced(lambda a: a + 1, 0, 3),
        "start"),
    "other momentum before replay": (MOVING, replaced(lambda a: a * 2, 4),
        "start"),
    "nearly the same momentum before replay": (MOVING,
        replaced(lambda a: a * np.float32(1.001), 4), ""),
    "other residuals before replay": (
        {**MOVING, **residuals()}, both(residuals(), replaced(lambda a: a * 2, 6)), ""),
    "state at a resume": ({"steps": (1, 2)}, replaced(lambda a: a, 4) | REPLAYED, ""),
    "no state at a resume": ({"steps": (1, 2)}, replaced(lambda a: a * 0, 4, 5) | REPLAYED,
        "start"),
    "residuals of each replica": (residuals(), residuals(), ""),
    "residuals of replica 0": (residuals(), {**OWN, **residuals(3)}, "between"),
    "weights that one ties": ({"about": {"tied": [[*WEIGHTS]]}}, {"about": {}},
        "start"),
    "not loaded": ({}, not_loaded(("kernel/momentum",)), ""),
    "a later step that is not loaded": ({}, {**not_loaded(WEIGHTS), **starts_apart(1)}, ""),
    "a later step of which a part is not loaded": (
        {}, {**not_loaded(WEIGHTS[:1]), **starts_apart(1)}, "start"),
    "a first step that is not loaded": (
        {}, {**not_loaded(WEIGHTS), **starts_apart(0)}, "start"),
    **{
        f"a second optimizer, {name}": (
            {**of_first, **GROUP}, both(of_first, own_states(
                lambda a, at, r, index, by=factor: a + np.float32(0.1 * by * (index == 6)))),
            found)
        for name, of_first, factor, found in (
            ("the same", SECOND_OPTIMIZER, 1, ""), ("times 2", SECOND_OPTIMIZER, 2, CHANGED),
            ("times 1.001", SECOND_OPTIMIZER, 1.001, CHANGED),
            ("which the reference has not", STILL, 1, CHANGED))
    },
    **{
        f"a bit of variable {index} changes": (
            {}, last_bits(f"3/1/{index}"), CHANGED)
        for index in (0, 2, 4)
    },
    "momentum is 0 again": ({}, own_states(
        lambda a, at, r, index: a * ((at, index) != (3, 4))) | REPLAYED, "between"),
    "DDP sends the buffers of replica 0": ({}, {"local_norm": True, **buffers_of_first()},
        "update?"),
    # The whole training.
    "ended with an exception": ({}, RAISED, "",
        {"status": NOT_VERIFIED}),
    "ended with an exception, not reduced": ({}, {**RAISED, "reduce": None},
        "sum"),
    "ended before its last steps": ({}, {"about": {"asked": range(6)}}, "",
        {"status": NOT_VERIFIED}),
    "both skip an update": (SKIPPED, {}, ""),
    "the second skips an update": ({}, SKIPPED, "",
        {"status": NOT_VERIFIED}),
    "the first skips an update": (SKIPPED, {"about": {"asked": range(4), "trained": 5}}, "",
        {"status": NOT_VERIFIED}),
    "a reference that ended with an exception": (RAISED, {"about": {}}, "",
        {"status": NOT_VERIFIED}),
    **{
        f"{name}, {optimizer}": (
            {**given, **first}, {**given, **second}, "",
            {"status": NOT_VERIFIED})
        for optimizer, given in (("SGD", {}), ("unknown", UNKNOWN))
        for name, first, second in (
            ("no compared step updates a weight", BIAS_LATE, {**BIAS_LATE, **OWN}),
            ("no step has the state after it", without("after"), without("after")),
            ("a weight of the second", {}, HEAD),
            ("a weight of the first", HEAD, {"more_variables": ()}))
    },
    "a weight that none trains": (bias_times(lambda step, r: 0), STILL, ""),
    **{
        f"replica {replica} ends early{name}": (
            {"steps": (0, 1, 2)}, {
                **ends_early(replica), "shard": shard, "weighted": False, "reduce": reduce},
            found)
        for replica, shard in ((0, at_the_end_on(1)), (1, at_the_end_on(0)))
        for name, reduce, found in (
            ("", mean_of_those_left, ""),
            (", and counts", functools.partial(mean_of_those_left, factor=0.5),
             "sum"))
    },
    "gradients that are rounding alone": ({**UNKNOWN, **of_rounding(1e-9)}, of_rounding(1.1e-9),
        ""),
    "equal gradients that are rounding alone": ({**UNKNOWN, **of_rounding(1e-9)}, {}, ""),
}  # fmt: skip
