"""Trains with two workers that Ray starts and restarts; see docs/cluster.md.

    pip install -r requirements.txt "ray[default,train]==2.60.0"
    python examples/ray_train.py --recipe=fast --epochs=1

Ray's `TensorflowTrainer` starts a process for each worker and sets TF_CONFIG in it; each runs the
same command `train`. After a failure Ray starts all of them again, which resume from --out.
"""

import argparse
import os
import pathlib
import subprocess
import sys

import ray.train
from ray.train.tensorflow import TensorflowTrainer

ROOT = pathlib.Path(__file__).resolve().parents[1]


def train_worker(config: dict) -> None:
    """Runs `train` in a worker; raises an error if it fails, so that Ray starts all again."""
    context = ray.train.get_context()  # Each worker gets its own cores, as with `--num_workers`.
    cores, step = sorted(os.sched_getaffinity(0)), context.get_local_world_size()
    os.sched_setaffinity(0, cores[context.get_local_rank() :: step] or cores)
    command = [sys.executable, str(ROOT / "main.py"), "train", "--strategy=multi_worker"]
    subprocess.run([*command, *config["flags"]], check=True)
    ray.train.report({})


def main() -> None:
    """Starts the workers on the machines of the Ray cluster, or on this one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_workers", type=int, default=2)
    parser.add_argument("--use_gpu", action="store_true", help="one GPU for each worker")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/ray"))
    options, flags = parser.parse_known_args()
    out = options.out.resolve()  # Worker 0 reads and writes it, wherever Ray starts it.
    TensorflowTrainer(
        train_worker,
        train_loop_config={"flags": [*flags, f"--out={out}"]},
        scaling_config=ray.train.ScalingConfig(
            num_workers=options.num_workers, use_gpu=options.use_gpu
        ),
        run_config=ray.train.RunConfig(
            name=out.name,
            storage_path=str(out.parent / "ray_results"),
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    ).fit()


if __name__ == "__main__":
    main()
