"""The terminal recording of the README: made of real lines, and up to date."""

import importlib.util
import xml.etree.ElementTree

import pytest

from conftest import ROOT

_SPEC = importlib.util.spec_from_file_location("recording", ROOT / "docs" / "recording.py")
assert _SPEC and _SPEC.loader
recording = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(recording)

_SVG = "{http://www.w3.org/2000/svg}"


def _texts(svg):
    return [each.text or "" for each in xml.etree.ElementTree.fromstring(svg).iter(f"{_SVG}text")]


def test_lines_are_shown_as_they_are():
    line = recording.Line("<b>&\"'  two  spaces", "bad")
    svg = recording.render([("first", [line]), ("second", [])])
    assert _texts(svg) == ["$ first", line.text, "$ second"]


def test_a_command_that_fails_is_not_recorded(tmp_path):
    with pytest.raises(recording.subprocess.CalledProcessError):
        recording.record("verify --steps=0", tmp_path / "out")


def test_the_recording_shows_the_commands_of_the_readme_and_what_they_print_today():
    texts = _texts((ROOT / "docs" / "recording.svg").read_text(encoding="utf-8"))
    commands = [text.removeprefix("$ ") for text in texts if text.startswith("$ ")]
    assert commands == [f"{recording._PROGRAM} {words}" for words in recording._SCENES]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(command in readme for command in commands)
    printed = "\n".join(texts)
    for line in (
        "The same training: 5 steps of manual and mirrored match one device",
        "Not the same training: manual does not match (lost gradient, first at step 1).",
        "why    the sum does not contain the gradient of replica 1",
        "# exit code 9 after",
    ):
        assert line in printed
