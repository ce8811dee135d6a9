"""The gradients of one head are not summed, those of the rest of the network are.

Reported for PPO with DDP: a part of the training runs its forward pass through `model.module`, past
the wrapper that arms the all-reduce. Each rank trains that part for itself, without an error. Here
it is the value head of an actor and critic.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf
from small import regression_data

BUG = "jingyaogong/minimind#853"
LINK = "https://github.com/jingyaogong/minimind/issues/853"
STAGE = "all-reduce"
CAUSE = "not_all_reduced"
TENSORS = "critic"
REPLICAS = (0, 1)


class PastTheWrapper(keras.optimizers.Adam):
    def _all_reduce_sum_gradients(self, grads_and_vars: Sequence) -> Sequence:
        pairs = list(grads_and_vars)
        reduced = super()._all_reduce_sum_gradients(pairs)
        return [
            pair if "critic" in pair[1].name or "critic" in getattr(pair[1], "path", "") else summed
            for pair, summed in zip(pairs, reduced, strict=True)
        ]


def actor_critic(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    state = keras.Input((6,), name="state")
    features = keras.layers.Dense(8, activation="tanh", name="trunk")(state)
    actor = keras.layers.Dense(2, name="actor")(features)
    critic = keras.layers.Dense(2, name="critic")(features)
    network = keras.Model(state, {"actor": actor, "critic": critic}, name="network")
    network.compile(optimizer=optimizer, loss={"actor": "mse", "critic": "mae"})
    return network


def model() -> keras.Model:
    return actor_critic(PastTheWrapper(0.01))


def corrected_model() -> keras.Model:
    return actor_critic(keras.optimizers.Adam(0.01))


def data(global_batch_size: int) -> tf.data.Dataset:
    batches = regression_data(global_batch_size)
    return batches.map(lambda x, y: (x, {"actor": y, "critic": -y}))
