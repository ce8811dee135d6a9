"""Implements the functions of a case for the built-in models and Fashion-MNIST.

A case defines its whole training. The learning rate is therefore that of a batch of 256 and ten
epochs, whatever the flags; initial weights depend on --seed, and every epoch has the order of the
first. See `builtin_cases/`.
"""

import functools
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from app.data.dataset import ImageDataset
from app.data.dataset_loader import load_dataset
from app.data.input_pipeline import num_steps_per_epoch, train_dataset
from app.runtime import console
from app.training.recipes import REFERENCE_GLOBAL_BATCH_SIZE, Recipe, find_recipe
from models import load_model_builder

NUM_EPOCHS = 10
_ORDER_SEED = 0


class BuiltInCase:
    """Defines the model and the data of a built-in case.

    Args:
        name: a key of `models.MODELS`.
    """

    def __init__(self, name: str):
        self._name = name

    @functools.cached_property
    def dataset(self) -> ImageDataset:
        """The dataset: real images if available."""
        return load_dataset("auto", data_dir=None, allow_unverified=False, warn=console.warn)

    def build_model(self, recipe_name: str) -> keras.Model:
        """Builds the model and compiles it with the loss and the optimizer of a recipe.

        Args:
            recipe_name: a key of `RECIPES`.
        """
        recipe, batch_size = find_recipe(recipe_name, self._name), REFERENCE_GLOBAL_BATCH_SIZE
        num_steps = NUM_EPOCHS * self._num_steps(batch_size)
        model = recipe.build_model(
            load_model_builder(self._name),
            image_shape=self.dataset.image_shape,
            num_classes=self.dataset.num_classes,
            # The caller of a case sets NumPy's seed to --seed first.
            seed=int(np.random.randint(2**31)),
        )
        rate = recipe.learning_rate(global_batch_size=batch_size, num_steps=num_steps)
        model.compile(
            optimizer=recipe.create_optimizer(rate, num_steps),
            loss=_loss_of(recipe),
            metrics=["accuracy"],
        )
        return model

    def data(self, global_batch_size: int) -> tf.data.Dataset:
        """Returns the batches of an epoch; the model's recipe `fast` may mirror images."""
        batches = train_dataset(
            self.dataset.train_images,
            self.dataset.train_labels,
            seed=_ORDER_SEED,
            global_batch_size=global_batch_size,
            flip=find_recipe("fast", self._name).flip,
        )
        return batches.take(self._num_steps(global_batch_size))

    def _num_steps(self, global_batch_size: int) -> int:
        return num_steps_per_epoch(len(self.dataset.train_images), global_batch_size, "keep")


def _loss_of(recipe: Recipe) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Returns the per-example loss, equal to `strategies.loss.shard_loss`."""

    def cross_entropy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        labels = tf.reshape(tf.cast(labels, tf.int32), [-1])  # Keras adds an axis.
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        evenly = tf.reduce_logsumexp(logits, axis=-1) - tf.reduce_mean(logits, axis=-1)
        return (1 - recipe.label_smoothing) * losses + recipe.label_smoothing * evenly

    return cross_entropy
