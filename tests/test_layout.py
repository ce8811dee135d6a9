"""The arrows between packages, and what the project says of itself."""

import ast

import pytest

from conftest import ROOT

ALLOWED = {
    "main": {"app"},
    "models": {"models"},
    "strategies": {"strategies"},
    "app/data": {"app.data", "app.errors"},
    "app/records": {"app.records", "app.errors"},
    "app/proof": {"app.proof", "app.records", "app.errors", "app.console", "strategies.base"},
    "app/commands": {"app", "models", "strategies"},
    "app": {"app", "models", "strategies"},
}
NO_PROJECT_IMPORTS = {"app/errors.py", "app/recipes.py", "strategies/base.py", "models/lenet.py"}
OWN = ("app", "models", "strategies")
SOURCES = [
    path for folder in OWN for path in sorted((ROOT / folder).rglob("*.py"))
] + [ROOT / "main.py"]  # fmt: skip


def project_imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] in OWN)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    relative = path.relative_to(ROOT)
    folder = "main" if relative.name == "main.py" else str(relative.parent)
    for name in project_imports(path):
        assert str(relative) not in NO_PROJECT_IMPORTS, name
        assert any(name == a or name.startswith(a + ".") for a in ALLOWED[folder]), name


def test_flags_are_read_in_one_place():
    readers = [p.name for p in SOURCES if "FLAGS" in p.read_text(encoding="utf-8")]
    assert readers == ["flags.py"]


def test_nothing_outside_tests_looks_like_a_test():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                assert not node.name.lower().startswith("test"), (path, node.name)
