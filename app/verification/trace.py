"""Reads and writes the results of each step of a training on disk.

A trace is a directory with one file for each step, `step-00003.safetensors`; step 0 is the initial
state. A trace of a single step has the file of that step and the state of the step before it. An
array's name in a file is `KIND/REPLICA/TENSOR`, for example `gradients/1/conv1/kernel`. A replica's
array that is bitwise identical to replica 0's is omitted, except for "examples"; `copies/0/count`
is the number of copies of the weights, `replicas/0/count` the number of replicas (if missing, as
many as shards). `parts/DEVICE/TENSOR`, in step 1, is the shape of a device's part of a weight, if
devices hold parts. The metadata entry `order` has the names as a JSON list in the order of the
model. Writing needs memory for the arrays of one step, reading for one array.
"""

import contextlib
import hashlib
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from app.records.arrays import ArrayFile, open_arrays, write_arrays
from app.records.files import io_errors_as, open_regular, remove
from app.runtime.errors import DataError, reason_of
from app.verification.split import KINDS_OF_A_SHARD, Split

# All results of a step, in the order of computation: the first mismatch explains later ones.
# "updates" are not stored but computed from the weights.
KINDS = {
    "examples": "which examples a replica was given, a hash of each",
    "loss": "a replica's part in the mean loss of the global batch",
    "gradients": "of that, on each replica, before the all-reduce",
    "sums": "the gradients after the all-reduce",
    "slots": "the optimizer's own variables after the step",
    "updates": "weights after the step minus weights before it",
    "weights": "trainable variables after the step",
    "agreement": "whether every replica holds the bits of replica 0",
    "own statistics": "moving statistics of BatchNorm, each replica's own",
    "statistics": "moving statistics averaged over the replicas: what is evaluated and saved",
}
KIND_TITLES = {"slots": "optimizer state"}  # Where the name is not the field's term.

_STORED = [kind for kind in KINDS if kind not in ("updates", "agreement")]
_NUM_COPIES, _NUM_REPLICAS = "copies/0/count", "replicas/0/count"
PARTS = "parts"  # Parts of the weights on devices; not a result of a step.
_NAME = re.compile(r"step-(\d{5,})\.safetensors")


class TraceWriter:
    """Writes one trace; use it in a `with` statement.

    Args:
        path: the directory; replaced if it exists.
        num_replicas: number of replicas of the shards; None for one shard per replica.

    Raises:
        DiskFullError: no space, at any point until it is closed.
        OutputError: the trace cannot be written for another reason.
    """

    def __init__(self, path: pathlib.Path, num_replicas: int | None = None):
        self._path, self._step, self._num_replicas = path, 0, num_replicas
        self._arrays: dict[str, np.ndarray] = {}  # Of the current step.
        with io_errors_as(path):
            remove(path)
            path.mkdir()

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, error: type[BaseException] | None, *details: object) -> None:
        if error is None:
            self._finish_step()

    def write(self, step: int, kind: str, per_replica: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Writes arrays of all replicas; omits arrays bitwise identical to replica 0's.

        The file of a step is written with the first call for the next step; until then the arrays
        must not change. "examples" are never omitted: they determine the number of shards.
        """
        if step != self._step:
            self._finish_step()
            self._step = step
        if kind == "weights":
            self._arrays[_NUM_COPIES] = np.array(len(per_replica))
            if self._num_replicas is not None:
                self._arrays[_NUM_REPLICAS] = np.array(self._num_replicas)
        for replica_id, arrays in enumerate(per_replica):
            for tensor, array in arrays.items():
                array = np.asarray(array)
                first = per_replica[0].get(tensor)
                whole = replica_id == 0 or kind in ("examples", PARTS)
                if whole or first is None or not have_same_bits(array, np.asarray(first)):
                    self._arrays[f"{kind}/{replica_id}/{tensor}"] = array

    def _finish_step(self) -> None:
        if self._arrays:
            with io_errors_as(self._path):
                write_arrays(_step_path(self._path, self._step), self._arrays)
            self._arrays = {}


class Trace:
    """Reads a trace, one array at a time.

    Args:
        path: the directory.
        syncs_batch_norm: whether BatchNorm was configured to normalise over all shards.

    Attributes:
        first_step: first step of the trace: 1, except in a trace of a single step.
        num_steps: last step of the trace.
        split: numbers of replicas, shards and copies of the weights.
        num_shards: number of shards with gradients.
        num_copies: number of copies of the weights; 0 if it has no weights.

    Raises:
        DataError: the trace is damaged, or is not a trace.
    """

    def __init__(self, path: pathlib.Path, *, syncs_batch_norm: bool = False):
        self._path = path
        self._open: dict[int, tuple[ArrayFile, contextlib.ExitStack]] = {}  # Step → its file.
        self._index: dict[tuple[int, str], dict[str, set[int]]] = {}
        with self._read_errors():
            steps = sorted(int(m[1]) for p in path.iterdir() if (m := _NAME.fullmatch(p.name)))
            if missing := set(range(steps[0], steps[-1])) - set(steps):
                raise ValueError(f"step {min(missing)} is missing")
            for step in steps:
                self._add_step(step)
            self.num_steps = max(step for step, _ in self._index)
            self.first_step = min(step for step, kind in self._index if kind == "examples")
            self.num_shards = len(self._index[self.first_step, "examples"]["examples"])
        self.num_copies = self._count("copies", 0)
        num_replicas = self._count("replicas", self.num_shards)
        self.split = Split(num_replicas, self.num_shards, self.num_copies, syncs_batch_norm)

    def _count(self, of: str, default: int) -> int:
        before = self.first_step - 1
        return int(self.read(before, of, 0, "count")) if (before, of) in self._index else default

    def _add_step(self, step: int) -> None:
        with open_regular(_step_path(self._path, step)) as file, open_arrays(file) as arrays:
            for name in arrays.names:
                kind, replica_id, tensor = name.split("/", 2)
                tensors = self._index.setdefault((step, kind), {})
                tensors.setdefault(tensor, set()).add(int(replica_id))

    @contextlib.contextmanager
    def _read_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # A damaged file may raise any exception.
            if isinstance(error, MemoryError):
                raise
            raise DataError(
                f"{self._path}: not a complete trace ({reason_of(error)}); record it again"
            ) from error

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, *exception: object) -> None:
        while self._open:
            _, stack = self._open.popitem()[1]
            stack.close()

    def tensors(self, step: int, kind: str) -> list[str]:
        """Returns the names of the tensors of a kind, in the order of the model."""
        if kind == "updates":
            return self.tensors(step, "weights") if step >= self.first_step else []
        return list(self._index.get((step, kind), {}))

    def replicas(self, step: int, kind: str, tensor: str) -> list[int]:
        """Returns replica 0, and the replicas whose array is not bitwise identical to its."""
        if kind == "updates":
            before = self.replicas(step - 1, "weights", tensor)
            return sorted({*before, *self.replicas(step, "weights", tensor)})
        return sorted(self._index[step, kind][tensor])

    def read(self, step: int, kind: str, replica_id: int, tensor: str) -> np.ndarray:
        """Reads one array; that of replica 0 if the replica's is bitwise identical.

        Raises:
            KeyError: there is no such array.
            DataError: the trace is damaged.
        """
        if kind == "updates":
            after, before = (self.read(s, "weights", replica_id, tensor) for s in (step, step - 1))
            return after.astype(np.float64) - before
        stored = self._index[step, kind][tensor]
        name = f"{kind}/{replica_id if replica_id in stored else 0}/{tensor}"
        with self._read_errors():
            return self._opened(step).read(name)

    def _opened(self, step: int) -> ArrayFile:
        """Returns the file of a step; the files of the last two steps are kept open."""
        if step not in self._open:
            if len(self._open) > 1:
                _, stack = self._open.pop(next(iter(self._open)))
                stack.close()
            with contextlib.ExitStack() as stack:
                file = stack.enter_context(open_regular(_step_path(self._path, step)))
                self._open[step] = stack.enter_context(open_arrays(file)), stack.pop_all()
        return self._open[step][0]

    def read_unit(self, step: int, kind: str, unit_id: int, tensor: str) -> np.ndarray:
        """Reads an array of one of `split.units`, summed over its shards."""
        shards = self.split.units[unit_id]
        if len(shards) == 1:
            return self.read(step, kind, shards[0], tensor)
        parts = [self.read(step, kind, shard_id, tensor) for shard_id in shards]
        return np.asarray(np.sum(parts, axis=0, dtype=np.float64))

    def parts(self) -> list[dict[str, tuple[int, ...]]]:
        """Returns for each device, path of a weight → shape of its part; empty for full copies."""
        per_device: dict[int, dict[str, tuple[int, ...]]] = {}
        step = self.first_step
        for tensor in self.tensors(step, PARTS):
            for device_id in self.replicas(step, PARTS, tensor):
                shape = tuple(map(int, self.read(step, PARTS, device_id, tensor)))
                per_device.setdefault(device_id, {})[tensor] = shape
        return [per_device[device_id] for device_id in sorted(per_device)]


def merge_traces(paths: Sequence[pathlib.Path], path: pathlib.Path) -> None:
    """Writes the trace of all replicas from the traces of the workers.

    Args:
        paths: traces of the workers, in order of workers.
        path: directory of the new trace.

    Raises:
        DiskFullError, OutputError: the trace cannot be written.
    """
    with contextlib.ExitStack() as stack:
        traces = [stack.enter_context(Trace(part)) for part in paths]
        num_replicas = sum(trace.split.num_replicas for trace in traces)
        merged = stack.enter_context(TraceWriter(path, num_replicas))
        for step in range(traces[0].num_steps + 1):
            for kind in _STORED:
                own = kind in KINDS_OF_A_SHARD
                items = [
                    (t, i) for t in traces for i in range(t.num_shards if own else t.num_copies)
                ]
                # Averaged statistics are the same on all workers.
                items = items[:1] if kind == "statistics" else items
                per_replica = [
                    {tensor: t.read(step, kind, i, tensor) for tensor in t.tensors(step, kind)}
                    for t, i in items
                ]
                merged.write(step, kind, per_replica)


def hash_examples(images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns 64 bits for each example, int64 `(n,)`, equal for equal image and label."""
    digests = [
        hashlib.blake2b(image.tobytes() + bytes([label]), digest_size=8).digest()
        for image, label in zip(images, labels, strict=True)
    ]
    return np.frombuffer(b"".join(digests), np.int64)


def _step_path(path: pathlib.Path, step: int) -> pathlib.Path:
    return path / f"step-{step:05d}.safetensors"


def have_same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Returns whether two arrays are bitwise equal, without copies of either."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    unsigned = f"u{a.dtype.itemsize}"
    return bool(np.array_equal(a.view(unsigned), b.view(unsigned)))
