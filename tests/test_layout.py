"""Where flags are read, and names that pytest would take for tests."""

import ast

from conftest import ROOT

PACKAGES = ("app", "models", "strategies")
SOURCES = [
    path for folder in PACKAGES for path in sorted((ROOT / folder).rglob("*.py"))
] + [ROOT / "main.py"]  # fmt: skip


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
