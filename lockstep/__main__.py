"""`python -m lockstep one.npz [two.npz …]`: verifies recordings of training scripts."""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any

import lockstep
from lockstep.text import one_line, record_of
from lockstep.verdict import Verdict

OK, FLAGS, UNREADABLE, MISMATCH = 0, 2, 3, 9  # Exit codes.


def main(arguments: Sequence[str] | None = None) -> int:
    """Verifies each recording on its own, and all further ones against the first.

    Returns:
        The exit code: 0 if no recording has a fault, 9 if one has, 3 if one cannot be read, or
        has nothing to verify.
    """
    options = _parser().parse_args(arguments)
    from lockstep.comparison import compare_traces
    from lockstep.match import NamesError
    from lockstep.trace_file import load

    try:
        names = dict(_pair(text) for text in options.name_map)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return FLAGS
    try:
        verdicts = compare_traces([load(f) for f in options.files], names, options.tolerance)
    except ValueError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return FLAGS if isinstance(error, NamesError) else UNREADABLE
    if options.json:
        print(json.dumps(record_of_all(verdicts), indent=1))
    else:
        print("\n\n".join(str(verdict) for verdict in verdicts.values()))
    if any(verdict.faults for verdict in verdicts.values()):
        return MISMATCH
    return OK if all(verdict.ok for verdict in verdicts.values()) else UNREADABLE


def record_of_all(verdicts: dict[str, Verdict]) -> dict[str, Any]:
    """Returns verdicts as plain data, as in `verify.json`; see docs/verify_json.md."""
    return {
        "format": "lockstep verify",
        "version": 2,
        "lockstep": lockstep.__version__,
        "trainings": {name: record_of(verdict) for name, verdict in verdicts.items()},
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lockstep",
        description="Verifies recordings of training scripts: each on its own, and all further"
        " ones against the first. A recording with permute= gives the tolerance.",
        epilog="exit codes: 0 no fault, 9 a fault, 3 a recording cannot be read or has nothing to"
        " verify, 2 wrong arguments",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a recording, a .npz file")
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON")
    parser.add_argument(
        "--tolerance", type=_fraction, metavar="X", help="relative difference of gradients to allow"
    )
    parser.add_argument(
        "--name_map", action="append", default=[], metavar="A=B",
        help="name of a weight in further recordings = its name in the first; may be repeated",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=lockstep.__version__)
    return parser


def _fraction(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) < 1:
            return value
    raise argparse.ArgumentTypeError(f"must be at least 0 and less than 1, got {text}")


def _pair(text: str) -> tuple[str, str]:
    name, equals, other = text.partition("=")
    if not (name and equals and other):
        raise ValueError(f"--name_map={text}: is not NAME=NAME")
    return name, other


if __name__ == "__main__":
    sys.exit(main())
