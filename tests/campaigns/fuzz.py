"""Feeds damaged and crafted files to the readers of the program, at random.

Each target must accept its input as it is, or refuse it with one of the program's errors, in a
line. Everything else is a finding: another exception, or more than some seconds.
"""

import collections
import copy
import hashlib
import io
import itertools
import json
import math
import pathlib
import random
import signal
import tempfile
import tracemalloc
import zipfile

import numpy as np

from app.errors import CheckpointError, OutputError
from app.records import checkpoint as checkpoints
from lockstep.data.file import TraceError, load
from lockstep.numeric.arrays import Rows
from tests.verifier.trace_samples import about, arrays

from . import CampaignError

LIMIT_SEC, LIMIT_BYTES = 10, 32 << 20


def _hang(*_):
    raise AssertionError(f"took more than {LIMIT_SEC} s")


def _outcome(read, *expected) -> str:
    """Reads an input, and checks that it is accepted, or refused with a clear line."""
    signal.signal(signal.SIGALRM, _hang)
    signal.alarm(LIMIT_SEC)
    try:
        read()
        return "accepted"
    except expected as error:
        text = str(error)
        assert len(text) < 2000, f"a line of {len(text)} characters"
        assert "; " in text, f"it does not say what to do: {text}"
        return "refused"
    finally:
        signal.alarm(0)


BYTES = [b"", b"\0" * 8, b"\xff" * 4, b"PK\x03\x04", b"\x1f\x8b\x08", b"<html>", b"\x80\x04"]
VALUES = [
    *(None, True, 0, -1, 7, 2**63, -(2**70), 0.5, 1e308, math.nan, math.inf, [], {}, [[0]]),
    *("", "x", "\0", "é", "\ud800", "../x", "/etc/passwd", "statistics/0/0", "F32", "O", "step"),
    *([1, "a"], {"a": None}, {"step": {"0": -1}}),
]


def damaged(content, choose) -> bytes:
    """Returns bytes with up to two changes, more often near the start."""
    for _ in range(choose.choice((0, 0, 1, 2))):
        at = int(choose.random() ** 3 * len(content))
        data = choose.choice(BYTES) or choose.randbytes(choose.randrange(12))
        content = choose.choice([
            content[:at] + data + content[at + len(data) :], content[:at] + data + content[at:],
            content[:at] + content[at + len(data) :], content[:at],
        ])  # fmt: skip
    return content


def damaged_json(value, choose) -> bytes:
    """Returns JSON with up to two nodes replaced or removed, and then perhaps bytes changed."""
    holder = [copy.deepcopy(value)]
    for _ in range(choose.randrange(3)):
        parent, key = choose.choice(list(_nodes_in(holder)))
        parent[key] = copy.deepcopy(choose.choice(VALUES))
        if choose.random() < 0.3 and parent is not holder:
            del parent[key]
    text = json.dumps(holder[0], separators=(",", ":")).encode()
    return damaged(text, choose) if choose.random() < 0.5 else text


def _nodes_in(parent):
    """Yields each place in a structure of JSON: a list or dictionary, and an index or key."""
    for key in list(parent if isinstance(parent, dict) else range(len(parent))):
        yield parent, key
        if isinstance(parent[key], dict | list):
            yield from _nodes_in(parent[key])


def fuzz_checkpoint(folder, choose):
    """Checkpoints that are damaged, or crafted with a valid hash."""
    from tests.training.test_checkpoint import make

    saved = make(17)
    path = checkpoints.save_checkpoint(folder, saved)
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header, state = json.loads(content[8:end]), damaged(content[end:], choose)
    texts = header["__metadata__"]
    about = damaged_json(json.loads(texts["checkpoint"]), choose)
    texts |= {"checkpoint": about.decode("utf-8", "replace"), "sha256": "0" * 64}
    text = json.dumps(header, separators=(",", ":")).encode()
    if choose.random() < 0.5:
        text = damaged_json(header, choose)
    content = len(text).to_bytes(8, "little") + text + state
    if choose.random() < 0.5:
        sha256 = hashlib.sha256(content).hexdigest()
        content = content.replace(b"0" * 64, sha256.encode(), 1)
    path.write_bytes(content)

    def read():
        loaded = checkpoints.find_newest_checkpoint(folder)
        assert sum(a.nbytes for a in loaded.state.values()) < len(content)

    return read


TRACE = about(num_replicas=2, steps=[3], settings=about()["settings"][:1], micro_batches=[1])
KINDS = ("data", "random", "loss", "raw", "sums", "clipped", "before", "after")
HEADER = np.lib.format.header_data_from_array_1_0(np.zeros(1))
SHAPES = (99999999999,), (False,), (0, 2**62), (1,) * 33, (-1, 0), (2**20, 2**20, 2**20)
MESHES = {"dp": 2}, {"dp": 2, "tp": 1}, {"dp": 2, "tp": 4096}, {f"a{i}": 1 for i in range(70)}


def fuzz_trace(folder, choose):
    """Recordings of scripts: damaged, truncated, packed, or with members missing or huge."""
    mesh = {"mesh": choose.choice(MESHES), "data_axes": ["dp"], "ranks": [0, 1]}
    description = TRACE | mesh if choose.random() < 0.3 else TRACE
    text = damaged_json(description, choose).decode("utf-8", "replace").rstrip("\0")
    members = arrays(1) | {"about": np.array(text)}
    missing = choose.sample(sorted(members), choose.randrange(3))
    huge, content = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(huge, HEADER | {"shape": choose.choice(SHAPES)})
    save = np.savez_compressed if choose.random() < 0.1 else np.savez
    save(content, **{name: each for name, each in members.items() if name not in missing})
    with zipfile.ZipFile(content, "a") as archive:
        for name in missing if choose.random() < 0.5 else ():
            archive.writestr(f"{name}.npy", huge.getvalue())
    # More often near the end: there is the directory of the archive.
    (folder / "two.npz").write_bytes(damaged(content.getvalue()[::-1], choose)[::-1])

    def read():
        tracemalloc.start()
        try:
            trace = load(folder / "two.npz")
            for position, kind in itertools.product(range(len(trace.steps)), KINDS):
                for item in trace.items(kind):
                    for array in trace.arrays(position, kind, item) or []:
                        dense = array.dense() if isinstance(array, Rows) else array
                        assert dense is None or dense.nbytes < LIMIT_BYTES
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < LIMIT_BYTES

    return read


TARGETS = {  # Target → function, and its errors.
    "checkpoint": (fuzz_checkpoint, CheckpointError, OutputError),
    "trace": (fuzz_trace, TraceError),
}


def fuzz(target, *, examples, seed) -> collections.Counter:
    """Runs a target on some examples; returns how many were accepted and refused."""
    outcomes = collections.Counter()
    function, *errors = TARGETS[target]
    for number in range(examples):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            read = function(folder, random.Random(f"{seed} {number}"))
            try:
                outcomes[_outcome(read, *errors)] += 1
            except Exception as error:
                raise CampaignError(f"{target}, seed {seed}, example {number}") from error
    return outcomes


def run(folder, options, counts):
    """Fuzzes each target with 500 inputs a cycle; yields what was done."""
    for cycle in range(options.cycles):
        for target in [name for name in TARGETS if options.wants(name)]:
            outcomes = fuzz(target, examples=500, seed=options.seed + cycle)
            counts["inputs"] += outcomes.total()
            counts["refused inputs"] += outcomes["refused"]
            yield f"{target}: {dict(outcomes)}"
