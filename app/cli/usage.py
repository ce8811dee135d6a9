"""What `--help` prints: all of the program, or what matters to one command."""

import dataclasses
import textwrap

from app.config import Config
from app.config.flag_groups import GROUPS
from app.config.options import COMMANDS, DEFAULT_COUNTS, OWN_DEFAULTS, WORDS

# Command → what it is for, and how it is written; a test reads every example.
COMMAND_HELP = {
    "train": (
        "one training, with history, plots and checkpoint in one directory",
        "--strategy=manual --device=cpu --num_devices=2 --epochs=3",
        "--recipe=fast --epochs=1 --out=runs/first",
        "--strategy=mirrored --num_gpus=2 --model=resnet18",
    ),
    "launch": (
        "the same on several local processes, started again after a failure",
        "--num_workers=2 --device=cpu --epochs=1",
    ),
    "evaluate": (
        "test accuracy of a run, on any strategy and number of devices",
        "--run=runs/NAME --strategy=mirrored --num_devices=4",
    ),
    "predict": (
        "class and probability of images, the batch split over the replicas",
        "--run=runs/NAME",
        "--run=runs/NAME --images=shoe.png,bags.npy",
    ),
    "compare": (
        "several strategies from the same weights and data, side by side",
        "--recipe=fast --epochs=1",
        "--strategies=single,manual --num_gpus=2",
    ),
    "verify": (
        "proves them the same training, or names the first false step",
        "--strategies=manual,mirrored --steps=20",
        "--strategies=manual --inject=drop_gradient:replica=1",
    ),
    "benchmark": (
        "throughput of strategies, device counts, batches and precisions",
        "--num_devices=1,2,4 --repeats=20",
    ),
    "explain": (
        "one step told with its numbers, and where its time goes",
        "--num_devices=2,3,4 --all_reduce=ring",
    ),
    "plan": (
        "what a training would take: steps, shards, exchange, memory, time",
        "--num_gpus=4 --model=resnet18 --global_batch_size=1024",
        "--num_devices=2 --epochs=10 --probe",
        "--num_workers=64 --devices_per_worker=8",
    ),
    "report": (
        "one page, report.html, from the directories of runs",
        "runs/first runs/second --out=report.html",
    ),
    "demo": (
        "the textbook's small experiments; alone it lists them",
        "",
        "allreduce --num_devices=3",
    ),
    "doctor": (
        "what this machine has, what is missing, and what to run",
        "",
        "--data_dir=DIR --num_gpus=2",
    ),
}
_WIDTH = 72


def help_text(command: str | None = None) -> str:
    """Returns the help: of one command, or the list of all of them with every flag."""
    return _join(_of_command(command) if command else _of_program())


def _of_program() -> list[list[str]]:
    commands = [f"  {name:<11}{text}" for name, (text, *_) in COMMAND_HELP.items()]
    everything = {name for group in GROUPS.values() for name in group}
    return [
        ["usage: python main.py [COMMAND] [--flag=value …]"],
        ["Commands (default: train)", *commands],
        ["What matters to one of them: python main.py COMMAND --help"],
        *_groups(everything, {}),
        ["Examples", *(line for name in COMMAND_HELP for line in _examples(name)[:1])],
        _BATCHES,
    ]


_BATCHES = [f"Batches are global: {Config.global_batch_size} examples over all replicas."]


def _of_command(command: str) -> list[list[str]]:
    word = f" [{WORDS[command]}]" if command in WORDS else ""
    names = {"num_devices" if name == "device_counts" else name for name in COMMANDS[command]}
    defaults = dict(OWN_DEFAULTS.get(command, {}))
    if command in DEFAULT_COUNTS:
        defaults["num_devices"] = DEFAULT_COUNTS[command]
    return [
        [f"usage: python main.py {command}{word} [--flag=value …]"],
        [f"{command}: {COMMAND_HELP[command][0]}"],
        ["Examples", *_examples(command)],
        *_groups(names, defaults),
        *([_BATCHES] if "global_batch_size" in names else []),
    ]


def _examples(command: str) -> list[str]:
    prefix = "" if command == "train" else f" {command}"
    _, *examples = COMMAND_HELP[command]
    return [f"  python main.py{prefix} {example}".rstrip() for example in examples]


def _groups(names: set[str], own_defaults: dict) -> list[list[str]]:
    """Returns the groups with the flags among `names`, each with its default."""
    defaults = {field.name: field.default for field in dataclasses.fields(Config)} | own_defaults
    groups = []
    for title, members in GROUPS.items():
        lines = []
        for name, (_, values, text) in members.items():
            if name in names:
                flag = f"--{name}={values}" if values else f"--{name}"
                shown = textwrap.fill(text + _default(defaults[name]), _WIDTH)
                lines += [f"  {flag}", textwrap.indent(shown, "      ")]
        if lines:
            groups.append([title, *lines])
    return groups


def _default(value) -> str:
    if value is None or value is False or value == ():
        return ""
    return f" [{','.join(map(str, value)) if isinstance(value, tuple) else value}]"


def _join(parts: list[list[str]]) -> str:
    return "\n\n".join("\n".join(part) for part in parts)
