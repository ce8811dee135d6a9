"""`python -m lockstep`: verifies recordings of training scripts, shows them, and makes them.

python -m lockstep one.npz two.npz [permuted.npz …] [--html page.html]
python -m lockstep show one.npz [two.npz …]
python -m lockstep run --reference "python train.py" --variant "torchrun … train.py"
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import lockstep
from lockstep.answer.json import EXIT_CODES, record_of_all
from lockstep.answer.text import describe, one_line
from lockstep.data.trace import LAST_STEP, MOST_STEPS

_USAGE = """lockstep FILE FILE [FILE …] [options]
       lockstep show FILE [FILE …] [--details]
       lockstep run --reference COMMAND --variant [NAME=]COMMAND [options]
       lockstep run --reference COMMAND --resume [NAME=]COMMAND COMMAND [options]"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Verifies all further recordings against the first.

    `show` lists what recordings hold, and `run` records trainings and verifies them.

    Returns:
        The exit code, one of `EXIT_CODES`, or 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    is_run, is_show = words[:1] == ["run"], words[:1] == ["show"]
    parser = _run_parser() if is_run else _parser(is_show)
    options = parser.parse_args(words[is_run or is_show :])
    _remove_page(options)
    from lockstep.numeric.memory import keep_freed_memory

    keep_freed_memory()
    if is_run:
        return _run(options)
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
    return _show(verdicts, options)


def _show(verdicts: Mapping[str, Any], options: argparse.Namespace) -> int:
    """Prints verdicts as text or JSON, writes their page, and returns the exit code.

    A page that cannot be written is an error; the code of a worse verdict stays.
    """
    record = record_of_all(verdicts)
    text = describe([*verdicts.values()], details=options.details)
    _print(json.dumps(record, indent=1) if options.json else text)
    if options.html:
        from lockstep.answer.html import write_page

        try:
            write_page([*verdicts.values()], options.html)
        except OSError as error:
            print(f"error: --html: {one_line(options.html)}: {error.strerror}", file=sys.stderr)
            return max(record["exit_code"], 2)
    return record["exit_code"]


def _remove_page(options: argparse.Namespace) -> None:
    """Removes the page of an earlier verification: after an error, there is none."""
    if getattr(options, "html", None):
        with contextlib.suppress(OSError):
            os.unlink(options.html)


def _run(options: argparse.Namespace) -> int:
    """Records a reference and its variants, verifies them, and returns the exit code."""
    from lockstep.data.match import NamesError
    from lockstep.running.launch import TrainingError
    from lockstep.running.run import Settings, verify_trainings

    settings = Settings(
        options.steps, dict(options.name_map), options.tolerance, options.modules,
        options.timeout, options.keep,
    )  # fmt: skip
    variants, resumes = _named(options)
    try:
        with _ended_by_signals():
            verdicts = verify_trainings(options.reference, variants, settings, resumes)
    except KeyboardInterrupt:
        print("interrupted: all trainings have been ended", file=sys.stderr)
        return 130
    except TrainingError as error:
        more = "\n--keep DIR keeps all that the trainings print" if error.tail else ""
        print(f"error: {error}{'' if options.keep else more}", file=sys.stderr)
        return 2
    except OSError as error:
        if isinstance(error, BlockingIOError):
            options.keep = None  # The folder of another run.
        print(f"error: {one_line(error.filename or error)}: {error.strerror}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, NamesError) else 3
    finally:
        if options.keep:
            print(f"recordings and output are in {options.keep}", file=sys.stderr)
    return _show(verdicts, options)


def _named(options: argparse.Namespace) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """Returns name → command, and for trainings that resume name → both commands.

    One without a name is called "variant", or "resumed", or by its number.
    """
    if not (options.variant or options.resume):
        _run_parser().error("--variant or --resume is required")
    variants, resumes = dict[str, str](), dict[str, tuple[str, str]]()
    for option, usual in (("variant", "variant"), ("resume", "resumed")):
        given = getattr(options, option)
        for number, each in enumerate(given, 1):
            (own, command), *others = each if option == "resume" else [each]
            name = own or (usual if len(given) == 1 else f"{usual} {number}")
            if name in {**variants, **resumes}:
                _run_parser().error(f"argument --{option}: two have the name {name}")
            if others:
                resumes[name] = command, others[0][1]
            else:
                variants[name] = command
    return variants, resumes


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Raises SystemExit when this process is to be ended, so that it ends its trainings first."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
    for number in before:
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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


def _new_parser(program: str, description: str, usage: str | None = None) -> _Parser:
    codes = "exit codes: " + ", ".join(f"{code} {text}" for code, text in EXIT_CODES.items())
    return _Parser(
        program, usage=usage, description=description, epilog=codes, allow_abbrev=False
    )  # fmt: skip


def _parser(is_show: bool) -> _Parser:
    """Returns the parser of `lockstep show`, or of `lockstep`."""
    if is_show:
        parser = _new_parser("lockstep show", "Lists what recordings hold.")
    else:
        parser = _new_parser(
            "lockstep",
            "Verifies recordings of training scripts: all further ones against the first. One with"
            " permute= gives the tolerance. `lockstep show` lists what a recording holds. `lockstep"
            " run` records trainings and verifies them; see `lockstep run --help`.",
            _USAGE,
        )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a recording, a .npz file")
    if is_show:
        more = "list all variables, not only the first weights"
        parser.add_argument("--details", action="store_true", help=more)
        return parser
    _add_options(parser, "name of a weight in further recordings = its name in the first")
    parser.add_argument("--version", action="version", version=lockstep.__version__)
    return parser


def _run_parser() -> _Parser:
    """Returns the parser of `lockstep run`."""
    parser = _new_parser(
        "lockstep run",
        "Records trainings and verifies that each variant is the training of the reference. Each"
        " command is run without a shell, the reference twice. In the script, the training steps"
        " are in `with lockstep.record(model, optimizer):`. The training runs to its end: give it"
        " few steps.",
    )
    parser.epilog = f"{parser.epilog}, or a training failed, 130 interrupted"
    add = parser.add_argument
    add("--reference", type=_command, required=True, metavar="COMMAND",
        help='the training on one device, as in "python train.py"')  # fmt: skip
    add("--variant", type=_variant, action="append", default=[], metavar="[NAME=]COMMAND",
        help='another way to run it, as in ddp="torchrun --nproc_per_node=2 train.py"; may be'
             " repeated")  # fmt: skip
    add("--resume", type=_variant, action="append", default=[], nargs=2,
        metavar=("[NAME=]COMMAND", "COMMAND"),
        help="a training that saves a checkpoint and ends early, and the one that resumes from it;"
             " may be repeated")  # fmt: skip
    add("--steps", type=_steps, default=2, metavar="N",
        help="number of first steps to record, or numbers as in 0,1,234; default: 2")  # fmt: skip
    _add_options(parser, "name of a weight in the variants = its name in the reference")
    add("--modules", nargs="?", const=True, default=False, metavar="PATTERN",
        help="record all modules in PyTorch, or those with such names, so that the first wrong one"
             " is named")  # fmt: skip
    add("--timeout", type=_seconds, default=300, metavar="SEC",
        help="time limit of each run; default: 300")  # fmt: skip
    add(
        "--keep",
        type=_new_folder,
        metavar="DIR",
        help="keep recordings and what the trainings print in a folder",
    )
    return parser


def _add_options(parser: _Parser, of_names: str) -> None:
    """Adds the options that `lockstep` and `lockstep run` have in common."""
    add = parser.add_argument
    add(
        "--details",
        action="store_true",
        help="show the compared nodes, all tensors and the tolerance, too",
    )
    add("--json", action="store_true", help="print the verdicts as JSON; see docs/for_agents.md")
    add("--html", type=_new_page, metavar="FILE",
        help="write the verdicts as a page, one HTML file")  # fmt: skip
    add("--tolerance", type=_fraction, metavar="X", help="relative difference to allow")
    add(
        "--name_map", type=_pair, action="append", default=[], metavar="A=B",
        help=f"{of_names}; may be repeated",
    )  # fmt: skip


def _command(text: str) -> str:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no command ({error})") from None
    if not words:
        raise argparse.ArgumentTypeError(f"{text!r} is no command")
    return text


def _variant(text: str) -> tuple[str, str]:
    """Returns the name, or "", and the command."""
    if named := re.match(r"([\w.+-]+)=(.*)", text, re.DOTALL):
        return named[1], _command(named[2])
    return "", _command(text)


def _steps(text: str) -> int | list[int]:
    with contextlib.suppress(ValueError):
        numbers = [int(number) for number in text.split(",")]
        if "," not in text and 0 < numbers[0] <= MOST_STEPS:
            return numbers[0]
        is_ascending = numbers == sorted({*numbers})
        if "," in text and is_ascending and 0 <= numbers[0] <= numbers[-1] < LAST_STEP:
            return numbers
    raise argparse.ArgumentTypeError(
        f"must be a number from 1 to {MOST_STEPS:,}, or numbers from 0 in ascending order as in"
        f" 0,1,234, got {text}"
    )


def _new_folder(text: str) -> str:
    """Creates a folder, if it does not exist."""
    try:
        os.makedirs(text, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}; pass a folder") from None
    return text


def _new_page(text: str) -> str:
    """Checks that a page can be written to a path, before the work begins."""
    from lockstep.answer.html import require_writable

    try:
        require_writable(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    return text


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if (value := float(text)) > 0:
            return value
    raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")


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
