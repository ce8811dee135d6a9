"""Layers of packages, where flags are read, and names that pytest would take for tests."""

import ast

import pytest

from conftest import ROOT

PACKAGES = ("app", "models", "strategies")
SOURCES = [
    path for folder in PACKAGES for path in sorted((ROOT / folder).rglob("*.py"))
] + [ROOT / "main.py"]  # fmt: skip
# From the top to the bottom: a package imports those of its own layer and of the layers below it.
LAYERS = (
    ("main",),
    ("app.cli",),
    ("app.commands",),
    ("app.demos", "app.doctor", "app.performance"),
    ("app.verification",),
    ("app.training",),
    ("app.report", "app.cluster", "app.devices"),
    ("app.records", "app.data", "app.config"),
    ("app.runtime",),
    ("strategies", "models"),
)
EXCEPTIONS = {("app.demos.textbook_table", "app.commands.train")}  # The default of `--out`.


def layer(module):
    (index,) = [
        i for i, packages in enumerate(LAYERS) for p in packages if f"{module}.".startswith(f"{p}.")
    ]
    return index


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from names if node.module == "app" else [node.module]
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if path.parent != ROOT / "app"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_imports_point_one_way(path):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for name in imported_modules(path):
        if name.split(".")[0] in PACKAGES and (module, name) not in EXCEPTIONS:
            assert layer(name) >= layer(module), name
            if module.startswith("strategies."):
                assert name.startswith("strategies."), name


def test_flags_are_read_in_one_place():
    readers = [p.name for p in SOURCES if "FLAGS" in p.read_text(encoding="utf-8")]
    assert readers == ["flags.py"]


def test_nothing_outside_tests_looks_like_a_test():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                assert not node.name.lower().startswith("test"), (path, node.name)


def test_no_two_modules_share_a_name():
    names = [path.stem for path in SOURCES if path.stem != "__init__"]
    assert sorted(set(names)) == sorted(names)


def test_app_has_packages_and_not_loose_files():
    assert {path.name for path in (ROOT / "app").glob("*.py")} <= {"__init__.py", "api.py"}


def test_commands_are_imported_by_the_command_line_and_the_api_alone():
    importers = {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if "from app.commands" in (text := path.read_text(encoding="utf-8"))
        or "import app.commands" in text
        or '"app.commands' in text
    }
    allowed = ("app/commands/", "app/cli/", "app/api.py", "main.py")
    assert importers and all(name.startswith(allowed) for name in importers), importers
