"""Builds model, optimizer and strategy as the options say, and restores checkpoints."""

import dataclasses

import keras

from app.data.dataset import IMAGE_SHAPE, NUM_CLASSES
from app.devices.device_setup import Devices
from app.options import Config
from app.records.checkpoint import Checkpoint
from app.runtime.errors import CheckpointError, ConfigError
from app.training.optimizers import INITIAL_LOSS_SCALE
from app.training.recipes import Recipe, find_recipe
from models import load_model_builder
from strategies import load_strategy_class
from strategies.base import Strategy


def recipe_of(config: Config) -> Recipe:
    """Returns the recipe of a training."""
    return find_recipe(config.training.recipe, config.training.model)


def build_model(config: Config) -> keras.Model:
    """Builds the model of a training with its initial weights.

    Raises:
        ConfigError: it does not fit the dataset.
    """
    return recipe_of(config).build_model(
        load_model_builder(config.training.model),
        image_shape=IMAGE_SHAPE,
        num_classes=NUM_CLASSES,
        seed=config.training.seed,
    )


def create_optimizer(
    config: Config, learning_rate: float, num_steps: int
) -> keras.optimizers.Optimizer:
    """Creates the optimizer of a training.

    Args:
        config: names the recipe and the precision.
        learning_rate: the peak.
        num_steps: steps of the whole training, for schedules.
    """
    scale = INITIAL_LOSS_SCALE if config.training.precision == "mixed_float16" else None
    return recipe_of(config).create_optimizer(learning_rate, num_steps, loss_scale=scale)


def build_strategy(
    config: Config,
    devices: Devices,
    *,
    learning_rate: float = 1.0,
    num_steps: int = 1,
    all_reduce: str | None = None,
) -> Strategy:
    """Builds the strategy of `config` with its model and optimizer on every device.

    Args:
        config: names the strategy, the model and the recipe.
        devices: devices of the replicas.
        learning_rate: see `create_optimizer`; of no effect without a training step.
        num_steps: see `create_optimizer`.
        all_reduce: algorithm that replaces the one of `config`.

    Raises:
        ConfigError: the strategy has no such all-reduce on these devices, cannot split the model,
            the model has no BatchNorm to synchronise, or it does not fit the dataset.
    """
    options = config.distribution
    if all_reduce:
        options = dataclasses.replace(options, all_reduce=all_reduce)
    smoothing = recipe_of(config).label_smoothing
    try:
        strategy = load_strategy_class(options.strategy)(
            devices.names, options, devices.workers, label_smoothing=smoothing
        )
    except ValueError as error:
        advice = "" if ";" in str(error) else "; choose other devices or --all_reduce=auto"
        raise ConfigError(f"{error}{advice}") from error
    keras.config.set_dtype_policy(config.training.precision)
    try:
        strategy.build(
            lambda: build_model(config), lambda: create_optimizer(config, learning_rate, num_steps)
        )
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
