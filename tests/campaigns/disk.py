"""Records file operations with `strace`, and lists what may be on disk after a power cut.

A file system keeps what was synced. Of everything else it may keep any part: the data of a file not
at all, in part, or as zeros of the right length; creations, renames and removals of a directory
none, all, or some of them.

Reference: CrashMonkey (OSDI 2018), ALICE (OSDI 2014).
"""

import dataclasses
import hashlib
import itertools
import os
import pathlib
import random
import re
from collections.abc import Iterator, Sequence

_CALLS = (
    *("open", "openat", "creat", "lseek", "write", "writev", "pwrite64", "pwritev"),
    *("truncate", "ftruncate", "fallocate", "fsync", "fdatasync", "mkdir", "mkdirat", "rename"),
    *("renameat", "renameat2", "unlink", "unlinkat", "rmdir", "link", "linkat", "symlink"),
    *("symlinkat", "copy_file_range", "sendfile", "mmap"),
)
_HEX = r"(?:\\x[0-9a-f]{2})*"
_LINE = re.compile(r"\d+ +(\w+)\((.*)\) += (\d+)(?:<.*>)?$")
_UNFINISHED = " <unfinished ...>"
_RESUMED = re.compile(r"(\d+) +<\.\.\. \w+ resumed>(.*)$")
_WORD = re.compile(rf'<({_HEX})>(?:\(deleted\))?|"({_HEX})"')
_MOST_CHANGES_IN_ALL_SUBSETS = 5


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
    operations: list[Operation] = []
    offsets: dict[tuple[str, str], int] = {}  # By descriptor and path; -1 for the end.
    begun: dict[str, str] = {}
    with open(recording, encoding="ascii") as lines:
        for line in map(str.rstrip, lines):
            if line.endswith(_UNFINISHED):
                begun[line.split()[0]] = line.removesuffix(_UNFINISHED)
                continue
            if resumed := _RESUMED.match(line):
                line = begun.pop(resumed[1]) + resumed[2]
            if match := _LINE.match(line):  # It did not fail.
                operations += _parse_call(match[1], match[2], int(match[3]), root, offsets)
    return operations


def _parse_call(
    call: str, text: str, result: int, root: pathlib.Path, offsets: dict[tuple[str, str], int]
) -> list[Operation]:
    found = _WORD.finditer(text)
    words = [bytes.fromhex((m[1] or m[2] or "").replace("\\x", "")) for m in found]
    paths = [os.fsdecode(word) for word in words[:4]]
    if call in ("openat", "renameat", "renameat2", "mkdirat", "unlinkat"):
        paths = [os.path.join(*paths[i : i + 2]) for i in range(0, len(paths), 2)]
    name = _below(paths[0], root) if paths else None
    if name is None:
        return []
    last = int(number[0]) if (number := re.search(r"\d+$", text)) else 0
    opened = (text.partition("<")[0], name)
    match call:
        case "open" | "openat" | "creat":
            offsets[str(result), name] = -1 if "O_APPEND" in text else 0
            made = [Operation("create", name)] if "O_CREAT" in text else []
            return [*made, *([Operation("truncate", name)] if "O_TRUNC" in text else [])]
        case "lseek":
            offsets[opened] = result if offsets.get(opened, 0) >= 0 else -1
            return []
        case "write" | "writev":
            offset = offsets.get(opened, 0)
            offsets[opened] = offset + result if offset >= 0 else -1
            return [Operation("write", name, data=b"".join(words[1:])[:result], number=offset)]
        case "pwrite64":
            return [Operation("write", name, data=words[1][:result], number=last)]
        case "ftruncate" | "truncate":
            return [Operation("truncate", name, number=last)]
        case "fsync" | "fdatasync":
            return [Operation("sync", name)]
        case "mkdir" | "mkdirat":
            return [Operation("mkdir", name)]
        case "rename" | "renameat" | "renameat2" if "RENAME_EXCHANGE" not in text:
            target = _below(paths[1], root)
            if target is not None:
                return [Operation("rename", name, target=target)]
        case "unlink" | "unlinkat" | "rmdir":
            return [Operation("remove", name)]
        case "mmap" if "MAP_SHARED" not in text or "PROT_WRITE" not in text:
            return []
    raise ValueError(f"{call} of {name} cannot be replayed")


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

    def variants(self) -> list[bytes]:
        """Returns what the file may contain after a power cut; the current content is last."""
        old, new = self.synced, self.current
        if old == new:
            return [new]
        size, half = len(new) - len(old), (len(old) + len(new)) // 2
        return [old, new[: len(old)] + bytes(max(0, size)), new[:half], new]


# Path → SHA-256 of the content; None for a directory.
Tree = dict[str, str | None]
_Entries = dict[int, dict[str, int]]
# Kind ("add", "remove" or "rename"), directory, name, file; new directory and name of a rename.
_Change = tuple[str, int, str, int, int, str]


class Disk:
    """The files and directories below one directory, and what of them is synced.

    Args:
        contents: gets the content of everything in a tree that is returned, by SHA-256.
    """

    def __init__(self, contents: dict[str, bytes]) -> None:
        self._files: dict[int, _File] = {}
        self._entries: _Entries = {0: {}}
        self._synced: _Entries = {0: {}}
        self._pending: list[_Change] = []
        self._hashes: dict[bytes, str] = {}
        self.contents = contents

    def apply(self, operation: Operation) -> None:
        """Applies an operation."""
        parent, name, number = self._find(operation.path)
        match operation.kind:
            case "create" | "mkdir" if number < 0:
                number = len(self._files) + len(self._entries)
                if operation.kind == "create":
                    self._files[number] = _File()
                else:
                    self._entries[number], self._synced[number] = {}, {}
                self._change(("add", parent, name, number, -1, ""))
            case "write" | "truncate" if number >= 0:  # Not of a file that was removed.
                file = self._files[number]
                file.current = _changed(file.current, operation)
            case "sync" if number in self._files:
                self._files[number].synced = self._files[number].current
            case "sync" if number >= 0:
                for change in [c for c in self._pending if number in (c[1], c[4])]:
                    _apply(self._synced, change)
                    self._pending.remove(change)
            case "remove":
                self._change(("remove", parent, name, number, -1, ""))
            case "rename":
                self._change(("rename", parent, name, number, *self._find(operation.target)[:2]))

    def tree(self, path: str = "") -> Tree:
        """Returns what the running program sees below a path."""
        number = self._find(path)[2]
        if number in self._files:
            return {"": self._hash(self._files[number].current)}
        return self._tree(self._entries, -1, number)

    def states(self, choices: random.Random) -> Iterator[Tree]:
        """Yields what may be on disk after a power cut; equal trees may be yielded repeatedly."""
        for chosen in _subsets(len(self._pending), choices):
            entries = {number: dict(names) for number, names in self._synced.items()}
            if all(_apply(entries, self._pending[i]) for i in chosen):
                for variant in range(4):
                    yield self._tree(entries, variant)

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

    def _tree(self, entries: _Entries, variant: int, number: int = 0, prefix: str = "") -> Tree:
        """Returns the tree below a directory; `variant` chooses the content of changed files."""
        tree: Tree = {}
        for name, child in sorted(entries[number].items()):
            if child in self._files:
                variants = self._files[child].variants()
                tree[prefix + name] = self._hash(variants[min(variant, len(variants) - 1)])
            else:
                tree[prefix + name] = None
                tree |= self._tree(entries, variant, child, f"{prefix}{name}/")
        return tree

    def _hash(self, content: bytes) -> str:
        if content not in self._hashes:
            self._hashes[content] = hashlib.sha256(content).hexdigest()
            self.contents[self._hashes[content]] = content
        return self._hashes[content]


def _changed(content: bytes, operation: Operation) -> bytes:
    if operation.kind == "truncate":
        return content[: operation.number].ljust(operation.number, b"\0")
    offset = operation.number if operation.number >= 0 else len(content)
    content = content.ljust(offset, b"\0")
    return content[:offset] + operation.data + content[offset + len(operation.data) :]


def _apply(entries: _Entries, change: _Change) -> bool:
    """Applies a change to directory entries; returns False if they do not permit it."""
    kind, parent, name, number, to_parent, to_name = change
    source = entries[parent]
    if kind == "add":
        return source.setdefault(name, number) == number
    if source.get(name) != number:
        return False
    if kind == "rename":
        if entries.get(entries[to_parent].get(to_name, -1)):  # A directory that is not empty.
            return False
        entries[to_parent][to_name] = number
    del source[name]
    return True


def _subsets(count: int, choices: random.Random) -> set[tuple[int, ...]]:
    """Returns which of the pending changes are on disk: all subsets, or the likely ones."""
    indices = range(count)
    if count <= _MOST_CHANGES_IN_ALL_SUBSETS:
        sizes = (itertools.combinations(indices, size) for size in range(count + 1))
        return set(itertools.chain.from_iterable(sizes))
    subsets = {tuple(indices[:size]) for size in range(count + 1)}
    subsets |= {tuple(i for i in indices if i != left_out) for left_out in indices}
    return subsets | {tuple(i for i in indices if choices.random() < 0.5) for _ in range(8)}
