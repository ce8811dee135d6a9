"""Wraps the private TensorFlow and Keras APIs that the program uses.

A private API may change with any release. Each one is used only here, in a function that documents
why no public API is sufficient; `tests/training/test_tf_private.py` has a test for each, whose
message names the missing API. Imports for training on several machines are inside functions, so
that a change there affects nothing else.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

# Job name of the workers in a cluster.
JOB = "worker"


def private(owner: object, name: str) -> Any:
    """Returns an attribute of a TensorFlow or Keras object.

    Raises:
        AttributeError: the installed release has no such attribute.
    """
    if not hasattr(owner, name):
        kind = owner if isinstance(owner, type) else type(owner)
        raise AttributeError(
            f"{kind.__module__}.{kind.__qualname__} has no private attribute {name} with TensorFlow"
            f" {tf.__version__} and Keras {keras.__version__}; install the releases that"
            " requirements.txt names"
        )
    return getattr(owner, name)


def is_onednn_enabled() -> bool:
    """Returns whether TensorFlow computes with oneDNN on CPUs, where oneDNN has a kernel.

    The environment variable says so only if it was set before TensorFlow was imported; there is no
    public API.
    """
    from tensorflow.python.util import _pywrap_util_port

    return bool(private(_pywrap_util_port, "IsMklEnabled")())


def disable_optimizer_all_reduce(optimizer: keras.optimizers.Optimizer) -> None:
    """Disables the optimizer's all-reduce of gradients in a replica context.

    Mutates the optimizer. Within `tf.distribute`, a Keras 3 optimizer sums the gradients over the
    replicas, and `apply` has no option to disable this. The strategies have already summed them, so
    that each gradient would count R times.
    """
    private(optimizer, "_all_reduce_sum_gradients")
    optimizer._all_reduce_sum_gradients = list  # `list` returns the same pairs.


def optimizer_variable_index(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable | tf.Variable
) -> int:
    """Returns the position of a weight among the weights that an optimizer was built with.

    A custom `update_step` uses it to find the weight's optimizer state, as Keras optimizers do.
    """
    return private(optimizer, "_get_variable_index")(variable)


def learning_rate_schedule(
    optimizer: keras.optimizers.Optimizer,
) -> keras.optimizers.schedules.LearningRateSchedule | None:
    """Returns the schedule of an optimizer, or None if its learning rate is a number.

    The public `optimizer.learning_rate` is only the schedule's value at the next step.
    """
    found = private(optimizer, "_learning_rate")
    return found if isinstance(found, keras.optimizers.schedules.LearningRateSchedule) else None


def flatten_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns all layers of a model, including those of nested models and layers.

    The public `model.layers` does not include nested layers.
    """
    return list(private(model, "_flatten_layers")(include_self=False))


def layer_nodes(
    model: keras.Model,
) -> list[tuple[keras.layers.Layer, Any, list[keras.KerasTensor]]]:
    """Returns the layer calls of a functional model, in Keras' order.

    The public `model.layers` does not include the arguments of the calls.

    Returns:
        For each call its layer, (args, kwargs) with symbolic tensors, and the tensors it returns.

    Raises:
        ValueError: the model is not a functional model.
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
    """Frees the memory of variables, which keep their names, shapes and dtypes.

    Calls that replace their values, in a `keras.StatelessScope`, still work; reading or assigning
    the variables does not. There is no public API for a model without values.
    """
    for variable in variables:
        private(variable, "_value")
        variable._value = _Freed(variable.path)


class _Freed:
    """Replaces the value of a variable whose memory was freed."""

    def __init__(self, path: str):
        self._path = path

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"variable {self._path} has no value of its own ({name})")


def set_collective_key_base(strategy: tf.distribute.Strategy, key_base: int) -> None:
    """Sets the first collective group key of a strategy; mutates the strategy.

    Call it before the strategy's extended object is created. Otherwise all strategies of a process
    start from 0, and device groups of different sizes with one key break every later collective.
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
    """Creates the extended object of `MultiWorkerMirroredStrategy` on given devices.

    The public class takes all GPUs of a worker, or else a single CPU device, even if there are
    several logical CPU devices.

    Args:
        strategy: the strategy that owns the extended object.
        local_devices: names of this worker's devices, all of one type.
        cluster_resolver: defines the workers and the index of this worker.
        communication_options: options of the collectives.
    """
    from tensorflow.python.distribute.collective_all_reduce_strategy import (
        CollectiveAllReduceExtended,
    )

    class ExtendedOnDevices(CollectiveAllReduceExtended):
        """`CollectiveAllReduceExtended` on the given devices."""

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
    """Configures the coordination service of a cluster. Call it before TensorFlow starts.

    TensorFlow's public classes use a fixed heartbeat timeout, which detects a frozen worker much
    later.

    Args:
        num_workers: number of workers; the service runs in worker 0.
        heartbeat_sec: seconds without a heartbeat after which a worker counts as lost.
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

    Workers have no other means of communication before the first collective.
    """
    private(_context(), "set_config_key_value")(key, text)


def wait_for_key_value(key: str, timeout_sec: float = 0.0) -> str:
    """Waits until a worker has stored a text under a key, and returns the text.

    Args:
        key: the key.
        timeout_sec: longest time to wait; 0 for no limit.

    Raises:
        tf.errors.OpError: there is no text in time, or a worker is lost.
    """
    return private(_context(), "get_config_key_value")(key, int(1000 * timeout_sec))


def _context() -> Any:
    """Returns the eager runtime of this process."""
    from tensorflow.python.eager import context

    return private(context, "context")()


def reset_layer_numbers() -> None:
    """Resets Keras' numbering of unnamed layers, so that the next `Dense` is `dense`.

    Keras numbers the unnamed layers of a process: the second model of a process would have
    `dense_2` where the first has `dense`. A model that is built right after this call has the same
    names in every process and on every replica; `verify` and checkpoints find tensors by name.

    `keras.utils.clear_session` resets the numbers, too, but also resets the dtype policy and
    replaces the default graph, which the scope of a `tf.distribute` strategy needs.
    """
    from keras.src.utils import naming

    private(naming, "reset_uids")()
