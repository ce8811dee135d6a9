"""`demo`: runs the small experiments of the textbook."""

import textwrap

from app.config import DemoConfig
from app.demos.registry import EXPERIMENTS, run_experiment
from app.runtime import console
from app.runtime.shown_command import shown_command


def run(config: DemoConfig) -> None:
    """Runs one experiment, or lists all.

    Raises:
        ConfigError: there is no such experiment, or it does not take an option.
    """
    if not config.experiment:
        _list_experiments()
        return
    run_experiment(config)


def _list_experiments() -> None:
    console.say("Usage: python main.py demo EXPERIMENT [--flag=value …]")
    console.say()
    for name, experiment in EXPERIMENTS.items():
        console.say(f"  {name:<13} {experiment.duration:<15} {experiment.text}")
    console.say()
    console.say("Durations are those of two CPU cores. Flags, and the experiments that take them:")
    owners: dict[str, list[str]] = {}
    for option in sorted({option for e in EXPERIMENTS.values() for option in e.options}):
        names = [name for name, e in EXPERIMENTS.items() if option in e.options]
        shown = "all" if len(names) == len(EXPERIMENTS) else ", ".join(names)
        owners.setdefault(shown, []).append(f"--{option}")
    for shown, options in owners.items():
        line = f"{' '.join(options)}: {shown}"
        console.say(textwrap.fill(line, 98, initial_indent="  ", subsequent_indent="      "))
    console.say()
    console.say(f"Start with: {shown_command(['demo', 'allreduce'])}")
