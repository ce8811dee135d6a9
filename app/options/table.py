"""The table of options: one row for each, a field of the group that it belongs to.

The flags, `--help`, `docs/options.md`, the checks of values and the config of a command come from
the rows. Does not import TensorFlow.
"""

import dataclasses
import difflib
import typing
from collections.abc import Callable, Iterable
from typing import Any

from absl import flags

from app.errors import ConfigError
from app.faults import FAULTS
from models import MODELS
from strategies import ALL_REDUCE_ALGORITHMS, STRATEGIES

NUM_TRAIN_EXAMPLES, NUM_TEST_EXAMPLES = 60_000, 10_000  # Of Fashion-MNIST.
_MAX_DEVICES = 64  # Logical devices, or workers on one machine.
# Options and strategies of earlier versions → what to use instead.
_LOCKSTEP = "see `python -m lockstep --help`"
_SCRIPT = "set it in a script of your own, and record the script: " + _LOCKSTEP
_THREE_WAYS = "examples/three_ways.py splits layers and tensors over devices"
REMOVED = {
    **dict.fromkeys(("traces", "name_map", "tolerance", "keep_traces"), _LOCKSTEP),
    **dict.fromkeys(("case", "thorough"), "record the script of the training: " + _LOCKSTEP),
    **dict.fromkeys(("communication_dtype", "jit_compile", "recompute"), _SCRIPT),
    **dict.fromkeys(("model_parallel", "micro_batches", "schedule", "pipeline_cuts"), _THREE_WAYS),
    "accumulate_steps": "use a smaller --global_batch_size or more devices",
    "allow_unverified_data": "for other data, record a script: " + _LOCKSTEP,
    "breakdown": "use TensorFlow's profiler: see docs/speed.md",
    "images": "classify images in a script of your own",
    "last_batch": "the smaller batch at the end of an epoch is always kept",
    "max_restarts": "the program restarts local workers up to three times",
    "on_mismatch": "a mismatch always stops the training, with exit code 9",
    "repeats": "the program chooses the number of rounds",
    "shard": "--strategy=sharded always divides weights, gradients and optimizer state",
    "shard_weights": "see examples/unequal_devices.py",
    "start_timeout_sec": "the program waits five minutes for workers",
    "verbosity": "set the variable TF_CPP_MIN_LOG_LEVEL=0 for all messages of TensorFlow",
    "wrong": "run examples/wrong_all_reduce.py",
}
_FRAMEWORKS = "`python -m lockstep run` verifies frameworks/*.py"
_REMOVED_STRATEGIES = {
    **dict.fromkeys(("pipeline", "tensor"), _THREE_WAYS),
    **dict.fromkeys(("torch_ddp", "jax_jit", "jax_pmap"), _FRAMEWORKS),
    "keras_fit": REMOVED["case"],
}
_DEFINE: dict[type, Callable[..., Any]] = {
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_bool,
    str: flags.DEFINE_string,
    tuple: flags.DEFINE_list,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """A row of the table: one option of one or several commands."""

    name: str  # Of the flag, and of the field of its group.
    group: str
    kind: type  # A key of `_DEFINE`; tuple for words separated by commas.
    default: Any
    help: str
    commands: tuple[str, ...]  # That have the option.
    choices: tuple[str, ...] = ()  # Empty for any value.
    bounds: tuple[float, float] = (0, 0)  # Of a number; a float has to exceed the first.
    metavar: str = ""  # Stands for a value in `--help`, for example "DIR".
    alias: str = ""  # Another name of the flag.
    is_word: bool = False  # Written without a flag, after the command.
    affects_result: bool = True  # Whether a training with another value is another run.

    def define(self, values: flags.FlagValues) -> None:
        """Defines the flag and its alias."""
        rest: dict[str, Any] = {"help": self.help, "flag_values": values}
        if self.kind in (int, float):
            rest |= {"lower_bound": self.bounds[0], "upper_bound": self.bounds[1]}
        default = list(self.default) if self.kind is tuple else self.default
        _DEFINE[self.kind](self.name, default, **rest)
        if self.alias:
            flags.DEFINE_alias(self.alias, self.name, values)

    def checked(self, value: Any) -> Any:
        """Returns a value that absl has parsed, after further checks."""
        if value == "" or (value == [] and self.default):
            raise self.refusal("")
        if self.kind is float and value is not None and not self.bounds[0] < value < float("inf"):
            raise self.refusal(f"{value:g}")
        words = value if self.kind is tuple else [value]
        for word in words:
            if self.choices and word not in (*self.choices, self.default):
                raise self.refusal(word)
        if self.choices and len(set(words)) != len(words):
            raise ConfigError(f"--{self.name} must name each value once, got {','.join(words)}")
        return tuple(value) if self.kind is tuple else value

    def refusal(self, text: str) -> ConfigError:
        """Returns the error for an invalid value."""
        if not text:
            shown = self.placeholder or "true"
            return ConfigError(f"--{self.name} has no value; write --{self.name}={shown}")
        low, high = self.bounds
        expected = {
            int: f"a whole number between {low} and {high}",
            float: f"a number above {low}, at most {high:g}",
            bool: "true or false",
        }.get(self.kind, f"one of {', '.join(self.choices)}" if self.choices else "text")
        shown = repr(text).strip("'") if self.kind in (int, float) else repr(text)
        advice = did_you_mean(text, self.choices)
        if self.choices == tuple(STRATEGIES) and text in _REMOVED_STRATEGIES:
            advice = f"; {_REMOVED_STRATEGIES[text]}"
        name = self.name if self.is_word else f"--{self.name}"
        return ConfigError(f"{name} must be {expected}, got {shown}{advice}")

    @property
    def placeholder(self) -> str:
        """What stands for the value in `--help`; "" for a switch."""
        of_kind = {int: "N", float: "X", str: "|".join(self.choices), tuple: "A,B,…"}
        return self.metavar or of_kind.get(self.kind, "")


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns "; did you mean …?" with the nearest known word, or ""."""
    # A higher cutoff than difflib's: resnet50 is not resnet18, and --dry_run not --run.
    nearest = difflib.get_close_matches(word, known, n=1, cutoff=0.76)
    return f"; did you mean {prefix}{nearest[0]}?" if nearest else ""


def option(default: Any, help: str, commands: tuple[str, ...], **attributes: Any) -> Any:
    """Returns the field of a group for an option; see `Option` for the attributes."""
    row = {"help": help, "commands": commands, **attributes}
    return dataclasses.field(default=default, metadata=row)


# Groups of commands.
_RUNS = ("train", "compare")
_TRAIN = (*_RUNS, "verify")
_STEPS = (*_TRAIN, "benchmark")
_DATA = (*_STEPS, "doctor", "demo")
_ALL = (*_TRAIN, "evaluate", "benchmark", "doctor", "demo")

_ALGORITHMS = "; ".join(f"{name}: {', '.join(a)}" for name, a in ALL_REDUCE_ALGORITHMS.items())
_ALL_REDUCE_NAMES = dict.fromkeys(a for names in ALL_REDUCE_ALGORITHMS.values() for a in names)

# fmt: off


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, and for how long."""

    model: str = option("lenet", "Network to train.", _STEPS, choices=tuple(MODELS))
    recipe: str = option("d2l", "Learning rate, schedule, initial weights and augmentation: d2l as"
        ' in "Dive into Deep Learning", fast a modern recipe.', _STEPS, choices=("d2l", "fast"))
    epochs: int = option(10, "Number of passes over the training set.", _TRAIN,
        bounds=(1, 100_000), alias="num_epochs")
    global_batch_size: int = option(256, "Examples in a step, over all replicas.", _STEPS,
        bounds=(1, NUM_TRAIN_EXAMPLES), alias="batch_size")
    learning_rate: float | None = option(None, "Peak learning rate. Default: the recipe's.",
        _TRAIN, bounds=(0, 3.4e38), alias="lr")
    seed: int = option(0, "Seed of the initial weights, of augmentation and of the order of"
        " examples.", (*_STEPS, "demo"), bounds=(0, 2**32 - 1))
    precision: str = option("float32", "Dtype that layers compute in; weights, updates and the"
        " loss are float32.", _STEPS, choices=("float32", "mixed_bfloat16"))
    deterministic: bool = option(False, "Use only kernels whose results are bitwise identical in"
        " every run.", _STEPS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """The images."""

    dataset: str = option("auto", "auto uses Fashion-MNIST where it is available, else generated"
        " images.", _DATA, choices=("auto", "fashion_mnist", "synthetic"))
    num_train_examples: int | None = option(None, "Train on a class-balanced random subset of N"
        " examples, chosen by the seed.", _STEPS, bounds=(1, NUM_TRAIN_EXAMPLES))
    num_test_examples: int | None = option(None, "Evaluate on such a subset of N test examples.",
        _RUNS, bounds=(1, NUM_TEST_EXAMPLES))
    data_dir: str | None = option(None, "Folder with the four Fashion-MNIST files, or a TFDS data"
        " directory. Without it: $FASHION_MNIST_DIR, then TFDS.", _ALL, metavar="DIR",
        affects_result=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distribution:
    """How a training is distributed over devices."""

    strategy: str = option("manual", "Distribution strategy. manual and mirrored split the batch,"
        " sharded the batch and the weights; multi_worker has several processes, on one or more"
        " machines.", ("train",), choices=tuple(STRATEGIES))
    strategies: tuple[str, ...] = option(("single", "manual", "mirrored"),
        f"The strategies, separated by commas: {', '.join(STRATEGIES)}.",
        ("compare", "verify", "benchmark", "doctor"), choices=tuple(STRATEGIES))
    num_gpus: int | None = option(None, "Number of replicas, each on a GPU (multi_worker: of each"
        " worker). Without any GPU: N logical CPU devices. Default: all GPUs, or 2 logical CPU"
        " devices.", _ALL, bounds=(1, _MAX_DEVICES), alias="num_devices")
    device: str = option("auto", "Device type: gpu fails without a GPU, cpu uses logical CPU"
        " devices.", _ALL, choices=("auto", "gpu", "cpu"))
    all_reduce: str = option("auto", f"All-reduce algorithm. {_ALGORITHMS}. mirrored and"
        " multi_worker have nccl on GPUs only, mirrored has ring on CPUs only.", _DATA,
        choices=("auto", *_ALL_REDUCE_NAMES))
    batch_norm: str = option("average", "average: each shard of the batch is normalised by its own"
        " statistics; moving statistics are averaged. sync (mirrored, multi_worker): all use the"
        " statistics of the whole batch.", _STEPS, choices=("average", "sync"))
    num_workers: int | None = option(None, "Worker processes of multi_worker, started on this"
        " machine unless TF_CONFIG or SLURM defines a cluster. Default: those of the cluster, or"
        " 2.", _TRAIN, bounds=(1, _MAX_DEVICES))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """What is written."""

    out: str | None = option(None, "Output directory; default runs/<time>-<strategy>-<model>."
        " report: the file to write; default report.html, beside a single run. doctor: the"
        " directory to examine.", (*_STEPS, "report", "doctor"), metavar="PATH",
        affects_result=False)
    overwrite: bool = option(False, "Start from scratch in an output directory that holds another"
        " run.", _STEPS, affects_result=False)
    checkpoint_every: int | None = option(None, "Save a checkpoint every N steps; default: every"
        " five minutes. One is always saved at the end of an epoch.", _RUNS,
        bounds=(1, 1_000_000_000), affects_result=False)
    stall_timeout_sec: int = option(1800, "Stop with exit code 142 after N seconds without"
        " progress; 0 waits forever.", _RUNS, bounds=(0, 1_000_000), affects_result=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    """What is verified."""

    steps: int = option(20, "Number of steps to verify.", ("verify",), bounds=(1, 100_000))
    inject: str | None = option(None, f"Inject a fault: {', '.join(FAULTS)};"
        " NAME:parameter=value,… sets its parameters. verify injects it into the first strategy"
        " with replicas, or into that of strategy=NAME.", ("train", "verify"), metavar="FAULT")
    verify_every: int = option(0, "Compare every N-th step with the same step on one device while"
        " the training runs; a mismatch stops it with exit code 9. 0: none.", ("train",),
        bounds=(0, 1_000_000_000), affects_result=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """What a command works on."""

    run: str | None = option(None, "Directory of the run.", ("evaluate",), metavar="DIR")
    strategy: str | None = option(None, "Distribution strategy; default: the run's, or mirrored for"
        " a run of multi_worker.", ("evaluate",), choices=tuple(STRATEGIES))
    experiment: str | None = option(None, "The experiment.", ("demo",), metavar="EXPERIMENT",
        choices=("allreduce", "split_batch", "replicate"), is_word=True)
    directories: tuple[str, ...] = option((), "Directories of runs.", ("report",),
        metavar="DIR …", is_word=True)


# Command → its line in `--help`, and examples; the first is also the program's.
COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "train": ("trains a model; writes history, plots and checkpoints", (
        "--strategy=manual --device=cpu --num_devices=2 --epochs=3",
        "--recipe=fast --epochs=1 --out=runs/first",
        "--strategy=mirrored --num_gpus=2 --model=resnet18",
        "--strategy=multi_worker --num_workers=2 --device=cpu --epochs=1")),
    "compare": ("trains several strategies from the same weights and data", (
        "--recipe=fast --epochs=1", "--strategies=single,manual --num_gpus=2")),
    "verify": ("compares strategies step by step and names the first mismatch", (
        "--strategies=manual,mirrored --steps=20",
        "--strategies=manual --inject=drop_gradient:replica=1")),
    "evaluate": ("computes the test accuracy of a run", (
        "--run=runs/NAME --strategy=mirrored --num_devices=4",)),
    "benchmark": ("measures the throughput of strategies", (
        "--strategies=single,manual,mirrored --num_devices=2",)),
    "report": ("writes a page about runs", ("runs/first runs/second --out=report.html",)),
    "doctor": ("checks this machine: what it has, what is missing, what to run", (
        "", "--data_dir=DIR --num_gpus=2")),
    "demo": ("the experiments of d2l; without a name, lists them", (
        "allreduce --num_devices=3", "")),
}
# fmt: on

GROUPS: dict[str, type] = {
    group.__name__.lower(): group
    for group in (Training, Data, Distribution, Output, Verification, Arguments)
}


def _row(group: str, field: Any) -> Option:
    """Returns the option of a field; its kind is the first type of the annotation."""
    origin = typing.get_origin(field.type)
    kind = origin if origin is tuple else (*typing.get_args(field.type), field.type)[0]
    return Option(name=field.name, group=group, kind=kind, default=field.default, **field.metadata)


TABLE: tuple[Option, ...] = tuple(
    _row(name, field) for name, group in GROUPS.items() for field in dataclasses.fields(group)
)


def options_of(command: str) -> dict[str, Option]:
    """Returns name → option for each option of a command."""
    return {row.name: row for row in TABLE if command in row.commands}
