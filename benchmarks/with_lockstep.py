"""Trains with Lockstep."""

import math
from typing import Any

from app.devices import device_setup
from app.options import Config
from program import NUM_WARMUP_STEPS, Job


def config_of(job: Job) -> Config:
    """Returns the options of the training."""
    options: dict[str, Any] = {"strategy": job.strategy, "recipe": job.recipe, "model": job.model}
    if job.strategy != "single":
        options["num_devices"] = job.num_devices
    if job.strategy == "pipeline":
        options["schedule"] = job.schedule
    if job.precision == "bfloat16":
        options["precision"] = "mixed_bfloat16"
    epochs = 1 if job.recipe == "fast" else 10
    return Config.of(
        "train", dataset="fashion_mnist", device="cpu", data_dir=job.data_dir, epochs=epochs,
        global_batch_size=job.global_batch_size, **options,
    )  # fmt: skip


class Training:
    """A training that is warmed up."""

    def __init__(self, job: Job) -> None:
        config = config_of(job)
        prepared = device_setup.set_up(config)

        from app.data.dataset_loader import load_data
        from app.runtime.versions import versions
        from app.training.evaluation import batches_to_evaluate
        from app.training.training_spec import TrainingSpec

        self.versions, self._dataset = versions(), load_data(config)
        spec = TrainingSpec(config, self._dataset)
        self._strategy = spec.build_strategy(prepared)
        weights = self._strategy.model.trainable_variables
        job.check_parameters(sum(math.prod(weight.shape) for weight in weights))
        state = self._strategy.state()
        self._strategy.train_steps(self._strategy.distribute(spec.batches()), NUM_WARMUP_STEPS)
        self._strategy.evaluate(batches_to_evaluate(self._dataset).take(1))  # Compiles it.
        self._strategy.load_state(state)
        self._batches = self._strategy.distribute(spec.batches())

    def train_steps(self, num_steps: int) -> int:
        """Trains; returns the number of images."""
        return self._strategy.train_steps(self._batches, num_steps).examples

    def evaluate(self) -> float:
        """Returns the test accuracy."""
        from app.training.evaluation import evaluate

        return evaluate(self._strategy, self._dataset).accuracy
