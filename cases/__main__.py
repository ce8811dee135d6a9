"""Runs programs of the data set, and compares what a tool says of them with what it said before.

    python -m cases losses                      a kind; all kinds without a name
    python -m cases losses/batch_dice.right     a form of a program
    python -m cases --every=3                   a third of the programs, always the same ones
    python -m cases --number=20 --seed=1        so many, drawn at random
    python -m cases --keep=DIR                  keeps recordings, and uses those that are there
    python -m cases --keep=DIR --kept           judges kept recordings, and runs nothing
    python -m cases --tool=plain                final weights and losses, in place of lockstep
    python -m cases --update                    writes what the tool says to its results

A recording depends on the program and on what it is given. Use another folder after a change of
modules that programs share, of recorders, or of a framework's version.

Exits with 0 if all is as expected, 9 after a difference or a form without a verdict, 2 after a
wrong argument, 3 if programs cannot be run, 8 if the disk is full, 129, 130 and 143 after a signal.
"""

import argparse
import concurrent.futures
import importlib
import os
import pathlib
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from .heads import FOLDER, Case, choose, read_cases, read_lines, write_lines
from .runner import AT_ONCE, CannotRunError, Runner, missing_packages
from .table import score

REFUSED = "refused"  # Status of a form without a verdict: its program, or the tool, failed.


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line says; returns the exit code."""
    options, chosen = _parse(arguments)
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # Not under nohup.
        signal.signal(signal.SIGHUP, _terminate)
    try:
        with tempfile.TemporaryDirectory(prefix="cases-", ignore_cleanup_errors=True) as scratch:
            keep = options.keep or pathlib.Path(scratch) / "kept"
            with Runner(keep, kept_only=options.kept, timeout_sec=options.timeout_sec) as runner:
                return _run_all(chosen, runner, pathlib.Path(scratch), options)
    except (CannotRunError, ValueError) as error:  # ValueError: of a file of results.
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "code", 3)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141


def _parse(arguments: Sequence[str] | None) -> tuple[Any, list[tuple[Case, list[str]]]]:
    """Returns the options of the command line, and the cases that it chooses."""
    parser = argparse.ArgumentParser(
        prog="python -m cases", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("names", nargs="*", help="kinds, cases, or forms of cases")
    parser.add_argument("--tool", default="lockstep", choices=["lockstep", "plain"])
    parser.add_argument("--framework", default="", choices=["torch", "jax", "keras"])
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one program of N")
    parser.add_argument("--number", type=int, metavar="N", help="N programs, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="seed of --number")
    parser.add_argument("--keep", type=_folder, metavar="DIR", help="folder of recordings")
    parser.add_argument("--kept", action="store_true", help="only judge recordings in DIR")
    parser.add_argument("--update", action="store_true", help="write the results")
    parser.add_argument("--timeout_sec", type=float, default=60, help="limit of each run")
    options = parser.parse_args(arguments)
    for name in ("every", "number", "timeout_sec"):
        value = getattr(options, name)
        if value is not None and not 0 < value <= 10**6:
            parser.error(f"--{name} must be greater than 0 and at most 1000000, got {value:g}")
    try:
        chosen = choose(
            read_cases(), options.names, framework=options.framework, every=options.every,
            number=options.number, seed=options.seed,
        )  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    if not chosen:
        parser.error("no program has these names and options")
    if options.kept and not options.keep:
        parser.error("--kept needs --keep=DIR")
    if options.kept and not options.keep.is_dir():
        parser.error(f"--keep={options.keep} is no folder with recordings")
    return options, chosen


def _folder(text: str) -> pathlib.Path:
    if not text:
        raise argparse.ArgumentTypeError("the name of a folder is empty")
    return pathlib.Path(text)


def _terminate(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _run_all(
    chosen: Sequence[tuple[Case, list[str]]], runner: Runner, scratch: pathlib.Path, options: Any
) -> int:
    """Runs cases, as many at once as there are processors; returns the exit code."""
    tool = importlib.import_module(f"cases.tools.{options.tool}")
    start, found, differing = time.monotonic(), dict[str, dict[str, Any]](), 0
    expected = read_lines(FOLDER / tool.RESULTS)
    pool, waiting = concurrent.futures.ThreadPoolExecutor(AT_ONCE), {}
    try:
        for number, (case, names) in enumerate(chosen):
            if missing := missing_packages(case):
                print(f"{case.id}: left out, needs {', '.join(missing)}", flush=True)
            else:
                folder = scratch / str(number)
                waiting[pool.submit(_judge, tool, case, names, runner, folder)] = case
        for number, done in enumerate(concurrent.futures.as_completed(waiting), 1):
            print(f"[{number}/{len(waiting)}] {waiting[done].id}", flush=True)
            for line in done.result():
                text = line.pop("text")
                found[line["variant"]] = line
                expected_line = expected.get(line["variant"], {})
                is_other = line.get("status") == REFUSED or tool.differs(expected_line, line)
                differing += is_other
                print(_in_lines(line, expected_line if is_other else None, text), flush=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        runner.end()
        pool.shutdown()  # No thread writes to the scratch folder any more.
    if options.update:
        _write_results(FOLDER / tool.RESULTS, found)
    verdicts, distances = (found if options.tool == name else {} for name in ("lockstep", "plain"))
    print("\n".join(score(read_cases(), verdicts, distances)))
    left_out, minutes = len(chosen) - len(waiting), (time.monotonic() - start) / 60
    print(f"{len(found)} forms of {len(waiting)} programs, {differing} not as expected,"
          f" {left_out} programs left out, {minutes:.1f} min")  # fmt: skip
    has_refused = any(line.get("status") == REFUSED for line in found.values())
    if has_refused or (differing and not options.update):
        return 9
    return 3 if left_out and not found else 0


def _judge(
    tool: Any, case: Case, names: Sequence[str], runner: Runner, folder: pathlib.Path
) -> list[dict[str, Any]]:
    """Returns what a tool says of forms of a case; of all that none has a verdict if it fails."""
    folder.mkdir()
    try:
        return list(tool.judge(case, names, runner, folder))
    except CannotRunError:
        raise
    except Exception as error:  # A bug of the tool.
        refused = {"status": REFUSED, "text": f"{type(error).__name__}: {error}"}
        return [{"variant": f"{case.id}.{name}", **refused} for name in names]


def _write_results(path: pathlib.Path, found: dict[str, dict[str, Any]]) -> None:
    """Writes results beside those of other forms; warns of verdicts that look wrong."""
    lines = read_lines(path) | {
        key: line for key, line in found.items() if line.get("status") != REFUSED
    }
    forms = {
        f"{case.id}.{name}": name in case.wrong for case in read_cases() for name in case.variants
    }
    for key, line in found.items():
        if line.get("status") == ("clean" if forms[key] else "fault"):
            kind = "wrong" if forms[key] else "right"
            print(f"warning: {key}, a {kind} form, is {line['status']}")
    write_lines(path, {key: lines[key] for key in lines.keys() & forms.keys()})


def _in_lines(line: dict[str, Any], expected: dict[str, Any] | None, text: str) -> str:
    """Returns a form in a line; one that is not as expected with what was expected, and why."""
    form = line["variant"].partition(".")[2]
    if expected is None:
        return f"    {form}: {_in_words(line)}"
    lines = [f"expected: {_in_words(expected) or 'nothing'}", *text.strip().splitlines()[-12:]]
    return "\n        ".join([f"    DIFFERS {line['variant']}: {_in_words(line)}", *lines])


def _in_words(line: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in line.items() if key != "variant")


if __name__ == "__main__":
    sys.exit(main())
