"""The figure of a right and a wrong training with similar curves: all of it is read from runs."""

import importlib

import pytest

from tests.cli.report_samples import write_training, write_verification
from tests.conftest import ROOT

DOCS = ROOT / "docs"


def test_the_figure_has_what_the_files_of_its_runs_say(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    same_curve = importlib.import_module("same_curve")
    runs = []

    def run(words, out, expected):
        runs.append((words[0] == "verify", any("--inject" in w for w in words), expected))
        if words[0] == "verify":
            write_verification(out, fault="scale_gradient:factor=1.5" if expected else None)
        else:
            write_training(out, num_epochs=3)

    monkeypatch.setattr(same_curve, "_run", run)
    monkeypatch.setitem(same_curve._STYLE, "svg.fonttype", "none")
    same_curve.main([f"--out={tmp_path}"])
    right, wrong = (False, False, 0), (False, True, 0)
    assert runs == [right, wrong, right, right, (True, False, 0), (True, True, 9)]
    drawn = (tmp_path / "same_curve.svg").read_text("utf-8")
    assert "manual is the training on one device<" in drawn
    assert "first in step 1, sum, conv1/kernel" in drawn
    assert (tmp_path / "same_curve.png").exists()


@pytest.mark.parametrize("text", ["is the training on one device", "first in step 2, "])
def test_the_figure_of_the_pages_is_of_this_version(text):
    """Texts are shapes in the file; each has its words as a comment."""
    assert text in (DOCS / "same_curve.svg").read_text("utf-8")
