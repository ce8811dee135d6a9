"""Defines titles of datasets, and the caveats that every output shows with a result."""

from app.options import Config
from app.records.history import Summary

DATASET_TITLES = {
    "fashion_mnist": "Fashion-MNIST",
    "synthetic": "GENERATED garments",
    "unverified": "UNVERIFIED images",
}
DATASET_CAVEATS = {
    "synthetic": "GENERATED images in place of Fashion-MNIST: accuracies are not comparable",
    "unverified": "UNVERIFIED images: these are not the accuracies of Fashion-MNIST",
}
TIMING_CAVEAT = "simulated devices: timing is not scaling"
_CHANCE = 0.15  # Ten classes: the accuracy of guessing is 0.1.


def caveats(config: Config, summary: Summary) -> list[str]:
    """Returns a line for each way in which a result differs from the command's intent.

    Omits a fault that the command injects, because the command warns of it when it starts.
    """
    announced = config.verification.fault is not None
    lines = []
    if summary.injected_fault and not announced:
        lines.append(injected_fault_caveat(summary.injected_fault))
    if summary.changes:
        lines.append(f"changed on the way: {'; '.join(summary.changes)}")
    if config.data.dataset == "auto" and summary.dataset == "synthetic":
        lines.append(DATASET_CAVEATS["synthetic"])
    if summary.dataset == "unverified":
        lines.append(DATASET_CAVEATS["unverified"])
    accuracy = summary.test_accuracy
    if accuracy is not None and accuracy < _CHANCE:
        lines.append(
            f"test accuracy {accuracy:.4f} is hardly better than guessing: nothing has"
            " been learned yet; use more --epochs, or another --learning_rate or --recipe"
        )
    return lines


def dataset_title(name: str) -> str:
    """Returns the title of a dataset in figures and pages."""
    return DATASET_TITLES.get(name, str(name))


def injected_fault_caveat(fault: str) -> str:
    """Returns the caveat shown with every result of a training with an injected fault."""
    return f"injected fault: {fault}; the result is wrong on purpose"
