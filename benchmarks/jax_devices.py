"""JAX: one compiled step over several host devices by `shard_map`, gradients averaged by `pmean`.

What was chosen, and why:

- The host gathers the bytes of a global batch and sends each device its shard: under a millisecond
  of a step of dozens. Each step is waited for: with several under way, the all-reduces of one can
  hold the threads that another one needs.
- Weights and the sum of losses are donated: a step updates them where they are.
- Channels last, and convolutions as the one operation that XLA has for them: cut into matrix
  products, they were slower.
"""

import functools
import os

import protocol

if __name__ == "__main__":
    JOB = protocol.open_job(["lenet"])
    os.environ["XLA_FLAGS"] = " ".join(
        [
            os.environ.get("XLA_FLAGS", ""),
            f"--xla_force_host_platform_device_count={JOB.num_devices}",
        ]
    )
    os.environ["JAX_PLATFORMS"] = "cpu"
    # An all-reduce holds a thread for each device: where XLA has no more than that, it can wait for
    # ever, and XLA ends the program after 40 s.
    os.environ["NPROC"] = str(4 * JOB.num_devices)

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

AXIS = "devices"


def initial_params() -> dict[str, dict[str, jax.Array]]:
    """Draws LeNet's weights, in Glorot's way; biases are 0."""
    shapes = {
        "conv1": (3, 3, 1, 20),
        "conv2": (5, 5, 20, 50),
        "hidden": (800, 128),
        "logits": (128, 10),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    initialize = jax.nn.initializers.glorot_uniform()
    return {
        name: {"kernel": initialize(key, shape), "bias": jnp.zeros(shape[-1])}
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def lenet(params, images):
    """Computes logits `(n, 10)` of byte images `(n, 28, 28, 1)`."""
    x = images.astype(jnp.float32) / 255
    for name in ("conv1", "conv2"):
        x = _average_pool(jax.nn.relu(_conv(x, **params[name])))
    x = x.reshape(len(x), -1)
    x = jax.nn.relu(_dense(x, **params["hidden"]))
    return _dense(x, **params["logits"])


def _conv(x, kernel, bias):
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=layout) + bias


def _average_pool(x):
    window = (1, 2, 2, 1)
    return lax.reduce_window(x, 0.0, lax.add, window, window, "VALID") / 4


def _dense(x, kernel, bias):
    return x @ kernel + bias


def mean_loss(params, images, labels):
    """Computes the mean cross-entropy of a shard."""
    log_probabilities = jax.nn.log_softmax(lenet(params, images))
    return -jnp.take_along_axis(log_probabilities, labels[:, None], axis=1).mean()


def train_step(params, loss_sum, images, labels, *, learning_rate):
    """Makes one step on each device, all with the same gradient.

    Returns:
        New weights, and `loss_sum` with the losses of the whole global batch added.
    """
    results = jax.value_and_grad(mean_loss)(params, images, labels)
    loss, gradients = lax.pmean(results, AXIS)  # Shards are equal: the mean over the global batch.
    params = jax.tree.map(lambda p, g: p - learning_rate * g, params, gradients)
    return params, loss_sum + loss * len(labels) * lax.axis_size(AXIS)


def count_correct(params, images, labels):
    """Counts the images of all devices whose class is right; a label of −1 is never right."""
    return lax.psum(jnp.sum(lenet(params, images).argmax(1) == labels), AXIS)


class JaxTrainer:
    """The weights, the same on every device, and the data, on the host.

    Args:
        job: what to train.
    """

    def __init__(self, job: protocol.BenchmarkJob):
        self._job = job
        if jax.device_count() != job.num_devices:
            raise RuntimeError(f"{jax.device_count()} devices, not {job.num_devices}")
        mesh = jax.make_mesh((job.num_devices,), (AXIS,))
        self._replicated, self._sharded = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS))
        # The check would have gradients summed where they are made, one by one, without a word.
        shard_map = functools.partial(jax.shard_map, mesh=mesh, out_specs=P(), check_vma=False)
        self._train_step = jax.jit(
            shard_map(
                functools.partial(train_step, learning_rate=job.learning_rate),
                in_specs=(P(), P(), P(AXIS), P(AXIS)),
            ),
            donate_argnums=(0, 1),
        )
        self._count_correct = jax.jit(
            shard_map(count_correct, in_specs=(P(), P(AXIS), P(AXIS))),
        )
        self._images = job.data.train_images
        self._labels = job.data.train_labels.astype(np.int32)
        self._test_batches = self._cut_test_data()
        self._restart()
        protocol.check_num_parameters(job, sum(p.size for p in jax.tree.leaves(self._params)))

    def warm_up(self) -> None:
        """Compiles everything, for the short last batch of an epoch too; takes the weights back."""
        for size in {where.stop - where.start for where in self._job.epoch_slices}:
            for _ in range(protocol.NUM_WARMUP_STEPS):
                self._make_step(np.arange(size))
        self.evaluate()
        self._restart()

    def train_steps(self, num_steps: int) -> tuple[int, float]:
        """Makes so many steps; returns how many images they had, and their mean loss."""
        num_images = 0
        for _ in range(num_steps):
            indices = next(self._batches)
            self._make_step(indices)
            num_images += len(indices)
        jax.block_until_ready(self._params)
        mean = float(self._loss_sum) / num_images
        self._reset_loss()
        return num_images, mean

    def evaluate(self) -> float:
        """Returns the part of the test images that is classified rightly."""
        counts = [self._count_correct(self._params, *batch) for batch in self._test_batches]
        return sum(int(count) for count in counts) / len(self._job.data.test_labels)

    def _make_step(self, indices):
        batch = jax.device_put((self._images[indices], self._labels[indices]), self._sharded)
        self._params, self._loss_sum = self._train_step(self._params, self._loss_sum, *batch)
        self._loss_sum.block_until_ready()

    def _restart(self):
        self._params = jax.device_put(initial_params(), self._replicated)
        self._batches = self._job.index_batches()
        self._reset_loss()

    def _reset_loss(self):
        self._loss_sum = jax.device_put(jnp.zeros(()), self._replicated)

    def _cut_test_data(self):
        """Puts equal batches on the devices, the last one filled up with labels of −1."""
        size = self._job.global_batch_size
        images, labels = self._job.data.test_images, self._job.data.test_labels.astype(np.int32)
        missing = -len(labels) % size
        images = np.pad(images, [(0, missing), (0, 0), (0, 0), (0, 0)])
        labels = np.pad(labels, (0, missing), constant_values=-1)
        return [
            jax.device_put((images[i : i + size], labels[i : i + size]), self._sharded)
            for i in range(0, len(labels), size)
        ]


def main(job: protocol.BenchmarkJob) -> None:
    """Warms up and serves requests."""
    trainer = JaxTrainer(job)
    trainer.warm_up()
    protocol.serve(
        protocol.describe(job, jax=jax.__version__, jaxlib=jaxlib.__version__),
        protocol.training_handlers(trainer.train_steps, trainer.evaluate),
    )


if __name__ == "__main__":
    main(JOB)
