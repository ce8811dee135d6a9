"""The strategies by name; a new one is a file here and a line in `STRATEGIES`."""

STRATEGIES = {
    "single": "strategies.single:SingleStrategy",
    "manual": "strategies.manual:ManualStrategy",
    "mirrored": "strategies.mirrored:MirroredStrategy",
    "multi_worker": "strategies.multi_worker:MultiWorkerStrategy",
}
ALL_REDUCE_ALGORITHMS: dict[str, tuple[str, ...]] = {
    "manual": ("reduce_to_one", "ring", "tree", "direct"),
    "mirrored": ("reduce_to_one", "nccl", "hierarchical", "ring"),
    "multi_worker": ("ring", "nccl"),
}
