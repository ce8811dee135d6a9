"""The notebook, executed from its first cell to its last."""

import os

import nbclient
import nbformat
import pytest

from conftest import ROOT

NOTEBOOK = ROOT / "docs" / "tour.ipynb"


def texts(notebook):
    """Returns what each cell of code has printed and returned."""
    return [
        "".join(
            output.get("text", "") or "\n" + output.get("data", {}).get("text/plain", "")
            for output in cell.outputs
        )
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.slow
def test_it_runs_and_shows_what_it_says():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    shown = texts(notebook)
    # Under pytest a kernel leaves out what processes of its own print.
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": NOTEBOOK.parent}}
    ).execute(env=environment)  # Raises where a cell fails.
    seen = texts(notebook)
    for told in (
        "[[3. 3.]]",
        "'bit-identical'",
        "exit code 9: manual does not match: lost gradient",
        "\nTrue",
        "(8, True)",
    ):
        assert any(told in text for text in shown), f"{told} in the file"
        assert any(told in text for text in seen), told
    by_hand, mirrored = next(text for text in seen if text.startswith("manual 0.")).splitlines()
    assert by_hand.split()[1:] == mirrored.split()[1:]
    assert not any(word in text for text in shown for word in ("WARNING: All log", "Traceback"))
