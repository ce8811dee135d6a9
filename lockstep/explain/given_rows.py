"""Rows of what the copies are given, where what the shards have sent does not explain it.

A script may change gradients in the backward pass, between micro-batches or after them: what it
leaves may be the reference's up to a factor, or in the mean over the copies.
"""

import functools
from collections.abc import Iterator, Sequence

from lockstep.answer.text import count
from lockstep.explain.factors import meanings
from lockstep.explain.own_weights import reduces_otherwise
from lockstep.explain.raw_rows import Raw, rows_of_some
from lockstep.explain.rows import choose
from lockstep.numeric.arrays import Named, same_bits
from lockstep.reference import StepPair

Why = tuple[str, str, str]  # Stage, detail and sentence.


def given_rows(pair: StepPair) -> Iterator[tuple[Why, list[str]]]:
    """Yields explanations of all wrong gradients, with the reference's names; none if one fails."""
    wrong, copies = [*pair.different_gradients], pair.gradients.given
    if not wrong or pair.found_in("forward") or pair.found_in("loss"):
        return
    first, *others = copies
    if any(not same_bits(own[n], first[n]) for own in others for n in wrong):
        if why := _of_copies(pair, wrong, copies):
            yield ("all-reduce", *why), wrong
        return
    right = pair.gradients.reference
    raw = Raw([first], 1.0, right, functools.partial(meanings, pair, of_sum=True),
              "each gradient that is applied")  # fmt: skip
    rows = [*raw.of_factor()] if len(wrong) == len(right) else [*rows_of_some(pair, raw)]
    chosen, left = choose(right, wrong, rows, pair.tolerance, 1)
    if not left and all(choice.row.detail != "scaled_gradient" for choice in chosen):
        for choice in chosen:
            yield ("all-reduce", choice.row.detail, choice.row.text), [*choice.names]


def _of_copies(
    pair: StepPair, wrong: Sequence[str], copies: Sequence[Named]
) -> tuple[str, str] | None:
    """Explains copies that are given different gradients, whose mean or sum is right."""
    if reduces_otherwise(pair):
        return None
    right = {name: pair.gradients.reference[name] for name in wrong}
    for word, share in (("mean", 1 / len(copies)), ("sum", 1.0)):
        if pair.tolerance.fits(right, [(share, own) for own in copies], wrong):
            is_all = len(wrong) == len(pair.gradients.names)
            text = f"the copies are given different gradients of {count('weight', len(wrong))}"
            cause = "not_all_reduced" if is_all else "partly_all_reduced"
            return cause, f"{text}, and their {word} over the copies is right"
    return None
