"""Compares Lockstep with its peers in one interleaved run, and writes the results.

    make bench                 everything, about forty minutes; writes docs/BENCHMARKS.md
    make bench ARGS=--quick    this project and PyTorch, three rounds: five minutes; no page
    make bench ARGS=--only=lenet    one part

A round times one block of each program in turn, while the others sleep, so that disturbances affect
all of them. Ratios are of medians over the rounds, with 95 % bootstrap intervals over rounds.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

from app.performance import interval
from app.performance.benchmark_output import processor_name
from app.records.files import write_file
from app.report.plot_style import LOOKS, STYLE, save_figure

FIGURE = "benchmarks.png"
STARTED_TOGETHER = 3  # More would compete for the cores, and some have deadlines.
GRACE_SEC = 10

# Name in the tables → framework and flags of `program.py`.
PROGRAMS = {
    "manual × 2": "lockstep",
    "manual × 2, bfloat16": "lockstep --precision=bfloat16",
    "mirrored × 2": "lockstep --strategy=mirrored",
    "single × 1": "lockstep --strategy=single --num_devices=1",
    "pipeline, GPipe × 2": "lockstep --strategy=pipeline --schedule=gpipe",
    "pipeline, 1F1B × 2": "lockstep --strategy=pipeline --schedule=1f1b",
    "tensor × 2": "lockstep --strategy=tensor",
    "sharded × 2": "lockstep --strategy=sharded",
    "PyTorch DDP × 2": "torch_ddp",
    "PyTorch DDP × 2, bfloat16": "torch_ddp --precision=bfloat16",
    "PyTorch pipeline, GPipe × 2": "torch_pipeline --schedule=gpipe",
    "PyTorch pipeline, 1F1B × 2": "torch_pipeline --schedule=1f1b",
    "PyTorch FSDP2 × 2": "torch_fsdp",
    "JAX × 1": "jax --num_devices=1",
    "d2l, eager loop × 2": "d2l",
    "Keras fit × 2": "keras",
    "Keras fit × 2, bfloat16": "keras --precision=bfloat16",
    "Keras fit × 1": "keras --num_devices=1",
    "Keras fit × 1, bfloat16": "keras --num_devices=1 --precision=bfloat16",
}
PEERS = ("PyTorch", "JAX", "Keras")
OWN = ("manual × 2", "manual × 2, bfloat16")
NETWORK = (
    *OWN, "mirrored × 2", "single × 1", "PyTorch DDP × 2", "PyTorch DDP × 2, bfloat16", "JAX × 1",
)  # fmt: skip
KERAS = (*OWN, "Keras fit × 2", "Keras fit × 2, bfloat16")  # Apart: its stalls disturb others.
SPLIT = ("pipeline, GPipe × 2", "pipeline, 1F1B × 2", "tensor × 2", "sharded × 2")
TORCH = ("PyTorch DDP × 2", *(f"PyTorch {s}" for s in (*SPLIT[:2], "FSDP2 × 2")))
RATIOS = ((OWN[1], OWN[0]), ("mirrored × 2", OWN[0]), (OWN[0], "single × 1"))


@dataclasses.dataclass(frozen=True)
class Part:
    """Programs that are measured in turn.

    Attributes:
        title: title of the table; its first words are the model.
        flags: flags of all its programs.
        programs: names of the programs.
        ratios: program and base of comparisons to print, besides each peer's best.
        tests_first_block: whether the test accuracy is computed after the first block, untimed.
    """

    title: str
    flags: str
    programs: tuple[str, ...]
    ratios: tuple[tuple[str, str], ...] = ()
    tests_first_block: bool = False


LENET = "--model=lenet --global_batch_size=256 --num_steps=120"
RESNET = "--model=resnet18 --global_batch_size=64 --num_steps=4"
PARTS = {
    "lenet": Part(
        "LeNet, batch 256", LENET, (*NETWORK, "d2l, eager loop × 2"),
        (*RATIOS, (OWN[0], "d2l, eager loop × 2")),
    ),
    "lenet_keras": Part(
        "LeNet, batch 256, beside Keras", LENET,
        (*KERAS, "Keras fit × 1", "Keras fit × 1, bfloat16"),
    ),
    "resnet18": Part("ResNet-18, batch 64", RESNET, NETWORK, RATIOS),
    "resnet18_keras": Part(
        "ResNet-18, batch 64, beside Keras", RESNET, KERAS
    ),
    "lenet_split": Part(
        "LeNet, batch 256, recipe fast",
        "--model=lenet --recipe=fast --num_steps=235",  # The last batch is short.
        (OWN[0], *SPLIT, *TORCH),
        (*((name, OWN[0]) for name in SPLIT), *zip((*SPLIT[:2], SPLIT[3]), TORCH[1:], strict=True)),
        tests_first_block=True,
    ),
}  # fmt: skip
QUICK, QUICK_PEERS = ("lenet", "resnet18"), ("PyTorch DDP × 2", "PyTorch DDP × 2, bfloat16")


class Running(contextlib.AbstractContextManager):
    """A program in a process of its own; leaving the context ends it and its child processes."""

    def __init__(self, name: str, command: Sequence[str | pathlib.Path]):
        self.name = name
        # Not a pipe, which would not be read until the end; closed by `__exit__`.
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True,
            start_new_session=True,  # A process group, ended as a whole.
        )  # fmt: skip

    def ask(self, request: str = "") -> dict:
        """Sends a request, if there is one, and waits for the answer."""
        if request:
            print(request, file=self._process.stdin, flush=True)
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._said.seek(0)
        last = (self._said.read().strip().splitlines() or ["nothing"])[-1]
        sys.exit(f"error: {self.name} ended before it answered; it said last: {last}")

    def __exit__(self, *exception):
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(GRACE_SEC)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        self._said.close()


def command_of(name: str, part: Part, options: argparse.Namespace) -> list[str | pathlib.Path]:
    """Returns the command of a program, with the interpreter that has its framework."""
    framework, *flags = PROGRAMS[name].split()
    is_elsewhere = framework.startswith(("torch", "jax"))
    python = options.peers_python if is_elsewhere else sys.executable
    data = f"--data_dir={options.data_dir}"
    return [python, FOLDER / "program.py", framework, *part.flags.split(), *flags, data]


def measure(part: Part, options: argparse.Namespace) -> dict[str, Any]:
    """Times a block of every program of a part in each round.

    Returns:
        name → "versions", the seconds per image of each block in "secs", "images", and the test
        accuracy where it is computed.
    """
    print(part.title, flush=True)
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        running: list[Running] = []
        for first in range(0, len(part.programs), STARTED_TOGETHER):
            names = part.programs[first : first + STARTED_TOGETHER]
            started = [Running(name, command_of(name, part, options)) for name in names]
            for each in map(stack.enter_context, started):
                results[each.name] = {**each.ask(), "secs": [], "images": []}
            running += started
        for number in range(options.rounds):
            print(f"  round {number + 1} of {options.rounds}", flush=True)
            for each in running if number % 2 == 0 else reversed(running):
                answer, result = each.ask("steps"), results[each.name]
                result["secs"].append(answer["sec"] / answer["images"])
                result["images"].append(answer["images"])
                if part.tests_first_block and number == 0:
                    result |= each.ask("evaluate")
    return results


def render(results: dict[str, Any]) -> str:
    """Returns the results as Markdown: one table of all comparisons."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        (FOLDER / "preamble.md").read_text(encoding="utf-8"),
        f"{results['date']}, {results['processor']}, {results['cores']} cores, no GPU; {versions}.",
        *("", f"![ratios of times with their intervals]({FIGURE})", "", *summary(results), ""),
    ]
    tested = [each["accuracy"] for part in results["parts"].values() for each in part.values()
              if "accuracy" in each]  # fmt: skip
    if tested:  # The programs of recipe fast.
        lines += [
            f"The test accuracies after the epoch of recipe `fast` are {min(tested):.4f} to"
            f" {max(tested):.4f}.", "",
        ]  # fmt: skip
    return "\n".join(lines)


def comparisons(results: dict[str, Any]) -> Iterator[tuple[str, str, str, interval.Interval]]:
    """Yields (title of a part, program, base, ratio of their times for an image)."""
    for part, programs in results["parts"].items():
        for name, base in [*_against_best(programs), *PARTS[part].ratios]:
            if name in programs and base in programs:  # Not all are measured with --quick.
                ratio = interval.ratio(programs[name]["secs"], programs[base]["secs"])
                yield PARTS[part].title, name, base, ratio


def summary(results: dict[str, Any]) -> list[str]:
    """Returns a table of this project against each peer's best, and the other ratios.

    A training's title is in the first of its rows.
    """
    lines = [
        "| Training | Program | Images/s | Over | Images/s | Ratio of times |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    programs = {PARTS[name].title: part for name, part in results["parts"].items()}
    shown = ""
    for title, name, base, ratio in comparisons(results):
        rates = [1 / interval.median(programs[title][each]["secs"]).value for each in (name, base)]
        lines.append(
            f"| {title if title != shown else ''} | {name} | {rates[0]:,.0f} | {base} |"
            f" {rates[1]:,.0f} | {ratio.value:.3f} ({ratio.low:.3f}–{ratio.high:.3f}) |"
        )
        shown = title
    return lines


@matplotlib.rc_context(STYLE)
def plot_ratios(results: dict[str, Any], path: pathlib.Path) -> None:
    """Draws each ratio as a mark with its interval, left of 1 where the first program is faster."""
    rows = list(comparisons(results))
    figure = Figure(figsize=(9, 1 + 0.27 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for row, (_, _, _, ratio) in enumerate(rows):
        look = LOOKS[0] if ratio.high < 1 else LOOKS[6] if ratio.low > 1 else LOOKS[2]
        axes.plot([ratio.low, ratio.high], [row, row], color=look.colour, linewidth=2)
        axes.plot(ratio.value, row, look.marker, color=look.colour)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    labels = [f"{title.partition(',')[0]}: {name} / {base}" for title, name, base, _ in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("ratio of times; left of 1 is faster")
    axes.grid(axis="x")
    title = f"{results['processor']}, {results['cores']} cores shared by all devices of a program"
    figure.suptitle(title)
    save_figure(figure, path.parent, path.stem)


def _against_best(programs: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields `manual` in a precision and the fastest program of each peer.

    For bfloat16, the peer's fastest program in any precision is used: bfloat16 may be slower there.
    """
    for name in [name for name in programs if name in OWN]:
        for peer in PEERS:
            of_peer = [other for other in programs if other.startswith(peer)]
            if "bfloat16" not in name:
                of_peer = [other for other in of_peer if "bfloat16" not in other]
            if of_peer:
                yield name, min(of_peer, key=lambda n: interval.median(programs[n]["secs"]).value)


def save(results: dict[str, Any], out: pathlib.Path, page: pathlib.Path | None) -> None:
    """Writes the results and prints the table; the page only if all parts have been measured."""
    write_file(out / "bench.json", json.dumps(results, indent=1))
    print("\n".join(summary(results)))
    missing = [name for name in PARTS if name not in results["parts"]]
    if page and missing:
        print(f"{page} is left as it is: not measured yet: {', '.join(missing)}")
    for path in (out / "bench.md", *([page] if page and not missing else [])):
        write_file(path, render(results))
        plot_ratios(results, path.parent / FIGURE)
        print(f"saved {path}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the requested parts, prints a summary and saves all results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--quick", action="store_true", help="compare with PyTorch alone")
    parser.add_argument("--rounds", type=int, help="9; 3 with --quick")
    parser.add_argument("--data_dir", default=os.environ.get("FASHION_MNIST_DIR"))
    parser.add_argument("--out", type=pathlib.Path, default="runs/bench", help="all figures")
    parser.add_argument("--output", type=pathlib.Path, help="page, written once all is measured")
    parser.add_argument("--peers_python", default=FOLDER.parent / ".venv-bench/bin/python")
    options = parser.parse_args(arguments)
    options.rounds = (3 if options.quick else 9) if options.rounds is None else options.rounds
    if options.quick and options.only:
        parser.error("--quick has parts of its own; leave out --only")
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
    results = {"parts": {}, "versions": {"python": platform.python_version()}} | results
    results["processor"], results["cores"] = processor_name(), os.cpu_count()
    results["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    for name in [options.only] if options.only else QUICK if options.quick else PARTS:
        part = PARTS[name]
        if options.quick:
            part = dataclasses.replace(part, programs=(*OWN, *QUICK_PEERS))
        results["parts"][name] = measure(part, options)
        for result in results["parts"][name].values():
            results["versions"] |= result["versions"]
    save(results, options.out, options.output)


if __name__ == "__main__":
    main()
