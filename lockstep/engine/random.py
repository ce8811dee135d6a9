"""The states from which the random numbers of a step are drawn: of generators, keys, seeds.

They are judged in one way: equal on all ranks where they must not be, those of an earlier step, or
others than the reference's.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.data.trace import SEED
from lockstep.engine.pair import Pair
from lockstep.engine.step import Step
from lockstep.numeric.arrays import same_arrays, same_bits

SAME, REPEATED, OTHER = "same", "repeated", "other"
# The states of PyTorch's generators begin with the seed, of 8 bytes.
SEED_BYTES = 8

States = list[list[np.ndarray]]  # For each shard its arrays.


class Unlike(NamedTuple):
    """States unlike the reference's.

    Attributes:
        how: `SAME` on all ranks, where the reference draws unlike parts for them; `REPEATED`, that
            of an earlier step, which is not so in the reference; `OTHER`, on some ranks alone.
        what: the states, in words.
        ranks: those ranks; empty for all.
    """

    how: str
    what: str = "the random state"
    ranks: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """What is said of it."""
        words = {SAME: "is equal on all ranks", REPEATED: "is that of an earlier step"}
        return f"{self.what} {words.get(self.how, 'is not that of the reference')}"


def is_random(layer: Mapping[str, Any]) -> bool:
    """Returns whether a layer uses random numbers in training."""
    return "dropout" in str(layer.get("class", "")).lower() and layer.get("rate", 1) != 0


def draws(step: Step, shard: int) -> bool:
    """Returns whether a shard uses random numbers in a step, as far as its states tell."""
    before = step.arrays("random")[shard]
    if not before:
        return False
    if after := step.arrays("random_after")[shard]:
        return not same_arrays(before, after)
    layers = step.trace.about.layers
    return (has_keys(step) and not layers) or any(map(is_random, layers))


def has_keys(step: Step) -> bool:
    """Returns whether a script passes its random states, as keys, to each step."""
    return step.trace.about.framework == "jax"


def states_of(step: Step) -> States:
    """Returns the states from which each shard draws; none where a shard does not draw."""
    # One program on all devices has its keys once.
    asked = [shard for shard in step.shards if step.arrays("random")[shard] or not has_keys(step)]
    states = [[*own_states(step, shard)] for shard in asked if draws(step, shard)]
    if not states or not all(states):
        asked, states = [*step.shards], []
        for copy in map(step.trace.copy_of, step.shards):  # Of layers that are variables.
            own = step.own_starts[copy]
            moved = [name for name in _moved_seeds(step, copy) or () if name in own]
            states.append([np.atleast_1d(own[name]).view(np.uint8) for name in moved])
    return states if len(states) == len(asked) and all(states) else []


def _moved_seeds(step: Step, copy: int) -> list[str] | None:
    """Returns the states of layers that are variables, and that a step changes; None without."""
    before, after = step.named("before")[copy], step.ends[copy]
    names = [name for name in step.of_kind(SEED) if name in before and name in after]
    moved = [name for name in names if not same_bits(before[name], after[name])]
    return moved if names else None


def own_states(step: Step, shard: int) -> Sequence[np.ndarray]:
    """Returns the random states of a shard, also where those of another recording replace them."""
    if step.has("own_random"):
        return step.arrays("own_random")[shard]
    drawn = step.arrays("random")[shard]
    if not (drawn and step.has("replaced")):
        return drawn
    copy = step.trace.copy_of(shard)
    given, own = (step.named(kind)[copy] for kind in ("before", "replaced"))
    names = [name for name in step.of_kind(SEED) if name in given and name in own]
    used = b"".join(given[name].tobytes() for name in names)
    is_used = names and used == b"".join(state.tobytes() for state in drawn)
    return [np.atleast_1d(own[name]).view(np.uint8) for name in names] if is_used else drawn


def unlike_states(pair: Pair) -> list[Unlike]:
    """Returns the random states unlike the reference's."""
    found, own, here = list[Unlike](), states_of(pair.training), states_of(pair.reference)
    first, earlier = [x for each in here for x in each], [*_earlier(pair)]
    if any(_are_equal(own, x) and not (here and _are_equal(here, y)) for y, x in earlier):
        found.append(Unlike(REPEATED))
    # Equal states in a step that was right say that ranks draw alike; so do states before and
    # after each shard that are the reference's, as for the whole batch.
    draw_alike = any(_are_equal(x[:1] * len(x), x) for _, x in earlier)
    if pair.has("random", "random_after"):
        draw_alike |= all(
            same_arrays(pair.reference.arrays(kind)[0], pair.training.arrays(kind)[shard])
            for kind in ("random", "random_after") for shard in pair.shards
        )  # fmt: skip
    if len(own) > 1 and _are_equal(own[:1] * len(own), own) and not draw_alike:
        found.append(Unlike(SAME))
    apart = [s for s, each in enumerate(own) if first and not same_arrays(each, first)]
    alike = first and all(each[0].shape == first[0].shape for each in own)
    # Ranks may rightly draw from states of their own, if they always did.
    if alike and apart and any(y and _are_equal(y[:1] * len(x), x) for y, x in earlier):
        found.append(Unlike(OTHER, ranks=tuple(apart)))
    if _moved_seeds(pair.reference, 0) and any(
        not has_keys(pair.training) and _moved_seeds(pair.training, copy) == []
        for copy in pair.copies
    ):
        found.append(Unlike(REPEATED, "the random state, which the step leaves as it was,"))
    return [*found, *_within_replicas(pair)]


def _are_equal(first: States, second: States) -> bool:
    return len(first) == len(second) and all(map(same_arrays, first, second))


def lost_states(pair: Pair) -> list[Unlike]:
    """Returns the states that the claim does not see: loading the reference's may hide them.

    A key that all devices have is each device's own with its number. So is a state, where layers
    of the reference by parts draw other numbers with the number of another replica.
    """
    is_own = has_keys(pair.training) or pair.reference.trace.about.draws_apart
    wrong = {REPEATED} if is_own else {REPEATED, SAME}
    found = [x for x in unlike_states(pair) if x.how in wrong]
    return [*found, *_within_replicas(pair)]


def _earlier(pair: Pair) -> Iterator[tuple[States, States]]:
    """Yields the states of each earlier step, of the reference and of the training."""
    reference, training = pair.reference.trace, pair.training.trace
    for position, number in enumerate(training.steps[: pair.training.position]):
        if number in reference.steps:
            steps = Step(reference, reference.steps.index(number)), Step(training, position)
            first, own = map(states_of, steps)
            if own:
                yield first, own


def _within_replicas(pair: Pair) -> Iterator[Unlike]:
    """Yields ranks that compute one replica together, draw numbers, and have unlike states."""
    step = pair.training
    for shard in step.shards if step.has("own_random") else ():
        for index in range(len(step.arrays("own_random")[shard])):
            views = step.trace.views(step.position, "own_random", shard, index)
            drawing = [rank for rank in views if _draws_from(step, shard, index, rank)]
            apart = [rank for rank in drawing if not same_bits(views[rank], views[drawing[0]])]
            if apart:
                yield Unlike(OTHER, "the random state of ranks of one replica", tuple(apart))
                return


def _draws_from(step: Step, shard: int, index: int, rank: int) -> bool:
    """Returns whether a rank draws from a generator, and does not set its seed before that."""
    kinds = "random", "random_after"
    views = [step.trace.views(step.position, kind, shard, index) for kind in kinds]
    if not all(rank in each for each in views):
        return False
    before, after = (each[rank] for each in views)
    is_seeded = not same_bits(before[:SEED_BYTES], after[:SEED_BYTES])
    return not (same_bits(before, after) or is_seeded)
