"""Trains with JAX: a compiled step on one device with all cores.

Choices and reasons, from processor time of LeNet in float32 with a batch of 256:

- One device takes as long as two host devices with `shard_map` and `pmean`.
- XLA's YNNPACK fusions, on by default in this version, are off: with them 1.7 times as long.
- Channels last: channels first 1.4 times as long; patches and a matrix product 1.8 times.
- float32: bfloat16 takes 1.7 times as long, as XLA has no convolution in it for a CPU.
- Every step is awaited; the weights are donated, so that a step updates them in place.
"""

import functools
import os
from typing import Any

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_experimental_ynn_fusion_type="
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax_models import NETWORKS, create_variables

from program import NUM_WARMUP_STEPS, Job


class Training:
    """A training that is warmed up."""

    def __init__(self, job: Job) -> None:
        self.versions = {"jax": jax.__version__, "jaxlib": jaxlib.__version__}
        self._job, self._network = job, NETWORKS[job.model]
        self._restart()
        job.check_parameters(sum(p.size for p in self._variables[0].values()))
        for size in {where.stop - where.start for where in job.epoch_slices()}:
            for _ in range(NUM_WARMUP_STEPS):
                self._make_step(np.arange(size))
        self._restart()

    def _restart(self) -> None:
        self._variables = jax.device_put(create_variables(self._job.model))
        self._batches = self._job.index_batches()

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def _step(self, variables: Any, images: jax.Array, labels: jax.Array) -> Any:
        params, state = variables

        def mean_loss(params: Any) -> Any:
            logits, new_state = self._network(params, state, images.astype(float) / 255, True)
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
            return -chosen.mean(), new_state

        gradients, state = jax.grad(mean_loss, has_aux=True)(params)
        rate = self._job.learning_rate
        return jax.tree.map(lambda p, g: p - rate * g, params, gradients), state

    def _make_step(self, rows: np.ndarray) -> None:
        images, labels = self._job.data[0]
        self._variables = self._step(self._variables, images[rows], labels[rows])
        jax.block_until_ready(self._variables)

    def train_steps(self, num_steps: int) -> int:
        """Trains; returns the number of images."""
        return self._job.train(self._batches, num_steps, self._make_step)

    def evaluate(self) -> float:
        """Returns the test accuracy."""
        images, labels = self._job.data[1]
        logits, _ = self._network(*self._variables, images.astype(np.float32) / 255, False)
        return float((logits.argmax(1) == labels).mean())
