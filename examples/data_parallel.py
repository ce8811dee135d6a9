"""Data parallelism in one file: LeNet on Fashion-MNIST, by hand and with MirroredStrategy.

    python examples/data_parallel.py --num_gpus=2

Every device holds a copy of the parameters; all copies start equal. A training step has the parts 1
to 4 below. All devices make the same update, so that all copies stay equal, and both ways end with
the same parameters (within rounding where the batch does not divide evenly: MirroredStrategy has
other shards). "d2l" marks names of "Dive into Deep Learning", "Training on Multiple GPUs".
"""

import argparse
import gzip
import os
import time

import numpy as np
import tensorflow as tf

BATCH_SIZE, LEARNING_RATE, SEED = 256, 0.2, 0
SHAPES = [(3, 3, 1, 20), (20,), (5, 5, 20, 50), (50,), (800, 128), (128,), (128, 10), (10,)]


def initial_values():
    """Returns the parameters before training: kernels from N(0, 0.01²), biases 0."""
    random = np.random.default_rng(SEED)
    return [np.float32(random.normal(0, 0.01, s) if len(s) > 1 else np.zeros(s)) for s in SHAPES]


def lenet(params, images):  # d2l: lenet; bias_add rounds as the layers of Keras do.
    """Returns the logits `(n, 10)` of uint8 images `(n, 28, 28, 1)`."""
    w1, b1, w2, b2, w3, b3, w4, b4 = params
    x = tf.cast(images, tf.float32) * (1 / 255)
    x = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, w1, 1, "VALID"), b1))
    x = tf.nn.avg_pool2d(x, 2, 2, "VALID")
    x = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, w2, 1, "VALID"), b2))
    x = tf.nn.avg_pool2d(x, 2, 2, "VALID")
    x = tf.nn.relu(tf.nn.bias_add(tf.reshape(x, [-1, 800]) @ w3, b3))
    return tf.nn.bias_add(x @ w4, b4)


def local_gradients(params, images, labels, num_examples):
    """Returns the gradients of (sum of a shard's losses) / (examples of the whole batch)."""
    with tf.GradientTape() as tape:
        logits = lenet(params, images)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)  # d2l: loss
        loss = tf.reduce_sum(losses) / tf.cast(num_examples, tf.float32)
    return tape.gradient(loss, params)


def sgd(params, gradients):  # d2l: sgd, which also divides by the batch size.
    """Updates the parameters."""
    for param, gradient in zip(params, gradients):
        param.assign_sub(LEARNING_RATE * gradient)


def copy_to(device, tensor):
    """Returns a copy of a tensor on a device."""
    with tf.device(device):
        return tf.identity(tensor)


def split_batch(tensor, devices):  # d2l: split_batch
    """Copies a part of the rows to each device; of 100 rows on 3 devices 34, 33 and 33."""
    sizes = [len(part) for part in np.array_split(range(len(tensor)), len(devices))]
    return [copy_to(*each) for each in zip(devices, tf.split(tensor, sizes))]


def all_reduce(tensors, devices):  # d2l: allreduce, which changes the list in place.
    """Returns a copy of the sum on each device."""
    with tf.device(devices[0]):
        total = tf.add_n(tensors)
    return [copy_to(device, total) for device in devices]


def by_hand(dataset, values, devices):
    """Returns the parameters of each device, the batches, and the function for one batch."""
    device_params = []
    for device in devices:
        with tf.device(device):  # d2l: get_params
            device_params.append([tf.Variable(value) for value in values])

    @tf.function  # Traced once per batch size, to a graph in which the devices work in parallel.
    def train_batch(images, labels):  # d2l: train_batch
        shards = zip(split_batch(images, devices), split_batch(labels, devices))  # 1. Shards.
        device_gradients = []  # 2. The gradients of each shard.
        for device, params, shard in zip(devices, device_params, shards):
            with tf.device(device):
                device_gradients.append(local_gradients(params, *shard, len(labels)))
        sums = [all_reduce(copies, devices) for copies in zip(*device_gradients)]  # 3. All-reduce.
        for device, params, gradients in zip(devices, device_params, zip(*sums)):
            with tf.device(device):
                sgd(params, gradients)  # 4. The same update everywhere.

    return device_params, dataset, train_batch


def mirrored(dataset, values, devices):
    """Returns the same with MirroredStrategy, whose default all-reduce may add in another order."""
    strategy = tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())
    batches = strategy.experimental_distribute_dataset(dataset)  # 1. Of 256 on 3: 86, 86 and 84.
    with strategy.scope():  # Creates each parameter on every device.
        params = [tf.Variable(value) for value in values]

    def replica_step(images, labels):  # Runs on each device, with its shard and its parameters.
        context = tf.distribute.get_replica_context()
        num_examples = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.size(labels))
        gradients = local_gradients(params, images, labels, num_examples)  # 2. Gradients.
        sums = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)  # 3. All-reduce.
        sgd(params, sums)  # 4. The same update everywhere.

    train_batch = tf.function(lambda *batch: strategy.run(replica_step, args=batch))
    return list(zip(*map(strategy.experimental_local_results, params))), batches, train_batch


def train(method, data, devices, num_epochs):  # d2l: train
    """Trains with `by_hand` or `mirrored`; returns the parameters of each device."""
    train_set, (test_images, test_labels) = data
    dataset = tf.data.Dataset.from_tensor_slices(train_set).shuffle(60_000, SEED).batch(BATCH_SIZE)
    device_params, batches, train_batch = method(dataset, initial_values(), devices)
    for epoch in range(1, num_epochs + 1):  # The first one has the time of tracing, too.
        start_time = time.perf_counter()
        for batch in batches:
            train_batch(*batch)
        sec, parts = time.perf_counter() - start_time, np.split(test_images, 10)
        logits = np.concatenate([lenet(device_params[0], part) for part in parts])
        acc = np.mean(np.argmax(logits, axis=1) == test_labels)
        print(f"{method.__name__}: epoch {epoch}, test acc: {acc:.2f}, {sec:.1f} sec on {devices}")
    return device_params


def load_data():
    """Returns images `(n, 28, 28, 1)` and labels of the training and the test set."""
    folder, sets = os.environ.get("FASHION_MNIST_DIR"), []
    for name in ["train", "t10k"] if folder else []:
        files = [f"{folder}/{name}-{kind}-ubyte.gz" for kind in ["images-idx3", "labels-idx1"]]
        images, labels = (np.frombuffer(gzip.open(file).read(), np.uint8) for file in files)
        sets.append((images[16:].reshape(-1, 28, 28), labels[8:]))
    sets = sets or tf.keras.datasets.fashion_mnist.load_data()  # Downloads 30 MB once.
    return [(images[..., None], labels.astype(np.int32)) for images, labels in sets]


def choose_devices(num_gpus):  # d2l: try_gpu
    """Sets up and returns the names of GPUs, or of logical CPU devices, which share the cores."""
    # With this optimization, TensorFlow may add three or more gradients in another order.
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    if kind == "CPU":
        (cpu,), one = tf.config.list_physical_devices("CPU"), tf.config.LogicalDeviceConfiguration()
        tf.config.set_logical_device_configuration(cpu, [one] * num_gpus)
    return [f"/device:{kind}:{index}" for index in range(num_gpus)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num_gpus", type=int, default=2, help="or as many CPU devices")
    parser.add_argument("--num_epochs", type=int, default=10, help="passes over the training set")
    flags = parser.parse_args()
    devices, data, copies = choose_devices(flags.num_gpus), load_data(), []
    for method in (by_hand, mirrored):
        trained = train(method, data, devices, flags.num_epochs)
        copies += [b"".join(param.numpy().tobytes() for param in params) for params in trained]
    print(f"{copies.count(copies[0])} of {len(copies)} copies are bitwise identical.")
