"""Implements training on one device, the reference for all other strategies."""

import tensorflow as tf

from strategies.base import BatchIterator, ModelFn, OptimizerFn
from strategies.replica_list import ReplicaList
from strategies.step_totals import StepTotals


class SingleStrategy(ReplicaList):
    """Trains one model on one device; the global batch is the only shard."""

    name = "single"

    def prepare(self) -> None:
        if self.num_devices != 1:
            raise ValueError(f"strategy single needs one device, got {self.num_devices}")

    def default_all_reduce(self) -> str:
        return "none"

    def build(self, model_fn: ModelFn, optimizer_fn: OptimizerFn) -> None:
        with tf.device(self.devices[0]):
            replica = self.new_replica(0, self.devices[0], model_fn, optimizer_fn)
        self.replicas, self.model, self.optimizer = [replica], replica.model, replica.optimizer

    def train_step(self, iterator: BatchIterator) -> StepTotals:
        images, labels = next(iterator)
        with tf.device(self.devices[0]):
            (replica,) = self.replicas
            gradients, totals = self.local_gradients(replica, (images, labels), tf.size(labels))
            self.apply_gradients(replica, gradients)
        return totals
