"""Checks that no module of `app` holds state, which would be shared between commands."""

import ast
import re

import pytest

from conftest import ROOT

SOURCES = [*sorted((ROOT / "app").rglob("*.py")), ROOT / "main.py"]
# What a module may not hold, as it changes while the program runs.
MUTABLE_CALLS = {
    "list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict", "count",
    "cycle", "Lock", "RLock", "Event", "Condition", "Semaphore", "Queue", "local", "ContextVar",
    "Thread", "open", "Logger", "getLogger", "TemporaryDirectory", "ExitStack",
}  # fmt: skip
ALLOWED = (
    # By it the state of a command is found, which is handed to all that the command calls.
    "_current: contextvars.ContextVar[RunContext | None] = contextvars.ContextVar(",
    # Guards `sys.modules`, which all commands of a process share.
    "_SYS_MODULES_LOCK = threading.Lock()",
)
MUTATORS = {
    "append", "extend", "insert", "remove", "pop", "clear", "sort", "update", "setdefault",
    "popitem", "add", "discard",
}  # fmt: skip
LITERALS = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def last_name(node):
    """Returns "c" of `a.b.c`, of `a.b.c(…)` and of `a.b.c[…]`."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "attr", getattr(node, "id", ""))


def statements_at_import(node, in_class=False):
    """Yields each assignment that runs when a module is imported, and whether a class has it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Assign | ast.AnnAssign) and child.value:
            yield child, in_class
        elif not isinstance(child, FUNCTIONS):
            yield from statements_at_import(child, in_class or isinstance(child, ast.ClassDef))


def targets(assignment):
    return getattr(assignment, "targets", None) or [assignment.target]


def is_state(assignment, in_class):
    """Returns whether a module or a class is given something that is there to change."""
    value = assignment.value
    name = getattr(
        targets(assignment)[0], "id", "A"
    )  # An item of a registry is part of a constant.
    is_constant = name.strip("_").isupper() or name.startswith("__")
    if isinstance(value, ast.Call):
        return last_name(value) in MUTABLE_CALLS
    is_value = isinstance(value, LITERALS) or (isinstance(value, ast.Constant) and not in_class)
    return is_value and not is_constant


def module_state(source):
    """Returns what in a module can change while the program runs, as lines of it."""
    tree = ast.parse(source)
    found = [node for node, in_class in statements_at_import(tree) if is_state(node, in_class)]
    held = {
        getattr(n, "id", "")
        for a, of_class in statements_at_import(tree)
        if not of_class
        for n in targets(a)
    }
    for node in (n for f in ast.walk(tree) if isinstance(f, FUNCTIONS) for n in ast.walk(f)):
        is_item = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
        is_call = isinstance(node, ast.Attribute) and node.attr in MUTATORS
        if (is_item or is_call) and getattr(node.value, "id", None) in held:
            found.append(node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            found.append(node)
        elif isinstance(node, ast.FunctionDef):
            found += [d for d in node.decorator_list if last_name(d) in ("cache", "lru_cache")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "atexit.register":
            found.append(node)
    return [line for line in map(ast.unparse, found) if not line.startswith(ALLOWED)]


def test_no_module_of_app_keeps_state():
    states = {path.name: module_state(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert len(SOURCES) > 100 and {name: state for name, state in states.items() if state} == {}


@pytest.mark.parametrize(
    "source",
    [
        "_kept = []", "_KEPT: list[int] = list()", "_done = False", "_armed: str | None = None",
        "_NUMBERS = itertools.count()", "_lock = threading.Lock()", "def f():\n    global x",
        "@functools.cache\ndef f(): pass", "@functools.lru_cache(3)\ndef f(): pass",
        "atexit.register(f)", "class A:\n    seen = []", "if x:\n    _kept = {}",
        "_SEEN = {}\ndef f():\n    _SEEN['x'] = 1", "_ALL = [1]\ndef f():\n    _ALL.append(2)",
        "_log = logging.getLogger('x')", "_x: ContextVar = ContextVar('x')",
    ],
)  # fmt: skip
def test_state_of_a_module_is_found(source):
    assert len(module_state(source)) == 1


def test_constants_and_registries_are_none():
    source = (
        "TYPES = {'a': 1}\nTYPES['b'] = TYPES['a']\n_NAMES = ['a']\n__all__ = ['x']\n_SEC = 5.0\n"
        "Result = TypeVar('R')\ndef f():\n    kept = []\n    kept.append(TYPES['a'])\n"
        "class A:\n    field: int = 1\n"
    )
    assert module_state(source) == []


def test_few_modules_start_processes():
    starts = re.compile(
        r"^(import|from) (subprocess|multiprocessing)\b(?!\.connection| import PIPE)"
        r"|\bos\.(fork|spawn\w*|posix_spawn\w*|exec[lv]\w*|system|popen)\(|ProcessPool",
        re.MULTILINE,
    )
    found = [path.name for path in SOURCES if starts.search(path.read_text(encoding="utf-8"))]
    assert found == ["gpus.py", "processes.py", "subprocesses.py"]
