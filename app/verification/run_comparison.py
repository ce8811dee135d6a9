"""Compares finished runs by their records on disk."""

import dataclasses
import itertools
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from app.records.checkpoint import find_newest_checkpoint, weights_sha256
from app.records.history import Summary, load_summary
from app.runtime.errors import CheckpointError, DataError
from app.verification.difference import WeightDifference

if TYPE_CHECKING:  # Imports TensorFlow.
    from strategies.copies import State


@dataclasses.dataclass(frozen=True)
class PairVerdict:
    """The comparison of the final weights of two runs from equal initial weights.

    Attributes:
        strategies: names of the strategies.
        num_steps: optimizer steps of both runs.
        difference: difference of their final weights.
        explanation: why the two trainings differ.
        is_unexpected: whether they should be bitwise identical.
    """

    strategies: tuple[str, str]
    num_steps: int
    difference: WeightDifference
    explanation: str
    is_unexpected: bool = False

    def sentence(self) -> str:
        """Returns the result in words, without the explanation."""
        first, second = self.strategies
        after = f"after {self.num_steps} step" + ("s" if self.num_steps > 1 else "")
        if self.difference.identical:
            return f"{first} and {second}: bit-identical weights {after}"
        return (
            f"{first} and {second}: weights {after} differ by at most"
            f" {self.difference.absolute:.2g} ({self.difference.relative:.2g} of the largest, in"
            f" {self.difference.tensor})"
        )


def verdict_lines(verdicts: Sequence[PairVerdict]) -> list[str]:
    """Returns the verdict in one sentence, a line for each pair, then each explanation once."""
    apart = [verdict for verdict in verdicts if not verdict.difference.identical]
    explanations = dict.fromkeys(verdict.explanation for verdict in apart)
    return [
        _summarize(verdicts, apart),
        *(verdict.sentence() for verdict in verdicts),
        *explanations,
    ]


def _summarize(verdicts: Sequence[PairVerdict], apart: Sequence[PairVerdict]) -> str:
    if not apart:
        return "All trainings end with bitwise identical weights."
    if any(verdict.is_unexpected for verdict in apart):
        return "Weights differ that should be bitwise identical."
    same = [verdict.strategies for verdict in verdicts if verdict.difference.identical]
    if not same:
        return "The trainings end with different weights, as expected."
    names = (
        f"{len(same)} of {len(verdicts)} pairs"
        if len(same) > 2
        else "; ".join(" and ".join(pair) for pair in same)
    )
    return f"{names} end with bitwise identical weights; the others differ, as expected."


def compare_weights(run_dirs: Sequence[pathlib.Path]) -> list[PairVerdict]:
    """Compares the final weights of each pair of runs.

    Raises:
        DataError: the runs were trained on different images.
        CheckpointError: a run has no weights, or unusable ones.
    """
    summaries = [_load_summary(path) for path in run_dirs]
    if len({summary.dataset_sha256 for summary in summaries}) > 1:
        found = ", ".join(f"{s.strategy} on {s.dataset}" for s in summaries)
        raise DataError(
            f"trained on different images: {found}; give the data set with --dataset and use"
            " --overwrite"
        )
    runs = [
        (summary, _load_weights(path, summary))
        for summary, path in zip(summaries, run_dirs, strict=True)
    ]
    return [
        _compare(first, second, first_state, second_state)
        for (first, first_state), (second, second_state) in itertools.combinations(runs, 2)
    ]


def _compare(
    first: Summary, second: Summary, first_state: "State", second_state: "State"
) -> PairVerdict:
    difference = WeightDifference.between(first_state, second_state)
    return PairVerdict(
        strategies=(first.strategy, second.strategy),
        num_steps=first.steps,
        difference=difference,
        explanation=_explain(first, second, first_state),
        is_unexpected=not difference.identical and _add_in_the_same_order(first, second),
    )


def _load_summary(run_dir: pathlib.Path) -> Summary:
    """Loads the summary of a run that has finished an epoch."""
    summary = load_summary(run_dir)
    if summary is None:
        raise CheckpointError(f"{run_dir} has no finished epoch; use --overwrite")
    return summary


def _load_weights(run_dir: pathlib.Path, summary: Summary) -> "State":
    """Loads the weights whose hash is in the summary."""
    found = find_newest_checkpoint(run_dir)
    if found is None:
        raise CheckpointError(f"{run_dir} has no checkpoint; use --overwrite")
    state = found.checkpoint.state
    if weights_sha256(state) != summary.weights_sha256:
        raise CheckpointError(
            f"{found.warning() or found.path}: not the weights of step {summary.steps}, which"
            f" {run_dir}/summary.json names; restore them, or use --overwrite"
        )
    return state


def _has_batch_norm(state: "State") -> bool:
    return any(name.endswith("/moving_mean") for name in state)


def _draws_random_numbers(state: "State") -> bool:
    return any("seed_generator" in name for name in state)


def _explain(first: Summary, second: Summary, state: "State") -> str:
    """Returns how two trainings differ by design, which need not be the only cause."""
    if _add_in_the_same_order(first, second):
        return (
            f"{first.strategy} and {second.strategy} add in the same order, so their weights should"
            " be bitwise identical."
        )
    splits_differently = first.num_shards != second.num_shards
    if _has_batch_norm(state) and splits_differently:
        why = (
            "each shard is normalised with its own statistics (--batch_norm=average), so the number"
            " of shards is part of the training"
        )
    elif _draws_random_numbers(state) and splits_differently:
        why = (
            "random layers draw different numbers on each replica, so the number of replicas is"
            " part of the training"
        )
    else:
        why = "the summation order differs, and training amplifies rounding errors"
    return f"A difference is expected: {why}."


def _add_in_the_same_order(first: Summary, second: Summary) -> bool:
    return (first.num_shards, first.all_reduce) == (second.num_shards, second.all_reduce)
