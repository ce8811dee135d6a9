"""`train`: one training, in one directory."""

import pathlib
import time

from app import console, devices
from app.caveats import caveats, injected_fault_caveat
from app.config import Config, check_shards
from app.errors import CheckpointError, OutputError
from app.records.history import Summary, load_summary
from app.records.run_directory import LOG_FILE, RunDirectory, open_run_directory


def run(config: Config) -> int:
    """Trains, or goes on with a training, or prints the result of a finished one; returns 0."""
    path = pathlib.Path(config.out or default_out(config)).expanduser()
    with open_run_directory(path, config.result_fields()) as run_directory:
        open_log(path)
        started = not config.overwrite and run_directory.holds_this_run()
        summary = load_summary(path) if started else None
        if summary and summary.status == "finished":
            _check_replicas(config, summary)
            console.say(f"{path} is already finished; this is its result")
        else:
            summary = _train(config, run_directory)
            console.say(f"saved in {path}: accuracy.png, history.jsonl, summary.json")
        for caveat in caveats(config, summary):
            console.warn(caveat)
        console.say(summary.last_line())
    return 0


def _check_replicas(config: Config, summary: Summary) -> None:
    """Refuses to pass the result of other replicas off as the one asked for."""
    if config.num_replicas_asked not in (None, summary.num_replicas):
        raise CheckpointError(
            f"--out={config.out} holds a finished run on"
            f" {console.count(summary.num_replicas, 'replica')}, not {config.num_replicas_asked}"
            " — the same number is required; choose another directory, or --overwrite"
        )


def _train(config: Config, run_directory: RunDirectory) -> Summary:
    prepared = devices.set_up(config)
    from app.job import load_data
    from app.training import Training

    dataset = load_data(config)
    check_shards(config, len(prepared.names), len(dataset.train_images))

    training = Training(config, prepared, dataset, run_directory.path)
    run_directory.start(overwrite=config.overwrite)  # From here on nothing is refused.
    training.resume()
    console.say(
        f"{config.strategy}: {config.model} on {dataset.name},"
        f" {len(dataset.train_images):,} training images"
    )
    console.say(
        f"{console.count(config.epochs, 'epoch')} of"
        f" {console.count(training.steps_per_epoch, 'step')}, recipe {config.recipe}, batch"
        f" {config.global_batch_size}, learning rate {training.learning_rate:g}"
    )
    console.say(f"replicas on {', '.join(prepared.names)}")
    if config.fault:
        console.warn(injected_fault_caveat(str(config.fault)))
    if prepared.simulated:
        console.say("simulated devices: they share one processor, timing is not scaling")
    return training.run()


def open_log(path: pathlib.Path) -> None:
    """Opens the log of a run.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        console.open_log(path / LOG_FILE)
    except OSError as error:
        raise OutputError(
            f"{path / LOG_FILE}: {error.strerror} — a log that can be written is required;"
            " choose another --out"
        ) from error


def default_out(config: Config) -> str:
    """Returns a new name under `runs/`: time, strategy or command, model."""
    kind = config.strategy if config.command == "train" else config.command
    return f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{kind}-{config.model}"
