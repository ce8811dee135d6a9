"""Builds a strategy from recipe, model and devices, and restores checkpoints."""

import dataclasses

import keras

from app.devices.device_setup import Devices
from app.options import Config
from app.records.checkpoint import Checkpoint
from app.runtime.errors import CheckpointError, ConfigError
from app.training.optimizers import initial_loss_scale
from app.training.recipes import find_recipe
from models import load_model_builder
from strategies import load_strategy_class
from strategies.base import Strategy


def build_strategy(
    config: Config,
    devices: Devices,
    *,
    image_shape: tuple[int, int, int],
    num_classes: int,
    learning_rate: float,
    num_steps: int,
    all_reduce: str | None = None,
) -> Strategy:
    """Builds the strategy of `config` with its model and optimizer on every device.

    Args:
        config: names the strategy, the model and the recipe.
        devices: devices of the replicas.
        image_shape: height, width and channels of the dataset's images.
        num_classes: number of classes of the dataset.
        learning_rate: peak learning rate.
        num_steps: steps of the whole training, for schedules.
        all_reduce: algorithm that replaces the one of `config`.

    Raises:
        ConfigError: the strategy has no such all-reduce on these devices, cannot split the model,
            the model has no BatchNorm to synchronise, or it does not fit the dataset.
    """
    recipe = find_recipe(config.training.recipe, config.training.model)
    strategy = create_strategy(
        config, devices, all_reduce=all_reduce, label_smoothing=recipe.label_smoothing
    )
    keras.config.set_dtype_policy(config.training.precision)

    def build_model() -> keras.Model:
        return recipe.build_model(
            load_model_builder(config.training.model),
            image_shape=image_shape,
            num_classes=num_classes,
            seed=config.training.seed,
        )

    def create_optimizer() -> keras.optimizers.Optimizer:
        loss_scale = initial_loss_scale(config)
        return recipe.create_optimizer(learning_rate, num_steps, loss_scale=loss_scale)

    try:
        strategy.build(build_model, create_optimizer)
    except ValueError as error:
        if "\n" in str(error):  # Only error messages of Keras have several lines.
            raise
        raise ConfigError(str(error)) from error
    if config.distribution.batch_norm == "sync" and not strategy.states.statistics_names:
        raise ConfigError(
            "--batch_norm=sync needs a model with BatchNorm, got"
            f" --model={config.training.model}; leave the flag out"
        )
    return strategy


def create_strategy(
    config: Config,
    devices: Devices,
    *,
    all_reduce: str | None = None,
    label_smoothing: float = 0.0,
) -> Strategy:
    """Creates the strategy of `config`, without building a model.

    Args:
        config: names the strategy and its options.
        devices: devices of the replicas.
        all_reduce: algorithm that replaces the one of `config`.
        label_smoothing: see `strategies.loss.shard_loss`.

    Raises:
        ConfigError: the strategy cannot run on these devices.
    """
    options = config.distribution
    if all_reduce:
        options = dataclasses.replace(options, all_reduce=all_reduce)
    try:
        return load_strategy_class(options.strategy)(
            devices.names, options, devices.workers, label_smoothing=label_smoothing
        )
    except ValueError as error:
        advice = "" if ";" in str(error) else "; choose other devices or --all_reduce=auto"
        raise ConfigError(f"{error}{advice}") from error


def restore(strategy: Strategy, checkpoint: Checkpoint) -> None:
    """Loads a checkpoint into every replica, with per-shard statistics if their number fits.

    Args:
        strategy: a built strategy with the same model, on any number of replicas.
        checkpoint: the checkpoint to load.

    Raises:
        CheckpointError: the checkpoint is of another model.
    """
    try:
        strategy.load_state(checkpoint.state)
        if len(checkpoint.per_shard_statistics) == strategy.num_shards:
            strategy.states.load_per_shard_statistics(checkpoint.per_shard_statistics)
    except ValueError as error:
        raise CheckpointError(
            f"checkpoint of step {checkpoint.progress.step}: {error}; choose a run of the same"
            " model"
        ) from error
