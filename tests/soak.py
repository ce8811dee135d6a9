"""Disturbs small trainings of each strategy at random and resumes them: `make soak`.

Each cycle draws a strategy and a failure: a signal, a fault point, a damaged checkpoint, a limit of
memory or disk, a jump of the clock, or a second start. Afterwards the files must be complete, the
exit code and the last line right, and nothing may be left behind. A finished training must have the
weights of an undisturbed one.
"""

import argparse
import gzip
import os
import pathlib
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from app.data.data_sources import SHA256
from app.data.synthetic import generate_synthetic
from app.records.checkpoint import NUM_NEWEST_KEPT, checkpoint_paths, load_checkpoint
from app.records.history import load_history, load_summary
from forked_program import adopt_orphans, wait_for_orphans
from idx_files import write_idx
from soak_failures import FAILURES, NEED_MOUNTS, NO_THREAD_DATA, STALLED, Ended, Site, SoakError
from soak_places import enter_mount_namespace

NUM_TRAIN, NUM_TEST, EPOCHS = 500, 200, 4
STRATEGIES = ("single", "manual", "mirrored", "pipeline", "tensor", "sharded")
TRAIN = (
    *("--device=cpu", "--recipe=fast", "--deterministic", "--allow_unverified_data"),
    *("--global_batch_size=50", f"--epochs={EPOCHS}", "--checkpoint_every=3"),
    "--steps_per_call=1",
)
PROCESS_SHARE = 0.05
_ORPHANS_SEC = 10
# How the last line begins, by exit code.
_LAST_LINE = {130: ("interrupted", "a second"), 143: ("terminated", "a second")}


class Soak:
    """Trainings that are disturbed and resumed. This process must not use TensorFlow.

    Args:
        folder: folder for all files.
        seed: seed of all random choices.
        strategies: strategies to draw from.
        kinds: failures to draw from.
        has_mounts: whether this process may mount file systems.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        seed: int,
        strategies: Sequence[str],
        kinds: Sequence[str],
        *,
        has_mounts: bool,
    ):
        adopt_orphans()
        self._random = random.Random(seed)
        self._kinds = [kind for kind in kinds if has_mounts or kind not in NEED_MOUNTS]
        self.counts = {name: dict.fromkeys(self._kinds, 0) for name in strategies}
        write_data(folder / "data")
        self._shared_memory = _names(pathlib.Path("/dev/shm")) if has_mounts else None
        self.sites: dict[str, Site] = {}
        self._weights: dict[str, str] = {}
        for name in strategies:
            devices = [] if name == "single" else ["--num_devices=2"]
            self.sites[name] = Site(
                folder / name,
                [f"--strategy={name}", *devices, *TRAIN],
                folder / "data",
                self._random,
                process_share=PROCESS_SHARE,
                has_mounts=has_mounts,
            )

    def train_undisturbed(self) -> None:
        """Trains with each strategy once, for its weights and times."""
        for name in self.sites:
            self._train_undisturbed(name)

    def cycle(self) -> str:
        """Starts a training, disturbs it, and checks what it leaves; returns what was done."""
        kind, names = self._random.choice(self._kinds), list(self.sites)
        if kind == "truncated":  # It needs an earlier checkpoint.
            several = [n for n in names if len(checkpoint_paths(self.sites[n].run_dir)) > 1]
            names = several or names
        name = self._random.choice(names)
        site = self.sites[name]
        newest = [p for p in checkpoint_paths(site.run_dir) if p != site.truncated][-1:]
        self.counts[name][kind] += 1
        for output in site.temporary.parent.glob("output*.txt"):
            output.unlink()
        left_before = _names(site.temporary)
        told = f"{name}: {kind}"
        try:
            ended = FAILURES[kind](site)
            told = f"{name}: {ended.told}, exit code {ended.code}"
            self._check_end(site, ended, left_before)
            self._check_left(site)
            now = checkpoint_paths(site.run_dir)
            if site.truncated not in (*newest, *now):
                _check(not newest or (now and now[-1] >= newest[0]), f"{newest[:1]} is lost")
            if ended.code == 0:
                self._check_finished(name)
                told += ", finished"
        except Exception as error:
            outputs = sorted(site.temporary.parent.glob("output*.txt"))
            shown = [p.read_text(encoding="utf-8", errors="replace")[-2000:] for p in outputs]
            raise SoakError("\n".join([f"{told}: {error!r}", *shown])) from error
        return told

    def finish(self) -> None:
        """Lets all trainings finish, and checks them."""
        for name, site in self.sites.items():
            code = site.finish(site.start())
            _check(code == 0, f"the last run of {name} ended with {code}")
            self._check_left(site)
            self._check_finished(name)

    def close(self) -> None:
        """Removes the mounts."""
        for site in self.sites.values():
            if site.disk:
                site.disk.close()

    def _train_undisturbed(self, name: str) -> None:
        site, start = self.sites[name], time.monotonic()
        code = site.finish(site.start())
        sec = time.monotonic() - start
        site.startup_sec = site.recovery_sec.pop() if site.recovery_sec else sec
        site.steps_sec = sec - site.startup_sec
        output = (site.temporary.parent / "output.txt").read_text(encoding="utf-8")
        _check(code == 0, f"the undisturbed run of {name} ended with {code}\n{output}")
        self._weights[name] = load_summary(site.run_dir).weights_sha256
        self._check_left(site)
        site.next_run()

    def _check_end(self, site: Site, ended: Ended, left_before: list[str]) -> None:
        """Checks exit code, last line, and temporary files; some were left before."""
        _check(ended.code in ended.expected, f"exit code {ended.code}, not {ended.expected}")
        output = (site.temporary.parent / "output.txt").read_text(encoding="utf-8")
        _check("Traceback" not in output, "a traceback")
        lines = output.splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        if 0 < ended.code < NO_THREAD_DATA or ended.code == STALLED:
            _check(len(errors) == 1 and lines[-1] == errors[0], f"error lines: {errors}")
            _check("; " in lines[-1], "no advice")
        else:
            _check(not errors, f"error lines: {errors}")
        beginning = _LAST_LINE.get(ended.code, "")
        _check(not beginning or lines[-1].startswith(beginning), f"last line {lines[-1:]}")
        # What was killed, or ended by native code, leaves its folder. The next run removes it,
        # unless that run is refused before it needs temporary files.
        names, was_killed = _names(site.temporary), ended.code < 0 or ended.code == NO_THREAD_DATA
        known = [] if ended.code == 0 else left_before
        left = sorted(set(names) - set(known))
        _check(len(left) <= was_killed, f"left in TMPDIR after {ended.code}: {left}")

    def _check_left(self, site: Site) -> None:
        """Checks the files of the run, and that nothing else is left."""
        left = wait_for_orphans(_ORPHANS_SEC)
        _check(not left, f"processes left: {left}")
        if self._shared_memory is not None:
            found = _names(pathlib.Path("/dev/shm"))
            _check(found == self._shared_memory, f"/dev/shm: {found}")
        paths = checkpoint_paths(site.run_dir)
        _check(len(paths) <= NUM_NEWEST_KEPT + 2, f"{len(paths)} checkpoints")
        for path in paths:
            if path != site.truncated:  # It exists until the run reaches its step.
                load_checkpoint(path)

    def _check_finished(self, name: str) -> None:
        site = self.sites[name]
        summary, history = load_summary(site.run_dir), load_history(site.run_dir)
        _check(summary.status == "finished", f"status {summary.status}")
        _check(summary.weights_sha256 == self._weights[name], "other weights")
        _check([r.epoch for r in history] == list(range(1, EPOCHS + 1)), "a torn history")
        left = [p for p in site.run_dir.rglob(".*") if p.name != ".lock"]
        _check(not left, f"left behind: {left}")
        site.next_run()

    @property
    def laps(self) -> int:
        """How often a training was finished, after the undisturbed ones."""
        return sum(site.laps - 1 for site in self.sites.values())


def _check(holds: object, what: str) -> None:
    if not holds:
        raise SoakError(what)


def _names(path: pathlib.Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def write_data(folder: pathlib.Path) -> None:
    """Writes a part of Fashion-MNIST, if available, else of the generated images."""
    folder.mkdir()
    real = pathlib.Path(os.environ.get("FASHION_MNIST_DIR") or "/nonexistent")
    generated = generate_synthetic(num_train=NUM_TRAIN, num_test=NUM_TEST)
    arrays = (
        *(generated.train_images[..., 0], generated.train_labels),
        *(generated.test_images[..., 0], generated.test_labels),
    )
    for name, array in zip(SHA256, arrays, strict=True):
        if (real / f"{name}.gz").is_file():
            content = gzip.decompress((real / f"{name}.gz").read_bytes())
            size = array.size
            first = np.frombuffer(content, np.uint8, size, 16 if "images" in name else 8)
            array = first.reshape(array.shape)
        write_idx(folder / name, array)


def main() -> int:
    """Runs the requested cycles; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--kinds", default=",".join(FAILURES))
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Removes mounts and files.
    print(f"soak: {options.cycles} cycles, --seed={options.seed}", flush=True)
    choices = options.strategies.split(","), options.kinds.split(",")
    has_mounts, start = enter_mount_namespace(), time.monotonic()
    if not has_mounts:
        print(f"skipped, because they need root: {', '.join(NEED_MOUNTS)}")
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        soak, number = Soak(pathlib.Path(folder), options.seed, *choices, has_mounts=has_mounts), 0
        try:
            soak.train_undisturbed()
            for number in range(1, options.cycles + 1):
                print(f"cycle {number}: {soak.cycle()}", flush=True)
            soak.finish()
        except SoakError as error:
            print(f"failed: cycle {number} of {options.cycles}, --seed={options.seed}: {error}")
            return 1
        finally:
            _print_counts(soak)
            soak.close()
    minutes = (time.monotonic() - start) / 60
    print(
        f"soak: {options.cycles} of {options.cycles} cycles held, --seed={options.seed};"
        f" finished {soak.laps} times with the weights of an undisturbed run; {minutes:.1f} min"
    )
    return 0


def _print_counts(soak: Soak) -> None:
    """Prints a table of the failures by strategy, and the times to recovery."""
    names = list(soak.counts)
    print(f"{'':22}" + "".join(f"{name:>10}" for name in names))
    for kind in soak.counts[names[0]]:
        print(f"{kind:22}" + "".join(f"{soak.counts[name][kind]:10}" for name in names))
    medians = [statistics.median(soak.sites[n].recovery_sec or [float("nan")]) for n in names]
    print(f"{'seconds to a new step':22}" + "".join(f"{median:10.1f}" for median in medians))


if __name__ == "__main__":
    sys.exit(main())
