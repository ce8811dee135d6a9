"""What a reader of a result must know about it, whoever prints it."""

from app.config import Config
from app.records.history import Summary
from app.records.wording import DATASET_CAVEATS, injected_fault_caveat

_CHANCE = 0.15  # Ten classes: guessing is right once in ten times.


def caveats(config: Config, summary: Summary) -> list[str]:
    """Returns a line for each way in which a run is not what its command asked for first."""
    lines = [injected_fault_caveat(summary.injected_fault)] if summary.injected_fault else []
    if summary.changes:
        lines.append(f"changed on the way: {'; '.join(summary.changes)}")
    if config.dataset == "auto" and summary.dataset == "synthetic":
        lines.append(DATASET_CAVEATS["synthetic"])
    if summary.dataset == "unverified":
        lines.append(DATASET_CAVEATS["unverified"])
    if config.num_gpus and "CPU" in summary.devices[0]:
        lines.append(
            f"--num_gpus={config.num_gpus}, but no GPU: these are logical CPU devices, and their"
            " times say nothing of GPUs"
        )
    if summary.test_accuracy < _CHANCE:
        lines.append(
            f"test accuracy {summary.test_accuracy:.4f} is hardly better than guessing: nothing has"
            " been learned yet; use more --epochs, or another --learning_rate or --recipe"
        )
    return lines
