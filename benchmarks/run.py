"""Compares Lockstep with its peers in one interleaved run, and writes the results.

    make bench                    everything, about 40 minutes; writes docs/BENCHMARKS.md
    make bench ARGS=--only=lenet  one part
    make bench ARGS=--quick       this project and PyTorch, short blocks: at most five minutes
    make bench ARGS=--isa=avx2    as on a processor with AVX2 alone

A round times one block of each program in turn, while the others sleep, so that disturbances affect
all of them. Ratios are of medians over the rounds, with 95 % bootstrap intervals over rounds. The
results of each round are written at once. The page has a section for each kind of processor, in
which the rows of trainings that are not measured again stay.
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
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from subprocess import PIPE
from typing import Any

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

import figure
import page
import parts
from app.records.files import write_file
from app.runtime import kernels
from app.runtime.console import count
from app.runtime.errors import reason_of
from app.runtime.processes import Process
from parts import EIGEN, ISA, ONEDNN, OWN, PARTS, PROGRAMS, QUICK, Part

STARTED_TOGETHER = 3  # More would compete for the cores, and some have deadlines.
NUM_ROUNDS = 9
BLOCK_SEC, QUICK_BLOCK_SEC = 2.0, 1.0  # Of `manual`, at least a step.
START_SEC = 12.0  # Of a program: imports, warm-up; in part while another one starts.


class Running(Process):
    """A program in a process of its own; leaving the context ends it and its child processes."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | pathlib.Path],
        environment: Mapping[str, str | None] | None = None,
    ):
        super().__init__(
            command,
            environment=environment,
            keeps_errors=True,
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,
        )
        self.name = name

    def ask(self, request: str = "") -> Any:
        """Sends a request, if there is one, and waits for the answer."""
        if request:
            self.stdin.write(f"{request}\n".encode())
            self.stdin.flush()
        if line := self.stdout.readline():
            return json.loads(line)
        told = self.last_line or "nothing"
        sys.exit(f"error: {self.name} ended before it answered; it said last: {told}")


def start(name: str, part: Part, num_steps: int, options: argparse.Namespace) -> Running:
    """Starts a program of a part, which warms up."""
    command = command_of(name, part, num_steps, options)
    return Running(name, command, parts.environment_of(name))


def command_of(
    name: str, part: Part, num_steps: int, options: argparse.Namespace
) -> list[str | pathlib.Path]:
    """Returns the command of a program, with the interpreter that has its framework."""
    framework, *flags = PROGRAMS[name].removeprefix(EIGEN).removeprefix(ONEDNN).split()
    is_elsewhere = framework.startswith(("torch", "jax"))
    python = options.peers_python if is_elsewhere else sys.executable
    size = [f"--num_steps={num_steps}", f"--data_dir={options.data_dir}"]
    return [python, FOLDER / "program.py", framework, *part.flags.split(), *flags, *size]


def choose_num_steps(part: Part, options: argparse.Namespace) -> int:
    """Returns the steps of a block, from the time of a step; prints how long the part will take."""
    with start(OWN[0], part, 1, options) as probe:
        probe.ask()
        step_sec = min(probe.ask("steps")["sec"] for _ in range(3))
    block_sec = QUICK_BLOCK_SEC if options.quick else BLOCK_SEC
    num_steps = part.num_steps or max(1, math.ceil(block_sec / step_sec))
    # The peers and Eigen take longer than `manual`: 1.5 times on average.
    a_program_sec = START_SEC + 1.5 * options.rounds * num_steps * step_sec
    minutes = count(math.ceil(len(part.programs) * a_program_sec / 60), "minute")
    print(
        f"{part.title}: {len(part.programs)} programs, {options.rounds} rounds of blocks of"
        f" {count(num_steps, 'step')}; about {minutes}",
        flush=True,
    )
    return num_steps


def measure(part: Part, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Times a block of every program of a part in each round.

    Yields:
        After each round: name → "versions", the seconds per image of each block in "secs",
        "images", and the test accuracy where it is computed.
    """
    num_steps = choose_num_steps(part, options)
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        running: list[Running] = []
        for first in range(0, len(part.programs), STARTED_TOGETHER):
            names = part.programs[first : first + STARTED_TOGETHER]
            started = [start(name, part, num_steps, options) for name in names]
            for each in map(stack.enter_context, started):
                results[each.name] = {**each.ask(), "secs": [], "images": []}
            running += started
        begin = time.monotonic()
        for number in range(options.rounds):
            for each in running if number % 2 == 0 else reversed(running):
                answer, result = each.ask("steps"), results[each.name]
                result["secs"].append(answer["sec"] / answer["images"])
                result["images"].append(answer["images"])
                if part.tests_first_block and number == 0:
                    result |= each.ask("evaluate")
            took = time.monotonic() - begin
            print(f"  round {number + 1} of {options.rounds}, {took:.0f} s", flush=True)
            yield results


def load(path: pathlib.Path) -> dict[str, Any]:
    """Reads the results of earlier runs: name of a processor → its results; empty without a file.

    Raises:
        SystemExit: the file holds something else.
    """
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not all({*results["parts"]} == {*results["rounds"]} for results in found.values()):
            raise KeyError("rounds")
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        sys.exit(f"error: {path} has no results of this program; move it away, or pass --out")


def save(machine: str, results: dict[str, Any], out: pathlib.Path) -> None:
    """Writes the results so far; those of other kinds of processors stay."""
    path = out / "bench.json"
    write_file(path, json.dumps(load(path) | {machine: results}, indent=1))


def write_page(machine: str, results: dict[str, Any], path: pathlib.Path) -> None:
    """Writes the section of a kind of processor and its figure."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    section = page.render(machine, results, text)
    write_file(path, page.with_section(text, section))
    figure.draw_ratios(machine, section, path.parent)
    print(f"saved {path}", flush=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--quick", action="store_true", help="PyTorch alone, short blocks, no page")
    parser.add_argument("--isa", choices=ISA, help="compute as on a processor with these alone")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--data_dir", default=os.environ.get("FASHION_MNIST_DIR"))
    parser.add_argument("--out", type=pathlib.Path, help="runs/bench; with --quick bench-quick")
    parser.add_argument("--output", type=pathlib.Path, help="page; --quick does not write it")
    parser.add_argument("--peers_python", default=FOLDER.parent / ".venv-bench/bin/python")
    options = parser.parse_args(arguments)
    options.out = options.out or pathlib.Path("runs/bench-quick" if options.quick else "runs/bench")
    if options.quick and options.only not in (None, *QUICK):
        parser.error(f"--quick has the parts {' and '.join(QUICK)}, not --only={options.only}")
    if options.rounds < 1:
        parser.error(f"--rounds={options.rounds} must be at least 1; use 5 or more")
    if not options.data_dir:
        sys.exit(
            "error: --data_dir is missing and $FASHION_MNIST_DIR is not set; pass the folder with"
            " the four files of Fashion-MNIST"
        )
    for name in (name for limits in ISA.values() for name in limits):
        if name != "XLA_FLAGS" and os.environ.get(name):
            sys.exit(f"error: {name} limits some programs only; unset it, or use --isa")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        if options.output and options.output.exists():
            options.output.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        sys.exit(f"error: {reason_of(error)}; choose other places with --out and --output")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the requested parts; prints and saves the results as they are measured."""
    options = parse(arguments)
    for name, value in ISA.get(options.isa, {}).items():
        os.environ[name] = f"{os.environ.get(name, '')} {value}".strip()
    machine, flags = page.name_of_machine(options.isa), kernels.usable_flags()
    print(machine)
    paths = [options.out / "bench.md"]
    paths += [options.output] if options.output and not options.quick else []
    results: dict[str, Any] = {"parts": {}, "rounds": {}, "dates": {}, "versions": {}}
    results |= load(options.out / "bench.json").get(machine, {})
    results["versions"] |= {"python": platform.python_version()}
    reasons = dict.fromkeys(parts.why_left_out(name, flags) for name in PROGRAMS)
    results["left_out"] = [reason for reason in reasons if reason]
    for name in [options.only] if options.only else QUICK if options.quick else PARTS:
        part = PARTS[name]
        chosen = [p for p in part.programs if not options.quick or p in parts.QUICK_PROGRAMS]
        for reason in dict.fromkeys(filter(None, (parts.why_left_out(p, flags) for p in chosen))):
            print(f"not measured: {reason}")
        part = dataclasses.replace(
            part, programs=tuple(p for p in chosen if not parts.why_left_out(p, flags))
        )
        for number, measured in enumerate(measure(part, options), start=1):
            results["parts"][name] = measured
            results["rounds"][name] = number, options.rounds
            results["dates"][name] = datetime.datetime.now(datetime.UTC).date().isoformat()
            for result in measured.values():
                results["versions"] |= result["versions"]
            save(machine, results, options.out)
        print("\n".join(page.summary({"parts": {name: results["parts"][name]}})))
        for path in paths:
            write_page(machine, results, path)


if __name__ == "__main__":
    main()
