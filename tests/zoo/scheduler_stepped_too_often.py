"""The learning rate's schedule advances by the number of processes with each step.

Reported for schedulers that are stepped once for every process: the learning rate reaches its end
after 1 / R of the training. In Keras, `iterations` is the clock of a schedule.
"""

import keras
import tensorflow as tf
from small import compiled_dense, regression_data

BUG = "huggingface/accelerate#2142"
LINK = "https://github.com/huggingface/accelerate/issues/2142"
STAGE = "update"
CAUSE = "schedule_stepped_too_often"
NUM_REPLICAS = 3
TENSORS = "iteration"


class StepsScheduleForEachProcess(keras.Sequential):
    def train_step(self, data: tuple) -> dict:
        logs = super().train_step(data)
        num_others = tf.distribute.get_replica_context().num_replicas_in_sync - 1
        self.optimizer.iterations.assign_add(num_others)
        return logs


def decaying() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5))


def model() -> keras.Model:
    return compiled_dense(decaying(), kind=StepsScheduleForEachProcess)


def corrected_model() -> keras.Model:
    return compiled_dense(decaying())


def data(global_batch_size: int) -> tf.data.Dataset:
    return regression_data(global_batch_size)
