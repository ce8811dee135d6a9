"""Describes the results of `verify` for pairs of trainings in sentences."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

IDENTICAL, EQUAL, DIFFERENT = "bit-identical", "equal within rounding", "different"
BY_DESIGN = "another training by design"

_MOST_LINES = 3

Pair = tuple[str, ...]  # Two names.


def verdict_sentence(record: Mapping[str, Any]) -> str:
    """Returns in one sentence whether all strategies of a `verify.json` are the same training."""
    runs = record["strategies"]
    wrong = {name: run for name, run in runs.items() if run["first_mismatch"]}
    if wrong:
        found = [f"{name} does not match ({_causes(run)})" for name, run in wrong.items()]
        return f"Not the same training: {'; '.join(found)}."
    steps = f"{record['steps']} step{'s' * (record['steps'] > 1)}"
    identical = all(run["outcome"] == IDENTICAL for run in runs.values())
    how = "in float32 bit for bit" if identical else "within rounding"
    match = f"{steps} of {_joined(list(runs))} match one device {how}"
    late = [f"{name} has a straggler" for name, run in runs.items() if run["findings"]]
    if any(pair["outcome"] == BY_DESIGN for pair in record["pairs"]):
        late.append("some differ by design, as explained below")
    return f"The same training: {match}{''.join(f'; {each}' for each in late)}."


def _causes(run: Mapping[str, Any]) -> str:
    causes = [str(finding["cause"]).replace("_", " ") for finding in run["findings"]]
    return ", ".join([*causes, f"first at step {run['first_mismatch']['step']}"])


def outcome_sentences(outcomes: Sequence[tuple[Pair, str]]) -> list[str]:
    """Returns one sentence per pair; for more than three pairs, one per group.

    Args:
        outcomes: pairs of strategies, each with its outcome.
    """
    if len(outcomes) <= _MOST_LINES:
        return [f"{' and '.join(pair)}: {outcome}" for pair, outcome in outcomes]
    names = list(dict.fromkeys(name for pair, _ in outcomes for name in pair))
    same = _groups(names, [pair for pair, outcome in outcomes if outcome in (IDENTICAL, EQUAL)])
    identical = _groups(names, [pair for pair, outcome in outcomes if outcome == IDENTICAL])
    sentences = [
        f"{_joined(group)}: {IDENTICAL if group in identical else EQUAL}"
        for group in same
        if len(group) > 1
    ]
    sentences += [
        f"{_joined(group)}: {IDENTICAL}"
        for group in identical
        if len(group) > 1 and group not in same
    ]
    for first, second in itertools.combinations(same, 2):
        between = {
            outcome
            for (one, other), outcome in outcomes
            if (one in first and other in second) or (one in second and other in first)
        }
        found = ", ".join(sorted(between))
        sentences.append(f"{_joined(first)} – {_joined(second)}: {found}")
    return sentences


def _groups(names: Sequence[str], pairs: Sequence[Pair]) -> list[list[str]]:
    """Returns the names in groups connected by the pairs."""
    groups = [[name] for name in names]
    for one, other in pairs:
        first = next(group for group in groups if one in group)
        second = next(group for group in groups if other in group)
        if first is not second:
            first += second
            groups.remove(second)
    return groups


def _joined(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
