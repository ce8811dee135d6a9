"""Lockstep: trains on several devices and verifies that strategies compute the same training."""

import os
import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Until a command starts, SIGINT ends the process.
if sys.version_info < (3, 11):  # Before any import that an old Python cannot parse.
    sys.stderr.write("error: Python must be 3.11 or newer, got %s\n" % sys.version.split()[0])
    sys.exit(2)
try:
    from absl import app as absl_app  # `from absl import app` would hide this project's package.
except ModuleNotFoundError:  # TensorFlow, which requires absl, is not installed either.
    sys.stderr.write(
        "error: TensorFlow and absl are not installed for this Python (%s); run `make setup`, then"
        " `.venv/bin/python main.py`\n" % sys.executable
    )
    sys.exit(2)

from app import console, errors, signals
from app.commands import run_command
from app.options import Config, parse_command_line


def parse(argv: list[str]) -> Config:
    """Parses the command line; exits on an error before anything is loaded."""
    try:
        return parse_command_line(argv)
    except errors.LockstepError as error:
        sys.exit(console.report_error(error))


def run(config: Config, *, leaves: bool = False) -> int:
    """Runs the command, prints errors and returns the exit code, or leaves the process with it."""
    # Deleting the objects of TensorFlow's cluster, which an exception refers to, can take 30 s.
    end = console.leave if leaves else int
    try:
        run_command(config)
        return end(0)
    except (KeyboardInterrupt, errors.Terminated) as stop:
        return end(console.report_interruption(stop))
    except Exception as error:
        return end(console.report_error(error))


def main(config: Config) -> int:
    """Runs the command as the only one of this process; returns the exit code."""
    signals.install()
    return run(config, leaves=config.command == "train" and config.has_workers)


if __name__ == "__main__":
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
        stream.reconfigure(errors="replace")  # For terminals that lack a character such as "—".
        setattr(sys, name, stream)  # The caller may have closed it.
    absl_app.run(main, flags_parser=parse)
