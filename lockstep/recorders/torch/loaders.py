"""Sees the seeds that data loaders give to their workers."""

from typing import Any

from lockstep.recorders.common import Hooks
from lockstep.recorders.torch.private import iterator_of_loaders, num_workers_of, seed_of_workers

MOST_SEEDS = 100


def observe_loaders(hooks: Hooks, seeds: list[int]) -> None:
    """Adds to `seeds` that of each pass over a loader with workers, until `hooks` are closed."""

    def begin(inner: Any, iterator: Any, *args: Any, **options: Any) -> None:
        inner(iterator, *args, **options)
        if num_workers_of(iterator) and len(seeds) < MOST_SEEDS:
            seeds.append(int(seed_of_workers(iterator)))

    hooks.hook(iterator_of_loaders(), "__init__", begin)
