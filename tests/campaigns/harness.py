"""Starts small trainings as a user does, and checks what they leave."""

import contextlib
import gzip
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import numpy as np

from app.data.data_sources import SHA256
from app.data.fashion_mnist import idx_bytes
from app.data.synthetic import generate_synthetic

ROOT = pathlib.Path(__file__).parents[2]
MAIN = (sys.executable, str(ROOT / "main.py"))
NUM_TRAIN, NUM_TEST, EPOCHS, BATCH = 500, 200, 3, 50
STEPS_PER_EPOCH = NUM_TRAIN // BATCH
TRAIN = (
    *("--device=cpu", "--recipe=d2l", "--deterministic", "--allow_unverified_data"),
    *(f"--global_batch_size={BATCH}", "--checkpoint_every=3"),
)
TIMEOUT_SEC = 300
MARK = "LOCKSTEP_CAMPAIGN"  # Variable of all processes of a training.


class CampaignError(Exception):
    """A check that failed."""


def check(holds: object, what: str) -> None:
    """Raises an error if something does not hold."""
    if not holds:
        raise CampaignError(what)


def write_data(folder: pathlib.Path) -> pathlib.Path:
    """Writes the first images of Fashion-MNIST, if available, else generated ones."""
    folder.mkdir()
    real = pathlib.Path(os.environ.get("FASHION_MNIST_DIR") or "/nonexistent")
    generated = generate_synthetic(num_train=NUM_TRAIN, num_test=NUM_TEST)
    images, tests = generated.train_images[..., 0], generated.test_images[..., 0]
    arrays = images, generated.train_labels, tests, generated.test_labels
    for name, array in zip(SHA256, arrays, strict=True):
        if (real / f"{name}.gz").is_file():
            content = gzip.decompress((real / f"{name}.gz").read_bytes())
            header = 16 if "images" in name else 8
            array = np.frombuffer(content, np.uint8, array.size, header).reshape(array.shape)
        (folder / name).write_bytes(idx_bytes(array))
    return folder


class Program:
    """A started command; its output is in `output`.

    Args:
        command: the words of the command.
        output: file for both streams.
        environment: variables in addition to those of this process.
    """

    def __init__(
        self, command: Sequence[str], output: pathlib.Path, environment: Mapping[str, str]
    ):
        self.output, self._mark = output, f"{os.getpid()}-{time.monotonic_ns()}"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TF_CPP")}
        with open(output, "wb") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                env={**inherited, **environment, MARK: self._mark}, start_new_session=True,
            )  # fmt: skip

    def wait(self, timeout_sec: float = TIMEOUT_SEC) -> int:
        """Returns the exit code, negative for a signal."""
        try:
            return self.process.wait(timeout_sec)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise CampaignError(f"no end within {timeout_sec:g} s\n{self.text()[-2000:]}") from None

    def text(self) -> str:
        """Returns what was printed."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def last_line(self) -> str:
        """Returns the last printed line."""
        return (self.text().strip().splitlines() or [""])[-1]

    def processes(self) -> list[int]:
        """Returns the running processes of the command, itself included."""
        found = []
        mark = f"{MARK}={self._mark}".encode()
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def check_no_process_is_left(self, within_sec: float = 15) -> None:
        """Checks that all processes of the command end."""
        end = time.monotonic() + within_sec
        while left := self.processes():
            if time.monotonic() > end:
                self.kill_all()
                raise CampaignError(f"processes left: {left}\n{self.text()[-2000:]}")
            time.sleep(0.1)

    def kill_all(self) -> None:
        """Kills the command and all that it has started."""
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def check_output(program: Program, code: int) -> None:
    """Checks that no traceback was printed, and the last line of an error or an interruption."""
    lines = program.text().strip().splitlines() or [""]
    check("Traceback" not in program.text(), f"a traceback\n{program.text()[-3000:]}")
    errors = [line for line in lines if line.startswith("error: ")]
    if 0 < code < 128 or code == 138:
        told = f"exit code {code}, last line {lines[-1]!r}, errors {errors}"
        check(errors == lines[-1:], told)
        check("; " in lines[-1], f"no advice: {lines[-1]!r}")
    else:
        check(not errors, f"exit code {code}, errors {errors}")
    if code in (130, 143):
        check(lines[-1].startswith(("interrupted", "terminated", "a second")), lines[-1])


def checkpoints(run_dir: pathlib.Path) -> list[pathlib.Path]:
    """Returns the published checkpoints, the newest last."""
    return sorted((run_dir / "checkpoints").glob("step-*"))


def check_intact(checkpoint: pathlib.Path) -> None:
    """Checks a checkpoint against the hashes in its manifest."""
    manifest = json.loads((checkpoint / "MANIFEST.json").read_bytes())
    for name, told in manifest["files"].items():
        sha256 = hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
        check(sha256 == told["sha256"], f"{checkpoint}/{name} is damaged")


def finished_weights(run_dir: pathlib.Path) -> str:
    """Returns `weights_sha256` of a finished run, after a check of its records."""
    summary = json.loads((run_dir / "summary.json").read_bytes())
    check(summary["status"] == "finished", f"status {summary['status']}")
    lines = (run_dir / "history.jsonl").read_bytes().splitlines()
    epochs = [json.loads(line)["epoch"] for line in lines]
    check(epochs == list(range(1, summary["epochs"] + 1)), f"a torn history: {epochs}")
    left = [path.name for path in run_dir.rglob(".*") if path.name != ".lock"]
    check(not left, f"left behind: {left}")
    return summary["weights_sha256"]
