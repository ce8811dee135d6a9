"""Starts small trainings as a user does, and checks what they leave."""

import contextlib
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

from . import CampaignError, check

MAIN = (sys.executable, str(pathlib.Path(__file__).parents[2] / "main.py"))
TRAIN = (
    *("--device=cpu", "--recipe=d2l", "--deterministic", "--dataset=synthetic", "--epochs=3"),
    *("--num_train_examples=500", "--global_batch_size=50", "--checkpoint_every=3"),
)


class Program:
    """A started command, with further variables of its environment; `output` has both streams."""

    def __init__(self, command, output: pathlib.Path, environment):
        self.output, self._mark = output, f"{os.getpid()}-{time.monotonic_ns()}"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TF_CPP")}
        marked = {**inherited, **environment, "LOCKSTEP_CAMPAIGN": self._mark}
        with open(output, "wb") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=marked,
                start_new_session=True,
            )  # fmt: skip

    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait(self, timeout_sec=300) -> int:
        """Returns the exit code, negative for a signal."""
        try:
            return self.process.wait(timeout_sec)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise CampaignError(f"no end within {timeout_sec:g} s\n{self.text()}") from None

    def text(self) -> str:
        """Returns the end of what was printed."""
        return self.output.read_text(encoding="utf-8", errors="replace")[-3000:]

    def processes(self) -> list[int]:
        """Returns the running processes of the command, itself included."""
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"LOCKSTEP_CAMPAIGN={self._mark}".encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def check_no_process_is_left(self) -> None:
        end = time.monotonic() + 15
        while left := self.processes():
            check(time.monotonic() < end, f"processes left: {left}\n{self.text()}")
            time.sleep(0.1)

    def kill_all(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def check_output(program: Program, code: int) -> None:
    """Checks that no traceback was printed, and the last line of an error or an interruption."""
    lines = program.text().strip().splitlines() or [""]
    told = f"exit code {code}\n{program.text()}"
    check("Traceback" not in program.text(), told)
    errors = [line for line in lines if line.startswith("error: ")]
    if 0 < code < 128 or code in (138, 142):
        check(errors == lines[-1:] and "; " in lines[-1], told)  # With what to do.
    else:
        check(not errors, told)
    if code in (130, 143):
        check(lines[-1].startswith(("interrupted", "terminated", "a second")), told)


def checkpoints(run_dir: pathlib.Path) -> list[pathlib.Path]:
    """Returns the published checkpoints, the newest last."""
    return sorted((run_dir / "checkpoints").glob("step-*.safetensors"))


def check_intact(checkpoint: pathlib.Path) -> None:
    """Checks a checkpoint against the hash in its header."""
    content = checkpoint.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    told = header["__metadata__"]["sha256"]
    sha256 = hashlib.sha256(content.replace(told.encode(), b"0" * 64, 1)).hexdigest()
    check(sha256 == told, f"{checkpoint} is damaged")


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
