"""`python -m lockstep`: verifies recordings of training scripts, and shows what they hold.

python -m lockstep one.npz [two.npz …]
python -m lockstep show one.npz [two.npz …]
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import lockstep
from lockstep.answer.json import EXIT_CODES, record_of_all
from lockstep.answer.text import describe, one_line


def main(arguments: Sequence[str] | None = None) -> int:
    """Verifies each recording on its own, and all further ones against the first; or shows them.

    Returns:
        The exit code, one of `EXIT_CODES`.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    is_show = words[:1] == ["show"]
    options = _parser(is_show).parse_args(words[is_show:])
    from lockstep.answer.show import contents_of
    from lockstep.comparison import compare_traces
    from lockstep.data.file import load
    from lockstep.data.match import NamesError

    try:
        traces = [load(file) for file in options.files]
        if is_show:
            _print("\n\n".join(contents_of(trace, options.details) for trace in traces))
            return 0
        verdicts = compare_traces(traces, dict(options.name_map), options.tolerance)
    except ValueError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, NamesError) else 3
    record = record_of_all(verdicts)
    text = describe([*verdicts.values()], details=options.details)
    _print(json.dumps(record, indent=1) if options.json else text)
    return record["exit_code"]


def _print(text: str) -> None:
    """Prints; a closed pipe (`| head -1`) does not change the exit code."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            sys.exit(f"error: standard output: {error.strerror}")


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line, as all other errors."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {one_line(message)}; see {self.prog} --help\n")


def _parser(is_show: bool) -> argparse.ArgumentParser:
    """Returns the parser of `lockstep show`, or of `lockstep`."""
    codes = "exit codes: " + ", ".join(f"{code} {text}" for code, text in EXIT_CODES.items())
    parser = _Parser("lockstep", epilog=codes, allow_abbrev=False)
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="a recording, a .npz file")
    if is_show:
        parser.prog, parser.description = "lockstep show", "Lists what recordings hold."
        add("--details", action="store_true", help="list all variables, not only the first weights")
        return parser
    parser.description = (
        "Verifies recordings of training scripts: each on its own, and all further ones against"
        " the first. A recording with permute= gives the tolerance. `lockstep show FILE` lists"
        " what a recording holds."
    )
    add("--details", action="store_true", help="show stages, sizes and tolerances, too")
    add("--json", action="store_true", help="print the verdicts as JSON; see docs/for_agents.md")
    add("--tolerance", type=_fraction, metavar="X", help="relative difference to allow")
    add(
        "--name_map", type=_pair, action="append", default=[], metavar="A=B",
        help="name of a weight in further recordings = its name in the first; may be repeated",
    )  # fmt: skip
    add("--version", action="version", version=lockstep.__version__)
    return parser


def _fraction(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) < 1:
            return value
    raise argparse.ArgumentTypeError(f"must be at least 0 and less than 1, got {text}")


def _pair(text: str) -> tuple[str, str]:
    name, equals, other = text.partition("=")
    if not (name and equals and other):
        raise argparse.ArgumentTypeError(f"{text} is not NAME=NAME")
    return name, other


if __name__ == "__main__":
    sys.exit(main())
