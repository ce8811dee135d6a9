"""Lists the strategies by name; to add one, add a file here and a line to `STRATEGIES`.

Importing this package imports neither Keras nor TensorFlow: `load_strategy_class` imports the
module of a strategy.
"""

import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strategies.base import Strategy

# Name of a strategy → "module:class".
STRATEGIES: dict[str, str] = {
    "single": "strategies.single:SingleStrategy",
    "manual": "strategies.manual:ManualStrategy",
    "mirrored": "strategies.mirrored:MirroredStrategy",
    "multi_worker": "strategies.multi_worker:MultiWorkerStrategy",
    "sharded": "strategies.sharded:ShardedStrategy",
    "pipeline": "strategies.pipeline:PipelineStrategy",
    "tensor": "strategies.tensor:TensorStrategy",
}

_ALL_REDUCE = ("all_reduce", "communication_dtype")
_DATA_PARALLEL = ("batch_norm", "accumulate_steps", "shard_weights", "jit_compile")
# Name of a strategy → the options that not every strategy has. XLA cannot compile strategies whose
# devices exchange tensors within a forward pass.
STRATEGY_OPTIONS: dict[str, tuple[str, ...]] = {
    "single": ("accumulate_steps", "jit_compile"),
    "manual": (*_DATA_PARALLEL, *_ALL_REDUCE),
    "mirrored": (*_DATA_PARALLEL, *_ALL_REDUCE),
    "multi_worker": (*_DATA_PARALLEL, *_ALL_REDUCE),
    "sharded": (*_DATA_PARALLEL, "shard"),
    "pipeline": ("model_parallel", "micro_batches", "schedule", "recompute", "pipeline_cuts"),
    "tensor": ("model_parallel",),
}

# Name of a strategy → its all-reduce algorithms. A strategy that is not listed accepts only "auto".
ALL_REDUCE_ALGORITHMS: dict[str, tuple[str, ...]] = {
    "manual": ("reduce_to_one", "ring", "tree", "direct"),
    "mirrored": ("reduce_to_one", "nccl", "hierarchical", "ring"),
    "multi_worker": ("ring", "nccl"),
}

# Options that not every strategy has.
OPTIONS_OF_SOME = tuple(dict.fromkeys(name for own in STRATEGY_OPTIONS.values() for name in own))


def has_option(strategy: str, name: str) -> bool:
    """Returns whether a strategy has an option, one of `OPTIONS_OF_SOME`."""
    return name in STRATEGY_OPTIONS.get(strategy, ())


def load_strategy_class(name: str) -> "type[Strategy]":
    """Imports and returns the class of a strategy.

    Args:
        name: a key of `STRATEGIES`.

    Raises:
        ImportError: the entry of `STRATEGIES` does not name a class.
    """
    target = STRATEGIES[name]
    try:
        strategy_class = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise ImportError(f'STRATEGIES["{name}"] = "{target}": {error}') from error
    if not isinstance(strategy_class, type):
        raise ImportError(f'STRATEGIES["{name}"] = "{target}": must be "module:class"')
    return strategy_class
