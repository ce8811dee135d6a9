"""`train`: one training, in one directory."""

import pathlib
import time

from app import console, devices
from app.caveats import caveats
from app.config import Config
from app.data.source import load_dataset, with_train_subset
from app.records.history import load_summary
from app.records.run_directory import LOG_FILE, open_run_directory


def run(config: Config) -> int:
    """Trains, or goes on with a training, or prints the result of a finished one; returns 0."""
    path = pathlib.Path(config.out or default_out(config))
    with open_run_directory(path, config.result_fields(), overwrite=config.overwrite) as run_dir:
        console.open_log(run_dir / LOG_FILE)
        summary = load_summary(run_dir)
        if summary and summary.status == "finished":
            console.say(f"{run_dir} is already finished; this is its result")
        else:
            summary = _train(config, run_dir)
            console.say(f"saved in {run_dir}")
        for caveat in caveats(config, summary):
            console.warn(caveat)
        console.say(summary.last_line())
    return 0


def _train(config: Config, run_dir: pathlib.Path):
    prepared = devices.set_up(config)
    dataset = load_dataset(
        config.dataset,
        data_dir=config.data_dir,
        allow_unverified=config.allow_unverified_data,
        warn=console.warn,
    )
    dataset = with_train_subset(dataset, config.num_train_examples, config.seed)
    from app.training import Training

    training = Training(config, prepared, dataset, run_dir)
    console.say(
        f"{config.strategy}: {config.model} on {dataset.name},"
        f" {len(dataset.train_images):,} training images"
    )
    console.say(
        f"{console.count(config.epochs, 'epoch')} of"
        f" {console.count(training.steps_per_epoch, 'step')}, recipe {config.recipe}, batch"
        f" {config.global_batch_size}, learning rate {training.learning_rate:g}"
    )
    note = " (simulated devices: timing is not scaling)" if prepared.simulated else ""
    console.say(f"replicas on {', '.join(prepared.names)}{note}")
    return training.run()


def default_out(config: Config) -> str:
    """Returns a new name under `runs/`: time, strategy or command, model."""
    kind = config.strategy if config.command == "train" else config.command
    return f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{kind}-{config.model}"
