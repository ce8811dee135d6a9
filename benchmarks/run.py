"""Compares Lockstep with its peers in one interleaved run, and writes the results.

    make bench                    everything, about 40 minutes; writes benchmarks/RESULTS.md
    make bench ARGS=--only=lenet  one part; writes no page

A round times one block of each program in turn, while the others sleep, so that disturbances affect
all of them. Ratios are of medians over the rounds, with 95 % bootstrap intervals over rounds. The
results of each round are written to `bench.json` at once.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import math
import os
import pathlib
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

import machine
import page
import parts
from app.console import count
from app.errors import reason_of
from app.records.files import write_file
from parts import EIGEN, ONEDNN, OWN, PARTS, PROGRAMS, Part

STARTED_TOGETHER = 3  # More would compete for the cores, and some have deadlines.
NUM_ROUNDS = 9
BLOCK_SEC = 2.0  # Of `manual`, at least a step.


class Running:
    """A program in a process of its own; leaving the context ends it and its child processes."""

    def __init__(
        self, name: str, command: Sequence[str | pathlib.Path],
        environment: Mapping[str, str | None],
    ):  # fmt: skip
        self.name, self._errors = name, tempfile.TemporaryFile()  # noqa: SIM115
        changed = {**os.environ, **environment}
        self._process = subprocess.Popen(
            command, env={key: value for key, value in changed.items() if value is not None},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.__exit__(None, None, None)
        self._errors.close()

    def ask(self, request: str = "") -> Any:
        """Sends a request, if there is one, and waits for the answer."""
        assert self._process.stdin and self._process.stdout
        if request:
            self._process.stdin.write(f"{request}\n".encode())
            self._process.stdin.flush()
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._errors.seek(0)
        last = [*self._errors.read().decode(errors="replace").splitlines(), "nothing"][-2:][0]
        sys.exit(f"error: {self.name} ended before it answered; it said last: {last}")


def start(name: str, part: Part, num_steps: int, options: argparse.Namespace) -> Running:
    """Starts a program of a part, with the interpreter that has its framework; it warms up."""
    framework, *flags = PROGRAMS[name].removeprefix(EIGEN).removeprefix(ONEDNN).split()
    is_elsewhere = framework.startswith(("torch", "jax"))
    python = options.peers_python if is_elsewhere else sys.executable
    size = [f"--num_steps={num_steps}", f"--data_dir={options.data_dir}"]
    command = [python, FOLDER / "program.py", framework, *part.flags.split(), *flags, *size]
    return Running(name, command, parts.environment_of(name))


def choose_num_steps(part: Part, options: argparse.Namespace) -> int:
    """Returns the steps of a block, from the time of a step."""
    with start(OWN[0], part, 1, options) as probe:
        probe.ask()
        step_sec = min(probe.ask("steps")["sec"] for _ in range(3))
    num_steps = part.num_steps or max(1, math.ceil(BLOCK_SEC / step_sec))
    print(
        f"{part.title}: {len(part.programs)} programs, {options.rounds} rounds of blocks of"
        f" {count(num_steps, 'step')}",
        flush=True,
    )
    return num_steps


def measure(part: Part, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times a block of every program of a part in each round.

    Yields:
        After each round: name → "versions", the seconds per image of each block in "secs", and
        the test accuracy where it is computed.
    """
    num_steps = choose_num_steps(part, options)
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        running: list[Running] = []
        for first in range(0, len(part.programs), STARTED_TOGETHER):
            names = part.programs[first : first + STARTED_TOGETHER]
            started = [start(name, part, num_steps, options) for name in names]
            for each in map(stack.enter_context, started):
                results[each.name] = {**each.ask(), "secs": []}
            running += started
        begin = time.monotonic()
        for number in range(options.rounds):
            for each in running if number % 2 == 0 else reversed(running):
                answer, result = each.ask("steps"), results[each.name]
                result["secs"].append(answer["sec"] / answer["images"])
                if part.num_steps and number == 0:
                    result |= each.ask("evaluate")
            took = time.monotonic() - begin
            print(f"  round {number + 1} of {options.rounds}, {took:.0f} s", flush=True)
            yield results


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--data_dir", default=os.environ.get("FASHION_MNIST_DIR"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/bench"))
    parser.add_argument("--output", type=pathlib.Path, help="page, if every part is measured")
    parser.add_argument("--peers_python", default=FOLDER.parent / ".venv-bench/bin/python")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds={options.rounds} must be at least 1; use 5 or more")
    if not options.data_dir:
        sys.exit(
            "error: --data_dir is missing and $FASHION_MNIST_DIR is not set; pass the folder with"
            " the four files of Fashion-MNIST"
        )
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"error: {reason_of(error)}; choose another place with --out")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the requested parts; prints and saves the results as they are measured."""
    options = parse(arguments)
    flags = machine.read_flags()
    results: dict[str, Any] = {
        "machine": machine.name_of_machine(),
        "command": f"benchmarks/run.py {shlex.join(arguments or sys.argv[1:])}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {"python": platform.python_version()},
        "parts": {},
    }
    print(results["machine"])
    reasons = dict.fromkeys(parts.why_left_out(name, flags) for name in PROGRAMS)
    results["left_out"] = [reason for reason in reasons if reason]
    for name in [options.only] if options.only else PARTS:
        chosen = tuple(p for p in PARTS[name].programs if not parts.why_left_out(p, flags))
        for measured in measure(dataclasses.replace(PARTS[name], programs=chosen), options):
            results["parts"][name] = measured
            for result in measured.values():
                results["versions"] |= result["versions"]
            write_file(options.out / "bench.json", json.dumps(results, indent=1))
        print("\n".join(page.summary({name: results["parts"][name]})))
    if options.output and results["parts"].keys() == PARTS.keys():
        before = options.output.read_text(encoding="utf-8") if options.output.exists() else ""
        write_file(options.output, page.render(results, before))
        print(f"saved {options.output}")


if __name__ == "__main__":
    main()
