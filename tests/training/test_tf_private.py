"""The private APIs of TensorFlow and Keras: they exist, and do what we rely on."""

import inspect
import re
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from strategies import tf_private
from strategies.collective_cluster import CollectiveStrategy
from tests.conftest import CPUS, ROOT
from tests.small_models import small_network

PRIVATE_FILES = {ROOT / "strategies" / "tf_private.py"}
# Modules of TensorFlow and Keras that are not public, and underscore attributes that they own.
PRIVATE = re.compile(
    r"tensorflow\.(python|compiler|core|tsl)\b|keras\.src\b|"
    r"\._(all_reduce_sum_gradients|get_variable_index|learning_rate|flatten_layers|inbound_nodes"
    r"|functional|nodes_by_depth|value|collective_key_base|initialize_local_devices"
    r"|symbolic_build|compile_loss|compute_loss|call_has_training_arg|seed_generators)\b"
)


def test_only_one_file_uses_private_apis():
    sources = [*(p for f in ("app", "models", "strategies") for p in (ROOT / f).rglob("*.py"))]
    users = [p for p in [*sources, ROOT / "main.py"] if PRIVATE.search(p.read_text("utf-8"))]
    assert set(users) == PRIVATE_FILES


def test_optimizer_all_reduce_sum_gradients():
    # Not the default, ring: collectives of two sizes in one process break each other.
    ops = tf.distribute.ReductionToOneDevice()
    strategy = tf.distribute.MirroredStrategy(CPUS[:2], cross_device_ops=ops)
    with strategy.scope():
        weight = keras.Variable(0.0)
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([weight])
    tf_private.disable_optimizer_all_reduce(optimizer)

    @tf.function
    def step():
        strategy.run(lambda: optimizer.apply([tf.constant(1.0)], [weight]))

    step()
    assert float(weight.numpy()) == -1, (
        "keras Optimizer._all_reduce_sum_gradients is not what sums gradients any more"
    )


def test_optimizer_get_variable_index_and_learning_rate():
    model, optimizer = small_network(), keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    found = [tf_private.optimizer_variable_index(optimizer, v) for v in model.trainable_variables]
    assert found == list(range(4)), "keras Optimizer._get_variable_index is another number"
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    assert tf_private.learning_rate_schedule(keras.optimizers.SGD(schedule)) is schedule, (
        "keras Optimizer._learning_rate does not hold the schedule"
    )
    assert tf_private.learning_rate_schedule(optimizer) is None


def test_model_flatten_layers():
    inner = small_network()
    images = keras.Input((28, 28, 1), dtype="uint8")
    found = tf_private.flatten_layers(keras.Model(images, inner(images)))
    assert {id(layer) for layer in inner.layers} <= {id(layer) for layer in found}, (
        "keras Model._flatten_layers does not look into nested models"
    )


def test_layer_nodes():
    """The calls of a functional model, in an order in which they can be made; not its input."""
    images = keras.Input((4, 4, 1))
    layers = [keras.layers.Flatten(name="b"), keras.layers.Flatten(name="a"), keras.layers.Add()]
    parts = [layers[0](images), layers[1](images)]
    model = keras.Model(images, layers[2](parts))
    found = tf_private.layer_nodes(model)
    assert {layer.name for layer, _, _ in found[:2]} == {"a", "b"}, (
        "keras Model._nodes_by_depth is not in the order of the calls"
    )
    layer, (args, kwargs), outputs = found[2]
    assert layer is layers[2] and kwargs == {} and outputs[0] is model.outputs[0]
    assert args[0] == parts, "keras Node.arguments does not tell what a layer is called with"
    assert len(found) == 3, "keras Node.is_input does not mark the input"
    names = [layer.name for layer, _, _ in tf_private.layer_nodes(small_network())]
    assert [names[1], names[3]] == ["conv", "logits"] and len(names) == 4, (
        "keras Sequential._functional does not hold its layers"
    )
    with pytest.raises(ValueError, match=r"is not made by keras.Model\(inputs, outputs"):
        tf_private.layer_nodes(keras.Model())


def test_free_values():
    """The memory is gone; shapes, and calls with other values are not."""
    layer = keras.layers.Dense(2, name="dense")
    layer.build((None, 3))
    values = [weakref.ref(v.value) for v in layer.variables]
    tf_private.free_values(layer.variables)
    assert [value() for value in values] == [None, None], (
        "keras Variable._value is not what holds its memory"
    )
    assert layer.count_params() == 8
    with pytest.raises(AttributeError, match=r"dense/kernel has no value of its own \(numpy\)"):
        layer.kernel.numpy()
    in_place = [(layer.kernel, tf.ones((3, 2))), (layer.bias, tf.constant([10.0, 20.0]))]
    with keras.StatelessScope(in_place):
        assert layer(tf.ones((1, 3))).numpy().tolist() == [[13.0, 23.0]]


def test_collective_devices_and_key_base_which_keeps_strategies_apart():
    sums = []
    for num_replicas in (2, 3, 2):
        strategy = CollectiveStrategy(CPUS[:num_replicas], "ring")
        devices = [tf.DeviceSpec.from_string(name) for name in strategy.extended.worker_devices]
        assert [device.device_index for device in devices] == [*range(num_replicas)], (
            "tensorflow CollectiveAllReduceExtended._initialize_local_devices is not called"
        )

        @tf.function
        def add(strategy=strategy):
            def one():
                context = tf.distribute.get_replica_context()
                return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.ones([2]))

            return strategy.experimental_local_results(strategy.run(one))

        sums.append([float(total[0]) for total in add()])
    assert sums == [[2, 2], [3, 3, 3], [2, 2]], (
        "tensorflow MultiWorkerMirroredStrategy._collective_key_base does not number the groups"
    )


def test_eager_context_and_coordinated_job():
    """What they do takes several processes: `test_workers.py` runs them."""
    from tensorflow.compiler.xla.tsl.protobuf.coordination_config_pb2 import CoordinatedJob

    job = CoordinatedJob(name="worker", num_tasks=2)
    assert (job.name, job.num_tasks) == ("worker", 2)
    context = tf_private._context()
    for method, arguments in {
        "configure_coordination_service": {
            *("service_type", "service_leader", "heartbeat_timeout_in_ms", "coordinated_jobs"),
        },
        "set_config_key_value": {"key", "value"},
        "get_config_key_value": {"key"},
    }.items():
        found = inspect.signature(getattr(context, method)).parameters
        assert arguments <= set(found), f"tensorflow.python.eager.context.Context.{method} changed"


def test_an_attribute_that_is_gone_is_named():
    with pytest.raises(AttributeError, match=r"SGD has no private attribute _gone with Tensor"):
        tf_private.private(keras.optimizers.SGD(), "_gone")
    with pytest.raises(AttributeError, match="ndarray has no private attribute _flatten_layers"):
        tf_private.flatten_layers(np.zeros(1))
