"""`compare`: trains several strategies from equal weights and data."""

import dataclasses
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from app.commands.framework_training import train_with_framework
from app.devices.cluster import is_in_cluster
from app.devices.device_setup import too_few_gpus
from app.devices.gpus import query_driver
from app.options import Config
from app.options.names import FRAMEWORKS, SINGLE
from app.records.caveats import caveats
from app.records.checkpoint import load_finished
from app.records.files import temporary_path, write_json
from app.records.history import FIGURE_FILES, Summary
from app.records.run_directory import CONFIG_FILE, default_out, named_path, open_command_directory
from app.records.run_metadata import summarize
from app.report.page import REPORT_FILE, write_report
from app.report.result import Result
from app.report.training_result import results_table
from app.runtime import console, signals
from app.runtime.errors import ConfigError, DataError, LockstepError, OutputError
from app.runtime.processes import call_in_child_process, start_program
from app.runtime.shown_command import shown_command
from app.verification.comparison import largest_difference
from app.verification.frameworks import find_interpreters, temporary_folder, write_training_files
from app.verification.output import DIFFERENT, IDENTICAL, Pair, record_of_pair
from lockstep.answer.html import BAD, GOOD

if TYPE_CHECKING:  # Imports TensorFlow.
    from strategies.copies import State

EXPECTED = "different, as expected"


def run(config: Config) -> list[Summary]:
    """Trains each strategy in a separate process, then prints the table and the verdict.

    Returns one summary per strategy, `single` first, then in order.

    Raises:
        LockstepError: a training did not finish; the program exits with its exit code.
    """
    if config.has_workers and is_in_cluster():
        raise ConfigError(
            "compare starts the workers on this machine, but the environment defines a cluster;"
            " unset TF_CONFIG, or run it outside of srun"
        )
    _check_num_gpus(config)
    strategies = sorted(config.distribution.strategies, key=lambda name: name != SINGLE)
    own = [name for name in strategies if name not in FRAMEWORKS]
    interpreters = find_interpreters([name for name in strategies if name in FRAMEWORKS])
    path = named_path(config.output.out or default_out("compare", config.training.model))
    fields = {
        **config.result_fields(),
        "strategy": ",".join(strategies),
        "num_replicas": config.num_devices_of_all_workers,  # For data parallelism.
    }
    overwrite = config.output.overwrite
    with (
        console.resumable(path, overwrite=overwrite),
        open_command_directory(path, fields, overwrite=overwrite) as run_directory,
    ):
        run_directory.start(overwrite=overwrite)
        console.say(f"training with {', '.join([*own, *interpreters])}, one after another")
        for strategy in own:
            _announce(strategy, path)
            exit_code = train_in_child_process(
                [*_words_for(config, strategy), f"--out={path / strategy}"]
            )
            if exit_code:
                if not any(path.glob(f"*/{CONFIG_FILE}")):  # Nothing was trained: free it.
                    run_directory.remove(CONFIG_FILE)
                raise LockstepError(
                    f"the training with {strategy} failed with exit code {exit_code}; fix the error"
                    " above and run the same command again",
                    exit_code,
                )
        if interpreters:
            _train_with_frameworks(config, interpreters, path)
        return _report(config, path, [path / strategy for strategy in strategies])


def _check_num_gpus(config: Config) -> None:
    """Checks that the driver has enough GPUs, before `single` trains, which needs only one.

    Raises:
        DeviceError: there are too few.
    """
    wanted = config.num_devices_asked
    if config.distribution.device == "cpu" or not wanted:
        return
    gpus, _ = query_driver()
    if gpus and wanted > len(gpus):
        raise too_few_gpus(wanted, len(gpus))


def _announce(strategy: str, path: pathlib.Path) -> None:
    """Prints which training starts.

    Raises:
        OutputError: the training's directory is a symbolic link.
    """
    console.say(f"\n{strategy}")
    if (path / strategy).is_symlink():
        raise OutputError(
            f"{path / strategy} is a symbolic link, and nothing is written outside of --out;"
            " replace it with the directory that it links to"
        )


def _train_with_frameworks(
    config: Config, interpreters: Mapping[str, str], path: pathlib.Path
) -> None:
    """Trains with frameworks, from equal weights and with the same order of examples."""
    with temporary_folder(temporary_path(path / "traces")) as folder:
        files = call_in_child_process(
            write_training_files,
            config.for_training(next(iter(interpreters))),
            None,
            folder,
        )
        own_run = path / config.own_strategies[0]
        for name, python in interpreters.items():
            _announce(name, path)
            train_with_framework(name, python, config, files, own_run, path / name)


def train_in_child_process(words: Sequence[str]) -> int:
    """Runs a training command as a child process and returns its exit code.

    Two MirroredStrategies of different size in one process break every later collective, and each
    training should run in the environment of a user's own run.

    Raises:
        KeyboardInterrupt, Terminated: a signal was received; the child has saved its state.
    """
    child = start_program(words, death_signal=signals.STOP_REQUEST)
    with signals.deferred(lambda: child.send_signal(signals.STOP_REQUEST)):
        child.wait()
    signals.check()
    return child.exit_code or 0


def _words_for(config: Config, strategy: str) -> list[str]:
    """Returns command and flags of the training of one strategy."""
    flags = config.for_training(strategy).flags()
    return ["train", *flags]


def _report(config: Config, out_dir: pathlib.Path, run_dirs: list[pathlib.Path]) -> list[Summary]:
    """Prints the table and the comparison of the weights; saves both, and a figure of all runs."""
    from app.report.accuracy_plot import plot_accuracy

    finished = [load_finished(path) for path in run_dirs]
    summaries = [summarize(each.metadata, each.progress) for each in finished]
    pairs = compare_weights(summaries, [each.state for each in finished])
    result = describe(config, summaries, pairs)
    console.say()
    result.print()
    histories = [each.progress.history for each in finished]
    runs = {s.strategy: (s, history) for s, history in zip(summaries, histories, strict=True)}
    plot_accuracy(runs, out_dir)
    write_json(
        out_dir / "compare.json",
        {
            "runs": [dataclasses.asdict(summary) for summary in summaries],
            "pairs": [record_of_pair(pair) for pair in pairs],
            "shown": result.to_record(),
        },
    )
    write_report([out_dir], out_dir / REPORT_FILE)
    console.say(f"saved in {out_dir}: {', '.join([*FIGURE_FILES, 'compare.json', REPORT_FILE])}")
    console.say(f"open {out_dir / REPORT_FILE} for the verdict and all curves on one page")
    return summaries


def describe(config: Config, summaries: Sequence[Summary], pairs: Sequence[Pair]) -> Result:
    """Describes the comparison of the weights, and the results in a table."""
    sentence, *lines = pair_lines(pairs, summaries[0].steps)
    if not all(pair.outcome == IDENTICAL for pair in pairs):
        lines.append(
            f"To verify step by step that this is rounding: {shown_command(_verify_words(config))}"
        )
    first = summaries[0]
    recipe = f" recipe {first.recipe}," if first.recipe else ""
    table = results_table(
        f"{first.model} on {first.dataset},{recipe} batch"
        f" {first.global_batch_size}, {console.count(first.epochs, 'epoch')}",
        {summary.strategy: summary for summary in summaries},
    )
    notes = ["times are medians over epochs of one run each, made one after another"]
    if any(summary.simulated_devices for summary in summaries):
        notes.insert(0, "simulated devices share one processor: their times show no speed-up")
    is_bad = any(pair.outcome == DIFFERENT for pair in pairs)
    return Result(
        [(BAD if is_bad else GOOD, sentence)],
        [*lines, table, *notes],
        caveats(config, summaries[-1]),
    )


def _verify_words(config: Config) -> list[str]:
    """Returns command and flags of the verification of the strategies that were compared."""
    return ["verify", *config.flags()]


def pair_lines(pairs: Sequence[Pair], num_steps: int) -> list[str]:
    """Returns the verdict in one sentence, a line for each pair that differs, and explanations."""
    lines, after = [_summarize(pairs)], f"after {console.count(num_steps, 'step')}"
    for pair in pairs:
        if pair.outcome != IDENTICAL:
            lines.append(
                f"{' and '.join(pair.trainings)}: weights {after} differ by at most"
                f" {pair.absolute:.2g} ({pair.relative:.2g} of the largest, in {pair.where})"
            )
    return [*lines, *dict.fromkeys(pair.why for pair in pairs if pair.outcome != IDENTICAL)]


def _summarize(pairs: Sequence[Pair]) -> str:
    outcomes = {pair.outcome for pair in pairs}
    if outcomes <= {IDENTICAL}:
        return "All trainings end with bitwise identical weights."
    if DIFFERENT in outcomes:
        return "Weights differ that should be bitwise identical."
    same = [f"{', '.join(names[:-1])} and {names[-1]}" for names in _identical(pairs)]
    if not same:
        return "The trainings end with different weights, as expected."
    return f"{'; '.join(same)} end with bitwise identical weights; the others differ, as expected."


def _identical(pairs: Sequence[Pair]) -> list[list[str]]:
    """Returns the groups of trainings that end with bitwise identical weights."""
    groups = list[list[str]]()
    for pair in pairs:
        if pair.outcome == IDENTICAL:
            group = next((g for g in groups if not set(g).isdisjoint(pair.trainings)), [])
            if not group:
                groups.append(group)
            group += [name for name in pair.trainings if name not in group]
    return groups


def compare_weights(summaries: Sequence[Summary], states: "Sequence[State]") -> list[Pair]:
    """Compares the final weights of each pair of runs from equal initial weights.

    The outcome of a pair is `DIFFERENT` if both should be bitwise identical and are not.

    Raises:
        DataError: the runs were trained on different images.
    """
    if len({summary.dataset_sha256 for summary in summaries}) > 1:
        found = ", ".join(f"{s.strategy} on {s.dataset}" for s in summaries)
        raise DataError(
            f"trained on different images: {found}; give the data set with --dataset and use"
            " --overwrite"
        )
    pairs = itertools.combinations(zip(summaries, states, strict=True), 2)
    return [_compare((one, two), (a, b)) for (one, a), (two, b) in pairs]


def _compare(summaries: tuple[Summary, Summary], states: "tuple[State, State]") -> Pair:
    weights = [
        {n.removeprefix("model/"): a for n, a in state.items() if n.startswith("model/")}
        for state in states
    ]
    tensor, absolute, relative = largest_difference(*weights)
    names = summaries[0].strategy, summaries[1].strategy
    num_shards, orders = zip(*((s.num_shards, s.all_reduce) for s in summaries), strict=True)
    splits_differently = num_shards[0] != num_shards[1]
    if not tensor:
        return Pair(names, IDENTICAL)
    kernels = [summary.cpu_kernels for summary in summaries]
    if not splits_differently and orders[0] == orders[1] and kernels[0] != kernels[1]:
        why = f"the kernels of the CPU, which round differently, are not the same ({kernels[0]};"
        why = f"A difference is expected: {why} {kernels[1]})."
        return Pair(names, EXPECTED, absolute, relative, tensor, why)
    if not splits_differently and orders[0] == orders[1]:
        why = "add in the same order, so their weights should be bitwise identical."
        return Pair(names, DIFFERENT, absolute, relative, tensor, f"{' and '.join(names)} {why}")
    why = "the summation order differs, and training amplifies rounding errors"
    if splits_differently and any(name.endswith("/moving_mean") for name in states[0]):
        why = (
            "each shard is normalised with its own statistics (--batch_norm=average), so the number"
            " of shards is part of the training"
        )
    elif splits_differently and any("seed_generator" in name for name in states[0]):
        why = (
            "random layers draw different numbers on each replica, so the number of replicas is"
            " part of the training"
        )
    return Pair(names, EXPECTED, absolute, relative, tensor, f"A difference is expected: {why}.")
