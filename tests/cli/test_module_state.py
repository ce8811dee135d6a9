"""Checks that no module of `app` holds state, which would be shared between commands."""

import ast
import re

import pytest

from tests.conftest import ROOT

SOURCES = [*sorted((ROOT / "app").rglob("*.py")), ROOT / "main.py"]
# What a module may not hold, as it changes while the program runs.
MUTABLE_CALLS = {
    "list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict", "count",
    "cycle", "Lock", "RLock", "Event", "Condition", "Semaphore", "Queue", "local", "ContextVar",
    "Thread", "open", "Logger", "getLogger", "TemporaryDirectory", "ExitStack",
}  # fmt: skip
ALLOWED = (
    # Guards `sys.modules`, which all commands of a process share.
    "_SYS_MODULES_LOCK = threading.Lock()",
)
LITERALS = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp | ast.Constant
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def last_name(node):
    """Returns "c" of `a.b.c`, of `a.b.c(…)` and of `a.b.c[…]`."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "attr", getattr(node, "id", ""))


def is_state(assignment):
    """Returns whether a module is given something that is there to change."""
    target = (getattr(assignment, "targets", None) or [assignment.target])[0]
    name = getattr(target, "id", "A")  # An item of a registry is part of a constant.
    if isinstance(assignment.value, ast.Call):
        return last_name(assignment.value) in MUTABLE_CALLS
    is_constant = name.strip("_").isupper() or name.startswith("__")
    return isinstance(assignment.value, LITERALS) and not is_constant


def module_state(source):
    """Returns what in a module can change while the program runs, as lines of it."""
    found, blocks = [], [ast.parse(source)]
    for block in blocks:
        for node in ast.iter_child_nodes(block):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and is_state(node):
                found.append(node)
            elif not isinstance(node, FUNCTIONS | ast.ClassDef):
                blocks.append(node)
    for node in ast.walk(blocks[0]):
        if isinstance(node, ast.Global):
            found.append(node)
        elif isinstance(node, ast.FunctionDef):
            found += [d for d in node.decorator_list if last_name(d) in ("cache", "lru_cache")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "atexit.register":
            found.append(node)
    return [line for line in map(ast.unparse, found) if not line.startswith(ALLOWED)]


def test_no_module_of_app_keeps_state():
    states = {path.name: module_state(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert len(SOURCES) > 80 and {name: state for name, state in states.items() if state} == {}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("_kept = []", 1), ("_KEPT: list[int] = list()", 1), ("_armed: str | None = None", 1),
        ("if x:\n    _kept = {}", 1), ("def f():\n    global x", 1), ("atexit.register(f)", 1),
        ("@functools.lru_cache(3)\ndef f(): pass", 1), ("_x: ContextVar = ContextVar('x')", 1),
        ("TYPES = {'a': 1}\nTYPES['b'] = TYPES['a']\n__all__ = ['x']\n_SEC = 5.0", 0),
        ("Result = TypeVar('R')\ndef f():\n    kept = []\nclass A:\n    field: int = 1", 0),
    ],
)  # fmt: skip
def test_state_of_a_module_is_found(source, count):
    assert len(module_state(source)) == count


def test_one_module_starts_processes():
    starts = re.compile(
        r"^(import|from) (subprocess|multiprocessing)\b(?!\.connection| import (?:PIPE|DEVNULL))"
        r"|\bos\.(fork|spawn\w*|posix_spawn\w*|exec[lv]\w*|system|popen)\(|ProcessPool",
        re.MULTILINE,
    )
    found = [path.name for path in SOURCES if starts.search(path.read_text(encoding="utf-8"))]
    assert found == ["processes.py"]
