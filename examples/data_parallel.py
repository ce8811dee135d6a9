"""Data parallelism in one file: LeNet on Fashion-MNIST, on several devices.

    python examples/data_parallel.py --num_gpus=2

Every device holds a copy of the parameters; all copies start equal. One training step

1. splits the batch into one shard per device,
2. computes on each device the gradients of its shard,
3. sums the gradients over the devices and copies the sums to each of them (an all-reduce), and
4. applies the same update on each device.

The copies therefore stay bitwise identical. The loops over devices run once, while `tf.function`
traces the step; the devices then work in parallel. The file does this by hand, then with
`tf.distribute.MirroredStrategy`, and both end with bitwise identical parameters. "d2l" marks the
names of "Dive into Deep Learning", section "Training on Multiple GPUs".
"""

import argparse
import functools
import gzip
import os
import time

import matplotlib.pyplot as plt
import numpy as np

# Without TensorFlow's log messages; those of the import ignore the level, and go to /dev/null.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
stderr = os.dup(2)
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
try:
    import tensorflow as tf
finally:
    os.dup2(stderr, 2)

BATCH_SIZE, LEARNING_RATE, SEED = 256, 0.2, 0
SHAPES = [(3, 3, 1, 20), (20,), (5, 5, 20, 50), (50,), (800, 128), (128,), (128, 10), (10,)]


def initial_values():
    """Returns the initial values of LeNet's parameters: N(0, 0.01²) for kernels, 0 for biases."""
    random = np.random.default_rng(SEED)
    values = [random.normal(0, 0.01, s) if len(s) > 1 else np.zeros(s) for s in SHAPES]
    return [value.astype(np.float32) for value in values]


def lenet(params, images):  # d2l: lenet
    """Returns the logits `(n, 10)` of uint8 images `(n, 28, 28, 1)`."""
    w1, b1, w2, b2, w3, b3, w4, b4 = params
    x = tf.cast(images, tf.float32) * (1 / 255)
    x = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, w1, 1, "VALID"), b1))
    x = tf.nn.avg_pool2d(x, 2, 2, "VALID")
    x = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, w2, 1, "VALID"), b2))
    x = tf.nn.avg_pool2d(x, 2, 2, "VALID")
    x = tf.nn.relu(tf.nn.bias_add(tf.matmul(tf.reshape(x, [-1, 800]), w3), b3))
    return tf.nn.bias_add(tf.matmul(x, w4), b4)


def local_gradients(params, shard, num_examples):
    """Returns the gradients of (sum of the losses of a shard) / (examples of the whole batch).

    Their sum over the shards is the gradient of the batch's mean loss, also for uneven shards. (d2l
    divides by the size of the batch in its `sgd` instead.)
    """
    images, labels = shard
    with tf.GradientTape() as tape:
        logits = lenet(params, images)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)  # d2l: loss
        loss = tf.reduce_sum(losses) / tf.cast(num_examples, tf.float32)
    return tape.gradient(loss, params)


def sgd(params, gradients):  # d2l: sgd
    """Updates the parameters by stochastic gradient descent."""
    for param, gradient in zip(params, gradients, strict=True):
        param.assign_sub(LEARNING_RATE * gradient)


def split_batch(batch, devices):  # d2l: split_batch, split_and_load
    """Copies a shard to each device; 100 examples on 3 devices are 34, 33 and 33."""
    num_examples, num_devices = tf.shape(batch[0])[0], len(devices)
    sizes = [
        (num_examples + num_devices - 1 - index) // num_devices for index in range(num_devices)
    ]
    images, labels = [tf.split(tensor, sizes) for tensor in batch]
    shards = []
    for device, own_images, own_labels in zip(devices, images, labels, strict=True):
        with tf.device(device):
            shards.append([tf.identity(own_images), tf.identity(own_labels)])
    return shards


def all_reduce(per_device_gradients, devices):  # d2l: allreduce
    """Sums each gradient over the devices, and copies the sum to each device."""
    with tf.device(devices[0]):  # Reduce: ((device 0 + device 1) + device 2) + ...
        copies_of_each = zip(*per_device_gradients, strict=True)
        sums = [functools.reduce(tf.add, copies) for copies in copies_of_each]
    per_device_sums = []
    for device in devices:  # Broadcast.
        with tf.device(device):
            per_device_sums.append([tf.identity(total) for total in sums])
    return per_device_sums


def by_hand(values, devices):
    """Copies the values to each device; returns the copies and a function that trains a batch."""
    per_device_params = []
    for device in devices:  # d2l: get_params
        with tf.device(device):
            per_device_params.append([tf.Variable(value) for value in values])

    def train_batch(batch):  # d2l: train_batch
        shards = split_batch(batch, devices)  # 1. A shard for each device.
        per_device_gradients = []  # 2. The gradients of each shard.
        for params, shard, device in zip(per_device_params, shards, devices, strict=True):
            with tf.device(device):
                per_device_gradients.append(local_gradients(params, shard, tf.shape(batch[0])[0]))
        per_device_sums = all_reduce(per_device_gradients, devices)  # 3. All-reduce (sum).
        for params, sums, device in zip(per_device_params, per_device_sums, devices, strict=True):
            with tf.device(device):
                sgd(params, sums)  # 4. The same update everywhere.

    return per_device_params, train_batch


def mirrored(values, devices):
    """Does the same with MirroredStrategy."""
    # The default, `add_n`, may add in another order than `all_reduce`.
    add_in_order = functools.partial(functools.reduce, tf.add)
    strategy = tf.distribute.MirroredStrategy(
        devices, cross_device_ops=tf.distribute.ReductionToOneDevice(accumulation_fn=add_in_order)
    )
    with strategy.scope():  # Creates each parameter on every device, with equal values.
        params = [tf.Variable(value) for value in values]

    def replica_step(shard, num_examples):
        gradients = local_gradients(params, shard, num_examples)  # 2. The gradients of its shard.
        context = tf.distribute.get_replica_context()
        sums = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)  # 3. All-reduce (sum).
        sgd(params, sums)  # 4. The same update everywhere.

    def per_replica(tensors):  # Makes one value of the tensors of all devices.
        return strategy.experimental_distribute_values_from_function(
            lambda context: tensors[context.replica_id_in_sync_group]
        )

    def train_batch(batch):
        shards = split_batch(batch, devices)  # 1. A shard for each device.
        shard = [per_replica(tensors) for tensors in zip(*shards, strict=True)]
        strategy.run(replica_step, args=(shard, tf.shape(batch[0])[0]))

    copies = [strategy.experimental_local_results(param) for param in params]
    return list(zip(*copies, strict=True)), train_batch


def evaluate(params, images, labels):  # d2l: evaluate_accuracy, evaluate_accuracy_gpu
    """Returns the accuracy, a fraction."""
    logits = [lenet(params, part) for part in np.split(images, 10)]
    return np.mean(np.argmax(np.concatenate(logits), axis=1) == labels)


def require_equal(copies, names):
    """Exits unless the copies of the parameters are bitwise identical."""
    for params in copies[1:]:
        pairs = zip(params, copies[0], strict=True)
        if any(a.numpy().tobytes() != b.numpy().tobytes() for a, b in pairs):
            raise SystemExit(f"error: {names}: the copies of the parameters differ")


def train(create, devices, data, num_epochs):  # d2l: train
    """Trains with `by_hand` or `mirrored`; returns the copies and each epoch's test accuracy."""
    (images, labels), (test_images, test_labels) = data
    print(f"{create.__name__}: training LeNet on {devices}, epochs: {num_epochs}", flush=True)
    per_device_params, train_batch = create(initial_values(), devices)
    step = tf.function(train_batch, autograph=False, reduce_retracing=True)
    accuracies, seconds = [], 0.0
    for epoch in range(num_epochs):
        start_time = time.perf_counter()
        order = tf.random.experimental.stateless_shuffle(tf.range(len(images)), [SEED, epoch])
        for start in range(0, len(images), BATCH_SIZE):
            rows = order.numpy()[start : start + BATCH_SIZE]
            step((tf.constant(images[rows]), tf.constant(labels[rows], tf.int32)))
        seconds += time.perf_counter() - start_time
        accuracies.append(evaluate(per_device_params[0], test_images, test_labels))
        print(f"{create.__name__}, epoch {epoch + 1}: test acc {accuracies[-1]:.4f}", flush=True)
        require_equal(per_device_params, create.__name__)
    each = seconds / num_epochs
    print(f"test acc: {accuracies[-1]:.2f}, {each:.1f} sec/epoch on {devices}", flush=True)
    return per_device_params, accuracies


def load_data():
    """Returns images `(n, 28, 28, 1)` and labels of the training set and of the test set.

    They are in the folder `FASHION_MNIST_DIR`; if it is not set, they are downloaded once (30 MB).
    """

    def read(name, header_size):
        path = os.path.join(os.environ["FASHION_MNIST_DIR"], f"{name}-ubyte")
        with open(path, "rb") if os.path.exists(path) else gzip.open(f"{path}.gz") as file:
            return np.frombuffer(file.read(), np.uint8, offset=header_size)

    try:
        if os.environ.get("FASHION_MNIST_DIR"):
            parts = "train", "t10k"
            sets = [(read(f"{p}-images-idx3", 16), read(f"{p}-labels-idx1", 8)) for p in parts]
        else:
            sets = tf.keras.datasets.fashion_mnist.load_data()
    except Exception as error:
        remedy = "set FASHION_MNIST_DIR to the folder with its four .gz files"
        raise SystemExit(f"error: Fashion-MNIST: {error}; {remedy}") from None
    return [(images.reshape(-1, 28, 28, 1), labels) for images, labels in sets]


def choose_devices(num_gpus):
    """Returns the names of GPUs; without any, creates logical CPU devices that share the cores."""
    # TensorFlow would otherwise change the order in which three or more gradients are added.
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    if gpus := tf.config.list_physical_devices("GPU"):
        if len(gpus) < num_gpus:
            raise SystemExit(f"error: --num_gpus={num_gpus}, but TensorFlow sees {len(gpus)} GPUs")
        return [f"/device:GPU:{index}" for index in range(num_gpus)]
    print(f"No GPU found: {num_gpus} logical CPU devices are used; times do not show scaling.")
    cpu, part = tf.config.list_physical_devices("CPU")[0], tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [part] * num_gpus)
    return [f"/device:CPU:{index}" for index in range(num_gpus)]


def main():
    """Trains in both ways, compares the parameters and plots the accuracies."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--num_gpus", type=int, default=2)
    parser.add_argument("--num_epochs", "--epochs", type=int, default=10)
    flags = parser.parse_args()
    devices = choose_devices(flags.num_gpus)
    data, all_copies = load_data(), []
    for create, style in [(by_hand, "-"), (mirrored, "o")]:
        per_device_params, accuracies = train(create, devices, data, flags.num_epochs)
        all_copies += per_device_params
        plt.plot(range(1, flags.num_epochs + 1), accuracies, style, label=create.__name__)
    require_equal(all_copies, "by_hand and mirrored")
    print(f"The {len(all_copies)} copies of the parameters are bitwise identical.")
    plt.xlabel("epoch")
    plt.ylabel("test accuracy")
    plt.legend()
    plt.savefig("data_parallel.png")
    print("Saved data_parallel.png")


if __name__ == "__main__":
    main()
