"""Compares Lockstep with its peers in one interleaved run, and writes down what was seen.

    make bench                                        everything, about half an hour;
                                                      writes docs/BENCHMARKS.md
    .venv/bin/python benchmarks/run.py --only=lenet   one part of it

A round times one block of each program, one after another, the others asleep: whatever else the
machine does hits all of them. Ratios are of medians over the rounds, with 95 % intervals by the
bootstrap over rounds.
"""

import argparse
import contextlib
import dataclasses
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

from app.performance.benchmark_output import processor_name
from app.records.files import write_file
from benchmark_page import (
    LENET_STEPS,
    LONG_STEPS,
    PARTS,
    RESNET_STEPS,
    TARGET_ACCURACY,
    is_complete,
    render,
)
from programs import Program, Running

LENET = ("--model=lenet", "--global_batch_size=256")
RESNET = ("--model=resnet18", "--global_batch_size=64")


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A line of the table: the time of one program over that of another."""

    text: str
    program: str
    base: str


def lockstep(name: str, *flags: str) -> Program:
    """Returns Lockstep with these flags."""
    return Program(name, "lockstep.py", flags)


def lenet_part(peers_python: str) -> tuple[list[Program], list[Ratio]]:
    """Returns what is compared on LeNet, an epoch a block."""
    ours = [("single", 1), ("manual", 2), ("mirrored", 2), ("manual", 4), ("mirrored", 4)]
    programs = [
        lockstep(f"{s} × {n}", *LENET, f"--strategy={s}", f"--num_devices={n}") for s, n in ours
    ]
    programs += [
        lockstep("manual × 2, bfloat16", *LENET, "--precision=mixed_bfloat16"),
        Program("book's eager loop × 2", "d2l_loop.py", (*LENET, "--num_devices=2")),
        Program("PyTorch DDP × 2", "torch_ddp.py", (*LENET, "--num_devices=2"), peers_python),
        Program("JAX × 2", "jax_devices.py", (*LENET, "--num_devices=2"), peers_python),
        Program("peak, float32", "peak.py", ("--precision=float32",)),
    ]
    ratios = [
        Ratio("exchange costs nothing", name, "single × 1")
        for name in ("manual × 2", "mirrored × 2", "manual × 4", "mirrored × 4")
    ]
    ratios += [
        Ratio("against the book's eager loop", "manual × 2", "book's eager loop × 2"),
        Ratio("against PyTorch DDP, 2 processes", "manual × 2", "PyTorch DDP × 2"),
        Ratio("against JAX on 2 host devices", "manual × 2", "JAX × 2"),
        Ratio("bfloat16 against float32", "manual × 2, bfloat16", "manual × 2"),
    ]
    return programs, ratios


def resnet_part(peers_python: str) -> tuple[list[Program], list[Ratio]]:
    """Returns what is compared on ResNet-18, a few steps a block."""
    programs = [
        lockstep("manual × 2", *RESNET),
        lockstep("manual × 2, bfloat16", *RESNET, "--precision=mixed_bfloat16"),
        lockstep("mirrored × 2", *RESNET, "--strategy=mirrored"),
        Program("PyTorch DDP × 2", "torch_ddp.py", (*RESNET, "--num_devices=2"), peers_python),
        Program("peak, float32", "peak.py", ("--precision=float32",)),
        Program("peak, bfloat16", "peak.py", ("--precision=bfloat16",)),
    ]
    ratios = [
        Ratio("against PyTorch DDP, 2 processes", "manual × 2", "PyTorch DDP × 2"),
        Ratio("bfloat16 against float32", "manual × 2, bfloat16", "manual × 2"),
    ]
    return programs, ratios


def lenet_split_part(peers_python: str) -> tuple[list[Program], list[Ratio]]:
    """Returns what is compared of three ways to split a training, an epoch of `fast` a block."""
    fast = (*LENET, "--recipe=fast", "--num_devices=2")
    peers = [
        ("PyTorch DDP × 2", "torch_ddp.py", ()),
        ("PyTorch pipeline, GPipe × 2", "torch_pipeline.py", ("--schedule=gpipe",)),
        ("PyTorch pipeline, 1F1B × 2", "torch_pipeline.py", ("--schedule=1f1b",)),
        ("PyTorch FSDP2 × 2", "torch_fsdp.py", ()),
    ]
    own = [
        ("manual × 2", ("--strategy=manual",)),
        ("pipeline, GPipe × 2", ("--strategy=pipeline", "--schedule=gpipe")),
        ("pipeline, 1F1B × 2", ("--strategy=pipeline", "--schedule=1f1b")),
        ("tensor × 2", ("--strategy=tensor",)),
        ("sharded × 2", ("--strategy=sharded",)),
    ]
    programs = [lockstep(name, *fast, "--epochs=1", *flags) for name, flags in own]
    programs += [Program(name, file, (*fast, *flags), peers_python) for name, file, flags in peers]
    ratios = [Ratio(f"{name} against manual", name, "manual × 2") for name, _ in own[1:]]
    pairs = [(own[0], peers[0]), (own[1], peers[1]), (own[2], peers[2]), (own[4], peers[3])]
    ratios += [Ratio(f"{a} against {b}", a, b) for (a, *_), (b, *_) in pairs]
    return programs, ratios


def keras_part(*flags: str) -> tuple[list[Program], list[Ratio]]:
    """Returns what is compared with Keras, in a run of its own: its stalls would hit others."""
    programs = [
        lockstep("manual × 2", *flags),
        Program("Keras fit × 2", "keras_fit.py", (*flags, "--num_devices=2")),
    ]
    return programs, [Ratio("against Keras fit", "manual × 2", "Keras fit × 2")]


def measure(
    programs: list[Program],
    *,
    rounds: int,
    num_steps: int,
    data_dir: str,
    test_first_block: bool = False,
) -> dict:
    """Times a block of every program in each round.

    Args:
        programs: what to time.
        rounds: how many.
        num_steps: of a block.
        data_dir: folder with the four files of Fashion-MNIST.
        test_first_block: whether to ask for the test accuracy after the first block, untimed.

    Returns:
        name → what the program said of itself, and under "secs" what each block took per image;
        for a peak the seconds per floating-point operation. Under "accuracy" that of the test.
    """
    with contextlib.ExitStack() as stack:
        running = []
        for program in programs:
            print(f"preparing {program.name}", flush=True)
            one = stack.enter_context(Running(program, data_dir))
            running.append((one, one.wait_until_ready()))
        results = {one.program.name: {**about, "secs": [], "images": []} for one, about in running}
        for number in range(rounds):
            for one, _ in running if number % 2 == 0 else reversed(running):
                answer = one.ask(do="steps", num_steps=num_steps)
                result = results[one.program.name]
                result["secs"].append(answer["sec"] / answer["images"])
                result["images"].append(answer["images"])
                print(f"round {number + 1}  {one.program.name}: {answer['sec']:.2f} s", flush=True)
                if test_first_block and number == 0:
                    result["accuracy"] = one.ask(do="evaluate")["accuracy"]
    return results


def time_to_accuracy(peers_python: str, *, rounds: int, data_dir: str) -> dict:
    """Trains until the test accuracy is reached, testing after every epoch, in turn.

    Returns:
        name → for each round, seconds of training and testing, and epochs.
    """
    programs = [
        lockstep("fast, manual × 2, bfloat16", *LENET, "--recipe=fast", "--epochs=1",
                 "--precision=mixed_bfloat16"),
        lockstep("fast, manual × 2", *LENET, "--recipe=fast", "--epochs=1"),
        Program("the book's recipe in its loop × 2", "d2l_loop.py", (*LENET, "--num_devices=2")),
    ]  # fmt: skip
    results = {program.name: [] for program in programs}
    for number in range(rounds):
        for program in programs:
            if number and program.file == "d2l_loop.py":
                continue  # Minutes long, so once: the ratio is far from any bound.
            with Running(program, data_dir) as one:
                one.wait_until_ready()
                sec, epochs, accuracy = 0.0, 0, 0.0
                while accuracy < TARGET_ACCURACY and epochs < 30:
                    sec += one.ask(do="steps", num_steps=LENET_STEPS)["sec"]
                    answer = one.ask(do="evaluate")
                    sec, accuracy, epochs = sec + answer["sec"], answer["accuracy"], epochs + 1
                    print(
                        f"{program.name}: epoch {epochs}, {accuracy:.4f}, {sec:.1f} s", flush=True
                    )
            results[program.name].append({"sec": sec, "epochs": epochs, "accuracy": accuracy})
    return results


def memory_growth(data_dir: str) -> dict:
    """Makes many steps and returns resident memory before and after them, in bytes."""
    program = lockstep("manual × 2", *LENET, "--precision=mixed_bfloat16")
    with Running(program, data_dir) as one:
        one.wait_until_ready()
        one.ask(do="steps", num_steps=500)  # Buffers have reached their size.
        before = one.ask(do="memory")["resident_bytes"]
        for _ in range(20):
            one.ask(do="steps", num_steps=LONG_STEPS // 20)
        return {"before_bytes": before, "after_bytes": one.ask(do="memory")["resident_bytes"]}


def measure_parts(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Measures the parts that are asked for and adds them to `results`."""
    parts = {
        "lenet": (lambda: lenet_part(options.peers_python), LENET_STEPS),
        "lenet_split": (lambda: lenet_split_part(options.peers_python), LENET_STEPS),
        "lenet_keras": (lambda: keras_part(*LENET), LENET_STEPS),
        "resnet18": (lambda: resnet_part(options.peers_python), RESNET_STEPS),
        "resnet18_keras": (lambda: keras_part(*RESNET), RESNET_STEPS),
    }
    for name, (part, num_steps) in parts.items():
        if options.only in (None, name):
            programs, ratios = part()
            measured = measure(
                programs, rounds=options.rounds, num_steps=num_steps, data_dir=options.data_dir,
                test_first_block=name == "lenet_split",
            )  # fmt: skip
            results[name] = {
                "programs": measured,
                "ratios": [dataclasses.asdict(ratio) for ratio in ratios],
            }
            results["versions"] = {**results.get("versions", {}), **_versions(measured)}
    if options.only in (None, "accuracy"):
        results["accuracy"] = time_to_accuracy(
            options.peers_python, rounds=3, data_dir=options.data_dir
        )
    if options.only in (None, "memory"):
        results["memory"] = memory_growth(options.data_dir)


def save(results: dict[str, Any], out: pathlib.Path, page: pathlib.Path | None) -> None:
    """Writes the results and prints the tables; each file is replaced whole or not at all.

    Args:
        results: of this run, and of earlier runs with `--only`.
        out: a directory for `bench.json` and `bench.md`.
        page: written only where all parts have been measured; None for no page.
    """
    write_file(out / "bench.json", json.dumps(results, indent=1))
    table = render(results)
    write_file(out / "bench.md", table)
    print(table)
    if page and is_complete(results):
        write_file(page, table)
        print(f"saved {page}")
    elif page:
        missing = ", ".join(part for part in PARTS if part not in results)
        print(f"{page} is left as it is: not measured yet: {missing}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the parts that are asked for, prints the tables and saves them with all figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--data_dir", default=os.environ.get("FASHION_MNIST_DIR"))
    parser.add_argument("--out", default="runs/bench", help="directory of all figures")
    parser.add_argument("--output", type=pathlib.Path, help="page, written once all is measured")
    parser.add_argument("--peers_python", default=str(ROOT / ".venv-bench/bin/python"))
    options = parser.parse_args(arguments)
    if not options.data_dir:
        sys.exit(
            "error: --data_dir is missing and $FASHION_MNIST_DIR is not set — the folder with the"
            " four files of Fashion-MNIST is required; name it"
        )
    out = pathlib.Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "bench.json"
    results = json.loads(path.read_text(encoding="utf-8")) if options.only and path.exists() else {}
    results["processor"], results["cores"] = processor_name(), os.cpu_count()
    results["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    measure_parts(options, results)
    save(results, out, options.output)


def _versions(measured: dict[str, Any]) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for result in measured.values():
        versions |= result.get("versions", {})
    return versions


if __name__ == "__main__":
    main()
