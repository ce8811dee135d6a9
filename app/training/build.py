"""Builds what a training consists of: data, batches, learning rate, model, optimizer, strategy."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from app.data import batches
from app.data.fashion_mnist import IMAGE_SHAPE, NUM_CLASSES, ImageDataset
from app.devices.setup import Devices
from app.errors import CheckpointError, ConfigError, DataError
from app.options import Config, rules
from app.records.checkpoint import Checkpoint
from app.records.history import RunMetadata, versions
from app.training.injection import FaultyObserver
from app.training.recipes import find_recipe
from models import load_model_builder
from strategies import load_strategy_class
from strategies.base import Strategy, Workers


class TrainingRun:
    """A training that is ready to start: the strategy is built, and no step is done.

    Attributes:
        config, devices, dataset, recipe: what it is made from.
        steps_per_epoch, num_steps: batches per epoch and of the whole training.
        learning_rate: peak learning rate.
        strategy: the strategy, with model and optimizer on every device.
        fault: the observer that injects `--inject`; None without a fault.

    Raises:
        ConfigError: a shard would be empty, the strategy cannot run, or the fault has no effect.
        DataError: another worker has other data.
    """

    def __init__(self, config: Config, devices: Devices, dataset: ImageDataset):
        self.config, self.devices, self.dataset = config, devices, dataset
        training, num_examples = config.training, dataset.num_train_examples
        size = training.global_batch_size
        rules.check_shards(config, len(devices.names), num_examples)
        _check_same_data(dataset, devices.workers or Workers())
        self.recipe = find_recipe(training.recipe, training.model)
        self.steps_per_epoch = batches.num_steps_per_epoch(num_examples, size)
        self.num_steps = training.epochs * self.steps_per_epoch
        self.learning_rate = training.learning_rate or self.recipe.learning_rate(
            global_batch_size=size, num_steps=self.num_steps
        )
        self.strategy = build_strategy(
            config, devices, learning_rate=self.learning_rate, num_steps=self.num_steps
        )
        # Copied once, for all datasets.
        self._examples = batches.keep_in_memory(dataset.train_images, dataset.train_labels)
        self._order: dict[str, Any] = {
            "seed": training.seed,
            "global_batch_size": size,
            "augmentation": self.recipe.augmentation,
        }
        self.fault: FaultyObserver | None = None
        if config.fault:
            sizes = {each for each in (min(size, num_examples), num_examples % size) if each}
            self.fault = FaultyObserver(
                config.fault, self.strategy, batch_sizes=sizes, num_steps=self.num_steps
            )
            self.strategy.observer = self.fault

    def batches(self, start_step: int = 0) -> tf.data.Dataset:
        """Returns the infinite dataset of batches from a step on, with any injected fault."""
        dataset = batches.train_dataset(*self._examples, start_step=start_step, **self._order)
        return self.fault.batches(dataset) if self.fault else dataset

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the right global batch of a step, from 0, without `tf.data`."""
        images, labels = self.dataset.train_images, self.dataset.train_labels
        return batches.batch_of_step(images, labels, step=step, **self._order)

    def metadata(self) -> RunMetadata:
        """Returns the metadata of every checkpoint of this training."""
        strategy, dataset = self.strategy, self.dataset
        return RunMetadata(
            config=self.config.result_fields(),
            learning_rate=self.learning_rate,
            steps_per_epoch=self.steps_per_epoch,
            dataset=dataset.name,
            dataset_sha256=dataset.sha256(),
            test_part_sha256=dataset.sha256_of_test_part(),
            num_train_examples=dataset.num_train_examples,
            num_test_examples=dataset.num_test_examples,
            devices=list(strategy.devices),
            simulated_devices=self.devices.simulated,
            num_replicas=strategy.num_replicas,
            num_shards=strategy.num_shards,
            all_reduce=strategy.algorithm,
            num_parameters=strategy.model.count_params(),
            versions=versions(),
        )


def _check_same_data(dataset: ImageDataset, workers: Workers) -> None:
    """Checks that every worker has loaded the same data; all workers call it."""
    digests = [digest.decode()[:12] for digest in workers.gather(dataset.sha256().encode())]
    if len(set(digests)) > 1:
        raise DataError(
            f"{dataset.name} of the workers, in order, has SHA-256 {'…, '.join(digests)}…; use the"
            " same files on every worker"
        )


def build_strategy(
    config: Config, devices: Devices, *, learning_rate: float = 1.0, num_steps: int = 1
) -> Strategy:
    """Builds the strategy of `config` with its model and optimizer on every device.

    Raises:
        ConfigError: the strategy has no such all-reduce here, or the model no BatchNorm for "sync".
    """
    distribution, training = config.distribution, config.training
    recipe = find_recipe(training.recipe, training.model)

    def build_model() -> keras.Model:
        return recipe.build_model(
            load_model_builder(training.model),
            image_shape=IMAGE_SHAPE,
            num_classes=NUM_CLASSES,
            seed=training.seed,
        )

    try:
        strategy = load_strategy_class(distribution.strategy)(
            devices.names,
            all_reduce=distribution.all_reduce,
            batch_norm=distribution.batch_norm,
            workers=devices.workers,
            label_smoothing=recipe.label_smoothing,
        )
    except ValueError as error:
        raise ConfigError(f"{error}; choose other devices or --all_reduce=auto") from error
    keras.config.set_dtype_policy(training.precision)
    strategy.build(build_model, lambda: recipe.create_optimizer(learning_rate, num_steps))
    if distribution.batch_norm == "sync" and not strategy.states.statistics_names:
        raise ConfigError(
            f"--batch_norm=sync needs a model with BatchNorm, got --model={training.model}; leave"
            " the flag out"
        )
    return strategy


def restore(strategy: Strategy, checkpoint: Checkpoint) -> None:
    """Loads a checkpoint of the same model, with per-shard statistics if their number fits."""
    try:
        strategy.load_state(dict(checkpoint.state))
        if len(checkpoint.per_shard_statistics) == strategy.num_shards:
            strategy.states.load_per_shard_statistics(checkpoint.per_shard_statistics)
    except ValueError as error:
        raise CheckpointError(
            f"checkpoint of step {checkpoint.step}: {error}; choose a run of the same model"
        ) from error
