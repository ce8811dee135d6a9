"""Trains with Lockstep."""

import math

from app.devices.setup import set_up
from app.options import Config
from program import NUM_WARMUP_STEPS, Job


class Training:
    """A training that is warmed up."""

    def __init__(self, job: Job) -> None:
        config = Config.of(
            "train", strategy=job.strategy, recipe=job.recipe, model=job.model, device="cpu",
            num_gpus=job.num_devices, global_batch_size=job.global_batch_size,
            precision="mixed_bfloat16" if job.precision == "bfloat16" else "float32",
            epochs=1 if job.recipe == "fast" else 10, dataset="fashion_mnist",
            data_dir=job.data_dir,
        )  # fmt: skip
        devices = set_up(config)

        from app.data.batches import eval_dataset
        from app.data.fashion_mnist import load_data
        from app.records.history import versions
        from app.training.build import TrainingRun

        self.versions, self._dataset = versions(), load_data(config)
        training = TrainingRun(config, devices, self._dataset)
        self._strategy = training.strategy
        weights = self._strategy.model.trainable_variables
        job.check_parameters(sum(math.prod(weight.shape) for weight in weights))
        state = self._strategy.state()
        batches = self._strategy.distribute(training.batches())
        self._strategy.train_steps(batches, NUM_WARMUP_STEPS)
        tested = self._dataset.test_images, self._dataset.test_labels
        self._strategy.evaluate(eval_dataset(*tested, global_batch_size=1000).take(1))  # Compiles.
        self._strategy.load_state(state)
        self._batches = self._strategy.distribute(training.batches())

    def train_steps(self, num_steps: int) -> int:
        """Trains; returns the number of images."""
        return self._strategy.train_steps(self._batches, num_steps).examples

    def evaluate(self) -> float:
        """Returns the test accuracy."""
        from app.training.loop import evaluate

        return evaluate(self._strategy, self._dataset).accuracy
