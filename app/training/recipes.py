"""Defines recipes: initialisation, input scaling, optimizer and schedule under a name."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import keras

from app.data.batches import Augmentation
from app.errors import ConfigError
from strategies.tf_private import learning_rate_schedule, reset_layer_numbers

MIN_WARMUP_STEPS = 100


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Defines a training apart from the architecture."""

    kernel_initializer: str | Mapping[str, Any]  # Of Keras; biases start at 0.
    pixel_mean: float  # Subtracted from pixels of 0 to 255.
    pixel_std: float  # Divides the pixels after the subtraction.
    peak_learning_rate: float  # At a global batch of 256.
    label_smoothing: float = 0.0  # Part of the target that is spread evenly over all classes.
    augmentation: Augmentation = "none"
    momentum: float = 0.0  # Nesterov momentum of stochastic gradient descent; 0 for none.
    weight_decay: float | None = None  # Times the learning rate: the part of a weight per step.
    # Part of all steps in which the learning rate rises to its peak, before a cosine decay to 0;
    # None for a constant learning rate. At least 100 steps, and as many as a rise by a hundredth
    # of `peak_learning_rate` per step takes, but at most half of all steps.
    warmup: float | None = None

    def learning_rate(self, *, global_batch_size: int, num_steps: int) -> float:
        """Returns the peak learning rate, which is proportional to the global batch.

        With warm-up, it grows with the square root of a batch above 256, and a run of few steps has
        a proportional part of it. (LeNet, learning rate 0.2: 40 steps end at an accuracy of 0.12
        instead of 0.70 without.) docs/speed.md has the measurement of the rules.

        Reference: P. Goyal et al., "Accurate, Large Minibatch SGD", 2017: the linear rule;
            A. Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014:
            the square root.
        """
        growth = global_batch_size / 256
        if self.warmup is None:
            return self.peak_learning_rate * growth
        growth = min(growth, math.sqrt(growth))
        full_steps = 2 * MIN_WARMUP_STEPS * max(1.0, growth)
        return self.peak_learning_rate * growth * min(1.0, num_steps / full_steps)

    def create_optimizer(self, learning_rate: float, num_steps: int) -> keras.optimizers.Optimizer:
        """Creates the optimizer of a training of `num_steps`, with a peak of `learning_rate`."""
        schedule = learning_rate
        if self.warmup is not None:
            rise = round(MIN_WARMUP_STEPS * learning_rate / self.peak_learning_rate)
            least = min(max(MIN_WARMUP_STEPS, rise), num_steps // 2)
            warmup_steps = max(round(self.warmup * num_steps), least)
            schedule = keras.optimizers.schedules.CosineDecay(
                0.0,
                max(1, num_steps - warmup_steps),
                warmup_target=learning_rate,
                warmup_steps=warmup_steps,
            )
        return keras.optimizers.SGD(
            schedule,
            momentum=self.momentum,
            nesterov=self.momentum > 0,
            weight_decay=self.weight_decay,
        )

    def build_model(
        self,
        builder: Callable[..., keras.Model],
        *,
        image_shape: tuple[int, int, int],
        num_classes: int,
        seed: int,
    ) -> keras.Model:
        """Builds a model for uint8 images, whose weights depend only on `seed`.

        Raises:
            ConfigError: the model does not fit the data, or the strategies cannot train it.
        """
        reset_layer_numbers()
        keras.utils.set_random_seed(seed)  # Every initializer gets its own seed from this stream.
        network = builder(
            image_shape=image_shape,
            num_classes=num_classes,
            kernel_initializer=self.kernel_initializer,
        )
        _check_fits(network, image_shape, num_classes)
        images = keras.Input(image_shape, dtype="uint8")
        scaled = keras.layers.Rescaling(
            1 / self.pixel_std, -self.pixel_mean / self.pixel_std, dtype=keras.config.floatx()
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
        sizes = itertools.zip_longest(found, required)
        if any(size not in (None, needed) for size, needed in sizes):  # An open dimension is None.
            raise ConfigError(
                f"model {network.name}: its {kind} shape is {found}, the data set requires"
                f" {required}; build it from the image_shape and num_classes that its builder gets"
            )


def check_model(model: keras.Model) -> None:
    """Raises `ConfigError` if strategies cannot train a model equally.

    Two variables must not have the same name, and no layer may add a loss.
    """
    counts = collections.Counter(variable.path for variable in model.variables)
    name, count = counts.most_common(1)[0]
    if count > 1:
        raise ConfigError(
            f"model {model.name}: {count} variables are named {name}; give each layer a name of its"
            " own"
        )
    # Only a call finds activity regularizers and added losses; it changes no variable.
    model(keras.ops.zeros((1, *model.input_shape[1:]), dtype=model.inputs[0].dtype), training=False)
    layer = model if model.losses else None
    while inner := [each for each in getattr(layer, "layers", ()) if each.losses]:
        layer = inner[0]
    if layer is not None:
        raise ConfigError(
            f"model {model.name}: layer {layer.name} adds a loss of its own, which training would"
            " leave out; remove its regularizers and add_loss, and use the weight decay of a"
            " recipe"
        )


# Of the chapters of d2l on several GPUs.
_D2L = Recipe(
    kernel_initializer={"class_name": "RandomNormal", "config": {"stddev": 0.01}},
    pixel_mean=0.0,
    pixel_std=255.0,
    peak_learning_rate=0.1,
)
# Chosen by measurement.
_FAST = Recipe(
    kernel_initializer="he_normal",
    pixel_mean=72.94,
    pixel_std=90.02,
    peak_learning_rate=0.1,
    momentum=0.9,
    weight_decay=5e-4,
    warmup=0.2,
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
        "resnet18": _FAST_RESIDUAL,
        "other": _FAST,
    },
}


def find_recipe(name: str, model: str) -> Recipe:
    """Returns a model's settings in a recipe."""
    return RECIPES[name].get(model, RECIPES[name]["other"])


def last_learning_rate(optimizer: keras.optimizers.Optimizer) -> float:
    """Returns the learning rate of the last step, where Keras returns that of the next."""
    schedule = learning_rate_schedule(optimizer)
    if schedule is not None:
        return float(schedule(optimizer.iterations - 1))
    # With `tf.distribute`, a variable has a copy on each device, which float() does not accept.
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))
