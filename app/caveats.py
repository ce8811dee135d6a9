"""What a reader of a result must know about it, whoever prints it."""

from app.config import Config
from app.records.history import Summary


def caveats(config: Config, summary: Summary) -> list[str]:
    """Returns a line for each way in which a run is not what its command asked for first."""
    lines = []
    if config.dataset == "auto" and summary.dataset == "synthetic":
        lines.append("GENERATED images in place of Fashion-MNIST: accuracies are not comparable")
    if summary.dataset == "unverified":
        lines.append("UNVERIFIED images: these are not the accuracies of Fashion-MNIST")
    if config.num_gpus and "CPU" in summary.devices[0]:
        lines.append(
            f"--num_gpus={config.num_gpus}, but no GPU: these are logical CPU devices, and their"
            " times say nothing of GPUs"
        )
    return lines
