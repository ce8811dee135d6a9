"""Handles the nested inputs and predictions of a compiled Keras model."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from strategies.keras_private import get_mask, set_mask


class BatchStructure:
    """Converts between nested batches and the flat tuples of tensors that strategies split.

    Args:
        element_spec: the dataset's: `(x, y)` or `(x, y, sample_weight)`, each any nest.

    Attributes:
        spec: `element_spec` with None where elements have None.
    """

    def __init__(self, element_spec: Any):
        self.spec = without_none(element_spec)

    def nest(self, leaves: Sequence[tf.Tensor]) -> Any:
        """Returns the nested batch with the given leaves."""
        values = iter(leaves)
        flat = [None if spec is None else next(values) for spec in tf.nest.flatten(self.spec)]
        return tf.nest.pack_sequence_as(self.spec, flat)

    def example(self) -> list[tf.Tensor]:
        """Returns the leaves of a batch with one example, all zeros."""
        return [
            tf.zeros([1, *(size or 1 for size in spec.shape[1:])], spec.dtype)
            for spec in present(self.spec)
        ]


def leaves_with_rows(
    model: keras.Model, y_pred: Any, examples: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns the leaves of a model's predictions after a check that each has a row per example.

    Raises:
        ValueError: a leaf has no batch axis.
        tf.errors.InvalidArgumentError: a leaf does not have one row per example.
    """
    size, checked = tf.shape(examples[0])[0], []
    for prediction in tf.nest.flatten(y_pred):
        if getattr(prediction, "shape", None) is None or prediction.shape.rank == 0:
            raise ValueError(
                f"model {model.name} returns {_described(prediction)}; a strategy joins the"
                " predictions of all replicas, and needs tensors with a row for each example"
            )
        rows = tf.debugging.assert_equal(
            tf.shape(prediction)[0],
            size,
            f"model {model.name} returns a prediction without a row for each example, which a"
            " strategy needs to join those of all replicas",
        )
        with tf.control_dependencies([rows] if rows is not None else []):
            checked.append(tf.identity(prediction))
        mask = get_mask(prediction)
        if mask is not None:
            set_mask(checked[-1], mask)
    return checked


def without_none(element_spec: Any) -> Any:
    """Returns a dataset's element spec with None where its elements have None."""
    return tf.nest.map_structure(lambda spec: None if is_none(spec) else spec, element_spec)


def is_none(spec: tf.TypeSpec) -> bool:
    """Returns whether a spec stands for None; TensorFlow has no public name for its type."""
    return type(spec).__name__ == "NoneTensorSpec"


def present(nest: Any) -> list[Any]:
    """Returns the leaves of a nest that are not None."""
    return [leaf for leaf in tf.nest.flatten(nest) if leaf is not None]


def _described(prediction: Any) -> str:
    return "a scalar" if hasattr(prediction, "shape") else f"a {type(prediction).__name__}"
