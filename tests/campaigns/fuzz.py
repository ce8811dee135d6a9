"""Feeds damaged and crafted input to the readers of the program, with Hypothesis.

Each target must accept its input as it is, or refuse it with one of the program's errors, in a
printable line. Everything else is a finding: another exception, more than some seconds, a changed
file elsewhere, a started process or a pickle.
"""

import collections
import contextlib
import gzip
import hashlib
import io
import itertools
import json
import os
import pathlib
import re
import signal
import sys
import tempfile
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator

import hypothesis
import numpy as np
from hypothesis import strategies as st

from app.data.fashion_mnist import load_fashion_mnist
from app.devices.cluster import find_cluster
from app.options.table import COMMANDS, TABLE
from app.records import checkpoint as checkpoints
from app.runtime.errors import CheckpointError, ConfigError, DataError, OutputError
from lockstep.data.file import TraceError, load
from lockstep.numeric.arrays import Rows
from strategies.step_totals import StepTotals
from tests.conftest import idx_files
from tests.in_process import parse_here
from tests.verifier.trace_samples import about, arrays

from . import Options

LIMIT_SEC, LIMIT_BYTES = 10, 32 << 20
_CLEAR = re.compile(r"--\w|'.*'|^(directories|experiment|report) |TF_CONFIG")
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


def _hang(*_: object) -> None:
    raise AssertionError(f"took more than {LIMIT_SEC} s")


def _outcome(folder: pathlib.Path, read: Callable[[], None], *expected: type[Exception]) -> str:
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


_CRAFTED = [b"\0" * 8, b"\xff" * 4, b"PK\x03\x04", b"\x1f\x8b\x08", b"<html>", b"\x80\x04"]
_PLACE = st.floats(0, 1, exclude_max=True)
_KIND = st.sampled_from(["overwrite", "insert", "delete", "cut"])
_EDIT = st.tuples(_KIND, _PLACE, st.one_of(st.binary(max_size=12), st.sampled_from(_CRAFTED)))
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
    | st.sampled_from(["../x", "/etc/passwd", "statistics/0/0", "F32", "O", "step", "\0"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)  # fmt: skip
_NODES = st.lists(st.tuples(_PLACE, _JSON, st.booleans()), max_size=3)
_EDITS = st.lists(_EDIT, max_size=2)


def _edited(content: bytes, edits) -> bytes:
    """Returns `content` with some bytes changed, more often in the header."""
    if isinstance(edits, bytes):
        return edits
    for kind, place, data in edits:
        at = int(place**3 * len(content))
        rest = at + (len(data) if kind in ("overwrite", "delete") else 0)
        end = b"" if kind == "cut" else content[rest:]
        content = content[:at] + (b"" if kind in ("delete", "cut") else data) + end
    return content


def _edited_json(value, nodes, edits) -> bytes:
    """Returns JSON with some nodes replaced or removed, and then some bytes changed."""
    holder = [json.loads(json.dumps(value))]
    for place, new, remove in nodes:
        places = list(_nodes_in(holder))
        parent, key = places[int(place * len(places))]
        parent[key] = new
        if remove and parent is not holder:
            del parent[key]
    return _edited(json.dumps(holder[0]).encode("utf-8", "surrogatepass"), edits)


def _nodes_in(parent) -> Iterator[tuple]:
    """Yields each place in a structure of JSON: a list or dictionary, and an index or key."""
    for key in list(parent if isinstance(parent, dict) else range(len(parent))):
        yield parent, key
        if isinstance(parent[key], dict | list):
            yield from _nodes_in(parent[key])


# Each target writes its input to a folder, and returns what reads it.

_FILES = idx_files(3, 3)
_FILE_EDITS = st.dictionaries(
    st.sampled_from(list(_FILES)),
    st.one_of(st.lists(_EDIT, min_size=1, max_size=4), st.binary(max_size=900)),
    min_size=1,
)


def fuzz_idx(folder: pathlib.Path, inner, outer, is_packed) -> Callable[[], None]:
    """Files of the dataset, damaged before or after compression, or not compressed."""
    for number, (name, content) in enumerate(_FILES.items()):
        damaged = _edited(content, inner.get(name, [])) if number % 2 or not is_packed else content
        if is_packed:
            damaged = _edited(gzip.compress(damaged, mtime=0), outer.get(name, []))
        (folder / f"{name}{'.gz' * is_packed}").write_bytes(damaged)

    def read() -> None:
        dataset = load_fashion_mnist(str(folder), allow_unverified=True, environ={})
        images, labels = dataset.train_images, dataset.train_labels
        assert dataset.name == "unverified" and images.shape == (len(labels), 28, 28, 1)
        assert 0 <= labels.max() <= 9

    return read


def fuzz_checkpoint(
    folder: pathlib.Path, nodes, header_edits, state_edits, is_forged
) -> Callable[[], None]:
    """Checkpoints that are damaged, or crafted with a valid hash."""
    from tests.training.test_checkpoint import RUN_METADATA, STATE

    progress = checkpoints.Progress(17, epoch_step=7, totals=StepTotals(1.5, 3, 350))
    own = [[np.float32([1, 2])], [np.float32([3, 4])]]
    saved = checkpoints.Checkpoint(RUN_METADATA, progress, STATE, own)
    path = checkpoints.save_checkpoint(folder, saved)
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header, state = json.loads(content[8:end]), _edited(content[end:], state_edits)
    texts = header["__metadata__"]
    about = _edited_json(json.loads(texts["checkpoint"]), nodes, [])
    texts |= {"checkpoint": about.decode("utf-8", "replace"), "sha256": "0" * 64}
    text = _edited(json.dumps(header, separators=(",", ":")).encode(), header_edits)
    content = len(text).to_bytes(8, "little") + text + state
    if is_forged and b"0" * 64 in content:
        sha256 = hashlib.sha256(content).hexdigest()
        content = content.replace(b"0" * 64, sha256.encode(), 1)
    path.write_bytes(content)

    def read() -> None:
        loaded = checkpoints.find_newest_checkpoint(folder)
        assert sum(a.nbytes for a in loaded.state.values()) < len(content)

    return read


_NAMES = st.sampled_from(sorted({row.name for row in TABLE}))
_VALUE = st.one_of(
    st.text(max_size=6), st.integers(-3, 70).map(str), st.floats().map(str),
    st.sampled_from(["lenet", "resnet18", "manual,mirrored", "1,2", "", "true", "nan", "1e400",
                     "drop_gradient:replica=9", "../x", "synthetic", "best", "gpu", "\0", "é"]),
)  # fmt: skip
_WORD = st.one_of(
    st.tuples(_NAMES, _VALUE).map(lambda pair: f"--{pair[0]}={pair[1]}"),
    _NAMES.map("--{}".format), _NAMES.map("--no{}".format), st.text(max_size=8),
    st.sampled_from(["--", "-", "---", "--flagfile=/none", "--undefok=x", "-h", "--batch_size=7"]),
)  # fmt: skip


def fuzz_flags(folder: pathlib.Path, command, words) -> Callable[[], None]:
    """Random command lines."""

    def read() -> None:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                parse_here(*filter(None, [command]), *words)
            except SystemExit as end:
                assert end.code == 0 and "usage: " in output.getvalue()

    return read


_CLUSTER = {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}


def fuzz_tf_config(folder: pathlib.Path, nodes, edits) -> Callable[[], None]:
    """The variable that defines a cluster."""
    text = _edited_json(_CLUSTER, nodes, edits).decode("utf-8", "replace")

    def read() -> None:
        cluster = find_cluster({"TF_CONFIG": text})
        assert cluster.addresses[cluster.index]

    return read


_TRACE = about(num_replicas=2, steps=[3], settings=about()["settings"][:1], micro_batches=[1])
KINDS = ("data", "random", "loss", "raw", "sums", "clipped", "before", "after")
_HUGE = np.lib.format.header_data_from_array_1_0(np.zeros(1)) | {"shape": (99999999999,)}


def fuzz_trace(
    folder: pathlib.Path, nodes, about_edits, names, is_huge, edits
) -> Callable[[], None]:
    """Recordings of scripts: damaged, truncated, or with members that are missing or huge."""
    text = _edited_json(_TRACE, nodes, about_edits).decode("utf-8", "replace").rstrip("\0")
    members = arrays(1) | {"about": np.array(text)}
    huge, content = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(huge, _HUGE)
    np.savez(content, **{name: each for name, each in members.items() if name not in names})
    with zipfile.ZipFile(content, "a") as archive:
        for name in names if is_huge else ():
            archive.writestr(f"{name}.npy", huge.getvalue())
    # Edits count from the end: there is the directory of the archive.
    (folder / "two.npz").write_bytes(_edited(content.getvalue()[::-1], edits)[::-1])

    def read() -> None:
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


_SOME_EDITS, _SOME_NODES = st.one_of(st.just([]), _EDITS), st.one_of(st.just([]), _NODES)
# Target → function, its errors, and strategies of its arguments.
TARGETS = {
    "idx": (fuzz_idx, (DataError,), {"inner": _FILE_EDITS, "outer": _FILE_EDITS,
                                     "is_packed": st.booleans()}),
    "checkpoint": (fuzz_checkpoint, (CheckpointError, OutputError), {
        "nodes": _NODES, "header_edits": _EDITS, "state_edits": _EDITS,
        "is_forged": st.booleans()}),
    "flags": (fuzz_flags, (ConfigError,), {
        "command": st.sampled_from([*COMMANDS, "nonsense", ""]),
        "words": st.lists(_WORD, max_size=5)}),
    "TF_CONFIG": (fuzz_tf_config, (ConfigError,), {"nodes": _NODES, "edits": _SOME_EDITS}),
    "trace": (fuzz_trace, (TraceError,), {
        "nodes": _SOME_NODES, "about_edits": _SOME_EDITS, "edits": _SOME_EDITS,
        "names": st.sets(st.sampled_from([*arrays(1), "about"]), max_size=2),
        "is_huge": st.booleans()}),
}  # fmt: skip


def fuzz(target: str, *, max_examples: int, seed: int) -> collections.Counter:
    """Runs a target on some examples; returns how many were accepted and refused.

    Raises:
        The smallest input that fails, as reported by Hypothesis.
    """
    outcomes: collections.Counter = collections.Counter()
    function, errors, arguments = TARGETS[target]

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=max_examples, deadline=None, database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(st.fixed_dictionaries(arguments))
    def test(inputs):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            read = function(folder, **inputs)
            outcomes[_outcome(folder, read, *errors)] += 1

    test()
    return outcomes


def run(folder: pathlib.Path, options: Options, counts: collections.Counter) -> Iterator[str]:
    """Fuzzes each target with 500 inputs a cycle; yields what was done."""
    for cycle in range(options.cycles):
        for target in [name for name in TARGETS if options.wants(name)]:
            outcomes = fuzz(target, max_examples=500, seed=options.seed + cycle)
            counts["inputs"] += outcomes.total()
            counts["refused inputs"] += outcomes["refused"]
            yield f"{target}: {dict(outcomes)}"
