"""`compare`: trains several strategies from equal weights and data."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from app.commands.framework_training import train_with_framework
from app.devices.cluster import is_in_cluster
from app.devices.device_setup import too_few_gpus
from app.devices.gpus import query_driver
from app.options import Config
from app.records.caveats import caveats
from app.records.checkpoint import load_finished
from app.records.files import temporary_path, write_json
from app.records.history import FIGURE_FILES, Summary
from app.records.run_directory import (
    CONFIG_FILE,
    RunDirectory,
    default_out,
    named_path,
    open_command_directory,
)
from app.records.run_metadata import summarize
from app.report.page import REPORT_FILE, write_report
from app.report.result import Result
from app.report.training_result import results_table
from app.runtime import console, signals
from app.runtime.errors import ConfigError, LockstepError, OutputError
from app.runtime.processes import call_in_child_process, start_program
from app.runtime.shown_command import shown_command
from app.verification.comparison import compare_weights, pair_lines
from app.verification.frameworks import find_interpreters, temporary_folder, write_training_files
from app.verification.output import DIFFERENT, IDENTICAL, Pair, record_of_pair
from lockstep.answer.html import BAD, GOOD


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
    fields, overwrite = config.result_fields(), config.output.overwrite
    strategies = fields["strategy"].split(",")
    interpreters = find_interpreters(strategies)
    path = named_path(config.output.out or default_out("compare", config.training.model))
    with (
        console.resumable(path, overwrite=overwrite),
        open_command_directory(path, fields, overwrite=overwrite) as run_directory,
    ):
        run_directory.start(overwrite=overwrite)
        own = [name for name in strategies if name not in interpreters]
        console.say(f"training with {', '.join([*own, *interpreters])}, one after another")
        for strategy in own:
            _train(config, strategy, run_directory)
        if interpreters:
            _train_with_frameworks(config, interpreters, path)
        return _report(config, path, [path / strategy for strategy in strategies])


def _train(config: Config, strategy: str, run_directory: RunDirectory) -> None:
    """Trains with one strategy, as a user's own command does.

    Raises:
        LockstepError: the training did not finish.
    """
    path = run_directory.path
    _announce(strategy, path)
    words = ["train", *config.for_training(strategy).flags(), f"--out={path / strategy}"]
    if exit_code := train_in_child_process(words):
        if not any(path.glob(f"*/{CONFIG_FILE}")):  # Nothing was trained: free it.
            run_directory.remove(CONFIG_FILE)
        raise LockstepError(
            f"the training with {strategy} failed with exit code {exit_code}; fix the error above"
            " and run the same command again",
            exit_code,
        )


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
        command = shown_command(["verify", *config.flags("verify")])
        lines.append(f"To verify step by step that this is rounding: {command}")
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
