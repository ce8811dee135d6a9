"""The files for contributors: pinned packages, targets of make, tests, the version."""

import importlib
import re

import pytest
import yaml

import lockstep
from tests.conftest import ROOT


def test_the_lock_file_has_every_pinned_package():
    locked = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    for pinned in (ROOT / "requirements.txt").read_text(encoding="utf-8").split():
        name = re.escape(pinned.replace("_", "-"))
        assert re.search(rf"^{name}\b.*\\\n    --hash=sha256:", locked, re.M | re.I)


@pytest.mark.parametrize("name", ["README", "BUILD", "CONTRIBUTING"])
def test_make_targets_of_the_page_exist(name):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    text = (ROOT / f"{name}.md").read_text(encoding="utf-8")
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) <= targets


def test_each_file_of_tests_serves_a_promise():
    page = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    files = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(re.findall(r"`(?:verifier/)?(test_\w+)`", page)) == files


def test_the_release_has_one_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest, date = re.search(r"^## ([\d.]+) - (\S+)$", changes, re.MULTILINE).groups()
    assert lockstep.__version__ == newest == citation["version"]
    assert str(citation["date-released"]) == date


def test_the_page_of_verdicts_has_the_names_of_the_table(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    names = importlib.import_module("names")
    assert names.FILE.read_text("utf-8") == names.page()
