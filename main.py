"""Lockstep: trains on several devices and verifies that all strategies compute the same training.

python main.py [COMMAND] [--flags]        python main.py --help
"""

import io
import os
import pathlib
import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Until a command starts, SIGINT ends the process.
if sys.version_info < (3, 11):  # Before any import that an old Python cannot parse.
    version = sys.version.split()[0]
    sys.stderr.write("error: Python must be 3.11 or newer, got %s\n" % version)
    sys.exit(2)

try:
    from absl import app as absl_app  # `from absl import app` would hide this project's package.
except ModuleNotFoundError:  # TensorFlow, which requires absl, is not installed either.
    sys.stderr.write(
        "error: TensorFlow and absl are not installed for this Python (%s); run `make setup`, then"
        " `.venv/bin/python main.py`\n" % sys.executable
    )
    sys.exit(2)

from app.commands import run_command
from app.options import Config, flags
from app.runtime import console, errors, signals


def parse(argv: list[str]) -> Config:
    """Parses the command line; exits on an error before anything is loaded."""
    try:
        return flags.parse_config(argv)
    except errors.LockstepError as error:
        sys.exit(console.report_error(error))


def main(config: Config) -> int:
    """Runs the command as the only one of this process; returns the exit code."""
    signals.install()
    exit_code = run(config)
    if config.command == "train" and config.has_workers:
        # Shutting down TensorFlow's cluster can take 30 s, and waits for workers that have ended.
        console.leave(exit_code)
    return exit_code


def run(config: Config) -> int:
    """Runs the command; prints errors and returns the exit code."""
    try:
        run_command(config)
        return 0
    except (KeyboardInterrupt, errors.Terminated) as stop:
        return console.report_interruption(stop)
    except Exception as error:
        return console.report_error(error)


if __name__ == "__main__":
    nowhere = pathlib.Path(os.devnull)  # For streams that the caller has closed.
    sys.stdout, sys.stderr = sys.stdout or nowhere.open("w"), sys.stderr or nowhere.open("w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # For terminals that lack a character such as "—".
    absl_app.run(main, flags_parser=parse)
