"""Compares Lockstep with its peers in one interleaved run, and writes the results.

    make bench                    everything, about 40 minutes; writes docs/BENCHMARKS.md
    make bench ARGS=--only=lenet  one part
    make bench ARGS=--quick       this project and PyTorch, short blocks: at most five minutes
    make bench ARGS=--isa=avx2    as on a processor with AVX2 alone

A round times one block of each program in turn, while the others sleep, so that disturbances affect
all of them. Ratios are of medians over the rounds, with 95 % bootstrap intervals over rounds. The
results of each round are written at once. The page has a section for each kind of processor.
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
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

FOLDER = pathlib.Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

from app.performance import interval
from app.records.files import write_file
from app.report.plot_style import LOOKS, STYLE, save_figure
from app.runtime import kernels, processor

STARTED_TOGETHER = 3  # More would compete for the cores, and some have deadlines.
GRACE_SEC = 10
# Limit → what makes oneDNN, PyTorch and XLA compute as on such a processor.
ISA = {
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
    }
}
EIGEN, ONEDNN = f"{kernels.VARIABLE}=0", f"{kernels.VARIABLE}=1"

# Name in the tables → framework and flags of `program.py`, after an environment variable.
PROGRAMS = {
    "manual × 2": "lockstep",
    "manual × 2, Eigen": f"{EIGEN} lockstep",
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
    "Keras fit × 2, oneDNN": f"{ONEDNN} keras",
    "Keras fit × 2, bfloat16": "keras --precision=bfloat16",
    "Keras fit × 1": "keras --num_devices=1",
    "Keras fit × 1, oneDNN": f"{ONEDNN} keras --num_devices=1",
    "Keras fit × 1, bfloat16": "keras --num_devices=1 --precision=bfloat16",
}
PEERS = ("PyTorch", "JAX", "Keras")
OWN = ("manual × 2", "manual × 2, bfloat16")
NETWORK = (
    *OWN, "manual × 2, Eigen", "mirrored × 2", "single × 1", "PyTorch DDP × 2",
    "PyTorch DDP × 2, bfloat16", "JAX × 1",
)  # fmt: skip
# Apart: its stalls disturb others.
KERAS = (*OWN, "Keras fit × 2", "Keras fit × 2, oneDNN", "Keras fit × 2, bfloat16")
SPLIT = ("pipeline, GPipe × 2", "pipeline, 1F1B × 2", "tensor × 2", "sharded × 2")
TORCH = ("PyTorch DDP × 2", *(f"PyTorch {s}" for s in (*SPLIT[:2], "FSDP2 × 2")))
RATIOS = (
    (OWN[1], OWN[0]), (OWN[0], "manual × 2, Eigen"), ("mirrored × 2", OWN[0]),
    (OWN[0], "single × 1"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Part:
    """Programs that are measured in turn.

    Attributes:
        title: title of the table; its first words are the model.
        flags: flags of all its programs.
        programs: names of the programs.
        ratios: program and base of comparisons to print, besides each peer's best.
        num_steps: steps of a block, the last of which evaluates; 0 for as many as `BLOCK_SEC` says.
    """

    title: str
    flags: str
    programs: tuple[str, ...]
    ratios: tuple[tuple[str, str], ...] = ()
    num_steps: int = 0

    @property
    def tests_first_block(self) -> bool:
        """Whether the test accuracy is computed after the first block, an epoch, untimed."""
        return self.num_steps > 0


LENET = "--model=lenet --global_batch_size=256"
RESNET = "--model=resnet18 --global_batch_size=64"
PARTS = {
    "lenet": Part(
        "LeNet, batch 256", LENET, (*NETWORK, "d2l, eager loop × 2"),
        (*RATIOS, (OWN[0], "d2l, eager loop × 2")),
    ),
    "lenet_keras": Part(
        "LeNet, batch 256, beside Keras", LENET,
        (*KERAS, "Keras fit × 1", "Keras fit × 1, oneDNN", "Keras fit × 1, bfloat16"),
    ),
    "resnet18": Part("ResNet-18, batch 64", RESNET, NETWORK, RATIOS),
    "resnet18_keras": Part(
        "ResNet-18, batch 64, beside Keras", RESNET, KERAS
    ),
    "lenet_split": Part(
        "LeNet, batch 256, recipe fast",
        f"{LENET} --recipe=fast",
        (OWN[0], *SPLIT, *TORCH),
        (*((name, OWN[0]) for name in SPLIT), *zip((*SPLIT[:2], SPLIT[3]), TORCH[1:], strict=True)),
        num_steps=235,  # The last batch is short.
    ),
}  # fmt: skip
QUICK = ("lenet", "resnet18")
QUICK_PROGRAMS = (*OWN, "manual × 2, Eigen", "PyTorch DDP × 2", "PyTorch DDP × 2, bfloat16")
NUM_ROUNDS = 9
BLOCK_SEC, QUICK_BLOCK_SEC = 2.0, 1.0  # Of `manual`, at least a step.
START_SEC = 12.0  # Of a program: imports, warm-up; in part while another one starts.


class Running(contextlib.AbstractContextManager):
    """A program in a process of its own; leaving the context ends it and its child processes."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | pathlib.Path],
        environment: Mapping[str, str] = os.environ,
    ):
        self.name = name
        # Not a pipe, which would not be read until the end; closed by `__exit__`.
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True,
            env=environment,
            start_new_session=True,  # A process group, ended as a whole.
        )  # fmt: skip

    def ask(self, request: str = "") -> Any:
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


def start(name: str, part: Part, num_steps: int, options: argparse.Namespace) -> Running:
    """Starts a program of a part, which warms up."""
    command = command_of(name, part, num_steps, options)
    return Running(name, command, environment_of(name))


def command_of(
    name: str, part: Part, num_steps: int, options: argparse.Namespace
) -> list[str | pathlib.Path]:
    """Returns the command of a program, with the interpreter that has its framework."""
    framework, *flags = PROGRAMS[name].removeprefix(EIGEN).removeprefix(ONEDNN).split()
    is_elsewhere = framework.startswith(("torch", "jax"))
    python = options.peers_python if is_elsewhere else sys.executable
    size = [f"--num_steps={num_steps}", f"--data_dir={options.data_dir}"]
    return [python, FOLDER / "program.py", framework, *part.flags.split(), *flags, *size]


def environment_of(name: str) -> dict[str, str]:
    """Returns the environment of a program: other users of TensorFlow have its own kernels."""
    environment, words = dict(os.environ), PROGRAMS[name].split()
    if "=" in words[0]:
        variable, _, environment[variable] = words[0].partition("=")
    elif words[0] in ("keras", "d2l"):
        environment.pop(kernels.VARIABLE, None)
        if not kernels.is_tensorflows_choice(processor.usable_flags()):
            environment[kernels.VARIABLE] = "0"  # TensorFlow does not see the limit of --isa.
    return environment


def why_left_out(name: str, flags: frozenset[str]) -> str:
    """Returns why a program is not measured on a processor with these flags; "" if it is."""
    if "bfloat16" in name and flags and not processor.computes_in_bfloat16(flags):
        return "bfloat16, which this processor emulates: several times slower than float32"
    if name.startswith("Keras") and "oneDNN" in name and kernels.is_tensorflows_choice(flags):
        return f"Keras with {ONEDNN}, which TensorFlow chooses on this processor"
    return ""


def choose_num_steps(part: Part, options: argparse.Namespace) -> int:
    """Returns the steps of a block, from the time of a step; prints how long the part will take."""
    with start(OWN[0], part, 1, options) as probe:
        probe.ask()
        step_sec = min(probe.ask("steps")["sec"] for _ in range(3))
    block_sec = QUICK_BLOCK_SEC if options.quick else BLOCK_SEC
    num_steps = part.num_steps or max(1, math.ceil(block_sec / step_sec))
    # The peers and Eigen take longer than `manual`: 1.5 times on average.
    a_block_sec = START_SEC + 1.5 * options.rounds * num_steps * step_sec
    minutes = len(part.programs) * a_block_sec / 60
    print(
        f"{part.title}: {len(part.programs)} programs, {options.rounds} rounds of blocks of"
        f" {num_steps} steps; about {math.ceil(minutes)} minutes",
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


def name_of_machine(isa: str | None) -> str:
    """Returns the name of this kind of processor, a heading of the page."""
    features = ", ".join(processor.features(processor.usable_flags()))
    limit = " limited to" if isa else ":"
    return f"{processor.processor_name()}{limit} {features}, {os.cpu_count()} cores"


def figure_name(machine: str) -> str:
    """Returns the file name of a processor's figure."""
    return f"benchmarks-{re.sub(r'[^a-z0-9]+', '-', machine.lower()).strip('-')}.png"


def render(machine: str, results: dict[str, Any]) -> str:
    """Returns the results of a kind of processor as Markdown: its section of the page."""
    versions = ", ".join(
        f"{name} {version}"
        for name, version in results["versions"].items()
        if name != "cpu_kernels"
    )
    lines = [
        f"## {machine}", "",
        f"{results['date']}, no GPU; {versions}.",
        *("", f"![ratios of times with their intervals]({figure_name(machine)})", ""),
        *(*summary(results), ""),
    ]  # fmt: skip
    lines += [f"Not measured: {reason}.\n" for reason in results["left_out"]]
    if missing := [part.title for name, part in PARTS.items() if name not in results["parts"]]:
        lines += [f"Not measured yet: {'; '.join(missing)}.", ""]
    tested = [each["accuracy"] for part in results["parts"].values() for each in part.values()
              if "accuracy" in each]  # fmt: skip
    if tested:  # The programs of recipe fast.
        lines += [
            f"The test accuracies after the epoch of recipe `fast` are {min(tested):.4f} to"
            f" {max(tested):.4f}.", "",
        ]  # fmt: skip
    return "\n".join(lines)


def with_section(page: str, section: str) -> str:
    """Returns the page with a section in the place of the one of the same heading, or added."""
    preamble = (FOLDER / "preamble.md").read_text(encoding="utf-8")
    sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)[1:]
    by_heading = {text.splitlines()[0]: text for text in (*sections, section)}
    return "\n".join(text.strip("\n") + "\n" for text in (preamble, *by_heading.values()))


def comparisons(results: dict[str, Any]) -> Iterator[tuple[str, str, str, interval.Interval]]:
    """Yields (title of a part, program, base, ratio of their times for an image)."""
    for part, programs in results["parts"].items():
        for name, base in [*_against_best(programs), *PARTS[part].ratios]:
            if name in programs and base in programs:  # Some are left out.
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
def plot_ratios(machine: str, results: dict[str, Any], path: pathlib.Path) -> None:
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
    figure.suptitle(f"{machine}, shared by all devices of a program")
    save_figure(figure, path.parent, path.stem)


def _against_best(programs: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields `manual` in a precision and the fastest program of each peer.

    Keras with the variable is a peer of its own: users may have either. For bfloat16, the peer's
    fastest program in any precision is used: bfloat16 may be slower there.
    """
    for name in [name for name in programs if name in OWN]:
        for peer in PEERS:
            of_peer = [other for other in programs if other.startswith(peer)]
            if "bfloat16" not in name:
                of_peer = [other for other in of_peer if "bfloat16" not in other]
            with_variable = [other for other in of_peer if "oneDNN" in other]
            for each in ([n for n in of_peer if n not in with_variable], with_variable):
                if each:
                    yield name, min(each, key=lambda n: interval.median(programs[n]["secs"]).value)


def save(machine: str, results: dict[str, Any], out: pathlib.Path) -> None:
    """Writes the results so far; those of other kinds of processors stay."""
    path = out / "bench.json"
    of_others = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_file(path, json.dumps(of_others | {machine: results}, indent=1))


def write_page(machine: str, results: dict[str, Any], page: pathlib.Path) -> None:
    """Writes the section of a kind of processor and its figure."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    write_file(page, with_section(text, render(machine, results)))
    plot_ratios(machine, results, page.parent / figure_name(machine))
    print(f"saved {page}", flush=True)


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
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the requested parts; prints and saves the results as they are measured."""
    options = parse(arguments)
    os.environ.update(ISA.get(options.isa, {}))
    options.out.mkdir(parents=True, exist_ok=True)
    machine, flags = name_of_machine(options.isa), processor.usable_flags()
    print(machine)
    pages = [options.out / "bench.md"]
    pages += [options.output] if options.output and not options.quick else []
    path = options.out / "bench.json"
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    results = {"parts": {}, "versions": {"python": platform.python_version()}}
    if options.only:
        results |= earlier.get(machine, {})
    results["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    reasons = dict.fromkeys(why_left_out(name, flags) for name in PROGRAMS)
    results["left_out"] = [reason for reason in reasons if reason]
    for reason in results["left_out"]:
        print(f"not measured: {reason}")
    for name in [options.only] if options.only else QUICK if options.quick else PARTS:
        part = PARTS[name]
        chosen = [p for p in part.programs if not options.quick or p in QUICK_PROGRAMS]
        part = dataclasses.replace(
            part, programs=tuple(p for p in chosen if not why_left_out(p, flags))
        )
        for measured in measure(part, options):
            results["parts"][name] = measured
            for result in measured.values():
                results["versions"] |= result["versions"]
            save(machine, results, options.out)
        print("\n".join(summary({"parts": {name: results["parts"][name]}})))
        for page in pages:
            write_page(machine, results, page)


if __name__ == "__main__":
    main()
