"""All texts use the terms of the field: see `plain_language.py`."""

import json

import pytest
from plain_language import WORDS, check, files, findings, text_of


def test_no_text_has_a_word_that_the_project_does_not_use():
    found = check(files())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line, word",
    [
        ("as in the book's table", "the book's"),
        ("the training goes on", "goes on"),
        ("f'{path}: no trace — one that verifies is required; record it'", "is required;"),
        ("# Nobody waits for it.", "Nobody"),
        ("weights hold the same bits", "the same bits"),
    ],
)
def test_a_word_is_found_with_its_line(line, word):
    ((number, found, use),) = findings(f"first\n{line}\n")
    assert number == 2 and found.endswith(word) and use in WORDS.values()


@pytest.mark.parametrize(
    "line",
    ["bookmark", "recommended", "has to do with it", "a bitwise identical copy", "depends on"],
)
def test_other_words_are_not_found(line):
    assert list(findings(line)) == []


def test_documents_code_and_deployment_files_are_checked():
    names = {path.name for path in files()}
    assert {"README.md", "tour.ipynb", "manual.py", "slurm.sbatch", "Makefile"} <= names


def test_a_notebook_is_checked_without_its_outputs(tmp_path):
    path = tmp_path / "a.ipynb"
    cell = {"source": ["one\n", "two"], "outputs": [{"text": "the book"}]}
    path.write_text(json.dumps({"cells": [cell]}))
    assert text_of(path) == "one\ntwo\n"
