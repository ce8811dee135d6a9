"""Where flags are read, and names; the layers are checked by import-linter in `make lint`."""

import ast

from conftest import ROOT

PACKAGES = ("app", "models", "recorders", "strategies")
SOURCES = [
    path for folder in PACKAGES for path in sorted((ROOT / folder).rglob("*.py"))
] + [ROOT / "main.py"]  # fmt: skip
FIELDS = ("test_accuracy", "test_loss")  # Of a record.


def test_flags_are_read_in_one_place():
    readers = [p.name for p in SOURCES if "FLAGS" in p.read_text(encoding="utf-8")]
    assert readers == ["flags.py"]


def test_frameworks_and_recorders_use_nothing_of_the_program():
    """They run where it is not installed."""
    paths = [p for folder in ("frameworks", "recorders") for p in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 3
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            assert not {(name or "").split(".")[0] for name in modules} & {*PACKAGES}, path


def test_nothing_outside_tests_looks_like_a_test():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                assert not node.name.lower().startswith("test") or node.name in FIELDS


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
    allowed = ("app/commands/", "app/api.py", "main.py")
    assert importers and all(name.startswith(allowed) for name in importers), importers
