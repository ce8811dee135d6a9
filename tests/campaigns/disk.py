"""Records file operations with `strace`, and lists what may be on disk after a power cut.

A file system keeps what was synced. Of everything else it may keep any part: the data of a file not
at all, in part, or as zeros or other bytes of the right length; creations, renames and removals of
a directory none, all, or some of them, also in another order.

Reference: CrashMonkey (OSDI 2018), ALICE (OSDI 2014).
"""

import collections
import dataclasses
import hashlib
import itertools
import os
import pathlib
import random
import re
from collections.abc import Callable, Iterator, Sequence

_CALLS = (
    *("open", "openat", "creat", "lseek", "write", "writev", "pwrite64", "pwritev"),
    *("truncate", "ftruncate", "fallocate", "fsync", "fdatasync", "mkdir", "mkdirat", "rename"),
    *("renameat", "renameat2", "unlink", "unlinkat", "rmdir", "link", "linkat", "symlink"),
    *("symlinkat", "copy_file_range", "sendfile", "mmap", "clone", "clone3", "fork", "vfork"),
)
_HEX = r"(?:\\x[0-9a-f]{2})*"
_LINE = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+)(?:<.*>)?$")
_UNFINISHED = " <unfinished ...>"
_RESUMED = re.compile(r"(\d+) +<\.\.\. (\w+) resumed>(.*)$")
_WORD = re.compile(rf'<({_HEX})>(?:\(deleted\))?|"({_HEX})"')
_MOST_CHANGES_IN_ALL_SUBSETS = 5
_PAGE_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Operation:
    """A change of a file or a directory below the recorded directory, or a sync.

    Attributes:
        kind: "create", "truncate", "write", "sync", "mkdir", "rename" or "remove".
        path: the path below the recorded directory.
        target: the new path of a rename.
        data: the written bytes.
        number: the offset of a write, -1 for the end of the file; the size of a truncated file.
    """

    kind: str
    path: str
    target: str = ""
    data: bytes = b""
    number: int = 0


def strace_command(command: Sequence[str], output: pathlib.Path, kill_at_sync: int) -> list[str]:
    """Returns the command that records `command` in `output`; see `parse_operations`.

    Args:
        command: the command.
        output: path of the recording.
        kill_at_sync: kill the command at this call of `fsync`; 0 for never.
    """
    options = ["-f", "-y", "-xx", "-s", str(1 << 28), "-o", str(output)]
    options += ["-e", f"trace={','.join(_CALLS)}", "-e", "signal=none"]
    # The filter is faster, but prevents the injection.
    inject = ["-e", f"inject=fsync:signal=SIGKILL:when={kill_at_sync}"]
    return ["strace", *options, *(inject if kill_at_sync else ["--seccomp-bpf"]), *command]


def parse_operations(recording: pathlib.Path, root: pathlib.Path) -> list[Operation]:
    """Returns the operations below `root`, in their order.

    Raises:
        ValueError: a call that this module does not replay.
    """
    calls = [call for call in _finished_calls(recording) if int(call[3]) >= 0]
    process_of = {  # Of a thread.
        result: thread
        for thread, call, text, result in calls
        if call.startswith("clone") and "CLONE_THREAD" in text
    }
    operations: list[Operation] = []
    # Process → descriptor → offset; -1 for the end.
    positions: dict[str, dict[int, int]] = collections.defaultdict(dict)
    for process, call, text, result in calls:
        while process in process_of:
            process = process_of[process]
        operations += _parse_call(call, text, int(result), root, positions[process])
    return operations


def _finished_calls(recording: pathlib.Path) -> Iterator[tuple[str, str, str, str]]:
    """Yields thread, name, arguments and result of each call, in the order of their ends."""
    begun: dict[str, str] = {}
    with open(recording, encoding="ascii") as lines:
        for line in map(str.rstrip, lines):
            if line.endswith(_UNFINISHED):
                begun[line.split()[0]] = line.removesuffix(_UNFINISHED)
                continue
            if resumed := _RESUMED.match(line):
                line = begun.pop(resumed[1]) + resumed[3]
            if match := _LINE.match(line):
                yield match[1], match[2], match[3], match[4]


def _parse_call(
    call: str, text: str, result: int, root: pathlib.Path, positions: dict[int, int]
) -> list[Operation]:
    if call in ("clone", "clone3", "fork", "vfork"):
        return []
    words = [
        bytes.fromhex((match[1] or match[2] or "").replace("\\x", ""))
        for match in _WORD.finditer(text)
    ]
    if call in ("open", "openat", "creat"):
        positions[result] = -1 if "O_APPEND" in text else 0
        path = os.path.join(*map(os.fsdecode, words))
        return _parse_open(path, text, root)
    names = [_below(os.fsdecode(word), root) for word in words[:1]]
    if call in ("rename", "renameat", "renameat2", "mkdirat", "unlinkat"):
        paths = list(map(os.fsdecode, words))
        if call != "rename":
            paths = [os.path.join(*paths[i : i + 2]) for i in range(0, len(paths), 2)]
        names = [_below(path, root) for path in paths]
    if not names or names[0] is None:
        return []
    name, descriptor = names[0], text.partition("<")[0]
    match call:
        case "lseek":
            if positions.get(int(descriptor), 0) >= 0:
                positions[int(descriptor)] = result
            return []
        case "write" | "writev":
            offset = positions.get(int(descriptor), 0)
            positions[int(descriptor)] = offset + result if offset >= 0 else -1
            return [Operation("write", name, data=b"".join(words[1:])[:result], number=offset)]
        case "pwrite64":
            offset = int(text.rpartition(",")[2])
            return [Operation("write", name, data=words[1][:result], number=offset)]
        case "ftruncate" | "truncate":
            return [Operation("truncate", name, number=int(text.rpartition(",")[2]))]
        case "fsync" | "fdatasync":
            return [Operation("sync", name)]
        case "mkdir" | "mkdirat":
            return [Operation("mkdir", name)]
        case "rename" | "renameat" | "renameat2":
            if names[1] is None or "RENAME_EXCHANGE" in text:
                raise ValueError(f"{text} of {name} cannot be replayed")
            return [Operation("rename", name, target=names[1])]
        case "unlink" | "unlinkat" | "rmdir":
            return [Operation("remove", name)]
        case "mmap" if "MAP_SHARED" not in text or "PROT_WRITE" not in text:
            return []
    raise ValueError(f"{call} of {name} cannot be replayed")


def _parse_open(path: str, text: str, root: pathlib.Path) -> list[Operation]:
    name = _below(path, root)
    operations = []
    if name is not None and "O_CREAT" in text:
        operations.append(Operation("create", name))
    if name is not None and "O_TRUNC" in text:
        operations.append(Operation("truncate", name))
    return operations


def _below(path: str, root: pathlib.Path) -> str | None:
    """Returns the path relative to `root`; None if it is not below."""
    path = os.path.normpath(os.path.join(root, path))
    if path == str(root):
        return ""
    return path[len(str(root)) + 1 :] if path.startswith(f"{root}/") else None


class _File:
    """A file, with the content that was synced and the current one."""

    def __init__(self) -> None:
        self.synced = self.current = b""
        self._variants: list[bytes] | None = None

    def change(self, content: bytes) -> None:
        self.current, self._variants = content, None

    def sync(self) -> None:
        self.synced, self._variants = self.current, None

    def variants(self) -> list[bytes]:
        """Returns what the file may contain after a power cut; the current content is last."""
        if self._variants is None:
            self._variants = [self.synced]
            if self.synced != self.current:
                self._variants = [*self._damaged(), self.synced, self.current]
        return self._variants

    def _damaged(self) -> list[bytes]:
        old, new = self.synced, self.current
        same = len(old)
        while old[:same] != new[:same]:
            same //= 2
        size, half = len(new) - same, (len(new) - same) // 2
        garbage = random.Random(size).randbytes(size)
        first = min(half, _PAGE_BYTES - same % _PAGE_BYTES)
        return [
            new[:same] + bytes(size),
            new[:same] + garbage,
            new[: same + half],
            new[: same + half] + bytes(size - half),
            new[:same] + bytes(first) + new[same + first :],
        ]


NUM_VARIANTS = 7  # Of one file.


@dataclasses.dataclass(frozen=True)
class _Change:
    """A change of directory entries that is not synced; `number` identifies file or directory."""

    kind: str  # "add", "remove" or "rename".
    parent: int
    name: str
    number: int
    to_parent: int = -1
    to_name: str = ""


_Entries = dict[int, dict[str, int]]
# Path → SHA-256 of the content; None for a directory.
Tree = dict[str, str | None]


class Disk:
    """The files and directories below one directory, and what of them is synced.

    Args:
        contents: gets the content of everything in a tree that is returned, by SHA-256.

    Attributes:
        contents: see above.
    """

    def __init__(self, contents: dict[str, bytes]) -> None:
        self._files: dict[int, _File] = {}
        self._entries: _Entries = {0: {}}
        self._synced: _Entries = {0: {}}
        self._pending: list[_Change] = []
        self._numbers = itertools.count(1)
        self._names: dict[int, tuple[bytes, str]] = {}
        self.contents = contents

    def apply(self, operation: Operation) -> None:
        """Applies an operation."""
        parent, name, number = self._find(operation.path)
        match operation.kind:
            case "create" | "mkdir" if number < 0:
                number = next(self._numbers)
                if operation.kind == "create":
                    self._files[number] = _File()
                else:
                    self._entries[number], self._synced[number] = {}, {}
                self._change(_Change("add", parent, name, number))
            case "create":
                pass
            case "write" | "truncate" if number >= 0:  # Not of a file that was removed.
                self._files[number].change(_changed(self._files[number].current, operation))
            case "sync" if number in self._files:
                self._files[number].sync()
            case "sync" if number >= 0:
                self._sync_directory(number)
            case "remove":
                self._change(_Change("remove", parent, name, number))
            case "rename":
                to_parent, to_name, _ = self._find(operation.target)
                self._change(_Change("rename", parent, name, number, to_parent, to_name))

    def tree(self, path: str = "") -> Tree:
        """Returns what the running program sees below a path."""
        number = self._find(path)[2]
        if number in self._files:
            return {"": self._identity(self._files[number].current)}
        return self._tree(self._entries, lambda file: file.current, number)

    def states(self, chooser: random.Random) -> Iterator[Tree]:
        """Yields what may be on disk after a power cut; equal trees may be yielded repeatedly."""
        for chosen in _subsets(len(self._pending), chooser):
            entries = {number: dict(names) for number, names in self._synced.items()}
            if all(_apply(entries, self._pending[i]) for i in chosen):
                for variant in range(NUM_VARIANTS):
                    yield self._tree(entries, lambda f, v=variant: _nth(f.variants(), v))
                yield self._tree(entries, lambda f: chooser.choice(f.variants()))

    def _find(self, path: str) -> tuple[int, str, int]:
        """Returns the number of the directory, the name in it, and the number of the entry."""
        parent, number, name = -1, 0, ""
        for name in path.split("/") if path else ():
            parent, number = number, self._entries[number].get(name, -1)
        return parent, name, number

    def _change(self, change: _Change) -> None:
        if not _apply(self._entries, change):
            raise ValueError(f"{change} cannot be replayed")
        self._pending.append(change)

    def _sync_directory(self, number: int) -> None:
        for change in list(self._pending):
            if number in (change.parent, change.to_parent):
                if not _apply(self._synced, change):
                    raise ValueError(f"{change} cannot be synced")
                self._pending.remove(change)

    def _tree(
        self,
        entries: _Entries,
        content: Callable[[_File], bytes],
        number: int = 0,
        prefix: str = "",
    ) -> Tree:
        tree: Tree = {}
        for name, child in sorted(entries[number].items()):
            if child in self._files:
                tree[prefix + name] = self._identity(content(self._files[child]))
            else:
                tree[prefix + name] = None
                tree |= self._tree(entries, content, child, f"{prefix}{name}/")
        return tree

    def _identity(self, content: bytes) -> str:
        known = self._names.get(id(content))
        if known is None or known[0] is not content:
            known = content, hashlib.sha256(content).hexdigest()
            self._names[id(content)] = known
            self.contents[known[1]] = content
        return known[1]


def _nth(variants: list[bytes], index: int) -> bytes:
    return variants[min(index, len(variants) - 1)]


def _changed(content: bytes, operation: Operation) -> bytes:
    if operation.kind == "truncate":
        return content[: operation.number].ljust(operation.number, b"\0")
    offset = operation.number if operation.number >= 0 else len(content)
    content = content.ljust(offset, b"\0")
    return content[:offset] + operation.data + content[offset + len(operation.data) :]


def _apply(entries: _Entries, change: _Change) -> bool:
    """Applies a change to directory entries; returns False if they do not permit it."""
    source = entries[change.parent]
    if change.kind == "add":
        if change.name in source:
            return False
        source[change.name] = change.number
        return True
    if source.get(change.name) != change.number:
        return False
    if change.kind == "remove":
        del source[change.name]
        return True
    target = entries[change.to_parent]
    found = target.get(change.to_name, -1)
    if entries.get(found):  # A directory that is not empty.
        return False
    del source[change.name]
    target[change.to_name] = change.number
    return True


def _subsets(count: int, chooser: random.Random) -> set[tuple[int, ...]]:
    """Returns which of the pending changes are on disk: all subsets, or the likely ones."""
    indices = range(count)
    if count <= _MOST_CHANGES_IN_ALL_SUBSETS:
        sizes = (itertools.combinations(indices, size) for size in range(count + 1))
        return set(itertools.chain.from_iterable(sizes))
    subsets = {tuple(indices[:size]) for size in range(count + 1)}
    subsets |= {tuple(i for i in indices if i != left_out) for left_out in indices}
    subsets |= {(i,) for i in indices}
    return subsets | {tuple(i for i in indices if chooser.random() < 0.5) for _ in range(8)}
