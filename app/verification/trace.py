"""What each step of a training computed, in one file that is written and read as a stream.

A trace is an uncompressed `.npz`: `numpy.load` opens it anywhere, and reads one array at a time, so
that neither writing nor comparing traces needs more memory than a few arrays. An array's name is
`STEP/KIND/REPLICA/TENSOR`, for example `3/gradients/1/conv1/kernel`. Step 0 is before the first.
"""

import contextlib
import hashlib
import pathlib
import zipfile
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from app.records.files import write_error

# Everything that a step computes, in the order in which it does: the first mismatch explains those
# after it. "updates" are not stored but taken from the weights.
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

# Those that each shard has of its own; copies of the weights have the others in common.
KINDS_OF_A_SHARD = {"examples", "loss", "gradients", "own statistics"}
_STORED = [kind for kind in KINDS if kind not in ("updates", "agreement")]


class TraceWriter:
    """Writes one trace; use it in a `with` statement.

    Args:
        path: the file; replaced if it is there.

    Raises:
        DiskFullError: no space, at any point until it is closed.
        OutputError: any other reason why it cannot be written.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        with self._write_errors():
            self._zip = zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True)

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        with self._write_errors():
            self._zip.close()

    @contextlib.contextmanager
    def _write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise write_error(self._path, error) from error

    def write(self, step: int, kind: str, per_replica: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Writes arrays of all replicas; a replica that holds replica 0's bits is left out.

        Of "examples" none is left out: they tell how many replicas there are.
        """
        for replica_id, arrays in enumerate(per_replica):
            for tensor, array in arrays.items():
                array = np.asarray(array, order="C")
                first = per_replica[0].get(tensor)
                if replica_id == 0 or kind == "examples" or not _same_bits(array, first):
                    self._write_array(f"{step}/{kind}/{replica_id}/{tensor}", array)

    def _write_array(self, name: str, array: np.ndarray) -> None:
        with self._write_errors(), self._zip.open(f"{name}.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array(member, array, allow_pickle=False)


class Trace:
    """Reads a trace, one array at a time.

    Attributes:
        num_steps: the last step that it holds.
        num_shards: how many shards sent gradients.
        num_copies: of the weights.
    """

    def __init__(self, path: pathlib.Path):
        self._file = np.load(path, allow_pickle=False)
        self._index: dict[tuple[int, str], dict[str, set[int]]] = {}
        for name in self._file.files:
            step, kind, replica_id, tensor = name.split("/", 3)
            tensors = self._index.setdefault((int(step), kind), {})
            tensors.setdefault(tensor, set()).add(int(replica_id))
        self.num_steps = max(step for step, _ in self._index)
        self.num_shards = self.num_copies = len(self._index[1, "examples"]["examples"])

    def __enter__(self) -> "Trace":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def tensors(self, step: int, kind: str) -> list[str]:
        """Returns the names of the tensors of a kind, in the order of the model."""
        if kind == "updates":
            return self.tensors(step, "weights") if step > 0 else []
        return list(self._index.get((step, kind), {}))

    def replicas(self, step: int, kind: str, tensor: str) -> list[int]:
        """Returns the replicas that hold other bits than replica 0, and replica 0."""
        if kind == "updates":
            before = self.replicas(step - 1, "weights", tensor)
            return sorted({*before, *self.replicas(step, "weights", tensor)})
        return sorted(self._index[step, kind][tensor])

    def read(self, step: int, kind: str, replica_id: int, tensor: str) -> np.ndarray:
        """Reads one array: that of replica 0 where the replica holds the same bits.

        Raises:
            KeyError: there is no such array.
        """
        if kind == "updates":
            after, before = (self.read(s, "weights", replica_id, tensor) for s in (step, step - 1))
            return after.astype(np.float64) - before
        stored = self._index[step, kind][tensor]
        return self._file[f"{step}/{kind}/{replica_id if replica_id in stored else 0}/{tensor}"]


def merge_traces(paths: Sequence[pathlib.Path], path: pathlib.Path) -> None:
    """Writes the trace of all replicas from those that each worker has written of its own.

    Args:
        paths: worker 0's first.
        path: where it goes.

    Raises:
        DiskFullError, OutputError: it cannot be written.
    """
    with contextlib.ExitStack() as stack:
        traces = [stack.enter_context(Trace(part)) for part in paths]
        merged = stack.enter_context(TraceWriter(path))
        for step in range(traces[0].num_steps + 1):
            for kind in _STORED:
                # Averaged statistics are the same for all: each worker holds them once.
                copies = [(t, r) for t in traces for r in range(t.num_shards)]
                copies = copies[:1] if kind == "statistics" else copies
                per_replica = [
                    {tensor: t.read(step, kind, r, tensor) for tensor in t.tensors(step, kind)}
                    for t, r in copies
                ]
                merged.write(step, kind, per_replica)


def hash_examples(images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns 64 bits for each example, int64 `(n,)`: the same for the same image and label."""
    digests = [
        hashlib.blake2b(image.tobytes() + bytes([label]), digest_size=8).digest()
        for image, label in zip(images, labels, strict=True)
    ]
    return np.frombuffer(b"".join(digests), np.int64)


def _same_bits(a: np.ndarray, b: np.ndarray | None) -> bool:
    return b is not None and a.dtype == b.dtype and a.tobytes() == b.tobytes()
