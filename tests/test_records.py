"""Tests history, run directories and figures: atomic writes, and reading back."""

import dataclasses
import errno
import fcntl
import json
import multiprocessing
import os

import matplotlib.image
import numpy as np
import pytest

from app.options.names import FRAMEWORKS
from app.records import files
from app.records import history as histories
from app.records.files import publish, read_json, write_atomically, write_json
from app.records.history import EpochRecord, Summary
from app.records.run_directory import load_run_config, open_run_directory
from app.report.accuracy_plot import draw_accuracy, plot_accuracy
from app.runtime.errors import CheckpointError, DiskFullError, OutputError
from strategies import STRATEGIES


def make_summary(**changes):
    examples = {"str": "x", "int": 1, "float": 0.5, "bool": False, "list": []}
    values = {
        field.name: examples.get(getattr(field.type, "__name__", ""), {})
        for field in dataclasses.fields(Summary)
    }
    values |= {
        "status": "running", "strategy": "manual", "num_replicas": 2, "num_shards": 2,
        "num_copies": 2, "simulated_devices": True,
        "devices": ["/device:CPU:0", "/device:CPU:1"], "model": "lenet", "dataset": "synthetic",
        "num_train_examples": 1000, "global_batch_size": 256, "learning_rate": 0.2, "epochs": 4,
        "test_accuracy": 0.8449, "best_test_accuracy": 0.5, "epoch_sec": 2.54, "recipe": "d2l",
    }  # fmt: skip
    return Summary(**{**values, **changes})


def make_history(num_epochs):
    return [
        EpochRecord(i, 10 * i, 1 / i, 1 - 0.9 / i, 1.1 / i, 1 - 1 / i, 2.5, 400.0)
        for i in range(1, num_epochs + 1)
    ]


class TestFiles:
    def test_a_published_directory_is_on_the_disk_before_its_name(self, tmp_path, monkeypatch):
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

    def test_a_failed_write_leaves_the_old_file_and_nothing_else(self, tmp_path):
        path = tmp_path / "file.json"
        write_json(path, {"a": 1})

        def fail(temporary):
            temporary.write_text("half")
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write_atomically(path, fail, size_bytes=4)
        assert read_json(path) == {"a": 1}
        assert [p.name for p in tmp_path.iterdir()] == ["file.json"]

    def test_a_full_disk_is_named_and_cleaned_up(self, tmp_path):
        def fill(temporary):
            temporary.write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.raises(
            DiskFullError, match=r"file\.json: No .* 4,321 bytes needed, [\d,]+ free"
        ):
            write_atomically(tmp_path / "file.json", fill, size_bytes=4321)
        assert list(tmp_path.iterdir()) == []


class TestHistory:
    def test_round_trip(self, tmp_path):
        assert histories.load_history(tmp_path) == []
        assert histories.load_summary(tmp_path) is None
        histories.write_history(tmp_path, make_history(3))
        histories.write_summary(tmp_path, make_summary())
        assert histories.load_history(tmp_path) == make_history(3)
        assert histories.load_summary(tmp_path) == make_summary()
        lines = (tmp_path / "history.jsonl").read_text().splitlines()
        assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3]

    @pytest.mark.parametrize("content", ["", "[]", "{", '{"epoch": 1}\n', "\x00"])
    def test_other_content_is_refused(self, tmp_path, content):
        (tmp_path / "summary.json").write_text(content)
        (tmp_path / "history.jsonl").write_text(content or "{")
        with pytest.raises(OutputError, match=r"summary\.json"):
            histories.load_summary(tmp_path)
        with pytest.raises(OutputError, match=r"history\.jsonl"):
            histories.load_history(tmp_path)

    def test_values_of_another_type_are_refused(self, tmp_path):
        histories.write_summary(tmp_path, make_summary(test_accuracy="high"))
        with pytest.raises(OutputError, match="test_accuracy is 'high'"):
            histories.load_summary(tmp_path)

    def test_the_last_line_is_that_of_d2l(self):
        assert make_summary().last_line() == (
            "test acc: 0.84, 2.5 sec/epoch on ['/device:CPU:0', '/device:CPU:1']"
        )


def hold(path, ready, release):
    with open_run_directory(path, {"a": 1}):
        ready.set()
        release.wait(30)


def start(path, config, *, overwrite=False):
    """Opens, checks and starts a run as `train` does; returns whether it was there before."""
    with open_run_directory(path, config) as run_directory:
        refused = not overwrite and run_directory.is_started
        if refused:
            run_directory.check_same_run()
        run_directory.start(overwrite=overwrite)
        return refused


class TestRunDirectory:
    def test_it_is_made_and_found_again(self, tmp_path):
        path = tmp_path / "new folder" / "ü"
        config = {"model": "lenet", "names": (1, 2)}
        assert [start(path, config), start(path, config)] == [False, True]
        assert load_run_config(path)["model"] == "lenet"

    def test_another_configuration_is_refused_with_the_changes(self, tmp_path):
        start(tmp_path, {"seed": 0, "epochs": 2})
        with pytest.raises(CheckpointError, match="epochs 2 → 3") as refusal:
            start(tmp_path, {"seed": 0, "epochs": 3})
        assert "seed" not in str(refusal.value)

    def test_overwrite_removes_the_records_and_nothing_else(self, tmp_path):
        start(tmp_path, {"seed": 0})
        (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
        (tmp_path / "summary.json").write_text("{}")
        (tmp_path / "my notes.txt").write_text("keep")
        assert not start(tmp_path, {"seed": 1}, overwrite=True)
        assert {p.name for p in tmp_path.iterdir()} == {".lock", "config.json", "my notes.txt"}
        assert load_run_config(tmp_path)["seed"] == 1

    def test_overwrite_cut_off_leaves_no_finished_run(self, tmp_path, monkeypatch):
        start(tmp_path, {"seed": 0})
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "summary.json").write_text("{}")
        removed = []

        def cut_off(path):
            removed.append(path.name)
            if len(removed) > 1:
                raise KeyboardInterrupt
            path.unlink()

        with monkeypatch.context() as patch:
            patch.setattr("app.records.run_directory.remove", cut_off)
            with pytest.raises(KeyboardInterrupt):
                start(tmp_path, {"seed": 1}, overwrite=True)
        assert not (tmp_path / "summary.json").exists() and (tmp_path / "config.json").exists()
        start(tmp_path, {"seed": 1}, overwrite=True)
        assert {p.name for p in tmp_path.iterdir()} == {".lock", "config.json"}

    def test_nothing_is_lost_before_the_new_run_starts(self, tmp_path):
        start(tmp_path, {"seed": 0})
        with open_run_directory(tmp_path, {"seed": 1}):
            pass  # Something is refused here: no data, no such device.
        assert load_run_config(tmp_path)["seed"] == 0

    @pytest.mark.parametrize("there", [[], ["log.txt"]])
    def test_a_refused_start_leaves_what_was_there(self, tmp_path, there):
        path = tmp_path / "run"
        if there:
            path.mkdir()
        for name in there:
            (path / name).write_text("keep")
        with pytest.raises(OutputError, match="refused"), open_run_directory(path, {}):
            (path / "log.txt").open("a").close()
            raise OutputError("refused")
        assert path.exists() == bool(there)
        assert all((path / name).read_text() == "keep" for name in there)

    def test_temporary_files_of_others_are_left_alone(self, tmp_path):
        start(tmp_path, {})
        (tmp_path / ".precious.tmp").mkdir()
        start(tmp_path, {})
        assert (tmp_path / ".precious.tmp").exists()

    def test_a_lock_that_leads_elsewhere_is_not_followed(self, tmp_path):
        (tmp_path / "victim").write_text("keep")
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / ".lock").symlink_to("../victim")
        with pytest.raises(OutputError, match="symbolic link"):
            start(tmp_path / "run", {})
        assert (tmp_path / "victim").read_text() == "keep"

    @pytest.mark.parametrize("leftover", [".config.json.99.tmp", "log.txt"])
    def test_what_a_killed_run_left_is_ours(self, tmp_path, leftover):
        (tmp_path / leftover).write_text("half")
        start(tmp_path, {})
        assert not (tmp_path / ".config.json.99.tmp").exists()

    @pytest.mark.parametrize("name", ["thesis.tex", "config.json"])
    def test_the_directory_of_something_else_is_left_alone(self, tmp_path, name):
        (tmp_path / name).write_text('{"important": true}')
        with pytest.raises(OutputError, match="files that this program did not write"):
            start(tmp_path, {}, overwrite=True)
        assert [p.name for p in tmp_path.iterdir()] == [name]

    @pytest.mark.parametrize("place", ["/dev/null/x", "/proc/x", "file"])
    def test_places_that_cannot_be_directories(self, tmp_path, place):
        (tmp_path / "file").write_text("")
        path = tmp_path / place
        with pytest.raises(OutputError, match=str(path)):
            start(path, {})

    def test_a_directory_in_use_names_the_process(self, tmp_path):
        context = multiprocessing.get_context("spawn")
        ready, release = context.Event(), context.Event()
        holder = context.Process(target=hold, args=(tmp_path / "run", ready, release))
        holder.start()
        try:
            assert ready.wait(60)
            with pytest.raises(OutputError, match=f"in use by process {holder.pid}"):
                start(tmp_path / "run", {})
        finally:
            release.set()
            holder.join(60)
        start(tmp_path / "run", {})
        assert (tmp_path / "run" / ".lock").read_text() == str(os.getpid())

    def test_a_lock_file_that_was_removed_is_not_the_lock(self, tmp_path, monkeypatch):
        """A run that has not started removes its lock file while another one waits for it."""
        flock, path = fcntl.flock, tmp_path / "run"
        calls = []

        def remove_first(*arguments):
            if not calls:
                (path / ".lock").unlink()
            calls.append(arguments)
            flock(*arguments)

        monkeypatch.setattr(fcntl, "flock", remove_first)
        with open_run_directory(path, {}), pytest.raises(OutputError, match="in use by process"):
            start(path, {})


class TestPlots:
    def make_run(self, path, num_epochs=3, **changes):
        path.mkdir()
        histories.write_history(path, make_history(num_epochs))
        histories.write_summary(path, make_summary(**changes))
        return path

    @pytest.mark.parametrize("num_epochs", [1, 4])
    def test_one_run(self, tmp_path, num_epochs):
        run_dir = self.make_run(tmp_path / "run", num_epochs)
        plot_accuracy([run_dir], run_dir)
        picture = matplotlib.image.imread(run_dir / "accuracy.png")
        assert picture.shape[0] > 350 and picture.shape[1] > 800
        assert picture.std() > 0.05  # Not an empty sheet.
        svg = (run_dir / "accuracy.svg").read_text()
        assert svg.rstrip().endswith("</svg>")

    def test_accuracies_after_one_epoch_are_bars(self, tmp_path):
        run_dir = self.make_run(tmp_path / "run", 1, epochs=1)
        summary, history = histories.load_summary(run_dir), histories.load_history(run_dir)
        (axes,) = draw_accuracy({"manual": (summary, history)}).axes
        (record,) = history
        drawn = [bar.get_width() for bar in axes.patches]
        assert drawn == [record.test_accuracy, record.train_accuracy]
        assert [text.get_text() for text in axes.texts] == [f"{each:.1%}" for each in drawn]

    def test_percents_on_the_axis_are_whole(self, tmp_path):
        run_dir = self.make_run(tmp_path / "run", 2)
        run = histories.load_summary(run_dir), histories.load_history(run_dir)
        figure = draw_accuracy({"manual": run})
        (axes,) = figure.axes
        figure.canvas.draw()
        percents = 100 * axes.get_yticks()
        np.testing.assert_allclose(percents, np.round(percents), atol=1e-9)
        low, high = axes.get_ylim()
        assert high - low >= 0.1
        assert [tick for tick in axes.get_xticks() if 0.5 <= tick <= 1.5] == [1]

    def test_title_and_legend_say_what_and_where(self, tmp_path, monkeypatch):
        import matplotlib

        monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
        run_dir = self.make_run(tmp_path / "run")
        plot_accuracy([run_dir], run_dir)
        svg = (run_dir / "accuracy.svg").read_text()
        for part in ("GENERATED", "manual on 2 simulated devices: timing is not scaling", "lenet"):
            assert part in svg
        assert "test: 66.7%" in svg and "train: 70.0%" in svg

    def test_several_runs_all_have_a_curve(self, tmp_path, monkeypatch):
        import matplotlib

        monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
        names = [*STRATEGIES, *FRAMEWORKS]
        runs = [
            self.make_run(tmp_path / name, strategy=name, dataset="fashion_mnist") for name in names
        ]
        plot_accuracy(runs, tmp_path)
        svg = (tmp_path / "accuracy.svg").read_text()
        for name in names:
            assert f"{name}: 66.7%" in svg
        assert "Fashion-MNIST" in svg and "GENERATED" not in svg


def test_a_number_without_limit_is_refused(tmp_path):
    values = dataclasses.asdict(make_summary()) | {"steps": 10**400}
    (tmp_path / "summary.json").write_text(json.dumps(values))
    with pytest.raises(OutputError, match="steps is too large"):
        histories.load_summary(tmp_path)
