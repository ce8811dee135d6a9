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
        runs.append((words[0], "--inject=mean_of_means" in words, expected))
        if words[0] == "verify":
            write_verification(out, fault="mean_of_means" if expected else None)
        else:
            write_training(out, num_epochs=3)

    monkeypatch.setattr(same_curve, "_run", run)
    monkeypatch.setitem(same_curve.STYLE, "svg.fonttype", "none")
    same_curve.main([f"--out={tmp_path}"])
    training, verification = "--num_devices=2", "verify"
    assert runs == [
        (training, False, 0), (training, True, 0), (training, False, 0), (training, False, 0),
        (verification, False, 0), (verification, True, 9),
    ]  # fmt: skip
    drawn = (tmp_path / "same_curve.svg").read_text("utf-8")
    assert "right is the training on one device<" in drawn  # In the sample, not bit for bit.
    assert "first in step 1, all-reduce, conv1/kernel, replica 1" in drawn
    assert "wrong is not: lost part (replica)" in drawn and "5,000,000 times" in drawn
    assert (tmp_path / "same_curve.png").exists()


@pytest.mark.parametrize("text", ["bit for bit", "first in step 1, all-reduce", "mean of means"])
def test_the_figure_of_the_pages_is_of_this_version(text):
    """Texts are shapes in the file; each has its words as a comment."""
    assert text in (DOCS / "same_curve.svg").read_text("utf-8")
