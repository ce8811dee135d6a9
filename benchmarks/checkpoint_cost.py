"""Measures the cost of a checkpoint of ResNet-18: the time that training waits, and the memory.

python benchmarks/checkpoint_cost.py [number of replicas]
"""

import pathlib
import statistics
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from app.config import TrainConfig
from app.devices import device_setup

NUM_SAVES, INTERVAL_SEC = 9, 300


def memory_mib(field: str) -> float:
    """Returns a field of this process's memory: `VmRSS`, or `VmHWM` for its peak."""
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(field))


def reset_peak() -> None:
    """Resets the peak to the current memory."""
    pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def main(num_replicas: int) -> None:
    """Saves several checkpoints within an epoch, one step apart."""
    config = TrainConfig(
        model="resnet18", global_batch_size=16, device="cpu", num_devices=num_replicas,
        dataset="synthetic", recipe="fast",
    )  # fmt: skip
    prepared = device_setup.set_up(config)
    from app.data.synthetic import generate_synthetic
    from app.records.run_log import open_run_log
    from app.training.loop import Training

    dataset = generate_synthetic(num_train=16 * (NUM_SAVES + 2), num_test=20)
    with tempfile.TemporaryDirectory() as folder, open_run_log(pathlib.Path(folder)) as log:
        training = Training(config, prepared, dataset, pathlib.Path(folder))
        training.begin(log)
        training.step(1)
        size_mib = sum(array.nbytes for array in training.strategy.state().values()) / 2**20
        seconds, grown_mib = [], []
        for _ in range(NUM_SAVES):
            training.step(1)
            reset_peak()
            before_mib, start = memory_mib("VmRSS"), time.monotonic()
            training.save()
            seconds.append(time.monotonic() - start)
            grown_mib.append(memory_mib("VmHWM") - before_mib)
    median = statistics.median(seconds)
    print(
        f"ResNet-18, {num_replicas} replicas: {median:.2f} s a save ({min(seconds):.2f} to"
        f" {max(seconds):.2f}), {100 * median / INTERVAL_SEC:.2f} % of {INTERVAL_SEC} s; memory"
        f" grows by {max(grown_mib):.0f} MiB, a copy of the state has {size_mib:.0f}"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
