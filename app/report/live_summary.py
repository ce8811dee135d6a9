"""Builds the top of the page of a training in progress: its state and its numbers."""

import dataclasses
import os
import pathlib
import statistics
import time
from typing import Any

from app.records.caveats import (
    DATASET_CAVEATS,
    TIMING_CAVEAT,
    dataset_title,
    injected_fault_caveat,
)
from app.report.live_run import LiveRun
from app.report.page_parts import count, devices_text, number, whole
from app.report.record_finder import MEASURED
from app.runtime.time_left import duration_text

_NUM_RECENT = 5


@dataclasses.dataclass(frozen=True)
class Tile:
    """A number with its name; `mark` is "good", "bad" or ""."""

    name: str
    value: str
    note: str = ""
    mark: str = ""


def _shown(path: pathlib.Path) -> str:
    """Returns a path as text, for any bytes."""
    return os.fspath(path).encode("utf-8", "replace").decode()


def title(run: LiveRun) -> str:
    """Returns the title of the page and its tab, with the progress first."""
    mark, headline, _ = _state(run)
    is_running = run.attempt is not None and run.attempt.stop is None and mark != "bad"
    share = f"{run.step / run.num_steps:.0%}" if is_running and run.num_steps else ""
    return f"{share or headline.partition(':')[0]} · {_shown(run.path)}"


def summary(run: LiveRun) -> dict[str, Any]:
    """Returns the contents of the top of the page."""
    mark, headline, what_next = _state(run)
    return {
        "name": _shown(run.path),
        "setup": _setup(run),
        "caveats": _caveats(run),
        "mark": mark,
        "headline": headline,
        "what_next": what_next,
        "step": run.step,
        "num_steps": run.num_steps if run.attempt else None,
        "tiles": _tiles(run, mark),
    }


def _state(run: LiveRun) -> tuple[str, str, str]:
    """Returns a mark ("good", "bad", "differs", ""), a headline, and advice."""
    if run.attempt is None:
        return _state_before_start(run)
    if run.attempt.stop is not None:
        return _state_at_end(run, run.attempt.stop)
    if not run.is_alive:
        return (
            "bad",
            f"Stopped without a last message, at step {_progress(run)}",
            "No process with the number in its log exists here: it was killed, or it runs on"
            " another machine or in a container. If it was killed, the same command resumes it"
            " from the last checkpoint.",
        )
    if not run.step:
        return "", "Compiling: the first step follows", ""
    epochs, steps_per_epoch = run.epochs or 0, run.steps_per_epoch or run.step or 1
    finished = len(run.history)
    verb = "Evaluating" if run.step >= (finished + 1) * steps_per_epoch else "Training"
    if finished and finished == epochs:
        verb = "Saving"
    epoch = min(finished + 1, epochs) if epochs else finished + 1
    of = f" of {epochs}" if epochs else ""
    return "", f"{verb}: epoch {epoch}{of}, step {_progress(run)}", ""


def _state_before_start(run: LiveRun) -> tuple[str, str, str]:
    command = run.config.get("command")
    if command in MEASURED:
        return "differs", f"No training: this is a run of {command}", "Only trainings are shown."
    if run.has_lock:
        return "", "Starting: the data are loaded and the model is built", ""
    return "", "No training here yet", "This page shows the training as soon as it has started."


def _state_at_end(run: LiveRun, stop: dict) -> tuple[str, str, str]:
    status, error = str(stop["status"]), str(stop.get("error", ""))
    if status == "finished":
        last = run.history[-1] if run.history else None
        result = f", test loss {last.test_loss:.4f}" if last else ""
        if last and last.test_accuracy is not None:
            result = f", test accuracy {last.test_accuracy:.4f}"
        return "good", f"Finished: {count(len(run.history), 'epoch')}{result}", ""
    what = status.replace("_", " ").capitalize()
    if status in ("interrupted", "terminated"):
        headline = f"{what} at step {_progress(run)}"
        return "differs", headline, "The same command resumes the training from this step."
    return "bad", f"{what}: stopped at step {_progress(run)}", error


def _progress(run: LiveRun) -> str:
    return f"{run.step:,} of {run.num_steps:,}" if run.num_steps else f"{run.step:,}"


def _setup(run: LiveRun) -> str:
    """Returns model, data and devices in a line, as far as known."""
    config, recorded = run.config, run.recorded("config")
    devices = [str(device) for device in recorded.get("devices", [])]
    data = str(run.recorded("data").get("name", config.get("dataset", "")))
    model = config.get("case") or config.get("model")
    known = [
        f"{model} on {dataset_title(data)}" if model else "",
        str(config.get("strategy") or ""),
        devices_text(devices, bool(recorded.get("simulated_devices"))) if devices else "",
        f"recipe {config['recipe']}" if config.get("recipe") and not config.get("case") else "",
        f"batch {config['global_batch_size']}" if config.get("global_batch_size") else "",
    ]
    return ", ".join(each for each in known if each)


def _caveats(run: LiveRun) -> list[str]:
    """Returns the caveats of the training."""
    fault, data = run.config.get("inject"), run.recorded("data").get("name")
    caveats = [injected_fault_caveat(str(fault))] if fault else []
    caveats += [DATASET_CAVEATS[data]] if data in DATASET_CAVEATS else []
    return caveats + [TIMING_CAVEAT] * bool(run.recorded("config").get("simulated_devices"))


def noun(run: LiveRun) -> str:
    """Returns the noun for the training examples."""
    return "example" if run.config.get("case") else "image"


def _tiles(run: LiveRun, mark: str) -> list[Tile]:
    """Returns the numbers on top of the page."""
    if run.attempt is None:
        return []
    tiles = [Tile("loss", number(_recent(run, "steps/loss"), ".4f"), "training, last steps")]
    accuracy = _recent(run, "steps/accuracy")
    if accuracy is not None:
        tiles.append(Tile("accuracy", number(accuracy, ".4f"), "training, last steps"))
    if run.history and run.history[-1].test_accuracy is not None:
        best = max(r.test_accuracy for r in run.history if r.test_accuracy is not None)
        text = number(run.history[-1].test_accuracy, ".4f")
        tiles.append(Tile("test accuracy", text, f"best {best:.4f}"))
    speed = number(_recent(run, "steps/images_per_sec"))
    tiles += [Tile(f"{noun(run)}s/s", speed, "last steps"), _verification_tile(run)]
    return tiles + _time_tiles(run, is_running=run.attempt.stop is None and mark != "bad")


def _recent(run: LiveRun, tag: str) -> float | None:
    """Returns the median of the last values, because one call may have a single step."""
    values = [p.values[tag] for p in run.points[-_NUM_RECENT:] if tag in p.values]
    return statistics.median(values) if values else None


def _verification_tile(run: LiveRun) -> Tile:
    verified, wrong = run.verified_steps
    if run.attempt and run.attempt.stop and run.attempt.stop["status"] == "mismatch":
        return Tile("verified steps", whole(verified), "then the mismatch above", "bad")
    if not verified:
        return Tile("verified steps", "0", "none so far")
    note = f"{wrong:,} mismatch{'es' * (wrong != 1)}"
    return Tile("verified steps", whole(verified), note, "bad" if wrong else "good")


def _time_tiles(run: LiveRun, *, is_running: bool) -> list[Tile]:
    stop, now = run.attempt.stop if run.attempt else None, time.time()
    if stop is not None:
        elapsed = stop.get("elapsed_sec")
        text = duration_text(elapsed) if isinstance(elapsed, int | float) else "–"
        return [Tile("elapsed", text, "in the last attempt")]
    tiles = []
    if run.started is not None and is_running:
        last = f"last step {duration_text(now - run.latest.time)} ago" if run.latest else ""
        tiles.append(Tile("elapsed", duration_text(now - run.started), last))
    if run.remaining_sec is not None and is_running:
        end = time.localtime(now + min(run.remaining_sec, 1e9))
        form = "%H:%M" if run.remaining_sec < 86_400 / 2 else "%Y-%m-%d %H:%M"
        until = f"expected end {time.strftime(form, end)}"
        tiles.append(Tile("time left", f"≈ {duration_text(run.remaining_sec)}", until))
    return tiles
