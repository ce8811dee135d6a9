"""Trains with JAX: a compiled step on one device with all cores, or on several with `shard_map`.

Choices and reasons. Ratios are of processor time for LeNet in float32 with a batch of 256, all
variants timed in turn:

- One device with all cores takes as long as two host devices with the gradients averaged by
  `pmean`; both are in the table.
- XLA's YNNPACK fusions, on by default in this version, are off: with them 1.7 times as long on one
  device, the same on two.
- Channels last: channels first 1.4 times as long; patches and a matrix product 1.8 times.
- Neither oneDNN's flags nor fast mathematics change anything.
- bfloat16 takes 1.7 times as long as float32: XLA has no convolution in it for a CPU.
- The host gathers the bytes of a global batch and sends each device its shard: under 1 ms of a step
  of tens of ms. Every step is awaited: with several steps in flight, the all-reduces of one can
  hold the threads that another one needs.
- Weights and the sum of losses are donated, so that a step updates them in place.
"""

import functools
import os
import pathlib
import sys

import protocol

sys.path.append(str(pathlib.Path(__file__).parents[1] / "frameworks"))

if __name__ == "__main__":
    JOB = protocol.open_job(["lenet", "resnet18"], flags=protocol.PRECISION_FLAG)
    os.environ["XLA_FLAGS"] = " ".join(
        [
            os.environ.get("XLA_FLAGS", ""),
            f"--xla_force_host_platform_device_count={JOB.num_devices}",
            "--xla_cpu_experimental_ynn_fusion_type=",
        ]
    )
    os.environ["JAX_PLATFORMS"] = "cpu"
    # An all-reduce holds one thread per device: without further threads XLA can deadlock, and exits
    # after 40 s.
    if JOB.num_devices > 1:
        os.environ["NPROC"] = str(4 * JOB.num_devices)

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax_models import NETWORKS, create_variables

AXIS = "devices"
Variables = tuple[dict[str, jax.Array], dict[str, jax.Array]]  # Weights, moving statistics.


def initial_variables(model: str) -> Variables:
    """Draws the weights with Glorot initialisation; biases are 0."""
    params, state = create_variables(model)
    keys = jax.random.split(jax.random.key(0), len(params))
    initialize = jax.nn.initializers.glorot_uniform()
    for key, name in zip(keys, params, strict=True):
        if name.endswith("/kernel"):
            params[name] = initialize(key, params[name].shape)
    return params, state


def logits_of(variables: Variables, images: jax.Array, job: protocol.BenchmarkJob, training: bool):
    """Computes float32 logits `(n, 10)` of byte images `(n, 28, 28, 1)`, and the statistics."""
    dtype = jnp.dtype(job.options["precision"])
    params, state = variables
    params = jax.tree.map(lambda weight: weight.astype(dtype), params)
    logits, state = NETWORKS[job.model](params, state, images.astype(dtype) / 255, training)
    return logits.astype(jnp.float32), state


def train_step(variables, loss_sum, images, labels, *, job):
    """Runs one step on each device, all with the same gradient.

    Returns:
        New weights and statistics, and `loss_sum` with the losses of the whole global batch added.
    """
    params, state = variables

    def mean_loss(params):
        logits, new_state = logits_of((params, state), images, job, True)
        log_probabilities = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(log_probabilities, labels[:, None], axis=1).mean(), new_state

    (loss, state), gradients = jax.value_and_grad(mean_loss, has_aux=True)(params)
    # Shards are equal: the mean over the global batch.
    loss, state, gradients = lax.pmean((loss, state, gradients), AXIS)
    params = jax.tree.map(lambda p, g: p - job.learning_rate * g, params, gradients)
    return (params, state), loss_sum + loss * len(labels) * lax.axis_size(AXIS)


def count_correct(variables, images, labels, *, job):
    """Counts the correctly classified images of all devices; a label of −1 never matches."""
    logits, _ = logits_of(variables, images, job, False)
    return lax.psum(jnp.sum(logits.argmax(1) == labels), AXIS)


class JaxTrainer:
    """Holds the weights, copied to every device, and the data, on the host.

    Args:
        job: the training.
    """

    def __init__(self, job: protocol.BenchmarkJob):
        self._job = job
        if jax.device_count() != job.num_devices:
            raise RuntimeError(f"{jax.device_count()} devices, not {job.num_devices}")
        mesh = jax.make_mesh((job.num_devices,), (AXIS,))
        self._replicated, self._sharded = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS))
        # With the check, gradients would be summed one by one where they are computed.
        shard_map = functools.partial(jax.shard_map, mesh=mesh, out_specs=P(), check_vma=False)
        self._train_step = jax.jit(
            shard_map(
                functools.partial(train_step, job=job),
                in_specs=(P(), P(), P(AXIS), P(AXIS)),
            ),
            donate_argnums=(0, 1),
        )
        self._count_correct = jax.jit(
            shard_map(functools.partial(count_correct, job=job), in_specs=(P(), P(AXIS), P(AXIS))),
        )
        self._images = job.data.train_images
        self._labels = job.data.train_labels.astype(np.int32)
        self._test_batches = self._cut_test_data()
        self._restart()
        protocol.check_num_parameters(job, sum(p.size for p in self._variables[0].values()))

    def warm_up(self) -> None:
        """Compiles all functions, also for the short last batch; restores the weights."""
        for size in {where.stop - where.start for where in self._job.epoch_slices}:
            for _ in range(protocol.NUM_WARMUP_STEPS):
                self._make_step(np.arange(size))
        self._count_correct(self._variables, *self._test_batches[0]).block_until_ready()
        self._restart()

    def train_steps(self, num_steps: int) -> tuple[int, float]:
        """Runs `num_steps` steps; returns the number of images and their mean loss."""
        num_images = 0
        for _ in range(num_steps):
            indices = next(self._batches)
            self._make_step(indices)
            num_images += len(indices)
        jax.block_until_ready(self._variables)
        mean = float(self._loss_sum) / num_images
        self._reset_loss()
        return num_images, mean

    def evaluate(self) -> float:
        """Returns the test accuracy."""
        counts = [self._count_correct(self._variables, *batch) for batch in self._test_batches]
        return sum(int(count) for count in counts) / len(self._job.data.test_labels)

    def _make_step(self, indices):
        batch = jax.device_put((self._images[indices], self._labels[indices]), self._sharded)
        self._variables, self._loss_sum = self._train_step(self._variables, self._loss_sum, *batch)
        self._loss_sum.block_until_ready()

    def _restart(self):
        self._variables = jax.device_put(initial_variables(self._job.model), self._replicated)
        self._batches = self._job.index_batches()
        self._reset_loss()

    def _reset_loss(self):
        self._loss_sum = jax.device_put(jnp.zeros(()), self._replicated)

    def _cut_test_data(self):
        """Puts equal batches on the devices; pads the last one with labels of −1."""
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
        protocol.describe(
            job,
            "one device with all cores, YNNPACK fusions off, channels last"
            if job.num_devices == 1
            else "shard_map over host devices, YNNPACK fusions off, channels last",
            jax=jax.__version__,
            jaxlib=jaxlib.__version__,
        ),
        protocol.training_handlers(trainer.train_steps, trainer.evaluate),
    )


if __name__ == "__main__":
    main(JOB)
