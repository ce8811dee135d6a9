"""The private APIs of TensorFlow and Keras that the program uses.

A private API may change with any release. Each one is used here alone, behind a function that says
why no public API does; `tests/test_tf_private.py` has a test for each, which names the API that is
gone. What only training on several machines needs is imported by the function that needs it, so
that nothing else fails with it. What compiled models need is in `keras_private.py`.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

# Job of the workers in a cluster.
JOB = "worker"


def private(owner: object, name: str) -> Any:
    """Returns an attribute of a TensorFlow or Keras object.

    Raises:
        AttributeError: the installed release does not have it.
    """
    if not hasattr(owner, name):
        kind = owner if isinstance(owner, type) else type(owner)
        raise AttributeError(
            f"{kind.__module__}.{kind.__qualname__} has no private attribute {name} with TensorFlow"
            f" {tf.__version__} and Keras {keras.__version__}; install the releases that"
            " requirements.txt names"
        )
    return getattr(owner, name)


def disable_optimizer_all_reduce(optimizer: keras.optimizers.Optimizer) -> None:
    """Makes an optimizer apply the gradients that it is given, in a replica context, too.

    Changes the optimizer. Within `tf.distribute` a Keras 3 optimizer sums the gradients over the
    replicas on its own, and `apply` has no option against it. Our strategies sum them before, so
    that each gradient would be counted R times.
    """
    private(optimizer, "_all_reduce_sum_gradients")
    optimizer._all_reduce_sum_gradients = list  # (gradient, variable) pairs as they are.


def optimizer_variable_index(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable | tf.Variable
) -> int:
    """Returns the position of a weight among the weights that an optimizer was built with.

    A custom `update_step` needs it to find the weight's optimizer state, as those of Keras do.
    """
    return private(optimizer, "_get_variable_index")(variable)


def learning_rate_schedule(
    optimizer: keras.optimizers.Optimizer,
) -> keras.optimizers.schedules.LearningRateSchedule | None:
    """Returns the schedule of an optimizer, or None if its learning rate is a number.

    The public `optimizer.learning_rate` is the schedule's value at the next step only.
    """
    found = private(optimizer, "_learning_rate")
    return found if isinstance(found, keras.optimizers.schedules.LearningRateSchedule) else None


def flatten_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns all layers inside a model, those of models inside it included.

    The public `model.layers` does not look into nested models and layers.
    """
    return list(private(model, "_flatten_layers")(include_self=False))


def has_symbolic_output(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer was called on symbolic tensors, so that `layer.output` is known.

    The public `layer.output` raises where it was not, as it does for other reasons.
    """
    return bool(private(layer, "_inbound_nodes"))


def layer_nodes(
    model: keras.Model,
) -> list[tuple[keras.layers.Layer, Any, list[keras.KerasTensor]]]:
    """Returns the calls that a functional model consists of, in the order of Keras.

    The public `model.layers` does not tell what a layer is called with.

    Returns:
        For each call its layer, (args, kwargs) with symbolic tensors, and the tensors it returns.

    Raises:
        ValueError: the model is not a functional one.
    """
    if isinstance(model, keras.Sequential):
        model = private(model, "_functional")
    if not hasattr(model, "_nodes_by_depth"):
        raise ValueError(
            f"model {model.name} is not made by keras.Model(inputs, outputs) or keras.Sequential,"
            " and does not tell its layers apart; use a strategy that splits the data alone"
        )
    by_depth = model._nodes_by_depth
    return [
        (node.operation, (node.arguments.args, node.arguments.kwargs), node.outputs)
        for depth in sorted(by_depth, reverse=True)
        for node in by_depth[depth]
        if not node.is_input
    ]


def free_values(variables: Sequence[keras.Variable]) -> None:
    """Frees the memory of variables; they keep names, shapes and dtypes.

    Calls with other values in their place, in a `keras.StatelessScope`, still work; reading or
    assigning the variables does not. There is no public way to have a model without its values.
    """
    for variable in variables:
        private(variable, "_value")
        variable._value = _Freed(variable.path)


class _Freed:
    """In place of the value of a variable whose memory was freed."""

    def __init__(self, path: str):
        self._path = path

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"variable {self._path} has no value of its own ({name})")


def set_collective_key_base(strategy: tf.distribute.Strategy, key_base: int) -> None:
    """Sets the number from which a strategy counts its groups of devices; changes the strategy.

    To be called before the strategy's extended part is created. All strategies of a process count
    from 0 otherwise: groups of different sizes under one number break every later collective.
    """
    private(tf.distribute.MultiWorkerMirroredStrategy, "_collective_key_base")
    strategy._collective_key_base = key_base


def create_collective_extended(
    strategy: tf.distribute.Strategy,
    *,
    local_devices: Sequence[str],
    cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver,
    communication_options: tf.distribute.experimental.CommunicationOptions,
) -> tf.distribute.StrategyExtended:
    """Creates the extended part of `MultiWorkerMirroredStrategy`, on given devices.

    The public class takes every GPU of a worker, or else one CPU device, however many logical CPU
    devices there are.

    Args:
        strategy: the strategy that the part is for.
        local_devices: names of this worker's devices, all of one kind.
        cluster_resolver: names the workers, and this one among them.
        communication_options: how collectives communicate.
    """
    from tensorflow.python.distribute.collective_all_reduce_strategy import (
        CollectiveAllReduceExtended,
    )

    class ExtendedOnDevices(CollectiveAllReduceExtended):
        """`CollectiveAllReduceExtended` with the devices that it is given."""

        def _initialize_local_devices(
            self, cluster_resolver: object, worker_device: str
        ) -> tuple[tuple[str, ...], str]:
            kind = "GPU" if "GPU" in local_devices[0] else "CPU"
            return tuple(worker_device + name for name in local_devices), kind

    private(CollectiveAllReduceExtended, "_initialize_local_devices")
    return ExtendedOnDevices(
        strategy, cluster_resolver=cluster_resolver, communication_options=communication_options
    )


def configure_coordination_service(*, num_workers: int, heartbeat_sec: int) -> None:
    """Configures the coordination service of a cluster, for when TensorFlow starts.

    TensorFlow's public classes configure it with a heartbeat of their own, so that a frozen worker
    would be noticed much later.

    Args:
        num_workers: processes of the cluster; the service runs in worker 0.
        heartbeat_sec: seconds without a sign of life after which a worker counts as lost.
    """
    from tensorflow.compiler.xla.tsl.protobuf.coordination_config_pb2 import CoordinatedJob

    private(_context(), "configure_coordination_service")(
        service_type="standalone",
        service_leader=f"/job:{JOB}/replica:0/task:0",
        heartbeat_timeout_in_ms=heartbeat_sec * 1000,
        coordinated_jobs=[CoordinatedJob(name=JOB, num_tasks=num_workers)],
    )


def post_key_value(key: str, text: str) -> None:
    """Stores a text in the coordination service, for all workers.

    The only way to communicate between workers before a collective can work.
    """
    private(_context(), "set_config_key_value")(key, text)


def wait_for_key_value(key: str) -> str:
    """Returns the text that a worker stored under a key; waits until there is one."""
    return private(_context(), "get_config_key_value")(key)


def _context() -> Any:
    """Returns the eager runtime of this process."""
    from tensorflow.python.eager import context

    return private(context, "context")()


def reset_layer_numbers() -> None:
    """Makes Keras number unnamed layers from the start: the next `Dense` is `dense`.

    Keras counts the unnamed layers of a process, so that the second model built there would have
    `dense_2` where the first has `dense`. Built right after this, a model has the same names in
    every process and on every replica; `verify` and checkpoints find tensors by them.

    `keras.utils.clear_session` does this too, but also forgets the dtype policy and replaces the
    default graph, on which the scope of a `tf.distribute` strategy lies.
    """
    from keras.src.utils import naming

    private(naming, "reset_uids")()


def is_op_determinism_enabled() -> bool:
    """Tells whether `tf.config.experimental.enable_op_determinism` was called."""
    from tensorflow.python.framework import config

    return private(config, "is_op_determinism_enabled")()


def disable_op_determinism() -> None:
    """Undoes `tf.config.experimental.enable_op_determinism`, for which there is no public way.

    A command that asks for it must not slow down the next one of the process.
    """
    from tensorflow.python.framework import config

    private(config, "disable_op_determinism")()


def local_replica_id() -> int:
    """Returns the number of the replica that `tf.distribute` is running among those of this worker.

    Its variables have a copy for each of these; the public number counts those of all workers. 0
    outside of a replica.
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        return 0
    return int(tf.get_static_value(private(context, "_replica_id")))
