"""A contrastive loss has the other examples of its replica as negatives, not those of the batch.

Reported for SimCLR on several GPUs: with a batch of 1024 on 8 GPUs, the loss compares each example
with those of 128. The loss is not a sum over examples, so that no division makes the training that
of one device. The corrected twin has a loss for each example.
"""

import keras
import tensorflow as tf
from small import compiled_dense, regression_data

BUG = "Spijkervet/SimCLR#13"
LINK = "https://github.com/Spijkervet/SimCLR/issues/13"
STAGE = "loss"
CAUSE = "not_a_sum_over_examples"
STATUS = "by design"


def contrastive(y: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """Returns how badly each prediction finds its own target among all of them."""
    similarities = tf.matmul(y_pred, y, transpose_b=True) / 0.5
    own = tf.range(tf.shape(y)[0])
    return tf.nn.sparse_softmax_cross_entropy_with_logits(own, similarities)


def model() -> keras.Model:
    return compiled_dense(loss=contrastive)


def corrected_model() -> keras.Model:
    return compiled_dense(loss="cosine_similarity")


def data(global_batch_size: int) -> tf.data.Dataset:
    return regression_data(global_batch_size)
