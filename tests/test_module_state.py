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
CACHES = {"cache", "lru_cache"}
MUTATORS = {
    "append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse", "update",
    "setdefault", "popitem", "add", "discard", "appendleft",
}  # fmt: skip
ALLOWED = (
    # By it the state of a command is found, which is handed to all that the command calls.
    "_current: contextvars.ContextVar[RunContext | None] = contextvars.ContextVar(",
    # Guards `sys.modules`, which all commands of a process share.
    "_SYS_MODULES_LOCK = threading.Lock()",
)
LITERALS = ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
BLOCKS = ast.If | ast.Try | ast.With | ast.For | ast.While | ast.ClassDef


def last_name(node):
    """Returns "c" of `a.b.c`, of `a.b.c(…)` and of `a.b.c[…]`."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "attr", getattr(node, "id", ""))


def assignments(body):
    """Yields each assignment to a name that runs when a module is imported."""
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and name_of(node):
            yield node
        elif isinstance(node, BLOCKS):
            yield from assignments(ast.iter_child_nodes(node))


def name_of(assignment):
    target = assignment.targets[0] if isinstance(assignment, ast.Assign) else assignment.target
    return getattr(target, "id", "")


def is_constant(name):
    return name.strip("_").isupper() or name.startswith("__")


def is_state(assignment):
    """Returns whether a module or a class is given something that is there to change."""
    value, name = assignment.value, name_of(assignment)
    if isinstance(value, ast.Call):
        return last_name(value) in MUTABLE_CALLS
    return isinstance(value, LITERALS) and not is_constant(name)


def changes(tree, constants):
    """Yields what functions do that outlives them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node
        elif isinstance(node, ast.FunctionDef):
            yield from (d for d in node.decorator_list if last_name(d) in CACHES)
            yield from (n for n in ast.walk(node) if changes_constant(n, constants))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "atexit.register":
            yield node


def changes_constant(node, constants):
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in MUTATORS and getattr(node.func.value, "id", "") in constants
    is_item = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
    return is_item and getattr(node.value, "id", "") in constants


def module_state(source):
    """Returns what in a module can change while the program runs, as lines of it."""
    tree = ast.parse(source)
    of_module = [node for node in tree.body if not isinstance(node, ast.ClassDef)]
    found = [node for node in assignments(tree.body) if is_state(node)]
    found += [
        node
        for node in assignments(of_module)
        if isinstance(node.value, ast.Constant) and not is_constant(name_of(node))
    ]
    constants = {name_of(n) for n in assignments(tree.body) if isinstance(n.value, LITERALS)}
    lines = [ast.unparse(node) for node in (*found, *changes(tree, constants))]
    return [line for line in lines if not line.startswith(ALLOWED)]


def test_no_module_of_app_keeps_state():
    found = {
        path.relative_to(ROOT).as_posix(): state
        for path in SOURCES
        if (state := module_state(path.read_text(encoding="utf-8")))
    }
    assert len(SOURCES) > 100 and found == {}


@pytest.mark.parametrize(
    "source",
    [
        "_kept = []", "_KEPT: list[int] = list()", "_done = False", "_armed: str | None = None",
        "_NUMBERS = itertools.count()", "_lock = threading.Lock()", "def f():\n    global x",
        "@functools.cache\ndef f(): pass", "@functools.lru_cache(3)\ndef f(): pass",
        "atexit.register(f)", "_SEEN = {}\ndef f():\n    _SEEN['x'] = 1", "class A:\n    seen = []",
        "_ALL = [1]\ndef f():\n    _ALL.append(2)", "if x:\n    _kept = {}",
        "_log = logging.getLogger('x')", "_x: ContextVar = ContextVar('x')",
        "_SEEN = {}\ndef f():\n    del _SEEN['x']",
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
