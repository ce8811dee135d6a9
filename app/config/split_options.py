"""Options of how a training is split over devices, beyond one shard per device."""

import dataclasses
from typing import Any

from app.config.names import DISTRIBUTION, MAX_LOGICAL_DEVICES
from app.config.option import option, options_of

_MAX_PARTS = 1024
_MAX_WEIGHT = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitOptions:
    """Sets how layers, tensors, weights and batches are split; see `STRATEGY_OPTIONS`."""

    model_parallel: int | None = option(
        None,
        "pipeline, tensor: number of devices that share one copy of the weights; must "
        "divide the number of devices. Each copy trains on a different part of the batch."
        " Default: all devices.",
        DISTRIBUTION,
        metavar="K",
        low=1,
        high=MAX_LOGICAL_DEVICES,
        affects_result=True,
    )
    micro_batches: int = option(
        4,
        "pipeline: number of micro-batches into which each replica's batch is split.",
        DISTRIBUTION,
        metavar="M",
        low=1,
        high=_MAX_PARTS,
        affects_result=True,
    )
    schedule: str = option(
        "1f1b",
        "pipeline: gpipe runs all forward passes first; 1f1b (one forward, one backward) "
        "starts each backward pass as early as possible and stores fewer activations. The"
        " result is the same.",
        DISTRIBUTION,
        choices=("gpipe", "1f1b"),
        affects_result=True,
    )
    recompute: bool = option(
        False,
        "pipeline: recompute the activations of a stage in its backward pass instead of "
        "storing them: less memory, more time, same result.",
        DISTRIBUTION,
        affects_result=True,
    )
    pipeline_cuts: tuple[str, ...] = option(
        (),
        "pipeline: layers after which the network is cut into stages. Default: cuts that "
        "balance the floating-point operations.",
        DISTRIBUTION,
        metavar="LAYER,…",
        affects_result=True,
    )
    shard: str = option(
        "weights",
        "sharded: what is divided among the replicas: the optimizer state (ZeRO-1), the "
        "gradients too (ZeRO-2), or the weights too (ZeRO-3).",
        DISTRIBUTION,
        choices=("optimizer", "gradients", "weights"),
        affects_result=True,
    )
    accumulate_steps: int = option(
        1,
        "Gradient accumulation: each replica splits its part of the batch into A parts "
        "and adds their gradients before the update. Needs less memory.",
        DISTRIBUTION,
        metavar="A",
        low=1,
        high=_MAX_PARTS,
        affects_result=True,
    )
    shard_weights: tuple[int, ...] = option(
        (),
        "Shares of the batch for unequal devices, one whole number for each replica: with"
        " 3,1 the first replica gets three quarters. Default: equal shares.",
        DISTRIBUTION,
        metavar="W,W,…",
        low=1,
        high=_MAX_WEIGHT,
        repeats=True,
        affects_result=True,
    )


def recorded_value(fields: dict[str, Any], name: str) -> Any:
    """Returns the value of an option in a record; the default for a record without the option.

    Args:
        fields: `result_fields` of a training, from disk or not.
        name: name of the option.
    """
    return fields.get(name, _DEFAULTS.get(name))


_DEFAULTS = {
    each.name: list(each.default) if each.is_list else each.default
    for each in options_of(SplitOptions)
}
