"""Tests history, run directories and figures: atomic writes, and reading back."""

import dataclasses
import errno
import os
from unittest import mock

import matplotlib
import matplotlib.image
import pytest

from app.errors import CheckpointError, DiskFullError, OutputError
from app.records import history as histories
from app.records.files import read_json, write_json
from app.records.history import last_lines, summarize
from app.records.run_directory import (
    check_same_run,
    load_run_config,
    open_command_directory,
    open_log,
    open_run_directory,
)
from app.report.plots import draw_accuracy, plot_accuracy
from tests.training.test_checkpoint import RUN_METADATA, make_history


def make_summary(history, config=None, **changes):
    config = RUN_METADATA.config | (config or {})
    return summarize(dataclasses.replace(RUN_METADATA, config=config, **changes), history)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    write_json(path, {"a": 1})
    full = OSError(errno.ENOSPC, "No space left on device")
    for call, error, raised, match in [
        ("fsync", KeyboardInterrupt, KeyboardInterrupt, None),
        ("fsync", full, DiskFullError, r"file\.json: No .* 13 bytes needed, [\d,]+ free"),
        ("replace", OSError(errno.EROFS, "Read-only"), OutputError, "file.json: Read-only"),
        ("fsync", OSError(errno.EFBIG, "File too large"), OutputError, "raise the limit"),
    ]:
        with monkeypatch.context() as patch, pytest.raises(raised, match=match):
            patch.setattr(os, call, mock.Mock(side_effect=error))
            write_json(path, {"a": 2})
        assert read_json(path) == {"a": 1}
        assert [p.name for p in tmp_path.iterdir()] == ["file.json"]


def test_records_are_read_as_they_were_written(tmp_path):
    drawn = []

    def draw(runs, out_dir):
        drawn.append(runs)
        for name in histories.FIGURE_FILES:
            (out_dir / name).touch()

    assert histories.load_history(tmp_path) == []
    assert histories.load_summary(tmp_path) is None
    history, summary = make_history(3), make_summary(make_history(3))
    for _ in range(2):  # The second time, all of them are there.
        histories.write_history(tmp_path, RUN_METADATA, history, draw)
        assert histories.load_history(tmp_path) == history
        assert histories.load_summary(tmp_path) == summary
    assert drawn == [{"manual": (summary, history)}]
    names = "status", "steps", "weights_sha256"
    assert [summary[name] for name in names] == ["running", 30, "3" * 64]
    assert make_summary(make_history(4))["status"] == "finished"
    histories.write_history(tmp_path, RUN_METADATA, [], draw)  # An attempt from scratch.
    assert list(tmp_path.iterdir()) == []


def test_another_history_is_refused(tmp_path):
    for content in ("[]", "{", '{"epoch": 1}\n'):
        (tmp_path / "history.jsonl").write_text(content)
        with pytest.raises(OutputError, match=r"history\.jsonl"):
            histories.load_history(tmp_path)


def test_the_last_lines_are_that_of_d2l_and_what_was_verified():
    history = make_history(2, verified_steps=4)
    history[0] = dataclasses.replace(history[0], test_accuracy=0.8449)
    summary = make_summary(history)
    assert last_lines(summary) == [
        "8 of 20 steps verified against one device",
        "test acc: 0.50, 2.5 sec/epoch on ['/device:CPU:0', '/device:CPU:1']",
    ]
    assert len(last_lines(make_summary(make_history(2)))) == 1
    assert summary["best_test_accuracy"] == 0.8449
    assert summary["images_per_sec"] == pytest.approx(0.6 * 1000 / 2.5)  # Of the other steps.


def start(path, config, *, overwrite=False):
    """Opens, checks and starts a run as `train` does; returns whether it was there before."""
    with open_run_directory(path, config) as run_directory:
        old = run_directory.old_config()
        if old and not overwrite:
            check_same_run(path, old, run_directory.config)
        run_directory.start(overwrite=overwrite)
        return bool(old)


def names(path):
    return {entry.name for entry in path.iterdir()}


def test_a_run_directory_is_made_and_found_again(tmp_path):
    path = tmp_path / "new folder" / "ü"
    config = {"model": "lenet", "names": (1, 2)}
    assert [start(path, config), start(path, config)] == [False, True]
    with pytest.raises(CheckpointError, match="model lenet → vgg") as refusal:
        start(path, {**config, "model": "vgg"})
    assert "names" not in str(refusal.value)


def test_a_verification_replaces_another_one_and_no_training(tmp_path):
    verify = {"command": "verify"}
    start(tmp_path / "one", {"command": "verify", "seed": 2})
    with open_command_directory(tmp_path / "one", verify, overwrite=False):
        pass
    start(tmp_path / "run", {"model": "lenet"})
    with pytest.raises(OutputError, match="another run"):
        open_command_directory(tmp_path / "run", verify, overwrite=False).__enter__()


def test_a_start_removes_what_a_killed_run_left_and_overwrite_the_records_and_nothing_else(
    tmp_path,
):
    start(tmp_path, {"seed": 0})
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    for name in (".lockstep-99-config.json", ".lockstep-7-traces", "log.txt", ".precious.tmp"):
        (tmp_path / name).touch()
    (checkpoints / ".lockstep-99-step-00000001-epoch-0000.safetensors").touch()
    start(tmp_path, {"seed": 0})
    assert names(tmp_path) == {".lock", "log.txt", "config.json", ".precious.tmp", "checkpoints"}
    assert names(checkpoints) == set()
    (checkpoints / "step-00000001-epoch-0000.safetensors").touch()
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "events.out.tfevents.000000000000.lockstep").touch()
    start(tmp_path, {"seed": 1}, overwrite=True)
    assert names(tmp_path) == {".lock", "log.txt", "config.json", ".precious.tmp"}
    assert load_run_config(tmp_path)["seed"] == 1


def test_the_directory_of_something_else_is_left_alone(tmp_path):
    for content in ("{}", "[" * 99_999):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(OutputError, match="files that this program did not write"):
            start(tmp_path, {}, overwrite=True)
        assert names(tmp_path) == {"config.json"}


@pytest.mark.parametrize("name", [".lock", "log.txt", "config.json"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("../victim")])
def test_neither_links_nor_pipes_in_the_place_of_records_are_used(tmp_path, name, make):
    """A link would lead elsewhere, and a pipe wait for its other end."""
    run_dir, victim = tmp_path / "run", tmp_path / "victim"
    victim.write_text("keep")
    start(run_dir, {})
    (run_dir / name).unlink(missing_ok=True)
    make(run_dir / name)
    with pytest.raises(OutputError), open_run_directory(run_dir, {}):
        open_log(run_dir)
    assert victim.read_text() == "keep"


def test_a_directory_in_use_names_the_process_and_its_end_releases_it(tmp_path):
    with open_run_directory(tmp_path / "run", {}):
        told = f"in use by process {os.getpid()}"
        with pytest.raises(OutputError, match=told), open_run_directory(tmp_path / "run", {}):
            pass
    start(tmp_path / "run", {})
    assert (tmp_path / "run" / ".lock").read_text() == str(os.getpid())


def test_the_figure_has_the_accuracies_and_says_what_and_where(tmp_path, monkeypatch):
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    history = make_history(3)
    plot_accuracy({"manual": (make_summary(history), history)}, tmp_path)
    svg = (tmp_path / "accuracy.svg").read_text()
    for part in ("GENERATED", "manual on 2 simulated devices: timing is not scaling", "lenet"):
        assert part in svg
    assert "test: 66.7%" in svg and "train, mean over the epoch: 70.0%" in svg
    assert matplotlib.image.imread(tmp_path / "accuracy.png").std() > 0.05  # No empty sheet.


def test_a_panel_has_the_accuracies_that_its_label_says_and_at_least_20_points():
    flat = [dataclasses.replace(record, test_accuracy=0.5) for record in make_history(2)]
    summary = make_summary(flat, dataset="fashion_mnist")
    figure = draw_accuracy(dict.fromkeys("ab", (summary, flat)))
    assert "Fashion-MNIST" in figure.get_suptitle() and "GENERATED" not in figure.get_suptitle()
    drawn = {axes.get_ylabel(): [*axes.lines[0].get_ydata()] for axes in figure.axes}
    train = "train accuracy, mean over the epoch"
    assert drawn == {"test accuracy": [0.5, 0.5], train: [0.1, 0.55]}
    flat = [dataclasses.replace(record, correct=500) for record in flat]
    (axes,) = draw_accuracy({"a": (summary, flat)}).axes
    low, high = axes.get_ylim()
    assert 0.199 < high - low < 0.3 and low < 0.5 < high
