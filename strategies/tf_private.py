"""Every private API of TensorFlow and Keras that the program uses.

A private API may change with any release. Each one is used here alone, behind a function that says
why no public API does; `tests/test_tf_private.py` has a test for each, which names the API that is
gone. What only training on several machines needs is imported by the function that needs it, so
that nothing else fails with it.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

# Job of the workers in a cluster.
JOB = "worker"


def _private(owner: object, name: str) -> Any:
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
    _private(optimizer, "_all_reduce_sum_gradients")
    optimizer._all_reduce_sum_gradients = list  # (gradient, variable) pairs as they are.


def optimizer_variable_index(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable | tf.Variable
) -> int:
    """Returns the position of a weight among the weights that an optimizer was built with.

    A custom `update_step` needs it to find the weight's optimizer state, as those of Keras do.
    """
    return _private(optimizer, "_get_variable_index")(variable)


def learning_rate_schedule(
    optimizer: keras.optimizers.Optimizer,
) -> keras.optimizers.schedules.LearningRateSchedule | None:
    """Returns the schedule of an optimizer, or None if its learning rate is a number.

    The public `optimizer.learning_rate` is the schedule's value at the next step only.
    """
    found = _private(optimizer, "_learning_rate")
    return found if isinstance(found, keras.optimizers.schedules.LearningRateSchedule) else None


def flatten_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Returns all layers inside a model, those of models inside it included.

    The public `model.layers` does not look into nested models and layers.
    """
    return list(_private(model, "_flatten_layers")(include_self=False))


def has_symbolic_output(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer was called on symbolic tensors, so that `layer.output` is known.

    The public `layer.output` raises where it was not, as it does for other reasons.
    """
    return bool(_private(layer, "_inbound_nodes"))


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
        model = _private(model, "_functional")
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
        _private(variable, "_value")
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
    _private(tf.distribute.MultiWorkerMirroredStrategy, "_collective_key_base")
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

    _private(CollectiveAllReduceExtended, "_initialize_local_devices")
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

    _private(_context(), "configure_coordination_service")(
        service_type="standalone",
        service_leader=f"/job:{JOB}/replica:0/task:0",
        heartbeat_timeout_in_ms=heartbeat_sec * 1000,
        coordinated_jobs=[CoordinatedJob(name=JOB, num_tasks=num_workers)],
    )


def post_key_value(key: str, text: str) -> None:
    """Stores a text in the coordination service, for all workers.

    The only way to communicate between workers before a collective can work.
    """
    _private(_context(), "set_config_key_value")(key, text)


def wait_for_key_value(key: str) -> str:
    """Returns the text that a worker stored under a key; waits until there is one."""
    return _private(_context(), "get_config_key_value")(key)


def _context() -> Any:
    """Returns the eager runtime of this process."""
    from tensorflow.python.eager import context

    return _private(context, "context")()


def reset_layer_numbers() -> None:
    """Makes Keras number unnamed layers from the start: the next `Dense` is `dense`.

    Keras counts the unnamed layers of a process, so that the second model built there would have
    `dense_2` where the first has `dense`. Built right after this, a model has the same names in
    every process and on every replica; `verify` and checkpoints find tensors by them.

    `keras.utils.clear_session` does this too, but also forgets the dtype policy and replaces the
    default graph, on which the scope of a `tf.distribute` strategy lies.
    """
    from keras.src.utils import naming

    _private(naming, "reset_uids")()


def is_op_determinism_enabled() -> bool:
    """Tells whether `tf.config.experimental.enable_op_determinism` was called."""
    from tensorflow.python.framework import config

    return _private(config, "is_op_determinism_enabled")()


def disable_op_determinism() -> None:
    """Undoes `tf.config.experimental.enable_op_determinism`, for which there is no public way.

    A command that asks for it must not slow down the next one of the process.
    """
    from tensorflow.python.framework import config

    _private(config, "disable_op_determinism")()


def build_compiled(model: keras.Model, batch: Any) -> None:
    """Creates all variables of a compiled model: its weights, optimizer state, loss and metrics.

    Keras does so within `fit`, for which there is no public way without training.

    Args:
        model: compiled.
        batch: `(x, y)` or `(x, y, sample_weight)` of one example.
    """
    _private(model, "_symbolic_build")(data_batch=batch)
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    if not model.built or not model.variables:
        model(x)
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def compiled_loss(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, *, training: bool
) -> tf.Tensor:
    """Returns the loss of a compiled model, with those that its layers add; 0 if it has none.

    The public `compute_loss` takes `training` or not, as whoever overrides it likes; and it raises
    where only layers add losses.
    """
    own = type(model).compute_loss is not keras.Model.compute_loss
    if not own and _private(model, "_compile_loss") is None and not model.losses:
        return tf.zeros([])
    return _private(model, "_compute_loss")(
        x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training
    )


def takes_training(model: keras.Model) -> bool:
    """Tells whether a model is called with `training`, as Keras finds out."""
    return _private(model, "_call_has_training_arg")


def is_seed(model: keras.Model, variable: keras.Variable) -> bool:
    """Tells whether a variable is the state of a seed generator of a layer."""
    layers = _private(model, "_flatten_layers")()
    return any(
        generator.state is variable
        for layer in layers
        for generator in _private(layer, "_seed_generators")
    )


def get_mask(prediction: tf.Tensor) -> tf.Tensor | None:
    """Returns the mask that Keras has attached to a tensor, None without any."""
    from keras.src.backend import get_keras_mask

    return get_keras_mask(prediction)


def set_mask(prediction: tf.Tensor, mask: tf.Tensor) -> None:
    """Attaches a mask to a tensor, as layers do; losses and metrics look for it."""
    from keras.src.backend import set_keras_mask

    set_keras_mask(prediction, mask)


def local_replica_id() -> int:
    """Returns the number of the replica that `tf.distribute` is running among those of this worker.

    Its variables have a copy for each of these; the public number counts those of all workers. 0
    outside of a replica.
    """
    context = tf.distribute.get_replica_context()
    if context is None:
        return 0
    return int(tf.get_static_value(_private(context, "_replica_id")))


def inner_optimizer(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the optimizer within a `LossScaleOptimizer`, else the optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def is_synchronized(layer: keras.layers.Layer) -> bool:
    """Tells whether a layer, or one inside it, normalises over the examples of all replicas."""
    layers = _private(layer, "_flatten_layers")()
    return any(getattr(inner, "synchronized", False) for inner in layers)


def stored_value(variable: keras.Variable) -> tf.Variable:
    """Returns the `tf.Variable` of a Keras variable, whatever scope it is asked in."""
    return _private(variable, "_value")
