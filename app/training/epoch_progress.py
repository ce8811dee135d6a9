"""Advances the progress of a training by a call of steps or by a finished epoch."""

import dataclasses
import math
from collections.abc import Mapping

from app.records.history import EpochRecord
from app.records.run_metadata import Progress
from strategies.base import StepTotals


def epoch_totals(progress: Progress) -> StepTotals:
    """Returns the sums over the current epoch."""
    return StepTotals(progress.loss_sum, progress.correct, progress.examples)


def after_steps(
    progress: Progress, num_steps: int, totals: StepTotals, *, call_sec: float
) -> Progress:
    """Returns the progress after a compiled call of `num_steps` steps."""
    return dataclasses.replace(
        progress,
        step=progress.step + num_steps,
        epoch_step=progress.epoch_step + num_steps,
        **epoch_totals(progress).plus(totals)._asdict(),
        epoch_sec=progress.epoch_sec + call_sec,
    )


def after_epoch(
    progress: Progress,
    test: StepTotals,
    *,
    evaluation_sec: float,
    learning_rate: float,
    injected_fault: str,
    test_metrics: dict[str, float] | None = None,
) -> Progress:
    """Returns the progress with the current epoch appended to its history.

    Args:
        progress: progress after the last step of the epoch.
        test: totals over the test set.
        evaluation_sec: seconds of the evaluation on the test set.
        learning_rate: learning rate of the last step.
        injected_fault: the injected fault; "" without one.
        test_metrics: metrics of a case; None for images, whose correct predictions are counted.
    """
    train, is_case = epoch_totals(progress), test_metrics is not None
    record = EpochRecord(
        epoch=progress.epoch + 1,
        step=progress.step,
        train_loss=train.loss,
        train_accuracy=None if is_case else train.accuracy,
        test_loss=test.loss,
        test_accuracy=find_accuracy(test_metrics or {}) if is_case else test.accuracy,
        epoch_sec=progress.epoch_sec,
        images_per_sec=train.examples / progress.epoch_sec,
        statistics_apart=progress.statistics_apart,
        injected_fault=injected_fault,
        learning_rate=learning_rate,
        evaluation_sec=evaluation_sec,
        test_metrics=test_metrics or {},
        verified_steps=progress.verified_steps,
        mismatches=progress.mismatches,
        verification_sec=progress.verification_sec,
    )
    return Progress(
        step=progress.step,
        total_sec=progress.total_sec,
        history=[*progress.history, record],
        changes=progress.changes,
    )


def find_accuracy(metrics: Mapping[str, float]) -> float | None:
    """Returns the accuracy among the metrics of a case; None without one."""
    names = [name for name in metrics if name.endswith(("_accuracy", "acc"))]
    for name in ("accuracy", *(name for name in names if "top_k" not in name)):
        if 0 <= metrics.get(name, math.nan) <= 1:
            return metrics[name]
    return None
