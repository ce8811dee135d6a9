"""Sees the seeds that data loaders give to their workers."""

import contextlib
from typing import Any

from torch.utils.data import dataloader

from lockstep.recorders.torch.versions import check_observed

MOST_SEEDS = 100


def observe_loaders(hooks: contextlib.ExitStack, seeds: list[int]) -> None:
    """Adds to `seeds` that of each pass over a loader with workers, until `hooks` are closed."""
    owner: Any = dataloader
    check_observed(owner, "_BaseDataLoaderIter")
    iterator = owner._BaseDataLoaderIter
    original = iterator.__init__

    def begin(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if self._num_workers and len(seeds) < MOST_SEEDS:
            seeds.append(int(self._base_seed))

    iterator.__init__ = begin
    hooks.callback(setattr, iterator, "__init__", original)
