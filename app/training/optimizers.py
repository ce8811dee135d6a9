"""Implements stochastic gradient descent with a loss scale, for gradients in float16."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from strategies.loss import are_finite, replaced_by_nan
from strategies.tf_private import learning_rate_schedule, optimizer_variable_index

# Gradients of a mean loss above 2 overflow; the scale is then halved in each step.
INITIAL_LOSS_SCALE = 2.0**15


class ScaledSGD(keras.optimizers.SGD):
    """Keras' SGD for gradients in float16: adapts the loss scale, and skips steps that overflow.

    After a step with a gradient that is not finite, weights and velocities are those before it, and
    the scale is halved; after `growth_steps` steps without one, it is doubled. The step counter
    always advances. Given equal gradients, all devices skip the same steps.

    Keras' `LossScaleOptimizer` skips the same steps with every strategy, but does not count them,
    so that a schedule falls behind the training, and its variables do not fit saved checkpoints.

    Args:
        learning_rate: a number or a schedule.
        weight_decay: fraction of a weight, times the learning rate, that each step subtracts.
        initial_scale: a power of two.
        growth_steps: number of steps.
        **options: of `keras.optimizers.SGD`.

    Attributes:
        decay, initial_scale, growth_steps: see above; `decay` is the weight decay.
        loss_scale: factor of the loss in the next step, after `build`.
        finite_steps: steps since the last change of the scale, after `build`.

    Reference: P. Micikevicius et al., "Mixed Precision Training", 2017, section 3.2.
    """

    def __init__(
        self,
        learning_rate: float | keras.optimizers.schedules.LearningRateSchedule,
        *,
        weight_decay: float | None = None,
        initial_scale: float,
        growth_steps: int = 2000,
        **options: Any,
    ):
        super().__init__(learning_rate, **options)  # Keras would decay weights in skipped steps.
        self.decay, self.initial_scale = weight_decay, initial_scale
        self.growth_steps = growth_steps

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the optimizer's variables."""
        super().build(variables)
        options: dict[str, Any] = {"shape": (), "aggregation": "only_first_replica"}
        scale = keras.initializers.Constant(self.initial_scale)
        self.loss_scale = self.add_variable(
            initializer=scale, dtype="float32", name="loss_scale", **options
        )
        self.finite_steps = self.add_variable(dtype="int64", name="finite_steps", **options)

    def apply(
        self,
        grads: Sequence[tf.Tensor],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        """Updates the weights if all gradients are finite, then the scale.

        Args:
            grads: one gradient per weight, not scaled.
            trainable_variables: the weights.
        """
        are_right = are_finite(grads)
        super().apply(replaced_by_nan(grads, are_right), trainable_variables)
        scale = tf.convert_to_tensor(self.loss_scale.value)
        count = tf.where(are_right, tf.convert_to_tensor(self.finite_steps.value) + 1, 0)
        grows = count >= self.growth_steps
        factor = tf.where(are_right, tf.where(grows, 2.0, 1.0), 0.5)
        self.loss_scale.assign(tf.maximum(scale * factor, 1.0))
        self.finite_steps.assign(tf.where(grows, tf.zeros_like(count), count))

    def update_step(
        self,
        gradient: tf.Tensor,
        variable: keras.Variable | tf.Variable,
        learning_rate: tf.Tensor,
    ) -> None:
        """Updates one weight; leaves it unchanged if its gradient is NaN."""
        changed = [variable.value if isinstance(variable, keras.Variable) else variable]
        if self.momentum:
            changed.append(self.momentums[optimizer_variable_index(self, variable)].value)
        before = [tf.identity(each) for each in changed]
        if self.decay:
            rate = tf.cast(self.decay, gradient.dtype) * tf.cast(learning_rate, gradient.dtype)
            changed[0].assign_sub(changed[0] * rate)
        super().update_step(gradient, variable, learning_rate)
        is_right = are_finite([gradient])
        for each, old in zip(changed, before, strict=True):
            each.assign(tf.where(is_right, tf.convert_to_tensor(each), old))


def last_learning_rate(optimizer: keras.optimizers.Optimizer) -> float:
    """Returns the learning rate of the last step.

    Keras returns that of the next step: after the last step of a cosine schedule, 0.
    """
    schedule = learning_rate_schedule(optimizer)
    if schedule is not None:
        return float(schedule(optimizer.iterations - 1))
    # With `tf.distribute`, a variable has a copy on each device, which float() does not accept.
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))
