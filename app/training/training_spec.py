"""Specifies a training by options and data: batches, steps, learning rate, model, optimizer."""

import math

import keras
import numpy as np
import tensorflow as tf

from app.data.dataset import ImageDataset
from app.data.input_pipeline import (
    Augmentation,
    batch_of_step,
    keep_in_memory,
    num_steps_per_epoch,
    train_dataset,
)
from app.devices.device_setup import Devices
from app.options import Config, rules
from app.records.run_metadata import RunMetadata
from app.runtime.errors import DataError
from app.runtime.versions import versions
from app.training.recipes import REFERENCE_GLOBAL_BATCH_SIZE
from app.training.strategy_builder import (
    build_model,
    build_strategy,
    create_optimizer,
    recipe_of,
)
from strategies.base import Strategy
from strategies.workers import Workers


class TrainingSpec:
    """Specifies a training, independent of the strategy.

    Args:
        config: the options.
        dataset: the images.

    Attributes:
        steps_per_epoch: batches per epoch.
        num_steps: steps of the whole training, for schedules.
        learning_rate: peak learning rate.
    """

    def __init__(self, config: Config, dataset: ImageDataset):
        self.config, self.dataset = config, dataset
        self.steps_per_epoch = num_steps_per_epoch(
            len(dataset.train_images), config.training.global_batch_size, config.training.last_batch
        )
        self.num_steps = config.training.epochs * self.steps_per_epoch
        # TensorFlow's copies of the training examples, once `batches` has made them.
        self._examples: tuple[tf.Tensor, tf.Tensor] | None = None
        self._recipe = recipe_of(config)
        self.learning_rate = config.training.learning_rate or self._recipe.learning_rate(
            global_batch_size=config.training.global_batch_size, num_steps=self.num_steps
        )

    def build_strategy(self, devices: Devices, *, all_reduce: str | None = None) -> Strategy:
        """Builds the strategy with its model and optimizer on every device.

        Args:
            devices: devices of the replicas.
            all_reduce: algorithm that replaces the one of the configuration.

        Raises:
            ConfigError: it cannot be built, or a shard of a batch would have no example.
        """
        rules.check_shards(self.config, len(devices.names), self.dataset.num_train_examples)
        return build_strategy(
            self.config,
            devices,
            learning_rate=self.learning_rate,
            num_steps=self.num_steps,
            all_reduce=all_reduce,
        )

    def rate_text(self) -> str:
        """Returns the learning rate in words, and why it is not that of the recipe."""
        rate = f"learning rate {self.learning_rate:.4g}"
        if self.config.training.learning_rate:
            return rate
        size, reasons = self.config.training.global_batch_size, list[str]()
        if size != REFERENCE_GLOBAL_BATCH_SIZE:
            peak = self._recipe.peak_learning_rate
            reasons.append(f"{peak:g} is for a batch of {REFERENCE_GLOBAL_BATCH_SIZE}")
        least = math.ceil(self._recipe.steps_of_full_peak(size))
        if self.num_steps < least:
            full = self._recipe.learning_rate(global_batch_size=size, num_steps=least)
            reasons.append(f"{full:.4g} needs at least {least} steps")
        return f"{rate} ({'; '.join(reasons)})" if reasons else rate

    def metadata(self, strategy: Strategy, devices: Devices) -> RunMetadata:
        """Returns the metadata of every checkpoint of this training."""
        return RunMetadata(
            config=self.config.result_fields(),
            learning_rate=self.learning_rate,
            steps_per_epoch=self.steps_per_epoch,
            dataset=self.dataset.name,
            dataset_sha256=self.dataset.sha256(),
            test_part_sha256=self.dataset.sha256_of_test_part(),
            num_train_examples=self.dataset.num_train_examples,
            num_test_examples=self.dataset.num_test_examples,
            devices=list(strategy.devices),
            simulated_devices=devices.simulated,
            intra_op_threads=devices.intra_op_threads,
            num_replicas=strategy.num_replicas,
            num_shards=strategy.num_shards,
            num_copies=strategy.num_copies,
            all_reduce=strategy.algorithm,
            num_parameters=strategy.model.count_params(),
            versions=versions(),
        )

    @property
    def label_smoothing(self) -> float:
        """Fraction of the target that is spread evenly over all classes."""
        return self._recipe.label_smoothing

    @property
    def has_schedule(self) -> bool:
        """Whether the learning rate depends on the number of steps of the whole training."""
        return self._recipe.warmup is not None

    @property
    def augmentation(self) -> Augmentation:
        """How training images are changed; see `Recipe`."""
        return self._recipe.augmentation

    def build_model(self) -> keras.Model:
        """Builds the model with its initial weights.

        Raises:
            ConfigError: the model does not fit the dataset.
        """
        return build_model(self.config)

    def create_optimizer(self) -> keras.optimizers.Optimizer:
        """Creates the optimizer."""
        return create_optimizer(self.config, self.learning_rate, self.num_steps)

    def batches(self, *, seed: int | None = None, start_step: int = 0) -> tf.data.Dataset:
        """Returns the infinite dataset of global batches from `start_step` on, ordered by seed."""
        if self._examples is None:
            self._examples = keep_in_memory(self.dataset.train_images, self.dataset.train_labels)
        return train_dataset(
            *self._examples,
            seed=self.config.training.seed if seed is None else seed,
            global_batch_size=self.config.training.global_batch_size,
            last_batch=self.config.training.last_batch,
            start_step=start_step,
            augmentation=self.augmentation,
        )

    def check_same_data(self, workers: Workers) -> None:
        """Checks that every worker has loaded the same data; all workers call it.

        Raises:
            DataError: another worker has other data.
        """
        digest = self.dataset.sha256()
        for index, gathered in enumerate(workers.gather(digest.encode())):
            other_digest = gathered.decode()
            if other_digest != digest:
                raise DataError(
                    f"worker {workers.index} has data {self.dataset.name} with SHA-256"
                    f" {digest[:12]}…, but worker {index} has {other_digest[:12]}…; use the same"
                    " files on every worker"
                )

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the global batch of a step, from 0, without `tf.data`."""
        return batch_of_step(
            self.dataset.train_images,
            self.dataset.train_labels,
            seed=self.config.training.seed,
            global_batch_size=self.config.training.global_batch_size,
            last_batch=self.config.training.last_batch,
            step=step,
            augmentation=self.augmentation,
        )

    def batch_sizes(self) -> set[int]:
        """Returns the sizes of batches: the global batch size and that of a short last batch."""
        size, num_examples = self.config.training.global_batch_size, len(self.dataset.train_images)
        rest = num_examples % size if self.config.training.last_batch == "keep" else 0
        return {size for size in (min(size, num_examples), rest) if size}
