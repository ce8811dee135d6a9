"""Kills a small training at random and resumes it repeatedly: `make soak`.

Each cycle starts the same command and ends it by SIGKILL or SIGTERM at a random moment, by a kill
or a full disk at a random fault point, or by a SIGKILL after the newest checkpoint was truncated.
The finished run must have the weights of an undisturbed one.
"""

import argparse
import gzip
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np

from app.data.data_sources import SHA256
from app.data.synthetic import generate_synthetic
from app.records.checkpoint import NUM_NEWEST_KEPT, checkpoint_paths, load_checkpoint
from app.records.history import load_history, load_summary
from app.records.run_directory import RUN_LOG_FILE
from app.records.run_log_check import CUT_OFF, check_log
from app.runtime.fault_points import POINTS, VARIABLE
from idx_files import write_idx

NUM_TRAIN, NUM_TEST, EPOCHS = 500, 200, 6
TRAIN = (
    *("--strategy=manual", "--device=cpu", "--num_devices=2", "--recipe=fast", "--deterministic"),
    *("--allow_unverified_data", "--global_batch_size=50", f"--epochs={EPOCHS}"),
    *("--checkpoint_every=3", "--steps_per_call=1"),
)
TIMEOUT_SEC = 120
# Approximate duration of the run after its start-up, from which the moments are drawn.
TRAINING_SEC = 2.5
KINDS = ("SIGKILL", "SIGTERM", "kill at", "disk full at", "truncated")


class SoakError(Exception):
    """A check that failed."""


class Soak:
    """A training that is killed and resumed.

    Args:
        folder: folder for all files.
        seed: seed of all random choices.
    """

    def __init__(self, folder: pathlib.Path, seed: int):
        self._folder, self._random = folder, random.Random(seed)
        self._data_dir = folder / "data"
        self._laps, self.counts = 0, dict.fromkeys(KINDS, 0)
        write_data(self._data_dir)
        whole = folder / "undisturbed"
        self._check(self._run(whole).wait(TIMEOUT_SEC) == 0, "the undisturbed run failed")
        self.weights_sha256 = load_summary(whole).weights_sha256
        self._run_dir, self._truncated = folder / "run", None

    def cycle(self) -> str:
        """Starts the training, ends it, and checks its files; returns what was done."""
        kind = self._random.choice(KINDS)
        intact = checkpoint_paths(self._run_dir)
        if kind == "truncated" and len(intact) < 2:
            kind = "SIGKILL"
        self.counts[kind] += 1
        if kind in ("kill at", "disk full at"):
            told, code = self._fail_at_point(kind)
        else:
            told, code = self._fail_at_moment(kind, intact)
        if code == 0:
            self._check_finished()
            told += ", after it had finished"
        self._check_left()
        return told

    def finish(self) -> None:
        """Lets the training finish, and checks it."""
        code = self._run(self._run_dir).wait(TIMEOUT_SEC)
        self._check(code == 0, f"the last run ended with {code}")
        self._check_finished()

    def _fail_at_point(self, kind: str) -> tuple[str, int]:
        action = "kill" if kind == "kill at" else "enospc"
        points = [p for p in POINTS if action == "kill" or p.partition(".")[2] or p == "log"]
        fault = f"{self._random.choice(points)}:{self._random.randint(1, 6)}:{action}"
        code = self._run(self._run_dir, fault).wait(TIMEOUT_SEC)
        expected = -signal.SIGKILL if action == "kill" else 8
        self._check(code in (0, expected), f"{fault} ended with {code}")
        return f"{kind} {fault.rpartition(':')[0]}", code

    def _fail_at_moment(self, kind: str, intact: list[pathlib.Path]) -> tuple[str, int]:
        if kind == "truncated":
            self._truncated = intact[-1]
            _truncate(self._random.choice(sorted(intact[-1].iterdir())))
        number = signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL
        started_after = _size(self._run_dir / RUN_LOG_FILE)
        process = self._run(self._run_dir)
        if self._random.random() < 0.9:  # Otherwise during start-up.
            while process.poll() is None and _size(self._run_dir / RUN_LOG_FILE) == started_after:
                time.sleep(0.01)
        delay_sec = self._random.uniform(0, TRAINING_SEC)
        time.sleep(delay_sec)
        process.send_signal(number)
        code = process.wait(TIMEOUT_SEC)
        expected = (0, 143, -signal.SIGTERM) if kind == "SIGTERM" else (0, -signal.SIGKILL)
        self._check(code in expected, f"{kind} ended with {code}")
        return f"{kind} after {delay_sec:.2f} s", code

    def _check_left(self) -> None:
        """Checks the files after a cycle."""
        paths = checkpoint_paths(self._run_dir)
        self._check(len(paths) <= NUM_NEWEST_KEPT + 2, f"{len(paths)} checkpoints")
        for path in paths:
            if path != self._truncated:  # It exists until the run reaches its step.
                load_checkpoint(path)
        if (self._run_dir / RUN_LOG_FILE).exists():
            self._check_log()

    def _check_log(self) -> None:
        problems = [p for p in check_log(self._run_dir) if p != CUT_OFF]
        self._check(not problems, f"{RUN_LOG_FILE}: {problems}")

    def _check_finished(self) -> None:
        summary, history = load_summary(self._run_dir), load_history(self._run_dir)
        self._check(summary.status == "finished", f"status {summary.status}")
        self._check(summary.weights_sha256 == self.weights_sha256, "other weights")
        self._check([r.epoch for r in history] == list(range(1, EPOCHS + 1)), "a torn history")
        left = [p for p in self._run_dir.rglob(".*") if p.name != ".lock"]
        self._check(not left, f"left behind: {left}")
        self._check_log()
        self._laps += 1
        self._run_dir = self._folder / f"run {self._laps}"

    def _run(self, run_dir: pathlib.Path, fault: str = "") -> subprocess.Popen:
        with open(self._folder / "output.txt", "w", encoding="utf-8") as output:
            return subprocess.Popen(
                [sys.executable, str(ROOT / "main.py"), *TRAIN, f"--out={run_dir}"],
                stdout=output,
                stderr=output,
                env={**os.environ, "FASHION_MNIST_DIR": str(self._data_dir), VARIABLE: fault},
            )

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            output = (self._folder / "output.txt").read_text(encoding="utf-8", errors="replace")
            raise SoakError(f"{self._run_dir}: {what}\n{output[-2000:]}")

    @property
    def laps(self) -> int:
        """How often the training was finished."""
        return self._laps


def _size(path: pathlib.Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _truncate(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def write_data(folder: pathlib.Path) -> None:
    """Writes a part of Fashion-MNIST, if available, else of the generated images."""
    folder.mkdir()
    real = pathlib.Path(os.environ.get("FASHION_MNIST_DIR") or "/nonexistent")
    generated = generate_synthetic(num_train=NUM_TRAIN, num_test=NUM_TEST)
    arrays = (
        *(generated.train_images[..., 0], generated.train_labels),
        *(generated.test_images[..., 0], generated.test_labels),
    )
    for name, array in zip(SHA256, arrays, strict=True):
        if (real / f"{name}.gz").is_file():
            content = gzip.decompress((real / f"{name}.gz").read_bytes())
            size = array.size
            first = np.frombuffer(content, np.uint8, size, 16 if "images" in name else 8)
            array = first.reshape(array.shape)
        write_idx(folder / name, array)


def main() -> int:
    """Runs the requested cycles; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    print(f"soak: {options.cycles} cycles, --seed={options.seed}", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak = Soak(pathlib.Path(folder), options.seed)
        for number in range(1, options.cycles + 1):
            try:
                told = soak.cycle()
            except Exception as error:
                print(f"cycle {number} of {options.cycles}, --seed={options.seed}: {error}")
                return 1
            print(f"cycle {number}: {told}", flush=True)
        soak.finish()
    minutes = (time.monotonic() - start) / 60
    counts = ", ".join(f"{kind} {count}" for kind, count in soak.counts.items())
    print(
        f"soak: {options.cycles} of {options.cycles} cycles held, --seed={options.seed}; {counts};"
        f" finished {soak.laps} times with weights_sha256 {soak.weights_sha256[:16]}…;"
        f" {minutes:.1f} min"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
