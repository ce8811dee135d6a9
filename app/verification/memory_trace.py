"""Holds the trace of one step in memory: inputs, results, and the states before and after it."""

import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from app.verification.split import KINDS_OF_A_SHARD, Split
from app.verification.trace import PARTS, Trace, TraceWriter

# Kind → for each replica, shard or copy, tensor → array.
PerItemArrays = list[dict[str, np.ndarray]]


class MemoryTrace(Trace):
    """A trace of one step in memory, with the interface of a trace on disk.

    Args:
        step: number of the step; the state before it belongs to the previous step.
        split: split of the training.
    """

    def __init__(self, step: int, split: Split):
        self.first_step = self.num_steps = step
        self.split, self.num_shards, self.num_copies = split, split.num_shards, split.num_copies
        self._index: dict[tuple[int, str], dict[str, set[int]]] = {}
        self._arrays: dict[tuple[int, str, int, str], np.ndarray] = {}

    def write(self, step: int, kind: str, per_replica: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Keeps arrays; omits those bitwise identical to replica 0's, like `TraceWriter.write`."""
        tensors = self._index.setdefault((step, kind), {})
        for replica_id, arrays in enumerate(per_replica):
            for tensor, array in arrays.items():
                array, first = np.asarray(array), per_replica[0].get(tensor)
                whole = replica_id == 0 or kind in ("examples", PARTS)
                if whole or first is None or not same_bits(array, np.asarray(first)):
                    tensors.setdefault(tensor, set()).add(replica_id)
                    self._arrays[step, kind, replica_id, tensor] = array

    def read(self, step: int, kind: str, replica_id: int, tensor: str) -> np.ndarray:
        """Returns one array; that of replica 0 if the replica's is bitwise identical."""
        if kind == "updates":
            return super().read(step, kind, replica_id, tensor)
        stored = self._index[step, kind][tensor]
        return self._arrays[step, kind, replica_id if replica_id in stored else 0, tensor]

    def is_finite(self, *, but: Collection[str] = ()) -> bool:
        """Returns whether all numbers are finite, but for those of some kinds."""
        return all(
            np.isfinite(array).all()
            for (_, kind, _, _), array in self._arrays.items()
            if kind not in but and np.issubdtype(array.dtype, np.floating)
        )

    def have_copies_differed(self) -> bool:
        """Whether copies of the weights or other common values differ, also before the step."""
        return any(
            len(ids) > 1
            for (_, kind), tensors in self._index.items()
            if kind in ("sums", "slots", "weights")
            for ids in tensors.values()
        )

    def kinds(self) -> Iterator[tuple[int, str, PerItemArrays]]:
        """Yields step, kind and the arrays of each shard or copy, for all arrays."""
        for step, kind in sorted(self._index, key=lambda key: key[0]):
            tensors = self._index[step, kind]
            count = self.num_shards if kind in KINDS_OF_A_SHARD else self.num_copies
            if kind in (PARTS, "statistics"):
                count = 1 + max((max(ids) for ids in tensors.values()), default=-1)
            held = tensors if kind == PARTS else dict.fromkeys(tensors, range(count))
            yield (
                step,
                kind,
                [
                    {t: self.read(step, kind, i, t) for t, ids in held.items() if i in ids}
                    for i in range(count)
                ],
            )

    def save(self, path: pathlib.Path) -> None:
        """Writes the trace to a directory, which `Trace` reads.

        Raises:
            DiskFullError, OutputError: the trace cannot be written.
        """
        with TraceWriter(path, self.split.num_replicas) as writer:
            for step, kind, per_item in self.kinds():
                writer.write(step, kind, per_item)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Returns whether two arrays are bitwise identical, including NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    first, second = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (a, b))
    return bool(np.array_equal(first, second))
