"""Compares Lockstep with its peers in one interleaved run, and writes the results.

    make bench                                        everything; writes docs/BENCHMARKS.md
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
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench_parts import Part, all_parts

from app.performance import interval
from app.performance.benchmark_output import processor_name
from app.records.files import write_file
from app.report.bar_plot import plot_bars
from benchmark_page import FIGURE, render, summary
from programs import Running

_STARTED_TOGETHER = 3  # More would compete for the cores, and some have deadlines.


def measure(part: Part, *, rounds: int, data_dir: str) -> dict[str, Any]:
    """Times a block of every program of a part in each round.

    Args:
        part: what to time.
        rounds: number of rounds.
        data_dir: folder with the four files of Fashion-MNIST.

    Returns:
        name → the program's description of itself; "secs" has the seconds per image of each block,
        "accuracy" the test accuracy.
    """
    print(part.title, flush=True)
    with contextlib.ExitStack() as stack:
        running: list[Running] = []
        results: dict[str, Any] = {}
        for first in range(0, len(part.programs), _STARTED_TOGETHER):
            some = part.programs[first : first + _STARTED_TOGETHER]
            started = [stack.enter_context(Running(program, data_dir)) for program in some]
            for one in started:
                about = one.wait_until_ready()
                results[one.program.name] = {
                    "peer": one.program.peer, "precision": one.program.precision,
                    **about, "secs": [], "images": [],
                }  # fmt: skip
            running += started
        for number in range(rounds):
            print(f"  round {number + 1} of {rounds}", flush=True)
            for one in running if number % 2 == 0 else reversed(running):
                answer = one.ask(do="steps", num_steps=part.num_steps)
                result = results[one.program.name]
                result["secs"].append(answer["sec"] / answer["images"])
                result["images"].append(answer["images"])
                if part.tests_first_block and number == 0:
                    result["accuracy"] = one.ask(do="evaluate")["accuracy"]
    return results


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
    draw(results, out)
    print("\n".join(summary(results)))
    print(f"saved {out}: bench.md, {FIGURE}, bench.json")
    missing = [name for name in all_parts() if name not in results["parts"]]
    if page and missing:
        print(f"{page} is left as it is: not measured yet: {', '.join(missing)}")
    elif page:
        write_file(page, table)
        draw(results, page.parent)
        print(f"saved {page}")


def draw(results: dict[str, Any], out_dir: pathlib.Path) -> None:
    """Draws images per second of every program, with intervals, in one panel per part."""
    panels = {}
    for part in results["parts"].values():
        rates = {
            name: interval.combine(lambda sec: 1 / sec, result["secs"])
            for name, result in part["programs"].items()
        }
        bars = {name: (rate.value, rate.low, rate.high) for name, rate in rates.items()}
        panels[f"{part['title'].replace('`', '')}: images per second"] = bars
    title = f"{results['processor']}, {results['cores']} cores shared by all devices of a program"
    plot_bars(title, panels, out_dir, pathlib.Path(FIGURE).stem)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the requested parts, prints a summary and saves all results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=all_parts())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--data_dir", default=os.environ.get("FASHION_MNIST_DIR"))
    parser.add_argument("--out", type=pathlib.Path, default="runs/bench", help="all figures")
    parser.add_argument("--output", type=pathlib.Path, help="page, written once all is measured")
    parser.add_argument("--peers_python", default=str(ROOT / ".venv-bench/bin/python"))
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds={options.rounds} must be at least 1; use 5 or more")
    if not options.data_dir:
        sys.exit(
            "error: --data_dir is missing and $FASHION_MNIST_DIR is not set; pass the folder with"
            " the four files of Fashion-MNIST"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "bench.json"
    results = json.loads(path.read_text(encoding="utf-8")) if options.only and path.exists() else {}
    results.setdefault("parts", {})
    results.setdefault("versions", {"python": platform.python_version()})
    results["processor"], results["cores"] = processor_name(), os.cpu_count()
    results["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    for name, part in all_parts(options.peers_python).items():
        if options.only in (None, name):
            measured = measure(part, rounds=options.rounds, data_dir=options.data_dir)
            results["parts"][name] = {
                "title": part.title, "model": part.model, "programs": measured,
                "ratios": part.ratios,
            }  # fmt: skip
            for result in measured.values():
                results["versions"] |= result.get("versions", {})
    save(results, options.out, options.output)


if __name__ == "__main__":
    main()
