"""Gathers the recordings of a step from all workers."""

import hashlib
import io
from typing import Any

import numpy as np

from app.verification.memory_trace import MemoryTrace, PerItemArrays
from app.verification.split import KINDS_OF_A_SHARD, Split
from app.verification.trace import PARTS
from strategies.workers import Workers

_COMMON = "weights", "slots", "sums"


def gather_trace(trace: MemoryTrace, split: Split, workers: Workers) -> MemoryTrace:
    """Returns the trace of all replicas; every worker calls it with its own trace.

    Values shared by all copies of the weights are sent only if they differ from the chief's.

    Args:
        trace: trace of this worker.
        split: split of the training.
        workers: the workers of the training.
    """
    if workers.count == 1:
        return trace
    step, own = trace.first_step, _flat(trace)
    digests = {key: hashlib.sha256(a.tobytes()).digest() for key, a in own.items() if _common(key)}
    chief = workers.broadcast(b"".join(digests.values()))
    expected = {key: chief[i * 32 : (i + 1) * 32] for i, key in enumerate(digests)}
    sent: dict[str, Any] = {
        "/".join(map(str, key)): array
        for key, array in own.items()
        if workers.is_chief or not _common(key) or digests[key] != expected[key]
    }
    buffer = io.BytesIO()
    np.savez(buffer, **sent)
    per_worker = [
        dict(np.load(io.BytesIO(message))) for message in workers.gather(buffer.getvalue())
    ]
    merged = MemoryTrace(step, split)
    for at, kind, per_item in trace.kinds():
        if kind == PARTS:
            continue
        num_items = len(per_item) * (1 if kind == "statistics" else workers.count)
        merged.write(at, kind, _merge(per_worker, at, kind, per_item, num_items))
    return merged


def _merge(
    per_worker: list[dict[str, np.ndarray]],
    step: int,
    kind: str,
    like: PerItemArrays,
    num_items: int,
) -> PerItemArrays:
    """Returns the arrays of all items of a kind; arrays omitted by a worker are the chief's."""
    merged = []
    for item_id in range(num_items):
        worker, local = divmod(item_id, len(like))
        names = {tensor: f"{step}/{kind}/{local}/{tensor}" for tensor in like[local]}
        sources = {t: worker if names[t] in per_worker[worker] else 0 for t in names}
        merged.append({t: per_worker[sources[t]][name] for t, name in names.items()})
    return merged


def _flat(trace: MemoryTrace) -> dict[tuple[int, str, int, str], np.ndarray]:
    return {
        (step, kind, item_id, tensor): array
        for step, kind, per_item in trace.kinds()
        if kind != PARTS
        for item_id, arrays in enumerate(per_item)
        for tensor, array in arrays.items()
    }


def _common(key: tuple[int, str, int, str]) -> bool:
    return key[1] in _COMMON and key[1] not in KINDS_OF_A_SHARD
