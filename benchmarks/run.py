"""Compares Lockstep with its peers in one interleaved run, and writes the results.

    make bench                                        everything, three quarters of an hour;
                                                      writes docs/BENCHMARKS.md
    make bench ARGS=--quick                           what matters most, in short blocks
    .venv/bin/python benchmarks/run.py --only=lenet   one part of it

A round times one block of each program in turn, while the others sleep, so that disturbances affect
all of them. Ratios are of medians over the rounds, with 95 % bootstrap intervals over rounds.
"""

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any, Self

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import benchmark_figure
from bench_parts import EPOCH_STEPS, LENET, Part, all_parts, lockstep

from app.performance.benchmark_output import processor_name
from app.records.files import write_file
from app.runtime.progress_bar import create_bar
from benchmark_page import FIGURE, LONG_STEPS, TARGET_ACCURACY, render, summary
from programs import Program, Running

_STARTED_TOGETHER = 3  # More would compete for the cores, and some have deadlines.
_QUICK_ROUNDS, _ROUNDS = 5, 9
_OTHERS = ("accuracy", "memory")


class Progress(contextlib.AbstractContextManager):
    """Shows a live bar of a part's blocks on a terminal, else one line per part."""

    def __init__(self) -> None:
        self._bar = create_bar()
        self._task = self._bar.add_task("", status="")
        self._done, self._total = 0, 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def start(self, title: str, total: int) -> None:
        """Shows a new part with `total` blocks."""
        self._done, self._total = 0, total
        self._bar.console.print(title)

    def next(self, what: str) -> None:
        """Shows the current task; the previous one is done."""
        self._bar.update(self._task, completed=self._done, total=self._total, status=what)
        self._done += 1


def measure(part: Part, *, rounds: int, data_dir: str, progress: Progress) -> dict[str, Any]:
    """Times a block of every program of a part in each round.

    Args:
        part: what to time.
        rounds: number of rounds.
        data_dir: folder with the four files of Fashion-MNIST.
        progress: shows the progress.

    Returns:
        name → the program's description of itself; "secs" has the seconds per image of each block,
        for peaks the seconds per floating-point operation; "accuracy" has the test accuracy.
    """
    programs = part.programs
    progress.start(part.title, (1 + rounds) * len(programs))
    with contextlib.ExitStack() as stack:
        running: list[Running] = []
        results: dict[str, Any] = {}
        for first in range(0, len(programs), _STARTED_TOGETHER):
            some = programs[first : first + _STARTED_TOGETHER]
            started = [stack.enter_context(Running(program, data_dir)) for program in some]
            for one in started:
                progress.next(f"preparing {one.program.name}")
                about = one.wait_until_ready()
                results[one.program.name] = {
                    "peer": one.program.peer, "precision": one.program.precision,
                    **about, "secs": [], "images": [],
                }  # fmt: skip
            running += started
        for number in range(rounds):
            for one in running if number % 2 == 0 else reversed(running):
                progress.next(f"round {number + 1} of {rounds}: {one.program.name}")
                answer = one.ask(do="steps", num_steps=part.num_steps)
                result = results[one.program.name]
                result["secs"].append(answer["sec"] / answer["images"])
                result["images"].append(answer["images"])
                if part.tests_first_block and number == 0:
                    result["accuracy"] = one.ask(do="evaluate")["accuracy"]
    return results


def time_to_accuracy(*, rounds: int, data_dir: str, progress: Progress) -> dict[str, Any]:
    """Trains to a test accuracy, testing after every epoch, with the programs in turn.

    Returns:
        name → for each round, seconds of training and testing, and epochs.
    """
    fast = (*LENET, "--recipe=fast", "--epochs=1")
    programs = [
        lockstep("fast, manual × 2, bfloat16", *fast, precision="bfloat16"),
        lockstep("fast, manual × 2", *fast),
        Program("d2l, its recipe and loop × 2", "d2l_loop.py", (*LENET, "--num_devices=2")),
    ]
    results: dict[str, Any] = {program.name: [] for program in programs}
    progress.start(f"Time to a test accuracy of {TARGET_ACCURACY}", 2 * rounds + 1)
    for number in range(rounds):
        for program in programs:
            if number and program.file == "d2l_loop.py":
                continue  # It takes minutes, so only once: the ratio is far from any bound.
            progress.next(program.name)
            with Running(program, data_dir) as one:
                one.wait_until_ready()
                sec, epochs, accuracy = 0.0, 0, 0.0
                while accuracy < TARGET_ACCURACY and epochs < 30:
                    sec += one.ask(do="steps", num_steps=EPOCH_STEPS)["sec"]
                    answer = one.ask(do="evaluate")
                    sec, accuracy, epochs = sec + answer["sec"], answer["accuracy"], epochs + 1
            results[program.name].append({"sec": sec, "epochs": epochs, "accuracy": accuracy})
    return results


def memory_growth(data_dir: str, progress: Progress) -> dict[str, int]:
    """Runs many steps and returns resident memory before and after them, in bytes."""
    num_blocks = 20
    progress.start(f"Memory over {LONG_STEPS:,} steps", num_blocks + 1)
    with Running(lockstep("manual × 2", *LENET, precision="bfloat16"), data_dir) as one:
        progress.next("preparing")
        one.wait_until_ready()
        one.ask(do="steps", num_steps=500)  # Buffers have reached their size.
        before = one.ask(do="memory")["resident_bytes"]
        for number in range(num_blocks):
            progress.next(f"block {number + 1} of {num_blocks}")
            one.ask(do="steps", num_steps=LONG_STEPS // num_blocks)
        return {"before_bytes": before, "after_bytes": one.ask(do="memory")["resident_bytes"]}


def measure_parts(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Measures the requested parts and adds them to `results`."""
    data_dir, rounds = options.data_dir, options.rounds
    with Progress() as progress:
        for name, part in all_parts(options.peers_python, quick=options.quick).items():
            if options.only not in (None, name):
                continue
            measured = measure(part, rounds=rounds, data_dir=data_dir, progress=progress)
            results["parts"][name] = {
                "title": part.title, "model": part.model, "programs": measured,
                "ratios": [[ratio.program, ratio.base] for ratio in part.ratios],
            }  # fmt: skip
            results["versions"] = {**results.get("versions", {}), **_versions(measured)}
        others: dict[str, Callable[[], dict[str, Any]]] = {
            "accuracy": lambda: time_to_accuracy(rounds=3, data_dir=data_dir, progress=progress),
            "memory": lambda: memory_growth(data_dir, progress),
        }
        for name, measure_it in others.items():
            if options.only == name or (options.only is None and not options.quick):
                results[name] = measure_it()


def save(results: dict[str, Any], out: pathlib.Path, page: pathlib.Path | None) -> None:
    """Writes the results and prints the summary; each file is replaced atomically.

    Args:
        results: results of this run, and of earlier runs with `--only`.
        out: directory for `bench.json`, `bench.md` and the figure.
        page: written, with the figure, only if all parts have been measured; None for no page.
    """
    write_file(out / "bench.json", json.dumps(results, indent=1))
    table = render(results)
    write_file(out / "bench.md", table)
    figure = pathlib.Path(FIGURE).stem
    if results["parts"]:
        benchmark_figure.draw(results, out, figure)
        print("\n".join(summary(results)))
    print(f"saved {out}: bench.md, {FIGURE}, bench.json")
    missing = [
        part for part in (*all_parts(), *_OTHERS) if part not in (*results["parts"], *results)
    ]
    if page and results.get("quick"):
        print(f"{page} is left as it is: it is written by the complete run, without --quick")
    elif page and missing:
        print(f"{page} is left as it is: not measured yet: {', '.join(missing)}")
    elif page:
        write_file(page, table)
        benchmark_figure.draw(results, page.parent, figure)
        print(f"saved {page}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the requested parts, prints a summary and saves all results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=(*all_parts(), *_OTHERS))
    parser.add_argument("--quick", action="store_true", help="what matters most, in short blocks")
    parser.add_argument("--rounds", type=int, help=f"{_ROUNDS}, with --quick {_QUICK_ROUNDS}")
    parser.add_argument("--data_dir", default=os.environ.get("FASHION_MNIST_DIR"))
    parser.add_argument("--out", help="directory of all figures: runs/bench, runs/bench_quick")
    parser.add_argument("--output", type=pathlib.Path, help="page, written once all is measured")
    parser.add_argument("--peers_python", default=str(ROOT / ".venv-bench/bin/python"))
    options = parser.parse_args(arguments)
    _check(parser, options)
    out = pathlib.Path(options.out or f"runs/bench{'_quick' if options.quick else ''}")
    out.mkdir(parents=True, exist_ok=True)
    path = out / "bench.json"
    results = json.loads(path.read_text(encoding="utf-8")) if options.only and path.exists() else {}
    results.setdefault("parts", {})
    results["processor"], results["cores"] = processor_name(), os.cpu_count()
    results["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    results["quick"] = options.quick
    measure_parts(options, results)
    save(results, out, options.output)


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exits with one line if the flags contradict each other."""
    quick = all_parts(quick=True)
    if options.quick and options.only and options.only not in quick:
        parser.error(
            f"--only={options.only}: not a part of --quick; use one of {', '.join(quick)}, or"
            " leave --quick out"
        )
    if options.rounds is None:
        options.rounds = _QUICK_ROUNDS if options.quick else _ROUNDS
    if options.rounds < 1:
        parser.error(f"--rounds={options.rounds} must be at least 1; use 5 or more")
    if not options.data_dir:
        sys.exit(
            "error: --data_dir is missing and $FASHION_MNIST_DIR is not set; pass the folder with"
            " the four files of Fashion-MNIST"
        )


def _versions(measured: dict[str, Any]) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for result in measured.values():
        versions |= result.get("versions", {})
    return versions


if __name__ == "__main__":
    main()
