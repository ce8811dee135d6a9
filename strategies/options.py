"""Defines the options of a strategy."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class StrategyOptions:
    """Holds the options of all strategies. `STRATEGY_OPTIONS` names those that each strategy has.

    Attributes:
        label_smoothing: see `strategies.loss.shard_loss`.
        batch_norm: "average" normalises each shard separately, "sync" normalises over the global
            batch.
        accumulate_steps: shards per replica; a replica adds their gradients before the all-reduce.
        shard_weights: relative sizes of the replicas' parts of a batch, whole numbers; empty for
            equal parts.
        jit_compile: compile loss and gradients of a shard with XLA.
        all_reduce: the algorithm that sums the gradients over the replicas: one of
            `strategies.ALL_REDUCE_ALGORITHMS`, "auto", or "none" to skip the all-reduce (to measure
            its cost).
        bucket_mib: size of the gradient buckets of the all-reduce, in 2²⁰ bytes; 0 for one
            all-reduce per gradient, None for the strategy's default.
        communication_dtype: dtype of the all-reduce; None for the dtype of the gradients.
        shard: what `sharded` splits over the devices: "optimizer", "gradients" or "weights".
        model_parallel: K, devices per replica; None for all devices in `pipeline` and `tensor`, and
            one device elsewhere.
        micro_batches: M, the shards of each pipeline.
        schedule: a key of `strategies.schedules.SCHEDULES`.
        recompute: a stage of a pipeline keeps only its inputs, and computes its activations again.
        pipeline_cuts: names of the layers after which the network is cut; empty for stages of
            equal arithmetic.
    """

    label_smoothing: float = 0.0
    batch_norm: str = "average"
    accumulate_steps: int = 1
    shard_weights: tuple[int, ...] = ()
    jit_compile: bool = False
    all_reduce: str = "auto"
    bucket_mib: float | None = None
    communication_dtype: str | None = None
    shard: str = "weights"
    model_parallel: int | None = None
    micro_batches: int = 4
    schedule: str = "1f1b"
    recompute: bool = False
    pipeline_cuts: tuple[str, ...] = ()
