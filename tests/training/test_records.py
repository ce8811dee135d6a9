"""Tests history, run directories and figures: atomic writes, and reading back."""

import dataclasses
import errno
import os

import matplotlib
import matplotlib.image
import pytest

from app.errors import CheckpointError, DiskFullError, OutputError
from app.records import files, run_directory
from app.records import history as histories
from app.records.files import publish, read_json, write_json
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


def make_metadata(config=None, **changes):
    config = {**RUN_METADATA.config, "strategy": "manual", **(config or {})}
    return dataclasses.replace(RUN_METADATA, config=config, **changes)


def make_summary(history, config=None, **changes):
    return summarize(make_metadata(config, **changes), history)


def test_a_published_directory_is_on_the_disk_before_its_name(tmp_path, monkeypatch):
    temporary, path = tmp_path / "temporary", tmp_path / "traces"
    (temporary / "manual").mkdir(parents=True)
    (temporary / "manual" / "step-00001.safetensors").write_text("arrays")
    done = []
    monkeypatch.setattr(files, "fsync", lambda at: done.append((at.name, path.exists())))
    publish(temporary, path)
    assert done == [
        *(("temporary", False), ("manual", False), ("step-00001.safetensors", False)),
        (tmp_path.name, True),
    ]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    write_json(path, {"a": 1})
    full = OSError(errno.ENOSPC, "No space left on device")
    for call, error, raised, match in [
        ("fsync", KeyboardInterrupt, KeyboardInterrupt, None),
        ("fsync", full, DiskFullError, r"file\.json: No .* 13 bytes needed, [\d,]+ free"),
        ("replace", OSError(errno.EROFS, "Read-only"), OutputError, "file.json: Read-only"),
    ]:

        def fail(*_, error=error):
            raise error

        with monkeypatch.context() as patch, pytest.raises(raised, match=match):
            patch.setattr(os, call, fail)
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
        histories.write_history(tmp_path, make_metadata(), history, draw)
        assert histories.load_history(tmp_path) == history
        assert histories.load_summary(tmp_path) == summary
    assert drawn == [{"manual": (summary, history)}]
    assert (summary["status"], summary["steps"], summary["weights_sha256"]) == (
        "running", 30, "3" * 64,
    )  # fmt: skip
    assert make_summary(make_history(4))["status"] == "finished"
    histories.write_history(tmp_path, make_metadata(), [], draw)  # An attempt from scratch.
    assert list(tmp_path.iterdir()) == []


def test_the_last_lines_are_that_of_d2l_and_what_was_verified():
    history = make_history(2)
    history[0] = dataclasses.replace(history[0], test_accuracy=0.8449)
    lines = last_lines(make_summary(history))
    told = "test acc: 0.50, 2.5 sec/epoch on ['/device:CPU:0', '/device:CPU:1']"
    assert lines == [told] and make_summary(history)["best_test_accuracy"] == 0.8449
    verified = [dataclasses.replace(record, verified_steps=4) for record in history]
    assert last_lines(make_summary(verified)) == [
        "8 of 20 steps verified against one device", told,
    ]  # fmt: skip


def test_images_per_second_are_of_the_steps_that_are_not_verified():
    (record,) = make_history(1, verified_steps=5)
    assert record.images_per_sec == pytest.approx(0.5 * 1000 / 2.5)


@pytest.mark.parametrize("content", ["[]", "{", '{"epoch": 1}\n'])
def test_another_history_is_refused(tmp_path, content):
    (tmp_path / "history.jsonl").write_text(content)
    with pytest.raises(OutputError, match=r"history\.jsonl"):
        histories.load_history(tmp_path)


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
    assert load_run_config(path)["model"] == "lenet"
    with pytest.raises(CheckpointError, match="model lenet → vgg") as refusal:
        start(path, {**config, "model": "vgg"})
    assert "names" not in str(refusal.value)
    write_json(path / "config.json", {**load_run_config(path), "format": None})
    with pytest.raises(CheckpointError, match="written by version 2"):
        start(path, config)


def test_a_verification_replaces_another_one_and_no_training(tmp_path):
    verify, other = {"command": "verify"}, pytest.raises(OutputError, match="another run")
    start(tmp_path / "one", {"command": "verify", "seed": 2})
    start(tmp_path / "run", {"model": "lenet"})
    with open_command_directory(tmp_path / "one", verify, overwrite=False):
        pass
    with other, open_command_directory(tmp_path / "run", verify, overwrite=False):
        pass


def test_overwrite_removes_the_records_and_nothing_else_even_if_it_is_cut_off(
    tmp_path, monkeypatch
):
    start(tmp_path, {"seed": 0})
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "events.out.tfevents.000000000000.lockstep").write_text("")
    (tmp_path / "my notes.txt").write_text("keep")
    removed = []

    def cut_off(path):
        removed.append(path.name)
        if len(removed) > 1:
            raise KeyboardInterrupt
        path.unlink()

    with monkeypatch.context() as patch:
        patch.setattr(run_directory.files, "remove", cut_off)
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path, {"seed": 1}, overwrite=True)
    assert not (tmp_path / "summary.json").exists() and load_run_config(tmp_path)["seed"] == 0
    start(tmp_path, {"seed": 1}, overwrite=True)
    assert names(tmp_path) == {".lock", "config.json", "my notes.txt"}
    assert load_run_config(tmp_path)["seed"] == 1


def test_what_is_refused_before_a_run_starts_changes_nothing(tmp_path):
    with pytest.raises(OutputError, match="refused"), open_run_directory(tmp_path / "new", {}):
        (tmp_path / "new" / "log.txt").touch()
        raise OutputError("refused")
    assert not (tmp_path / "new").exists()
    start(tmp_path / "other", {"seed": 0})
    with open_run_directory(tmp_path / "other", {"seed": 1}):
        pass
    assert load_run_config(tmp_path / "other")["seed"] == 0


def test_what_a_killed_run_left_is_removed_and_nothing_of_others(tmp_path):
    (tmp_path / ".lockstep-99-config.json").write_text("half")
    (tmp_path / "log.txt").write_text("half")
    start(tmp_path, {})
    (tmp_path / ".precious.tmp").mkdir()
    (tmp_path / ".lockstep-7-traces").mkdir()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".lockstep-99-step-00000001-epoch-0000.safetensors").touch()
    start(tmp_path, {})
    assert names(tmp_path) == {".lock", "log.txt", "config.json", ".precious.tmp", "checkpoints"}
    assert names(tmp_path / "checkpoints") == set()


@pytest.mark.parametrize("content", ["{}", "[" * 99_999])
def test_the_directory_of_something_else_is_left_alone(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(OutputError, match="files that this program did not write"):
        start(tmp_path, {}, overwrite=True)
    assert names(tmp_path) == {"config.json"}


def test_neither_links_nor_pipes_in_the_place_of_records_are_used(tmp_path):
    """A link would lead elsewhere, and a pipe wait for its other end."""
    run_dir, victim = tmp_path / "run", tmp_path / "victim"
    victim.write_text("keep")
    for name in (".lock", "log.txt", "config.json"):
        for make in (os.mkfifo, lambda path: path.symlink_to("../victim")):
            start(run_dir, {})
            (run_dir / name).unlink(missing_ok=True)
            make(run_dir / name)
            with pytest.raises(OutputError), open_run_directory(run_dir, {}):
                open_log(run_dir)
            (run_dir / name).unlink()
    assert victim.read_text() == "keep"


def test_a_directory_in_use_names_the_process_and_its_end_releases_it(tmp_path):
    with open_run_directory(tmp_path / "run", {}):
        told = f"in use by process {os.getpid()}"
        with pytest.raises(OutputError, match=told), open_run_directory(tmp_path / "run", {}):
            pass
    start(tmp_path / "run", {})
    assert (tmp_path / "run" / ".lock").read_text() == str(os.getpid())


def test_the_plot_has_the_accuracies_and_says_what_and_where(tmp_path, monkeypatch):
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    history = make_history(3)
    plot_accuracy({"manual": (make_summary(history), history)}, tmp_path)
    svg = (tmp_path / "accuracy.svg").read_text()
    for part in ("GENERATED", "manual on 2 simulated devices: timing is not scaling", "lenet"):
        assert part in svg
    assert "test: 66.7%" in svg and "train, mean over the epoch: 70.0%" in svg
    assert matplotlib.image.imread(tmp_path / "accuracy.png").std() > 0.05  # No empty sheet.
    runs = {
        name: (make_summary(history, {"strategy": name}, dataset="fashion_mnist"), history)
        for name in ("manual", "mirrored")
    }
    plot_accuracy(runs, tmp_path)
    svg = (tmp_path / "accuracy.svg").read_text()
    assert "manual: 66.7%" in svg and "mirrored: 66.7%" in svg
    assert "Fashion-MNIST" in svg and "GENERATED" not in svg


def test_each_panel_has_the_accuracies_that_its_label_says():
    history = [dataclasses.replace(record, test_accuracy=0.25) for record in make_history(2)]
    figure = draw_accuracy({name: (make_summary(history), history) for name in "ab"})
    drawn = {axes.get_ylabel(): [*axes.lines[0].get_ydata()] for axes in figure.axes}
    assert drawn == {
        "test accuracy": [0.25, 0.25],
        "train accuracy, mean over the epoch": [0.1, 0.55],
    }
