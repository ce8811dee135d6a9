"""Lockstep: trains on several devices in two ways and shows that both are the same training.

python main.py [COMMAND] [--flags]        python main.py --help
"""

import importlib
import io
import os
import pathlib
import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Until a command begins it just ends us.
if sys.version_info < (3, 11):  # Before anything is imported that an old Python cannot read.
    version = sys.version.split()[0]
    sys.stderr.write("error: Python must be 3.11 or newer, got %s\n" % version)
    sys.exit(2)

try:
    from absl import app as absl_app  # `from absl import app` would hide our own package.
except ModuleNotFoundError:  # TensorFlow, which requires absl, is not installed either.
    sys.stderr.write(
        "error: TensorFlow and absl are not installed for this Python (%s); run `make setup`, then"
        " `.venv/bin/python main.py`\n" % sys.executable
    )
    sys.exit(2)

from app.cli import flags
from app.config import Config, TrainConfig
from app.runtime import console, errors, fault_points, signals
from app.runtime.run_context import RunContext


def parse(argv: list[str]) -> Config:
    """Reads the command line; what is wrong with it ends the program before anything is loaded."""
    try:
        return flags.parse_config(argv)
    except errors.LockstepError as error:
        sys.exit(console.report_error(error))


def main(config: Config) -> int:
    """Runs the command and turns its outcome into an exit code; leaves nothing in the process."""
    with RunContext(), signals.handled():
        exit_code = run(config)
        if isinstance(config, TrainConfig) and config.has_workers:
            # Taking TensorFlow's cluster apart was seen to wait for half a minute, and for workers
            # that are no more.
            console.leave(exit_code)
        return exit_code


def run(config: Config) -> int:
    """Runs the command within the current context; prints how it ended, returns the exit code."""
    try:
        fault = fault_points.arm(os.environ)
        if fault:
            console.warn(f"{fault_points.VARIABLE}={fault}: this run is made to fail")
        importlib.import_module(f"app.commands.{config.command}").run(config)
        return 0
    except errors.LockstepError as error:
        return console.report_error(error)
    except KeyboardInterrupt:
        return console.report_interruption("interrupted", errors.INTERRUPTED_EXIT_CODE)
    except errors.Terminated:
        return console.report_interruption("terminated", errors.TERMINATED_EXIT_CODE)
    except Exception as error:
        if errors.is_out_of_memory(error):
            return console.report_error(errors.out_of_memory(error))
        return console.report_bug(error)  # The traceback goes into the log.


def run_program(config: Config) -> int:
    """Runs the command as all that this process does; returns the exit code."""
    exit_code = main(config)
    # The work is done: a request to stop, which may come more than once, must not change the code.
    for number in (signals.STOP_REQUEST, signals.HANG_UP):
        signal.signal(number, signal.SIG_IGN)
    return exit_code


if __name__ == "__main__":
    nowhere = pathlib.Path(os.devnull)  # For streams that the caller has closed.
    sys.stdout, sys.stderr = sys.stdout or nowhere.open("w"), sys.stderr or nowhere.open("w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # A terminal without "—" must not end it.
    flags.define_flags()
    absl_app.run(run_program, flags_parser=parse)
