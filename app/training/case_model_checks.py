"""Checks that strategies train the model of a case as one device does."""

import collections

from app.runtime.errors import ConfigError
from strategies.base import Strategy
from strategies.keras_private import inner_optimizer, is_synchronized


def check_case_model(strategy: Strategy, case: str | None) -> None:
    """Checks the model and the optimizer of a strategy that was just built.

    Args:
        strategy: a strategy with an objective.
        case: the case file, for the message.

    Raises:
        ConfigError: the strategy would train the model differently, or it cannot be saved.
    """
    where, model, name = f"--case={case}", strategy.model, strategy.name
    if inner_optimizer(strategy.optimizer) is not strategy.optimizer:
        raise ConfigError(
            f"{where}: strategy {name} has no loss scale; use mixed_bfloat16 in place of"
            " mixed_float16"
        )
    layer = next((layer.name for layer in model.layers if is_synchronized(layer)), None)
    if layer and strategy.num_replicas > 1:
        raise ConfigError(
            f"{where}: strategy {name} does not synchronize {layer}; use synchronized=False, or"
            " strategy single"
        )
    steps = strategy.optimizer.gradient_accumulation_steps
    if steps and name not in ("single", "manual"):
        raise ConfigError(
            f"{where}: gradient_accumulation_steps={steps} of the optimizer fails under"
            f" tf.distribute (keras issue 20582), and so with strategy {name}; use strategy single"
            " or manual"
        )
    names = collections.Counter(strategy.variable_names)
    repeated = [name for name, count in names.items() if count > 1]
    if repeated:
        raise ConfigError(
            f"{where}: {names[repeated[0]]} variables are named {repeated[0]}; give each layer a"
            " name of its own"
        )
    if not model.trainable_variables:
        raise ConfigError(f"{where}: the model has no weight to train")
