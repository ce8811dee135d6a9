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
}

# Name of a strategy → its all-reduce algorithms. A strategy that is not listed has only "auto".
ALL_REDUCE_ALGORITHMS: dict[str, tuple[str, ...]] = {
    "manual": ("reduce_to_one", "ring"),
    "mirrored": ("reduce_to_one", "nccl", "hierarchical", "ring"),
    "multi_worker": ("ring", "nccl"),
}


def load_strategy_class(name: str) -> "type[Strategy]":
    """Imports and returns the class of a strategy, named by a key of `STRATEGIES`."""
    return pkgutil.resolve_name(STRATEGIES[name])
