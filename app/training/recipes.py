"""Defines recipes: initialisation, input scaling, optimizer and schedule under a name."""

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import keras

from app.data.input_pipeline import Augmentation
from app.runtime.errors import ConfigError
from app.training.optimizers import ScaledSGD
from strategies.tf_private import reset_layer_numbers

REFERENCE_GLOBAL_BATCH_SIZE = 256
MIN_WARMUP_STEPS = 100


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Defines a training apart from the architecture.

    Attributes:
        kernel_initializer: name or configuration of a Keras initializer; biases start at 0.
        pixel_mean: subtracted from pixels of 0 to 255.
        pixel_std: divides the pixels after the subtraction.
        peak_learning_rate: peak learning rate at a global batch of 256.
        label_smoothing: fraction of the target that is spread evenly over all classes.
        augmentation: how training images are changed in about half of the epochs; see
            `app.data.input_pipeline.augmented_versions`.
        momentum: Nesterov momentum of stochastic gradient descent; 0 for none.
        weight_decay: fraction of a weight, times the learning rate, that each step subtracts.
        warmup: fraction of all steps in which the learning rate rises to its peak, before a cosine
            decay to 0; None for a constant learning rate. At least 100 steps, or half of all steps
            if there are fewer than 200.
        batch_rule: growth of the peak with a global batch above 256: with the batch ("linear"), or
            with its square root ("square_root"); the latter rises by at most a hundredth of
            `peak_learning_rate` per step, in at most half of all steps. Below 256 the peak is
            proportional to the batch.
    """

    kernel_initializer: str | Mapping[str, Any]
    pixel_mean: float
    pixel_std: float
    peak_learning_rate: float
    label_smoothing: float = 0.0
    augmentation: Augmentation = "none"
    momentum: float = 0.0
    weight_decay: float | None = None
    warmup: float | None = None
    batch_rule: Literal["linear", "square_root"] = "linear"

    def learning_rate(self, *, global_batch_size: int, num_steps: int) -> float:
        """Returns the peak learning rate, which grows with the global batch.

        With warm-up, a run of fewer than 200 steps is too short for the full peak: its peak is
        reduced proportionally. (LeNet, learning rate 0.2, images not augmented: 79 steps end at
        0.48 instead of 0.79, and 40 at 0.12 instead of 0.70 without this.) With the square root,
        the number of warm-up steps of a larger batch grows with its peak.

        Reference: P. Goyal et al., "Accurate, Large Minibatch SGD", 2017: the linear rule;
            A. Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014:
            the square root.
        """
        learning_rate = self.peak_learning_rate * global_batch_size / REFERENCE_GLOBAL_BATCH_SIZE
        if self.batch_rule == "square_root" and global_batch_size > REFERENCE_GLOBAL_BATCH_SIZE:
            growth = math.sqrt(global_batch_size / REFERENCE_GLOBAL_BATCH_SIZE)
            learning_rate = self.peak_learning_rate * growth
        least = self.steps_of_full_peak(global_batch_size)
        return learning_rate * min(1.0, num_steps / least) if least else learning_rate

    def steps_of_full_peak(self, global_batch_size: int) -> float:
        """Returns the number of steps from which the peak is not reduced."""
        if self.warmup is None:
            return 0.0
        growth = global_batch_size / REFERENCE_GLOBAL_BATCH_SIZE
        rise = max(1.0, math.sqrt(growth)) if self.batch_rule == "square_root" else 1.0
        return 2 * MIN_WARMUP_STEPS * rise

    def num_warmup_steps(self, learning_rate: float, num_steps: int) -> int:
        """Returns the number of warm-up steps; 0 for a constant learning rate.

        Args:
            learning_rate: the peak.
            num_steps: steps of the whole training.
        """
        if self.warmup is None:
            return 0
        least = MIN_WARMUP_STEPS
        if self.batch_rule == "square_root":
            least = max(least, round(least * learning_rate / self.peak_learning_rate))
        return max(round(self.warmup * num_steps), min(least, num_steps // 2))

    def create_optimizer(
        self, learning_rate: float, num_steps: int, *, loss_scale: float | None = None
    ) -> keras.optimizers.Optimizer:
        """Creates the optimizer of a training of `num_steps` steps.

        Args:
            learning_rate: the peak.
            num_steps: steps of the whole training.
            loss_scale: that of the first step; None without loss scaling.
        """
        schedule = learning_rate
        if self.warmup is not None:
            warmup_steps = self.num_warmup_steps(learning_rate, num_steps)
            schedule = keras.optimizers.schedules.CosineDecay(
                0.0,
                max(1, num_steps - warmup_steps),
                warmup_target=learning_rate,
                warmup_steps=warmup_steps,
            )
        options: dict[str, Any] = {
            "momentum": self.momentum,
            "nesterov": self.momentum > 0,
            "weight_decay": self.weight_decay,
        }
        if loss_scale is None:
            return keras.optimizers.SGD(schedule, **options)
        return ScaledSGD(schedule, initial_scale=loss_scale, **options)

    def build_model(
        self,
        builder: Callable[..., keras.Model],
        *,
        image_shape: tuple[int, int, int],
        num_classes: int,
        seed: int,
    ) -> keras.Model:
        """Builds a model for uint8 images, whose weights depend only on `seed`.

        Every layer creates its own initializer from `kernel_initializer`, with a seed from the
        stream that `set_random_seed` starts: two layers of one shape get different numbers, and two
        replicas get equal numbers.

        Args:
            builder: the result of `models.load_model_builder`.
            image_shape: height, width and channels of the dataset's images.
            num_classes: number of classes of the dataset.
            seed: 0 to 2³² − 1.

        Raises:
            ConfigError: the model takes other images, returns another number of logits, or cannot
                be trained by the strategies.
        """
        reset_layer_numbers()
        keras.utils.set_random_seed(seed)
        network = builder(
            image_shape=image_shape,
            num_classes=num_classes,
            kernel_initializer=self.kernel_initializer,
        )
        _check_fits(network, image_shape, num_classes)
        images = keras.Input(image_shape, dtype="uint8")
        scaled = keras.layers.Rescaling(
            1 / self.pixel_std,
            -self.pixel_mean / self.pixel_std,
            dtype=keras.config.floatx(),
        )(images)
        model = keras.Model(images, network(scaled), name=network.name)
        check_model(model)
        return model


def _check_fits(network: keras.Model, image_shape: tuple[int, int, int], num_classes: int) -> None:
    """Raises `ConfigError` if a model does not map such images to logits of such classes."""
    for kind, found, required in (
        ("input", network.input_shape, (None, *image_shape)),
        ("output", network.output_shape, (None, num_classes)),
    ):
        # A dimension that the model leaves open is None.
        fits = len(found) == len(required) and all(
            f is None or f == r for f, r in zip(found, required, strict=True)
        )
        if not fits:
            raise ConfigError(
                f"model {network.name}: its {kind} shape is {found}, the data set requires"
                f" {required}; build it from the image_shape and num_classes that its builder gets"
            )


def check_model(model: keras.Model) -> None:
    """Checks that all strategies can train a model equally; does not change its variables.

    Raises:
        ConfigError: two variables have the same name, or a layer adds a loss.
    """
    counts = collections.Counter(variable.path for variable in model.variables)
    repeated = [path for path, count in counts.items() if count > 1]
    if repeated:
        raise ConfigError(
            f"model {model.name}: {counts[repeated[0]]} variables are named {repeated[0]}; give"
            " each layer a name of its own"
        )
    layer = _find_added_loss(model)
    if layer is not None:
        raise ConfigError(
            f"model {model.name}: layer {layer.name} adds a loss of its own, which training would"
            " leave out; remove its regularizers and add_loss, and use the weight decay of a"
            " recipe"
        )


def _find_added_loss(model: keras.Model) -> keras.Layer | None:
    """Returns the innermost layer that adds a loss in a call of the model; None without one.

    Weight regularizers are found without a call. Activity regularizers and losses added by layers
    are not; the model is therefore called with one image in evaluation mode, which changes no
    variable.
    """
    model(keras.ops.zeros((1, *model.input_shape[1:]), dtype=model.inputs[0].dtype), training=False)
    layer = model if model.losses else None
    while inner := [each for each in getattr(layer, "layers", ()) if each.losses]:
        layer = inner[0]
    return layer


# The settings of the chapters of d2l on several GPUs.
_D2L = Recipe(
    kernel_initializer={"class_name": "RandomNormal", "config": {"stddev": 0.01}},
    pixel_mean=0.0,
    pixel_std=255.0,
    peak_learning_rate=0.1,
)
# The settings of `fast` were chosen by measurement.
_FAST = Recipe(
    kernel_initializer="he_normal",
    pixel_mean=72.94,
    pixel_std=90.02,
    peak_learning_rate=0.1,
    momentum=0.9,
    weight_decay=5e-4,
    warmup=0.2,
    batch_rule="square_root",  # docs/speed.md has the measurement of the rules.
)
# The learning rate and decay are those of David Page's ResNet-9. He adds a decay of 5e-4 to the
# gradient, which a momentum of 0.9 multiplies by 10.
_FAST_RESIDUAL = dataclasses.replace(
    _FAST, peak_learning_rate=0.2, weight_decay=5e-3, label_smoothing=0.1, augmentation="flip"
)
# Recipe → model → settings; "other" for models that are not listed.
RECIPES = {
    "d2l": {"lenet": dataclasses.replace(_D2L, peak_learning_rate=0.2), "other": _D2L},
    "fast": {
        "lenet": dataclasses.replace(_FAST, peak_learning_rate=0.2, augmentation="shift"),
        "resnet9": _FAST_RESIDUAL,
        "resnet18": _FAST_RESIDUAL,
        "other": _FAST,
    },
}


def find_recipe(name: str, model: str) -> Recipe:
    """Returns a model's settings in a recipe.

    Args:
        name: a key of `RECIPES`.
        model: name of a model, listed there or not.
    """
    return RECIPES[name].get(model, RECIPES[name]["other"])
