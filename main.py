"""Lockstep: trains on several devices in two ways and shows that both are the same training.

python main.py [COMMAND] [--flags]        python main.py --help
"""

import importlib
import io
import os
import pathlib
import signal
import sys

if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Until a command begins it just ends us.
if sys.version_info < (3, 11):  # Before anything is imported that an old Python cannot read.
    version = sys.version.split()[0]
    sys.stderr.write("error: Python %s — 3.11 or newer is required; use another\n" % version)
    sys.exit(2)

from absl import app as absl_app  # `from absl import app` would hide our own package.

from app.cli import flags
from app.config import Config, TrainConfig
from app.runtime import console, errors, fault_points, signals


def parse(argv: list[str]) -> Config:
    """Reads the command line; what is wrong with it ends the program before anything is loaded."""
    try:
        return flags.parse_config(argv)
    except errors.LockstepError as error:
        sys.exit(console.report_error(error))


def main(config: Config) -> int:
    """Runs the command and turns its outcome into an exit code."""
    signals.install()
    try:
        fault = fault_points.arm(os.environ)
        if fault:
            console.warn(f"{fault_points.VARIABLE}={fault}: this run is made to fail")
        command = importlib.import_module(f"app.commands.{config.command}")
        command.run(config)
        return end(config, 0)
    except errors.LockstepError as error:
        return end(config, console.report_error(error))
    except KeyboardInterrupt:
        code = console.report_interruption("interrupted", errors.INTERRUPTED_EXIT_CODE)
        return end(config, code)
    except errors.Terminated:
        code = console.report_interruption("terminated", errors.TERMINATED_EXIT_CODE)
        return end(config, code)
    except Exception as error:
        if errors.is_out_of_memory(error):
            return end(config, console.report_error(errors.out_of_memory(error)))
        # A bug: the traceback goes into the log.
        return end(config, console.report_bug(error))


def end(config: Config, exit_code: int) -> int:
    """Returns the exit code; a worker of a cluster ends with it at once.

    Taking TensorFlow's engine apart was seen to wait for half a minute, and for workers that are
    no more.
    """
    if isinstance(config, TrainConfig) and config.has_workers:
        console.leave(exit_code)
    return exit_code


if __name__ == "__main__":
    nowhere = pathlib.Path(os.devnull)  # For streams that the caller has closed.
    sys.stdout, sys.stderr = sys.stdout or nowhere.open("w"), sys.stderr or nowhere.open("w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # A terminal without "—" must not end it.
    flags.define_flags()
    absl_app.run(main, flags_parser=parse)
