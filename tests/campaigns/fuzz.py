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
import unittest.mock
import zipfile
from collections.abc import Iterator, Sequence

import hypothesis
import numpy as np
from hypothesis import strategies as st

from app.data.data_sources import SHA256
from app.data.fashion_mnist import idx_bytes, load_fashion_mnist
from app.devices.cluster import find_cluster
from app.options import Config
from app.options.table import COMMANDS, TABLE
from app.records import checkpoint as checkpoints
from app.records.checkpoint import Checkpoint, find_newest_checkpoint
from app.records.history import EpochRecord
from app.records.run_metadata import Progress, RunMetadata
from app.runtime.errors import CheckpointError, ConfigError, DataError, LockstepError, OutputError
from in_process import parse_here
from lockstep.trace import Rows
from lockstep.trace_file import TraceError, load
from trace_samples import about, arrays

LIMIT_SEC = 10
_CLEAR = re.compile(r"--\w|'.*'|^(directories|experiment|report) |TF_CONFIG")
_outcomes: collections.Counter = collections.Counter()
_guarded: str | None = None
_WRITES = {
    *("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate"),
    *("os.chmod", "os.chown", "shutil.rmtree", "shutil.move", "shutil.copyfile"),
}
_NEVER = {"os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen"} | {
    *("pickle.find_class", "socket.connect"),
}


def _audit(event: str, arguments: tuple) -> None:
    """Receives Python's audit events; within a target, raises an error for forbidden ones."""
    if _guarded is None:
        return
    if event in _NEVER:
        raise AssertionError(f"{event} {arguments!r:.200}")
    if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        writes = (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        paths = [arguments[0]] if writes else []
    else:
        paths = [a for a in arguments[:2] if isinstance(a, str)] if event in _WRITES else []
    for path in paths:
        place = os.path.realpath(os.fsdecode(path))
        if not f"{place}/".startswith(f"{_guarded}/") and place != os.devnull:
            raise AssertionError(f"{event} of {place}")


sys.addaudithook(_audit)


@contextlib.contextmanager
def guarded(folder: pathlib.Path, *expected: type[LockstepError], advice: str = "; "):
    """Checks that only `expected` is raised, nothing hangs, and nothing changes elsewhere."""
    global _guarded

    def hang(*_):
        raise AssertionError(f"took more than {LIMIT_SEC} s")

    signal.signal(signal.SIGALRM, hang)
    signal.alarm(LIMIT_SEC)
    _guarded = os.path.realpath(folder)
    try:
        yield
        _outcomes["accepted"] += 1
    except expected as error:
        assert len(str(error)) < 2000, f"a line of {len(str(error))} characters"
        if isinstance(error, ConfigError):  # It names the flag, or repeats the wrong word.
            assert _CLEAR.search(str(error)), f"unclear: {error}"
        else:
            assert advice in str(error), f"no advice in {error}"
        _outcomes["refused"] += 1
    finally:
        _guarded = None
        signal.alarm(0)


_CRAFTED = [b"\0" * 8, b"\xff" * 4, b"PK\x03\x04", b"\x1f\x8b\x08", b"<html>", b"\x80\x04"]
_PLACE = st.floats(0, 1, exclude_max=True)
_KIND = st.sampled_from(["overwrite", "insert", "delete", "cut"])
_EDIT = st.tuples(_KIND, _PLACE, st.one_of(st.binary(max_size=12), st.sampled_from(_CRAFTED)))


def _edited(content: bytes, edits) -> bytes:
    """Returns `content` with some bytes changed, more often in the header."""
    for kind, place, data in edits:
        at = int(place**3 * len(content))
        rest = at + (len(data) if kind in ("overwrite", "delete") else 0)
        end = b"" if kind == "cut" else content[rest:]
        content = content[:at] + (b"" if kind in ("delete", "cut") else data) + end
    return content


def _images(count: int) -> np.ndarray:
    return (np.arange(count * 784) % 251).astype(np.uint8).reshape(count, 28, 28)


_FILES = {
    name: idx_bytes(_images(3) if "images" in name else np.arange(3, dtype=np.uint8))
    for name in SHA256
}
_FILE_EDITS = st.dictionaries(
    st.sampled_from(list(SHA256)),
    st.one_of(st.lists(_EDIT, min_size=1, max_size=4), st.binary(max_size=900)),
    min_size=1,
)


def _load(contents: dict[str, bytes], suffix: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for file, content in contents.items():
            (folder / f"{file}{suffix}").write_bytes(content)
        with guarded(folder, DataError):
            dataset = load_fashion_mnist(name, allow_unverified=True, environ={})
            assert dataset.name == "unverified"
            images, labels = dataset.train_images, dataset.train_labels
            assert images.shape == (len(labels), 28, 28, 1) and 0 <= labels.max() <= 9


def _apply(content: bytes, edit) -> bytes:
    return edit if isinstance(edit, bytes) else _edited(content, edit)


def fuzz_idx(inner, outer):
    """Files of the dataset, damaged before or after compression, or not compressed."""
    contents = {}
    for number, (name, content) in enumerate(_FILES.items()):
        damaged = _apply(content, inner.get(name, [])) if number % 2 else content
        contents[name] = _apply(gzip.compress(damaged, mtime=0), outer.get(name, []))
    _load(contents, ".gz")
    _load({name: _apply(c, inner.get(name, [])) for name, c in _FILES.items()}, "")


_STATE = {"model/kernel": np.ones((2, 3), np.float32), "optimizer/iteration": np.array(7)}
_RUN_METADATA = RunMetadata(
    json.loads(json.dumps(Config.of().result_fields())),
    *(0.1, 10, "synthetic", "ab", "cd", 2, 2, 2, {"python": "3"}),
)
_RECORD = EpochRecord(1, 10, 1.0, 0.5, 1.0, 0.5, 2.5, 400.0)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
    | st.sampled_from(["../x", "/etc/passwd", "state.safetensors", "F32", "O", "step", "\0"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)  # fmt: skip


def _replaced(value, place: float, new, remove: bool):
    """Returns a JSON value with one node replaced or removed."""
    nodes = []

    def collect(node, parent, key):
        nodes.append((parent, key))
        if isinstance(node, dict | list):
            for name, child in list(node.items() if isinstance(node, dict) else enumerate(node)):
                collect(child, node, name)

    holder = [value]
    collect(value, holder, 0)
    parent, key = nodes[int(place * len(nodes))]
    if remove and parent is not holder:
        del parent[key]
    else:
        parent[key] = new
    return holder[0]


_NODES = st.lists(st.tuples(_PLACE, _JSON, st.booleans()), max_size=3)


def fuzz_checkpoint(nodes, manifest_edits, state_edits, forged):
    """Checkpoints that are damaged, or crafted with valid hashes."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        progress = Progress(
            17,
            epoch_step=7,
            loss_sum=1.5,
            correct=3,
            examples=350,
            epoch_sec=0.5,
            history=[_RECORD],
        )
        own = [[np.float32([1, 2])], [np.float32([3, 4])]]
        checkpoints.save_checkpoint(folder, Checkpoint(_RUN_METADATA, progress, _STATE, own))
        path = folder / "checkpoints" / "step-00000017-epoch-0001"
        state = path / "state.safetensors"
        state.write_bytes(_edited(state.read_bytes(), state_edits))
        manifest = json.loads((path / "MANIFEST.json").read_text())
        for place, new, remove in nodes:
            manifest = _replaced(manifest, place, new, remove)
        if forged and isinstance(manifest, dict):
            with contextlib.suppress(KeyError, TypeError):
                told = manifest["files"]["state.safetensors"]
                told["sha256"] = hashlib.sha256(state.read_bytes()).hexdigest()
                told["size_bytes"] = state.stat().st_size
            manifest.pop("sha256", None)
            manifest["sha256"] = checkpoints._manifest_sha256(manifest)
        content = json.dumps(manifest).encode("utf-8", "surrogatepass")
        (path / "MANIFEST.json").write_bytes(_edited(content, manifest_edits))
        with guarded(folder, CheckpointError, OutputError):
            found = find_newest_checkpoint(folder)
            loaded = found.checkpoint
            size = sum(array.nbytes for array in loaded.state.values())
            assert size < state.stat().st_size


_NAMES = sorted({row.name for row in TABLE})
_VALUE = st.one_of(
    st.text(max_size=6),
    st.integers(-3, 70).map(str),
    st.floats().map(str),
    st.sampled_from(["lenet", "resnet18", "manual,mirrored", "1,2", "", "true", "nan", "1e400",
                     "drop_gradient:replica=9", "../x", "synthetic", "best", "gpu", "\0", "é"]),
)  # fmt: skip
_WORD = st.one_of(
    st.tuples(st.sampled_from(_NAMES), _VALUE).map(lambda pair: f"--{pair[0]}={pair[1]}"),
    st.sampled_from(_NAMES).map("--{}".format),
    st.sampled_from(_NAMES).map("--no{}".format),
    st.text(max_size=8),
    st.sampled_from(["--", "-", "---", "--flagfile=/none", "--undefok=x", "-h", "--batch_size=7"]),
)  # fmt: skip


def fuzz_flags(command, words):
    """Random command lines."""
    output = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        guarded(pathlib.Path(folder), ConfigError),
    ):
        try:
            parse_here(*([command] if command else []), *words)
        except SystemExit as end:
            assert end.code == 0 and "usage: " in output.getvalue()


_CLUSTER = {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}


def fuzz_tf_config(nodes, edits):
    """The variable that defines a cluster."""
    value = json.loads(json.dumps(_CLUSTER))
    for place, new, remove in nodes:
        value = _replaced(value, place, new, remove)
    content = _edited(json.dumps(value).encode("utf-8", "surrogatepass"), edits)
    with tempfile.TemporaryDirectory() as name, guarded(pathlib.Path(name), ConfigError):
        cluster = find_cluster({"TF_CONFIG": content.decode("utf-8", "replace")})
        assert cluster.addresses[cluster.index]


_TRACE = about(num_replicas=2, steps=[3], settings=about()["settings"][:1], micro_batches=[1])
KINDS = ("data", "random", "loss", "raw", "sums", "clipped", "before", "after")
_HUGE = np.lib.format.header_data_from_array_1_0(np.zeros(1)) | {"shape": (99999999999,)}


def fuzz_trace(nodes, about_edits, names, is_huge, edits):
    """Recordings of scripts: damaged, truncated, or with members that are missing or huge."""
    value, members, huge = json.loads(json.dumps(_TRACE)), arrays(1), io.BytesIO()
    for place, new, remove in nodes:
        value = _replaced(value, place, new, remove)
    text = _edited(json.dumps(value).encode("utf-8", "surrogatepass"), about_edits)
    members["about"] = np.array(text.decode("utf-8", "replace").rstrip("\0"))
    members = {name: array for name, array in members.items() if name not in names}
    np.lib.format.write_array_header_1_0(huge, _HUGE)
    content = io.BytesIO()
    np.savez(content, **members)
    with zipfile.ZipFile(content, "a") as archive:
        for name in names if is_huge else ():
            archive.writestr(f"{name}.npy", huge.getvalue())
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "two.npz"
        # Edits count from the end: there is the directory of the archive.
        path.write_bytes(_edited(content.getvalue()[::-1], edits)[::-1])
        tracemalloc.start()
        try:
            with guarded(path.parent, TraceError):
                _read_all(path)
            assert tracemalloc.get_traced_memory()[1] < 32 << 20
        finally:
            tracemalloc.stop()


def _read_all(path: pathlib.Path) -> None:
    trace = load(path)
    for position, kind in itertools.product(range(len(trace.steps)), KINDS):
        for item in trace.items(kind):
            for array in trace.arrays(position, kind, item) or []:
                dense = array.dense() if isinstance(array, Rows) else array
                assert dense is None or dense.nbytes < 32 << 20


_EDITS = st.lists(_EDIT, max_size=2)
_SOME_EDITS, _SOME_NODES = st.one_of(st.just([]), _EDITS), st.one_of(st.just([]), _NODES)
# Target → function and strategies of its arguments.
TARGETS = {
    "idx": (fuzz_idx, {"inner": _FILE_EDITS, "outer": _FILE_EDITS}),
    "checkpoint": (fuzz_checkpoint, {"nodes": _NODES, "manifest_edits": _EDITS,
                                     "state_edits": _EDITS, "forged": st.booleans()}),
    "flags": (fuzz_flags, {"command": st.sampled_from([*COMMANDS, "nonsense", ""]),
                           "words": st.lists(_WORD, max_size=5)}),
    "TF_CONFIG": (fuzz_tf_config, {"nodes": _NODES, "edits": _SOME_EDITS}),
    "trace": (fuzz_trace, {"nodes": _SOME_NODES, "about_edits": _SOME_EDITS, "edits": _SOME_EDITS,
                           "names": st.sets(st.sampled_from([*arrays(1), "about"]), max_size=2),
                           "is_huge": st.booleans()}),
}  # fmt: skip


def fuzz(target: str, *, max_examples: int, seed: int) -> collections.Counter:
    """Runs a target on some examples; returns how many were accepted and refused.

    Raises:
        The smallest input that fails, as reported by Hypothesis.
    """
    _outcomes.clear()
    function, arguments = TARGETS[target]

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.fixed_dictionaries(arguments))
    def test(inputs):
        function(**inputs)

    with unittest.mock.patch.dict(os.environ):
        test()
    return collections.Counter(_outcomes)


def run(
    folder: pathlib.Path, cycles: int, seed: int, only: Sequence[str], counts: collections.Counter
) -> Iterator[str]:
    """Fuzzes each target with 500 inputs a cycle; yields what was done."""
    for cycle in range(cycles):
        for target in [name for name in TARGETS if name in (only or TARGETS)]:
            outcomes = fuzz(target, max_examples=500, seed=seed + cycle)
            counts["inputs"] += outcomes.total()
            counts["refused inputs"] += outcomes["refused"]
            yield f"{target}: {dict(outcomes)}"
