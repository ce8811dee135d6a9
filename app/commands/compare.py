"""`compare`: trains several strategies from equal weights and data."""

import itertools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from app import console, signals
from app.children import start_program
from app.errors import DataError, LockstepError, OutputError
from app.options import Config
from app.records import files
from app.records.checkpoint import Checkpoint, load_finished
from app.records.history import FIGURE_FILES, TIMING_CAVEAT, caveats, summarize
from app.records.run_directory import CONFIG_FILE, default_out, named_path, open_command_directory
from app.report import page
from app.report.page import DIFFERENT, IDENTICAL, REPORT_FILE

COMPARE_FILE = "compare.json"
EXPECTED = "different, as expected"


def run(config: Config) -> list[dict[str, Any]]:
    """Trains each strategy in a process, and reports; returns the summaries, `single` first."""
    strategies = sorted(config.strategies, key=lambda name: name != "single")
    fields = {**config.result_fields(), "command": "compare", "strategies": strategies}
    overwrite = config.output.overwrite
    path = named_path(config.output.out or default_out("compare", config.training.model))
    with (
        console.resumable(path, overwrite=overwrite),
        open_command_directory(path, fields, overwrite=overwrite) as run_directory,
    ):
        run_directory.start(overwrite=overwrite)
        for variable in ("TF_CONFIG", "SLURM_PROCID"):  # What is compared runs on this machine.
            os.environ.pop(variable, None)
        console.say(f"training with {', '.join(strategies)}, one after another")
        for strategy in strategies:
            _train(config, strategy, path)
        return _report(config, path, {name: load_finished(path / name) for name in strategies})


def _train(config: Config, strategy: str, path: pathlib.Path) -> None:
    """Trains with one strategy in a directory below `path`; raises LockstepError if it fails."""
    console.say(f"\n{strategy}")
    if (path / strategy).is_symlink():
        raise OutputError(
            f"{path / strategy} is a symbolic link, and nothing is written outside of --out;"
            " replace it with the directory that it links to"
        )
    words = ["train", *config.for_training(strategy).flags(), f"--out={path / strategy}"]
    if exit_code := train_in_child_process(words):
        if not any(path.glob(f"*/{CONFIG_FILE}")):  # Nothing was trained: free the directory.
            files.remove(path / CONFIG_FILE)
        raise LockstepError(
            f"the training with {strategy} failed with exit code {exit_code}; fix the error above"
            " and run the same command again",
            exit_code,
        )


def train_in_child_process(words: Sequence[str]) -> int:
    """Runs a training like a user's own run, which saves after a signal; returns its exit code."""
    with (
        start_program(words) as child,
        signals.deferred(lambda: child.send_signal(signals.STOP_REQUEST)),
    ):
        child.wait()
    signals.check()
    return child.exit_code or 0


def _report(
    config: Config, path: pathlib.Path, trained: Mapping[str, Checkpoint]
) -> list[dict[str, Any]]:
    """Prints the table and the comparison of the weights; saves both, and a figure of all runs."""
    from app.report.plots import plot_accuracy

    summaries = {name: summarize(each.metadata, each.epochs) for name, each in trained.items()}
    pairs = compare_weights(trained)
    *_, last = summaries.values()
    _print_pairs(config, pairs, console.count(last["steps"], "step"))
    console.say()
    console.print_table(
        f"{last['model']} on {last['dataset']}, recipe {last['recipe']}, batch"
        f" {last['global_batch_size']}, {console.count(last['epochs'], 'epoch')}",
        *page.results_table(summaries),
    )
    if last["simulated_devices"]:
        console.say(TIMING_CAVEAT)
    console.say("times are medians over epochs of one run each, made one after another")
    for caveat in caveats(last):
        console.warn(caveat)
    plot_accuracy({name: (summaries[name], trained[name].epochs) for name in trained}, path)
    record = {"command": "compare", "runs": list(summaries.values()), "pairs": pairs}
    files.write_json(path / COMPARE_FILE, record)
    page.write_report([path], path / REPORT_FILE)
    console.say(f"saved in {path}: {', '.join([*FIGURE_FILES, COMPARE_FILE, REPORT_FILE])}")
    console.say(f"open {path / REPORT_FILE} for the verdict and all curves on one page")
    return list(summaries.values())


def _print_pairs(config: Config, pairs: Sequence[dict[str, Any]], steps: str) -> None:
    """Prints the verdict on the weights, and the pairs that differ."""
    console.say()
    console.say(page.pairs_verdict(pairs)[1])
    different = [pair for pair in pairs if pair["outcome"] != IDENTICAL]
    for pair in different:
        console.say(
            f"{' and '.join(pair['trainings'])}: weights after {steps} differ by at most"
            f" {pair['absolute']:.2g} ({pair['relative']:.2g} of the largest, in {pair['where']})"
        )
    for reason in dict.fromkeys(pair["why"] for pair in different):
        console.say(reason)
    if different:
        command = console.shown_command(["verify", *config.flags("verify")])
        console.say(f"To verify step by step that this is rounding: {command}")


def compare_weights(trained: Mapping[str, Checkpoint]) -> list[dict[str, Any]]:
    """Compares the final weights of each pair of trainings; raises DataError for different images.

    A pair has `trainings`, `outcome`, the largest `absolute` difference of an element, the same
    `relative` to the largest element of its array, `where` it is, and `why`.
    """
    if len({each.metadata.dataset_sha256 for each in trained.values()}) > 1:
        found = ", ".join(f"{name} on {each.metadata.dataset}" for name, each in trained.items())
        raise DataError(
            f"trained on different images: {found}; give the data set with --dataset and use"
            " --overwrite"
        )
    pairs = []
    for names in itertools.combinations(trained, 2):
        first, second = (trained[name] for name in names)
        sizes, outcome, why = _largest_difference(first.state, second.state), IDENTICAL, ""
        if sizes["where"] and (reason := _why_different(first, second)):
            outcome, why = EXPECTED, f"A difference is expected: {reason}."
        elif sizes["where"]:
            outcome = DIFFERENT
            why = f"{' and '.join(names)} add in the same order: their weights should be identical."
        pairs.append({"trainings": list(names), "outcome": outcome, **sizes, "why": why})
    return pairs


def _largest_difference(
    first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Compares the models' arrays of two states; "where" is "" if all are bitwise identical."""
    found: list[dict[str, Any]] = [{"absolute": 0.0, "relative": 0.0, "where": ""}]
    for name in (name for name in first if name.startswith("model/")):
        if first[name].tobytes() != second[name].tobytes():
            a, b = first[name].astype(np.float64), second[name].astype(np.float64)
            absolute, largest = float(np.max(np.abs(a - b))), float(np.max(np.abs([a, b])))
            relative, where = absolute / (largest or 1.0), name.removeprefix("model/")
            found.append({"absolute": absolute, "relative": relative, "where": where})
    return max(
        found, key=lambda each: (each["where"] != "", np.nan_to_num(each["absolute"], nan=np.inf))
    )


def _why_different(first: Checkpoint, second: Checkpoint) -> str:
    """Returns why the weights of two trainings may differ; "" if they should be identical."""
    splits_differently = first.metadata.num_shards != second.metadata.num_shards
    if splits_differently and any(name.endswith("/moving_mean") for name in first.state):
        return (
            "each shard is normalised with its own statistics (--batch_norm=average), so the number"
            " of shards is part of the training"
        )
    if splits_differently and any("seed_generator" in name for name in first.state):
        return (
            "random layers draw different numbers on each replica, so the number of replicas is"
            " part of the training"
        )
    if splits_differently or first.metadata.all_reduce != second.metadata.all_reduce:
        return "the summation order differs, and training amplifies rounding errors"
    return ""
