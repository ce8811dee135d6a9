"""The table of options: one row for each, a field of the group that it belongs to.

The flags, `--help`, `docs/options.md`, the checks of values and the config of a command come from
the rows. The groups are in the order of `--helpfull`.
"""

import dataclasses
import pathlib
from typing import NamedTuple

from app.options import names
from app.options.fault import FAULTS, Fault
from app.options.option import Option, option, rows_of
from strategies import ALL_REDUCE_ALGORITHMS

# Groups of commands.
_RUNS = ("train", "compare")
_TRAIN = (*_RUNS, "verify")
_STEPS = (*_TRAIN, "benchmark")
_DATA = (*_STEPS, "doctor", "demo")
_DEVICES = (*_TRAIN, "evaluate", "doctor", "demo")
_ALL = (*_DATA, "evaluate")

_ALGORITHMS = "; ".join(f"{name}: {', '.join(a)}" for name, a in ALL_REDUCE_ALGORITHMS.items())
# Options of earlier versions → what to do instead.
REMOVED = dict.fromkeys(
    ("traces", "name_map", "tolerance"), "use `python -m lockstep one.npz two.npz --html FILE`"
)


def split_case(case: str) -> tuple[str, str]:
    """Splits `FILE:NAME` into the file and the function; other colons belong to the file."""
    path, _, name = case.rpartition(":")
    return (path, name) if path and name.isidentifier() else (case, "model")


# fmt: off


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, and for how long."""

    model: str = option("lenet",
        "Network to train.", _TRAIN, choices=names.MODEL_NAMES, affects_result=True)
    recipe: str = option("d2l",
        'Learning rate, schedule, initial weights and augmentation: d2l as in "Dive into Deep'
        ' Learning", fast a modern recipe.', _STEPS, choices=names.RECIPE_NAMES,
        affects_result=True)
    epochs: int = option(10,
        "Number of passes over the training set.", _TRAIN, bounds=(1, 100_000), alias="num_epochs",
        affects_result=True)
    global_batch_size: int = option(256,
        "Examples in a step, over all replicas.", _TRAIN, bounds=(1, names.NUM_TRAIN_EXAMPLES),
        alias="batch_size", affects_result=True)
    learning_rate: float | None = option(None,
        "Peak learning rate. Default: the recipe's.", _TRAIN, bounds=(0, names.MAX_FLOAT32),
        alias="lr", affects_result=True)
    seed: int = option(0,
        "Seed of the initial weights, of augmentation and of the order of examples.",
        (*_STEPS, "demo"),
        bounds=(0, 2**32 - 1), affects_result=True)
    last_batch: str = option("keep",
        "Keep or drop the smaller batch at the end of an epoch.", _TRAIN, choices=("keep", "drop"),
        affects_result=True)
    precision: str = option("float32",
        "Dtype that layers compute in; weights, updates and the loss are float32.", _TRAIN,
        choices=names.PRECISIONS, affects_result=True)
    deterministic: bool = option(False,
        "Use only kernels whose results are bitwise identical in every run.", _STEPS,
        affects_result=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """The images."""

    dataset: str = option("auto",
        "auto uses Fashion-MNIST where it is available, else generated images.", _DATA,
        choices=("auto", "fashion_mnist", "synthetic"), affects_result=True)
    num_train_examples: int | None = option(None,
        "Train on a class-balanced random subset of N examples, chosen by the seed.", _STEPS,
        bounds=(1, names.NUM_TRAIN_EXAMPLES), affects_result=True)
    data_dir: str | None = option(None,
        "Folder with the four Fashion-MNIST files, or a TFDS data directory. Without it:"
        " $FASHION_MNIST_DIR, then TFDS.", _ALL, metavar="DIR")
    allow_unverified_data: bool = option(False,
        "Accept data files whose hash is not that of Fashion-MNIST.", _ALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distribution:
    """How a training is distributed over devices."""

    strategy: str = option("manual",
        "Distribution strategy. manual and mirrored split the batch, sharded the batch and the"
        " weights, pipeline the layers, tensor each layer; multi_worker has several processes, on"
        " one or more machines.", ("train", "evaluate"), choices=names.STRATEGY_NAMES,
        affects_result=True)
    strategies: tuple[str, ...] = option(names.COMPARED_BY_DEFAULT,
        "The strategies, separated by commas. compare and verify also have torch_ddp, jax_jit and"
        " jax_pmap, which train in PyTorch and JAX: see make frameworks. verify --case has"
        " keras_fit, Keras' own fit under MirroredStrategy (the default), and single, its fit on"
        " one device.", ("compare", "verify", "benchmark", "doctor"),
        choices=(*names.STRATEGY_NAMES, names.KERAS_FIT, *names.FRAMEWORKS))
    num_gpus: int | None = option(None,
        "Number of GPUs. On a machine without GPUs: N logical CPU devices.", _DEVICES,
        bounds=(1, names.MAX_DEVICES))
    device: str = option("auto",
        "Device type: gpu fails without a GPU, cpu uses logical CPU devices.", _ALL,
        choices=("auto", "gpu", "cpu"))
    num_devices: int | None = option(None,
        "Number of devices (multi_worker: of each worker). Default: all GPUs, or 2 logical CPU"
        " devices.", _DEVICES, bounds=(1, names.MAX_DEVICES))
    all_reduce: str = option("auto",
        f"All-reduce algorithm. {_ALGORITHMS}. mirrored and multi_worker have nccl on GPUs only,"
        " mirrored has ring on CPUs only.", (*_STEPS, "doctor", "demo"),
        choices=("auto", *names.ALL_REDUCE_NAMES), affects_result=True)
    communication_dtype: str = option("float32",
        "Dtype of the gradient all-reduce.", ("verify", "benchmark"),
        choices=("float32", "bfloat16"), affects_result=True)
    batch_norm: str = option("average",
        "average: each shard of the batch is normalised by its own statistics; moving statistics"
        " are averaged. sync: all use the statistics of the whole batch.", _STEPS,
        choices=("average", "sync"), affects_result=True)
    accumulate_steps: int = option(1,
        "Gradient accumulation: each replica splits its shard into N parts and adds their gradients"
        " before the update. Needs less memory.", _STEPS, bounds=(1, 1024), affects_result=True)
    shard_weights: tuple[int, ...] = option((),
        "Shares of the batch for unequal devices: with 3,1 the first replica gets three quarters.",
        _STEPS, bounds=(1, 1000), repeats=True, affects_result=True)
    jit_compile: bool = option(False,
        "Compile the forward and backward pass with XLA.", _STEPS, affects_result=True)
    shard: str = option("weights",
        "sharded: divide the optimizer state (ZeRO-1), the gradients too (ZeRO-2), or the weights"
        " too (ZeRO-3).", _STEPS, choices=("optimizer", "gradients", "weights"),
        affects_result=True)
    model_parallel: int | None = option(None,
        "pipeline, tensor: devices that share one copy of the weights; must divide the number of"
        " devices. Each copy trains on a part of the batch. Default: all devices.", _STEPS,
        bounds=(1, names.MAX_DEVICES), affects_result=True)
    micro_batches: int = option(4,
        "pipeline: micro-batches into which each replica's batch is split.", _STEPS,
        bounds=(1, 1024), affects_result=True)
    schedule: str = option("1f1b",
        "pipeline: gpipe runs all forward passes first; 1f1b starts each backward pass as early as"
        " possible: less memory, same result.", _STEPS, choices=("gpipe", "1f1b"),
        affects_result=True)
    recompute: bool = option(False,
        "pipeline: recompute a stage's activations in its backward pass: less memory, more time,"
        " same result.", _STEPS, affects_result=True)
    pipeline_cuts: tuple[str, ...] = option((),
        "pipeline: layers after which the network is cut into stages. Default: cuts that balance"
        " the operations.", _STEPS, metavar="LAYER,…", affects_result=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The workers of multi_worker."""

    num_workers: int | None = option(None,
        "Worker processes of multi_worker, started on this machine without TF_CONFIG and outside of"
        " srun. Default: those of the cluster, or 2.", _TRAIN, bounds=(1, names.MAX_DEVICES))
    max_restarts: int = option(3,
        "How many times all local workers are restarted after a failure.", ("train",),
        bounds=(0, 1000))
    start_timeout_sec: int = option(300,
        "Seconds to wait for missing workers.", ("train",), bounds=(1, 1_000_000))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """What is written and printed."""

    out: str | None = option(None,
        "Output directory; default runs/<time>-<strategy>-<model>. report: the file to write;"
        " default report.html, beside a single run. doctor: the directory to examine.",
        (*_STEPS, "report", "doctor"), metavar="PATH")
    overwrite: bool = option(False,
        "Start from scratch in an output directory that holds another run.", _STEPS)
    checkpoint_every: int | None = option(None,
        "Save a checkpoint every N steps; default: every five minutes. One is always saved at"
        " the end of an epoch.", _RUNS, bounds=(1, 1_000_000_000))
    stall_timeout_sec: int = option(1800,
        "Stop with exit code 142 after N seconds without progress; 0 waits forever.", _RUNS,
        bounds=(0, 1_000_000))
    verbosity: int = option(-1,
        "0 shows TensorFlow's warnings, 1 all of its messages.", _ALL, bounds=(-1, 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    """What is verified."""

    steps: int = option(names.VERIFIED_STEPS,
        f"Number of steps to verify. With --case: {names.CASE_STEPS}, unless --thorough.",
        ("verify",), bounds=(1, 100_000))
    thorough: bool = option(False,
        f"With --case: verify {names.VERIFIED_STEPS} steps, and also the second epoch, a step after"
        " a save and resume, and an evaluation.", ("verify",))
    case: str | None = option(None,
        "Your own training: a Python file with model(), which returns a compiled Keras model, and"
        " data(global_batch_size), which returns a tf.data.Dataset. FILE:NAME takes the model of"
        " function NAME. See docs/verify_your_own.md.", ("verify",), metavar="FILE")
    keep_traces: bool = option(False,
        "Keep the recorded traces in a directory for each strategy.", ("verify",))
    inject: str | None = option(None,
        f"Inject a fault: {' '.join(str(Fault.parse(name)) for name in FAULTS)}. verify injects it"
        " into the first strategy that can have it, or into that of strategy=NAME.",
        ("train", "verify"), metavar="FAULT")
    verify_every: int | None = option(None,
        "Compare every N-th step, the first one and the last one of the first epoch with the same"
        " step on one device while the training runs. 0 turns it off. Default: the first step, the"
        f" last one of each epoch and every {names.VERIFY_EVERY}th of a long epoch, where steps can"
        " be verified.", ("train",), bounds=(0, 1_000_000_000))
    on_mismatch: str = option("stop",
        "When a verified step does not match: stop with exit code 9, or warn.", ("train",),
        choices=("stop", "warn"))

    @property
    def fault(self) -> Fault | None:
        """The fault of `--inject`."""
        return Fault.parse(self.inject) if self.inject else None

    @property
    def case_function(self) -> str:
        """The function of the case file that returns the model."""
        return split_case(self.case or "")[1]

    @property
    def case_path(self) -> pathlib.Path:
        """The path of the case file."""
        return pathlib.Path(split_case(self.case or "")[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What is measured: every combination of the lists."""

    repeats: int = option(10,
        f"Number of rounds, at least {names.MIN_ROUNDS}; each round times every case once.",
        ("benchmark",), bounds=(1, 10_000), affects_result=True)
    breakdown: bool = option(False,
        "Show where the time of a step goes, and count the bytes between devices.",
        ("benchmark",), affects_result=True)
    model: tuple[str, ...] = option(("lenet",),
        "Networks.", ("benchmark",), choices=names.MODEL_NAMES, affects_result=True)
    num_devices: tuple[int, ...] = option((1, 2),
        "Numbers of devices; multi_worker has one worker for each device.", ("benchmark",),
        bounds=(1, names.MAX_DEVICES), affects_result=True)
    global_batch_size: tuple[int, ...] = option((256,),
        "Examples in a step, over all replicas.", ("benchmark",),
        bounds=(1, names.NUM_TRAIN_EXAMPLES), alias="batch_size", affects_result=True)
    precision: tuple[str, ...] = option(("float32",),
        "Precisions.", ("benchmark",), choices=names.PRECISIONS, affects_result=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A finished run."""

    run: str = option("",
        "Directory of the run.", ("evaluate",), metavar="DIR", required=True)
    images: tuple[str, ...] = option((),
        "Images to classify instead of the test set.", ("evaluate",), metavar="A.png,B.npy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demo:
    """What an experiment shows."""

    wrong: bool = option(False,
        "allreduce: show a wrong all-reduce, which passes this demonstration.",
        ("demo",))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Words:
    """The words after the command."""

    experiment: str | None = option(None,
        "The experiment.", ("demo",), metavar="EXPERIMENT", choices=names.EXPERIMENTS, is_word=True)
    directories: tuple[str, ...] = option((),
        "Directories of runs.", ("report",), metavar="DIR …", is_word=True)


GROUPS: dict[str, type] = {
    group.__name__.lower(): group
    for group in (Training, Data, Distribution, Cluster, Output, Verification, Benchmark,
                  Evaluation, Demo, Words)
}
TABLE: tuple[Option, ...] = tuple(
    row for name, group_class in GROUPS.items() for row in rows_of(name, group_class)
)


class Command(NamedTuple):
    """A command: its line in `--help`, the options that its own `--help` shows, and examples.

    The first example is also the program's.
    """

    summary: str
    usual: tuple[str, ...]
    examples: tuple[str, ...]


_ON = ("device", "num_devices", "num_gpus")
_TRAINED = ("model", "recipe", "epochs", "global_batch_size", "learning_rate")

COMMANDS = {
    "train": Command("trains a model; writes history, plots and checkpoints",
        ("strategy", *_ON, *_TRAINED, "out"), (
        "--strategy=manual --device=cpu --num_devices=2 --epochs=3",
        "--recipe=fast --epochs=1 --out=runs/first",
        "--strategy=mirrored --num_gpus=2 --model=resnet18",
        "--strategy=multi_worker --num_workers=2 --device=cpu --epochs=1",
        "--strategy=pipeline --num_devices=2 --micro_batches=8",
        "--strategy=sharded --num_devices=2 --shard=gradients")),
    "compare": Command("trains several strategies from the same weights and data",
        ("strategies", *_ON, *_TRAINED, "out"), (
        "--recipe=fast --epochs=1",
        "--strategies=single,manual --num_gpus=2",
        "--strategies=single,torch_ddp,jax_pmap --epochs=1")),
    "verify": Command("compares trainings step by step and names the first mismatch",
        ("strategies", "case", "steps", "inject", *_ON, "model", "global_batch_size", "out"), (
        "--strategies=manual,mirrored --steps=20",
        "--strategies=manual --inject=drop_gradient:replica=1",
        "--case=examples/case_fit.py --num_devices=2",
        "--strategies=single,manual,mirrored,torch_ddp,jax_pmap")),
    "evaluate": Command("computes the test accuracy of a run, or classifies images",
        ("run", "images", "strategy", *_ON), (
        "--run=runs/NAME --strategy=mirrored --num_devices=4",
        "--run=runs/NAME --images=shoe.png,bags.npy")),
    "benchmark": Command("measures throughput over strategies, devices and batch sizes",
        ("strategies", "device", "num_devices", "model", "global_batch_size", "precision",
         "recipe", "repeats", "breakdown", "out"), (
        "--num_devices=1,2,4 --repeats=20",
        "--breakdown --strategies=manual --num_devices=2")),
    "report": Command("writes a page about runs", ("out",), (
        "runs/first runs/second --out=report.html",)),
    "doctor": Command("checks this machine: what it has, what is missing, what to run",
        ("strategies", *_ON, "data_dir", "out"), (
        "", "--data_dir=DIR --num_gpus=2")),
    "demo": Command("the experiments of d2l; without a name, lists them", (*_ON, "wrong"), (
        "allreduce --num_devices=3", "allreduce --wrong", "")),
}
# fmt: on


def options_of(command: str) -> dict[str, Option]:
    """Returns name → option for each option of a command."""
    return {row.name: row for row in TABLE if command in row.commands}
