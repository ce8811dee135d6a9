"""Feeds damaged and crafted input to the readers of the program, at random.

Each target must accept its input as it is, or refuse it with one of the program's errors, in a
printable line. Everything else is a finding: another exception, more than some seconds, a changed
file elsewhere, a started process or a pickle.
"""

import collections
import contextlib
import copy
import gzip
import hashlib
import io
import itertools
import json
import math
import os
import pathlib
import random
import re
import signal
import sys
import tempfile
import tracemalloc
import unittest.mock
import zipfile

import numpy as np

from app.data import fashion_mnist
from app.errors import CheckpointError, ConfigError, DataError, OutputError
from app.options import parse_command_line
from app.options.table import COMMANDS, TABLE
from app.records import checkpoint as checkpoints
from lockstep.data.file import TraceError, load
from lockstep.numeric.arrays import Rows
from tests.conftest import idx_files
from tests.verifier.trace_samples import about, arrays

from . import CampaignError

LIMIT_SEC, LIMIT_BYTES = 10, 32 << 20
_CLEAR = re.compile(r"--\w|'.*'|^(directories|experiment|report) ")
_WRITES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.truncate")
_NEVER = ("os.system", "os.posix_spawn", "subprocess.Popen", "pickle.find_class", "socket.connect")
_guarded: pathlib.Path | None = None


def _audit(event: str, arguments: tuple) -> None:
    """Receives Python's audit events; within a target, raises an error for forbidden ones."""
    if _guarded is None:
        return
    assert event not in _NEVER, f"{event} {arguments!r:.200}"
    writes = event in _WRITES or (event == "open" and (arguments[2] or 0) & os.O_ACCMODE)
    if writes and isinstance(arguments[0], str | bytes | os.PathLike):
        path = pathlib.Path(os.fsdecode(arguments[0])).resolve()
        assert path.is_relative_to(_guarded) or str(path) == os.devnull, f"{event} of {path}"


sys.addaudithook(_audit)


def _hang(*_):
    raise AssertionError(f"took more than {LIMIT_SEC} s")


def _outcome(folder, read, *expected) -> str:
    """Reads an input, and checks that it is accepted, or refused with a clear line."""
    global _guarded
    signal.signal(signal.SIGALRM, _hang)
    signal.alarm(LIMIT_SEC)
    _guarded = folder.resolve()
    try:
        read()
        return "accepted"
    except expected as error:
        text = str(error)
        assert len(text) < 2000, f"a line of {len(text)} characters"
        # It names the flag or repeats the wrong word, or says what to do.
        is_clear = _CLEAR.search(text) if isinstance(error, ConfigError) else "; " in text
        assert is_clear, f"unclear: {text}"
        return "refused"
    finally:
        _guarded = None
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


FILES = idx_files(3, 3)


def fuzz_idx(folder, choose):
    """Files of the dataset, damaged before or after compression, or not compressed."""
    is_packed, chosen = choose.random() < 0.5, choose.choice(list(FILES))
    for name, content in FILES.items():
        if name == chosen:
            content = damaged(content, choose)
        if is_packed:
            content = gzip.compress(content, mtime=0)
        if name == chosen:
            content = damaged(content, choose)
        (folder / f"{name}{'.gz' if is_packed else ''}").write_bytes(content)

    def read():
        right = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}
        with unittest.mock.patch.dict(fashion_mnist.SHA256, right):
            dataset = fashion_mnist.load_fashion_mnist(str(folder))
        assert dataset.train_images.shape == (3, 28, 28, 1)

    return read


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


NAMES = sorted({row.name for row in TABLE})
WORDS = [
    *("lenet", "resnet18", "manual,mirrored", "1,2", "", "true", "nan", "1e400", "../x", "-1", "7"),
    *("0.5", "drop_gradient:replica=9", "synthetic", "best", "gpu", "\0", "é"),
]
OTHERS = ["--", "-", "---", "--flagfile=/none", "--undefok=x", "-h", "--batch_size=7", *WORDS]


def fuzz_flags(folder, choose):
    """Random command lines."""
    words = [choose.choice([*COMMANDS, "nonsense", ""])]
    for _ in range(choose.randrange(6)):
        name, value = choose.choice(NAMES), choose.choice(WORDS)
        forms = f"--{name}={value}", f"--{name}", f"--no{name}", choose.choice(OTHERS)
        words.append(choose.choice(forms))

    def read():
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                parse_command_line(["main.py", *filter(None, words[:1]), *words[1:]])
            except SystemExit as end:
                assert end.code == 0 and "usage: " in output.getvalue()

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
    "idx": (fuzz_idx, DataError),
    "checkpoint": (fuzz_checkpoint, CheckpointError, OutputError),
    "flags": (fuzz_flags, ConfigError),
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
                outcomes[_outcome(folder, read, *errors)] += 1
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
