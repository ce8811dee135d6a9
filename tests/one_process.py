"""Runs several commands one after another in one process and prints the state that each leaves.

    python tests/one_process.py OUT_DIR [NUM_TRAIN_EXAMPLES]

`tests/test_one_process.py` runs it in a separate process and checks its last line, as JSON. The
images are those of `$FASHION_MNIST_DIR`.
"""

import contextlib
import io
import json
import logging
import os
import pathlib
import signal
import sys
import tempfile
import threading

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import main
from app.options import Config
from failing_steps import after_step

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_STEP_OF_SIGNAL = 3


class Tee(io.StringIO):
    """Prints text and stores it."""

    def write(self, text):
        sys.__stdout__.write(text)
        return super().write(text)


def state_of_process():
    """Returns all state that a command could leave in the process."""
    wakeup_fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup_fd)
    children = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/children")]
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "signal handlers": [str(signal.getsignal(number)) for number in _NUMBERS],
        "wakeup fd": wakeup_fd,
        "environment": dict(os.environ),
        "temporary directory": tempfile.gettempdir(),
        "temporary files": sorted(os.listdir(tempfile.gettempdir())),
        "children": "".join(children).split(),
        "log files": [
            handler.baseFilename
            for logger in loggers
            for handler in getattr(logger, "handlers", [])
            if isinstance(handler, logging.FileHandler)
        ],
    }


def run(config):
    """Runs a command; returns its exit code and what it has printed."""
    printed = Tee()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        exit_code = main.main(config)
    return exit_code, printed.getvalue().splitlines()


@contextlib.contextmanager
def interrupted():
    """Sends this process SIGINT after some steps of a training."""
    with after_step(_STEP_OF_SIGNAL, lambda: os.kill(os.getpid(), signal.SIGINT)):
        yield


def commands(out, num_examples):
    """Yields (name, config, whether a signal interrupts it)."""
    training = {
        "device": "cpu", "num_devices": 2, "num_train_examples": num_examples, "epochs": 2,
        "global_batch_size": 20, "allow_unverified_data": True,
    }  # fmt: skip
    several = {**training, "strategies": ("single", "manual"), "epochs": 1}
    verified = {name: several[name] for name in several if name != "epochs"}
    yield (
        "first",
        Config.of(
            "train", **training, precision="mixed_bfloat16", deterministic=True, out=f"{out}/first"
        ),
        False,
    )
    yield "compared", Config.of("compare", **several, out=f"{out}/compared"), False
    yield "interrupted", Config.of("train", **training, out=f"{out}/interrupted"), True
    yield "verified", Config.of("verify", **verified, steps=2, out=f"{out}/verified"), False
    yield "second", Config.of("train", **training, out=f"{out}/second"), False
    yield "resumed", Config.of("train", **training, out=f"{out}/interrupted"), False
    yield (
        "one device",
        Config.of(
            "train", **{**training, "strategy": "single", "num_devices": None}, out=f"{out}/one"
        ),
        False,
    )
    yield (
        "three devices",
        Config.of("train", **{**training, "num_devices": 3}, out=f"{out}/three"),
        False,
    )


def run_all(out, num_examples):
    """Returns for each command its exit code, its output, its log, and the state that it left."""
    results = {}
    for name, config, has_signal in commands(out, num_examples):
        print(f"\n== {name}: {config.command}", flush=True)
        before = state_of_process()
        with interrupted() if has_signal else contextlib.nullcontext():
            exit_code, printed = run(config)
        after = state_of_process()
        log = pathlib.Path(config.output.out) / "log.txt"
        results[name] = {
            "exit_code": exit_code,
            "printed": printed,
            "log": log.read_text(encoding="utf-8") if log.exists() else "",
            "left": {key: (before[key], after[key]) for key in after if after[key] != before[key]},
        }
        print(
            f"== exit code {exit_code}, left in the process: {results[name]['left'] or 'nothing'}"
        )
    for name, config, _ in commands(out, num_examples):
        log = pathlib.Path(config.output.out) / "log.txt"
        results[name]["log at the end"] = log.read_text(encoding="utf-8") if log.exists() else ""
    return results


if __name__ == "__main__":
    num_examples = int(sys.argv[2]) if len(sys.argv) > 2 else 200
    print("\n" + json.dumps(run_all(sys.argv[1], num_examples)))
