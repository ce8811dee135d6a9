"""Advances the progress of a training by a call of steps or by a finished epoch."""

import dataclasses

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
) -> Progress:
    """Returns the progress with the current epoch appended to its history.

    Args:
        progress: progress after the last step of the epoch.
        test: totals over the test set.
        evaluation_sec: seconds of the evaluation on the test set.
        learning_rate: learning rate of the last step.
        injected_fault: the injected fault; "" without one.
    """
    train = epoch_totals(progress)
    record = EpochRecord(
        epoch=progress.epoch + 1,
        step=progress.step,
        train_loss=train.loss,
        train_accuracy=train.accuracy,
        test_loss=test.loss,
        test_accuracy=test.accuracy,
        epoch_sec=progress.epoch_sec,
        images_per_sec=train.examples / progress.epoch_sec,
        statistics_apart=progress.statistics_apart,
        injected_fault=injected_fault,
        learning_rate=learning_rate,
        evaluation_sec=evaluation_sec,
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
