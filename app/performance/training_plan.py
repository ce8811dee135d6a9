"""Plans a training by arithmetic: steps, shards, all-reduce, memory, learning rate."""

import collections
import dataclasses
from collections.abc import Iterator

from app.config import PlanConfig
from app.config.constraints import check_shards
from app.config.model_options import Hyperparameters
from app.config.names import NUM_TRAIN_EXAMPLES
from app.data.dataset import IMAGE_SHAPE, NUM_CLASSES
from app.data.input_pipeline import num_steps_per_epoch
from app.devices.free_memory import available_bytes
from app.performance.all_reduce_model import all_reduce_cost
from app.performance.split_plan import SplitPlan
from app.runtime import console
from app.runtime.errors import ConfigError
from app.training.memory_estimate import MemoryEstimate, StepSize
from app.training.recipes import MIN_WARMUP_STEPS, REFERENCE_GLOBAL_BATCH_SIZE, find_recipe
from models import load_model_builder
from strategies import ALL_REDUCE_ALGORITHMS
from strategies.collectives import shard_sizes
from strategies.gradient_buckets import GradientBuckets

_FEW_STEPS = 50
# With a smaller shard, a device spends most of a step on fixed costs, and BatchNorm's statistics
# are those of a handful of images.
_SMALL_SHARD = 8
# Rule for the learning rate → largest batch for which it was shown to hold: the linear rule, with
# warm-up, by Goyal et al., 2017; the square root by `benchmarks/batch_study.py`.
_LARGE_BATCH = {"linear": 8192, "square_root": 4096}
# With LeNet at 1,024 images, 0.4 worked and 0.8 did not.
_HIGHEST_GROWTH = 2.0
_RULE_NAMES = {"linear": "linear", "square_root": "square-root"}
_FAR_FROM_RULE = 2.0


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """The plan of a training.

    Attributes:
        config: options of `plan`.
        num_replicas: number of replicas.
        num_parameters: number of trainable parameters.
        gradient_bytes: bytes that each replica all-reduces in a step.
        memory: estimated memory of a replica.
        recipe_learning_rate: learning rate of the recipe for this batch.
        split: memory and traffic of each device, if more than the batch is split.
    """

    config: PlanConfig
    num_replicas: int
    num_parameters: int
    gradient_bytes: int
    memory: MemoryEstimate
    recipe_learning_rate: float
    split: SplitPlan | None = None

    @classmethod
    def of(cls, config: PlanConfig) -> "TrainingPlan":
        """Builds the model and traces one step without training."""
        import keras

        keras.config.set_dtype_policy(config.precision)
        recipe = find_recipe(config.recipe, config.model)
        model = recipe.build_model(
            load_model_builder(config.model),
            image_shape=IMAGE_SHAPE,
            num_classes=NUM_CLASSES,
            seed=Hyperparameters.seed,
        )
        steps = config.epochs * _steps_per_epoch(config)
        learning_rate = recipe.learning_rate(
            global_batch_size=config.planned_batch_size, num_steps=steps
        )
        optimizer = recipe.create_optimizer(learning_rate, steps)
        optimizer.build(model.trainable_variables)
        dtype = None if config.communication_dtype == "float32" else config.communication_dtype
        weights = [weight.value for weight in model.trainable_variables]
        num_devices, split = config.num_workers * config.num_devices_planned, None
        if config.is_split:
            training = config.for_training()
            split = SplitPlan.of(training, num_devices, config.planned_batch_size, model, optimizer)
            num_devices = split.num_replicas
        return cls(
            config,
            num_devices,
            sum(weight.shape.num_elements() for weight in weights),
            GradientBuckets(weights, dtype=dtype).size_bytes,
            MemoryEstimate.of(model, optimizer.variables),
            learning_rate,
            split,
        )

    @property
    def batch(self) -> int:
        """Images per step over all devices."""
        return self.config.planned_batch_size

    @property
    def num_examples(self) -> int:
        """Training images per epoch."""
        return _num_examples(self.config)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch."""
        return _steps_per_epoch(self.config)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of all epochs."""
        return self.config.epochs * self.steps_per_epoch

    @property
    def last_batch(self) -> int:
        """Images of the short batch at the end of an epoch; 0 if there is none."""
        return self.num_examples % self.batch if self.config.last_batch == "keep" else 0

    @property
    def learning_rate(self) -> float:
        """The peak learning rate."""
        return self.config.learning_rate or self.recipe_learning_rate

    def shards(self, batch: int) -> dict[int, int]:
        """Returns size → number of replicas with a shard of that size."""
        return collections.Counter(shard_sizes(batch, self.num_replicas))

    @property
    def largest_shard(self) -> int:
        """Images of the largest shard."""
        return max(self.shards(min(self.batch, self.num_examples)))

    @property
    def memory_bytes(self) -> float:
        """Estimated memory per device."""
        return self.memory.total_bytes(StepSize(1, 1, self.largest_shard))

    def all_reduces(self) -> dict[str, tuple[int, float]]:
        """Returns algorithm → consecutive messages, bytes through the busiest connection."""
        names = ALL_REDUCE_ALGORITHMS["manual"]
        costs = {name: all_reduce_cost(name, self.num_replicas) for name in names}
        return {
            name: (steps, passes * self.gradient_bytes) for name, (steps, passes) in costs.items()
        }

    def warnings(self, *, on_cpu: bool) -> Iterator[str]:
        """Yields warnings about the planned training.

        Args:
            on_cpu: whether all replicas share this machine's main memory.
        """
        batch = self.batch
        try:
            check_shards(
                global_batch_size=min(batch, NUM_TRAIN_EXAMPLES),
                last_batch=self.config.last_batch,
                num_replicas=self.num_replicas,
                num_train_examples=self.num_examples,
            )
        except ConfigError as error:
            yield f"train would refuse this: {error}"
        if self.steps_per_epoch < _FEW_STEPS:
            yield (
                f"a global batch of {batch:,} leaves {console.count(self.steps_per_epoch, 'step')}"
                f" an epoch of {self.num_examples:,} images: few to learn from; use fewer devices,"
                " a smaller batch or more epochs"
            )
        if self.largest_shard < _SMALL_SHARD:
            yield (
                f"{console.count(self.largest_shard, 'image')} on each device: the devices would"
                f" mostly wait; use fewer of them, or a batch of {16 * self.num_replicas} or more"
            )
        if 0 < self.last_batch < batch / 4:
            yield (
                f"the last batch of each epoch has {self.last_batch} of {batch:,} images, and its"
                " step weighs as much as any other; --last_batch=drop leaves it out"
            )
        yield from self._learning_rate_warnings()
        total = self.split.total_bytes if self.split else self.num_replicas * self.memory_bytes
        available = available_bytes() if on_cpu else None
        if available is not None and total > available:
            yield (
                f"{total / 2**30:.1f} GiB for all devices by estimate, {available / 2**30:.1f} GiB"
                " of main memory are free: use a smaller batch or fewer devices"
            )

    def _learning_rate_warnings(self) -> Iterator[str]:
        recipe = find_recipe(self.config.recipe, self.config.model)
        if self.batch > _LARGE_BATCH[recipe.batch_rule]:
            yield (
                f"a global batch of {self.batch:,}: the {_RULE_NAMES[recipe.batch_rule]} rule for"
                f" the learning rate was seen to hold up to {_LARGE_BATCH[recipe.batch_rule]:,};"
                " use a smaller batch"
            )
        least = recipe.steps_of_full_peak(self.batch)
        if self.num_steps < least and not self.config.learning_rate:
            yield (
                f"{console.count(self.num_steps, 'step')} in all: with fewer than {least:,.0f} the"
                " learning rate rises less high, and accuracy was seen to fall; use a smaller"
                " batch or more epochs"
            )
        highest = _HIGHEST_GROWTH * recipe.peak_learning_rate
        if recipe.batch_rule == "square_root" and self.learning_rate > 1.001 * highest:
            yield (
                f"a learning rate of {self.learning_rate:g} is more than"
                f" {_HIGHEST_GROWTH:g} times the recipe's for {REFERENCE_GLOBAL_BATCH_SIZE} images,"
                f" which was not seen to hold; use --learning_rate={highest:g}"
            )
        apart = self.learning_rate / self.recipe_learning_rate
        if not 1 / _FAR_FROM_RULE <= apart <= _FAR_FROM_RULE:
            yield (
                f"--learning_rate={self.learning_rate:g} is {apart:.2g} times what the rule says"
                f" for this batch, {self.recipe_learning_rate:g}"
            )
        if recipe.warmup is None and self.batch >= 4 * REFERENCE_GLOBAL_BATCH_SIZE:
            yield (
                f"recipe {self.config.recipe} has no warm-up, which a rate of"
                f" {self.learning_rate:g} may need; --recipe=fast rises to it in"
                f" {MIN_WARMUP_STEPS} steps or more"
            )


def _num_examples(config: PlanConfig) -> int:
    return config.num_train_examples or NUM_TRAIN_EXAMPLES


def _steps_per_epoch(config: PlanConfig) -> int:
    return num_steps_per_epoch(_num_examples(config), config.planned_batch_size, config.last_batch)
