"""Compares the prediction of `plan` with steps of workers in networks of known speed.

Each worker has a network namespace of its own, whose link has a latency and a bandwidth
(tests/network.py); it needs root. Compute is measured on one device, as `plan` does.

Each measurement lasts several seconds: the first call of several steps waits for the others longer
than the rest, which `plan` leaves out.

`python benchmarks/network_check.py [--model=lenet] [--workers=2] [--seconds=15]`
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile

import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from app.config import TrainConfig
from app.performance.all_reduce_model import LinearCost
from app.performance.case import Case
from app.performance.cluster_plan import ClusterStep, Links, predict
from app.performance.rounds import measure
from app.runtime.progress_bar import StepProgress
from cluster_run import ClusterRun
from network import Link, Network, unavailable

MEGABITS, MILLISECONDS = (10, 100, 1000), (1, 10, 100)
NUM_EXAMPLES = 60_000  # Of an epoch.
TIMEOUT_SEC = 900


def measure_compute(model: str, batch: int, rounds: int) -> tuple[LinearCost, float]:
    """Returns the cost of a step on one device with one core, and the bytes of the gradients."""
    config = TrainConfig(
        strategy="multi_worker", model=model, device="cpu", num_devices=1, last_batch="drop"
    )
    sizes = [batch, batch // 2, batch // 4]
    cases = [
        Case(
            dataclasses.replace(config, global_batch_size=size, num_train_examples=4 * batch),
            cores=1,
        )
        for size in sizes
    ]
    with StepProgress(1) as progress:
        samples = measure(cases, repeats=rounds, progress=progress).samples
    steps = [float(np.median(sample.step_secs)) for sample in samples]
    return LinearCost.fit(sizes, steps), samples[0].facts.gradient_bytes


def measure_step(link: Link, options: argparse.Namespace, num_steps: int) -> float:
    """Trains in a network; returns the seconds of a step."""
    flags = [
        *(f"--model={options.model}", f"--global_batch_size={options.batch}", "--device=cpu"),
        *("--epochs=1", f"--num_train_examples={options.batch * num_steps}"),
        *("--recipe=fast", "--verify_every=0"),
    ]
    with tempfile.TemporaryDirectory() as name, Network(options.workers, link) as network:
        folder = pathlib.Path(name)
        out = folder / "run"
        with ClusterRun(network, [*flags, f"--out={out}"], folder, options.workers) as run:
            codes = run.wait(TIMEOUT_SEC)
            if any(code != 0 for code in codes):
                raise SystemExit(f"workers ended with {codes}: {run.last_line(0)}")
        (record,) = (out / "history.jsonl").read_text(encoding="utf-8").splitlines()
    return json.loads(record)["epoch_sec"] / num_steps


def predict_step(
    link: Link, options: argparse.Namespace, compute: LinearCost, size_bytes: float
) -> ClusterStep:
    """Returns what `plan` predicts."""
    links = Links(link.bits_per_sec / 8, link.latency_sec, 1e10, is_grpc=True)
    return predict(
        compute,
        links,
        num_workers=options.workers,
        devices_per_worker=1,
        global_batch_size=options.batch,
        size_bytes=size_bytes,
    )


def main() -> None:
    """Measures, predicts, and prints both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if reason := unavailable():
        raise SystemExit(reason)
    compute, size_bytes = measure_compute(options.model, options.batch, options.rounds)
    print(
        f"{options.model}, batch {options.batch}, {options.workers} workers with one core each:"
        f" compute {compute.fixed_sec * 1e3:.2f} ms + {compute.example_sec * 1e6:.0f} µs an image"
    )
    for mbit in MEGABITS:
        for ms in MILLISECONDS:
            link = Link(ms / 1e3, bits_per_sec=mbit * 1e6)
            predicted = predict_step(link, options, compute, size_bytes).step_sec
            num_steps = max(
                20, min(NUM_EXAMPLES // options.batch, int(options.seconds / predicted))
            )
            measured = measure_step(link, options, num_steps)
            print(
                f"{mbit:5} Mbit/s {ms:4} ms: predicted {predicted * 1e3:7.1f} ms, measured"
                f" {measured * 1e3:7.1f} ms: {predicted / measured - 1:+.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
