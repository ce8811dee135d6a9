"""Which runs a report is made of, where a directory holds other things, too."""

import json

import pytest

from app.report.record_finder import find_records
from app.runtime.errors import OutputError

RUN = {"written_by": "lockstep", "command": "train", "strategy": "manual"}
OTHER = {"model_type": "bert"}


def write_config(folder, config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def labels(folder):
    return [record.label for record in find_records([folder])]


def test_other_folders_and_files_beside_runs_are_ignored(tmp_path, capsys):
    write_config(tmp_path / "b", RUN)
    write_config(tmp_path / "a", RUN)
    (tmp_path / "notes").mkdir()
    (tmp_path / "todo.txt").write_text("train more")
    (tmp_path / "broken").symlink_to("nowhere")
    assert labels(tmp_path) == ["a", "b"]
    assert capsys.readouterr().err == ""


def test_a_configuration_of_another_program_is_ignored_with_one_line(tmp_path, capsys):
    write_config(tmp_path / "a", RUN)
    write_config(tmp_path / "bert", OTHER)
    write_config(tmp_path / "damaged", [])
    assert labels(tmp_path) == ["a"]
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "ignored bert, damaged" in told


def test_runs_are_found_in_a_directory_with_a_configuration_of_another_program(tmp_path):
    write_config(tmp_path, OTHER)
    write_config(tmp_path / "a", RUN)
    assert labels(tmp_path) == ["a"]


def test_a_comparison_has_the_runs_of_its_strategies_and_no_damaged_one(tmp_path):
    write_config(tmp_path / "c", {**RUN, "strategy": "manual,mirrored"})
    write_config(tmp_path / "c" / "manual", RUN)
    write_config(tmp_path / "c" / "single", RUN)
    assert [record.kind for record in find_records([tmp_path / "c"])] == ["compare", "train"]
    write_config(tmp_path / "c" / "mirrored", OTHER)
    with pytest.raises(OutputError, match="mirrored: not the directory of a run"):
        find_records([tmp_path / "c"])


@pytest.mark.parametrize("config", [None, OTHER])
def test_a_directory_without_any_run_is_refused_in_one_line(tmp_path, config):
    (tmp_path / "notes").mkdir()
    write_config(tmp_path / "bert", OTHER)
    if config:
        write_config(tmp_path, config)
    with pytest.raises(OutputError, match="not the directory of a run") as caught:
        find_records([tmp_path])
    assert "\n" not in str(caught.value)
