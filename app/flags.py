"""Every flag of the program; the only place that reads them. Nothing here imports TensorFlow."""

import dataclasses
import difflib
import re
import sys
import textwrap

from absl import flags

from app import console
from app.config import Config
from app.errors import ConfigError
from app.fault import FAULTS, Fault
from app.options import COMMANDS

FLAGS = flags.FLAGS

# Group → flag → (how absl parses it, how a value is written, what it does). Defaults are those of
# `Config`. `--verbosity` is absl's own.
_INT, _FLOAT, _TEXT, _BOOL = "int", "float", "text", "bool"
_LIST, _INTS = "list", "whole numbers"
GROUPS = {
    "What to train": {
        "model": (_TEXT, "lenet|resnet18", "The network."),
        "dataset": (
            _TEXT,
            "auto|fashion_mnist|synthetic",
            "auto takes real Fashion-MNIST where it can be had, else a generated set.",
        ),
        "data_dir": (
            _TEXT,
            "DIR",
            "Folder with the four Fashion-MNIST files, or a TFDS data directory. Without it:"
            " $FASHION_MNIST_DIR, then TFDS.",
        ),
        "allow_unverified_data": (
            _BOOL,
            "",
            "Accept files in the right format whose hash differs.",
        ),
        "num_train_examples": (_INT, "N", "Train on a seeded, class-balanced subset of N."),
        "recipe": (_TEXT, "d2l|fast", "d2l is the book's training, fast a modern one."),
    },
    "How to split": {
        "strategy": (
            _TEXT,
            "single|manual|mirrored|multi_worker",
            "Who keeps the replicas in step. multi_worker spans machines: see launch.",
        ),
        "num_gpus": (
            _INT,
            "N",
            "N replicas on GPUs; on a machine without any, N logical CPU devices.",
        ),
        "device": (_TEXT, "auto|gpu|cpu", "gpu insists, cpu chooses logical CPU devices."),
        "num_devices": (
            _INTS,
            "N",
            "N replicas; without it every GPU, else 2 logical CPUs. benchmark takes 1,2,4, explain"
            " 2,3,4: the first is explained, the last predicted. multi_worker: on each worker.",
        ),
        "all_reduce": (
            _TEXT,
            "auto|sum_on_one|ring|tree|all_to_all|nccl|hierarchical",
            "How gradients are added over the replicas. manual has sum_on_one, ring, tree and"
            " all_to_all; mirrored sum_on_one, ring (on CPUs), nccl (on GPUs) and hierarchical;"
            " multi_worker ring and nccl (on GPUs).",
        ),
        "bucket_mb": (
            _FLOAT,
            "X",
            "Exchange gradients in buckets of X · 2²⁰ bytes; 0 exchanges each by itself. Without"
            " it multi_worker has one bucket for all, the others exchange each by itself.",
        ),
        "exchange_dtype": (_TEXT, "float32|bfloat16", "In which gradients are exchanged."),
        "batch_norm": (_TEXT, "average", "Statistics of each replica's shard, then averaged."),
        "last_batch": (_TEXT, "keep|drop", "The short batch at the end of an epoch."),
    },
    "Hyperparameters": {
        "global_batch_size": (_INT, "N", "Examples of a step over all replicas (--batch_size)."),
        "learning_rate": (_FLOAT, "X", "Peak learning rate (--lr). Without it the recipe's."),
        "epochs": (_INT, "N", "Passes over the training set."),
        "seed": (_INT, "N", "Weights and order of examples follow from it."),
    },
    "Speed": {
        "precision": (
            _TEXT,
            "float32|mixed_bfloat16|mixed_float16",
            "What layers compute in; weights, their updates and the loss are float32.",
        ),
        "jit_compile": (_BOOL, "", "Let XLA compile what each replica computes by itself."),
        "steps_per_call": (_INT, "N", "Steps in a compiled call; without it, half a second's."),
        "deterministic": (_BOOL, "", "Only kernels that give the same bits in every run."),
    },
    "Output": {
        "out": (_TEXT, "DIR", "Where the run goes; default runs/<time>-<strategy>-<model>."),
        "overwrite": (_BOOL, "", "Start anew in a directory that holds another run."),
        "force_resume": (
            _BOOL,
            "",
            "Go on with a run although rate, batch, seed, recipe or data are others now.",
        ),
        "checkpoint_every": (
            _INT,
            "STEPS",
            "Save every so many steps; without it every five minutes. Always after an epoch.",
        ),
        "stall_timeout_sec": (
            _INT,
            "SEC",
            "End a training that makes no progress for so long, with exit code 138; 0 waits.",
        ),
    },
    "Cluster": {
        "num_workers": (_INT, "N", "Local processes that train together, in place of machines."),
        "max_restarts": (_INT, "N", "How often launch starts all of them again after a failure."),
        "start_timeout_sec": (_INT, "SEC", "How long workers wait for those that are missing."),
        "devices_per_worker": (_INT, "N", "Devices of each machine that plan plans."),
        "bandwidth_gbps": (_FLOAT, "X", "Of a machine's network, in one direction, for plan."),
        "latency_us": (_FLOAT, "X", "Of a message between machines, for plan."),
        "device_bandwidth_gbps": (
            _FLOAT,
            "X",
            "Of the links within a machine, for plan: 252 is PCIe 4.0 × 16, 2400 NVLink 3, 3600"
            " NVLink 4.",
        ),
    },
    "Several at once": {
        "strategies": (_LIST, "A,B,…", "What compare, verify and benchmark set side by side."),
        "models": (_LIST, "A,B,…", "The networks of a benchmark."),
        "global_batch_sizes": (_INTS, "N,M,…", "The batches of a benchmark."),
        "precisions": (_LIST, "A,B,…", "The precisions of a benchmark."),
        "repeats": (_INT, "N", "Rounds in which a benchmark times each point once."),
    },
    "Proof": {
        "steps": (_INT, "N", "Steps that verify walks through."),
        "inject": (
            _TEXT,
            "FAULT",
            "Spoil the training, to see what finds it; in verify the first strategy with replicas,"
            f" or the one of strategy=NAME. {' '.join(str(Fault.parse(name)) for name in FAULTS)}",
        ),
        "keep_traces": (_BOOL, "", "Keep what verify has recorded, an .npz for each strategy."),
    },
    "Finished runs": {
        "run": (_TEXT, "DIR", "The run that evaluate and predict read."),
        "checkpoint": (_TEXT, "newest|best", "Which of the run's; best has the highest accuracy."),
        "images": (_LIST, "A.png,B.npy", "What predict classifies; else ten test images."),
    },
}

_HELP = {"h", "help", "helpshort", "helpfull", "helpxml"}
COMMAND_HELP = {
    "train": "one training, with history, plots and checkpoint in one directory",
    "launch": "the same on several local processes, started again after a failure",
    "evaluate": "test accuracy of a run, on any strategy and number of devices",
    "predict": "class and probability of images, the batch split over the replicas",
    "compare": "several strategies from the same weights and data, side by side",
    "explain": "one step told with its numbers, and where its time goes",
    "benchmark": "throughput of strategies, device counts, batches and precisions",
    "plan": "what a cluster would do, from one device here and the links",
    "verify": "proves them the same training, or names the first false step",
}


def define_flags() -> None:
    """Defines every flag once; absl has no defaults here, `Config` has."""
    for group in GROUPS.values():
        for name, (kind, _, help_text) in group.items():
            if kind == _BOOL:
                flags.DEFINE_bool(name, None, help_text)
            elif kind == _INT:
                flags.DEFINE_integer(name, None, help_text)
            elif kind == _FLOAT:
                flags.DEFINE_float(name, None, help_text)
            elif kind in (_LIST, _INTS):
                flags.DEFINE_list(name, None, help_text)
            else:
                flags.DEFINE_string(name, None, help_text)
    flags.DEFINE_alias("batch_size", "global_batch_size")
    flags.DEFINE_alias("lr", "learning_rate")


def parse_config(argv: list[str]) -> Config:
    """Turns the command line into a `Config`, or prints the help and exits.

    Args:
        argv: the program's arguments, its own name first.

    Raises:
        ConfigError: an unknown flag or command, a stray word or a value that cannot be meant.
    """
    if argv[1:2] == ["help"] or any(
        word.startswith("-") and word.lstrip("-").partition("=")[0] in _HELP for word in argv[1:]
    ):
        console.say(help_text())
        sys.exit(0)
    try:
        words = FLAGS(argv)[1:]
    except flags.IllegalFlagValueError as error:
        shown = re.match(r"flag (--\S+?):", str(error))
        raise ConfigError(
            f"{shown[1] if shown else error} — a value of the kind that --help shows is required;"
            " write --name=value"
        ) from error
    except (flags.Error, ValueError, KeyError) as error:
        raise ConfigError(f"{error} — a flag of this program is required; see --help") from error
    command = words[0] if words else "train"
    if command not in COMMANDS:
        raise ConfigError(
            f"{command!r} is not a command — one of {', '.join(COMMANDS)} is required"
            + _proposal(command)
        )
    if len(words) > 1:
        raise ConfigError(
            f"{' '.join(words[1:])!r} after {command} — one command and flags are required;"
            " write options as --name=value"
        )
    options = _given_options(command)
    if command == "launch":
        options["strategy"] = "multi_worker"
    if command == "plan" and "global_batch_size" in options:
        options["planned_global_batch_size"] = options.pop("global_batch_size")
    return Config(command=command, **options)


def _given_options(command: str) -> dict:
    """Returns the options on the command line, each of which must mean something to `command`."""
    options = {field.name for field in dataclasses.fields(Config)} - {
        *("command", "device_counts", "planned_global_batch_size"),
    }
    given = {name: FLAGS[name].value for name in options if FLAGS[name].present}
    for name in given:
        if given[name] in ("", []):
            raise ConfigError(f"--{name}= is empty — a value is required; leave the flag out")
        known = {"num_devices" if n == "device_counts" else n for n in COMMANDS[command]}
        if name not in known:
            owners = [owner for owner, names in COMMANDS.items() if name in names]
            raise ConfigError(
                f"--{name} with {command} — it is an option of {', '.join(owners)}; leave it out"
            )
    kinds = {name: kind for group in GROUPS.values() for name, (kind, *_) in group.items()}
    for name, value in given.items():
        if kinds.get(name) == _INTS:
            given[name] = _whole_numbers(name, value)
        elif isinstance(value, list):
            given[name] = tuple(value)
    return _with_device_counts(command, given)


def _whole_numbers(name: str, words: list[str]) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words)
    except ValueError as error:
        raise ConfigError(
            f"--{name}={','.join(words)} — whole numbers are required, with commas between them;"
            " write --name=value"
        ) from error


def _with_device_counts(command: str, given: dict) -> dict:
    """Turns `--num_devices` into what the command calls it: several counts, or the one."""
    if "num_devices" not in given:
        return given
    counts = given.pop("num_devices")
    if "device_counts" in COMMANDS[command]:
        return {**given, "device_counts": counts}
    if len(counts) > 1:
        raise ConfigError(
            f"--num_devices={','.join(map(str, counts))} with {command} — one number is required;"
            " benchmark takes several"
        )
    return {**given, "num_devices": counts[0]}


def _proposal(word: str) -> str:
    nearest = difflib.get_close_matches(word, COMMANDS, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else "; see --help"


def help_text() -> str:
    """Returns what `--help` prints: the commands, then the flags in groups with their defaults."""
    lines = ["usage: python main.py [COMMAND] [--flag=value …]", "", "Commands (default: train)"]
    lines += [f"  {command:<12}{text}" for command, text in COMMAND_HELP.items()]
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    for group, members in GROUPS.items():
        lines += ["", group]
        for name, (_, values, text) in members.items():
            flag = f"--{name}={values}" if values else f"--{name}"
            default = defaults[name]
            if default is not None and default is not False and default != ():
                shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
                text += f" [{shown}]"
            lines += [f"  {flag}", textwrap.indent(textwrap.fill(text, 72), "      ")]
    lines += [
        "",
        "  --verbosity=-1|0|1",
        "      0 shows TensorFlow's own messages, 1 all of them. [-1]",
        "",
        "Examples",
        "  python main.py --strategy=manual --device=cpu --num_devices=2 --epochs=3",
        "  python main.py compare --recipe=fast --epochs=1",
        "  python main.py verify --strategies=manual,mirrored --steps=20",
        "  python main.py launch --num_workers=2 --device=cpu --epochs=1",
        "  python main.py evaluate --run=runs/NAME --strategy=mirrored --num_devices=4",
        "",
        f"Batches are global: {Config.global_batch_size} examples over all replicas.",
    ]
    return "\n".join(lines)
