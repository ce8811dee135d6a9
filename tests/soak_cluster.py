"""Kills, freezes and cuts off the workers of a small training, repeatedly: `make soak-cluster`.

Two to four workers train, each in a network namespace of its own (network.py); it needs root. Each
cycle ends the training in a random way at a random moment, or lets it survive, and the next one
resumes it. A finished training must have the weights of an undisturbed one: bit for bit if the
number of workers stayed the same, within rounding if each cycle drew another one.
"""

import argparse
import collections
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np

from app.records.checkpoint import checkpoint_paths, load_checkpoint
from app.records.history import load_summary
from app.records.run_directory import LOG_FILE
from app.runtime.fault_points import POINTS, VARIABLE
from cluster_run import ClusterRun
from network import Link, Network, unavailable
from network_faults import LOST, Cluster, FaultError, check
from soak import write_data
from soak_failures import TIMEOUT_SEC

COUNTS = (2, 3, 4)
LINK = Link(latency_sec=0.005)
START_SEC = 45  # After which workers that do not meet give up.
# After this, all workers must have ended, whatever was done to one of them.
END_SEC = 90.0
# Largest relative difference of the weights after trainings with other numbers of workers.
ROUNDING = 1e-3
TERMINATED, DISK_FULL, KILLED = 143, 8, -signal.SIGKILL
# Kind → exit codes that a worker may end with.
KINDS = {
    "kill": (0, LOST, KILLED, 134),
    "freeze": (0, LOST, 134),
    "short freeze": (0,),
    "partition": (0, LOST, 134),
    "short partition": (0,),
    "one-way partition": (0, LOST, 134),
    "disk full": (0, LOST, DISK_FULL, 134),
    "SIGTERM": (0, TERMINATED),
}


class ClusterSoak:
    """A training by workers that is interrupted and resumed.

    Args:
        folder: folder for all files.
        seed: seed of all random choices.
    """

    def __init__(self, folder: pathlib.Path, seed: int):
        self._random = random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.laps: collections.Counter[str] = collections.Counter()
        self._folder = folder
        write_data(folder / "data")
        self._undisturbed: dict[int, Cluster] = {}
        self._begin_lap()

    def cycle(self) -> str:
        """Starts the workers, disturbs them, and checks what they leave; returns what was done."""
        kind = self._random.choice(list(KINDS))
        self.counts[kind] += 1
        count = self._random.choice(COUNTS) if self._is_elastic else self._count
        victim, delay_sec = self._random.randrange(count), self._random.uniform(0, 6)
        environments: list[dict[str, str]] = [{} for _ in range(count)]
        if kind == "disk full":
            points = [point for point in POINTS if point.partition(".")[2] or point == "log"]
            point = f"{self._random.choice(points)}:{self._random.randint(1, 4)}:enospc"
            environments[0][VARIABLE] = point
        cluster = self._cluster
        num_saved = _num_saved(cluster.run_dir)
        with (
            Network(count, LINK, seed=self._random.randrange(2**32)) as network,
            cluster.start(
                network,
                f"--start_timeout_sec={START_SEC}",
                num_workers=count,
                environments=environments,
            ) as run,
        ):
            if self._random.random() < 0.9:  # Otherwise while the workers start.
                _wait_for_output(run)
            time.sleep(delay_sec)
            self._disturb(kind, network, run, victim)
            codes, expected = run.wait(END_SEC), KINDS[kind]
            if kind == "SIGTERM" and _num_saved(cluster.run_dir) == num_saved:
                expected += (LOST,)  # Before the first step, the worker ends without the others.
            check(all(code in expected for code in codes), f"{kind} of worker {victim}", run)
            check("Traceback" not in run.output(0), "a traceback", run)
        for path in checkpoint_paths(cluster.run_dir):
            load_checkpoint(path)  # Raises an error if it is damaged.
        told = f"{kind} of worker {victim} of {count} after {delay_sec:.1f} s: {codes}"
        if codes[0] == 0:
            self._end_lap()
            told += ", finished"
        return told

    def finish(self) -> None:
        """Lets the training finish, and checks it."""
        cluster = self._cluster
        with cluster.network(LINK) as network, cluster.start(network) as run:
            check(set(run.wait(TIMEOUT_SEC)) == {0}, "the last run failed", run)
        self._end_lap()

    def _disturb(self, kind: str, network: Network, run: ClusterRun, victim: int) -> None:
        count = len(run.processes)
        others = [index for index in range(count) if index != victim]
        if kind == "kill":
            run.signal(victim, signal.SIGKILL)
        elif kind == "SIGTERM":
            run.signal(victim, signal.SIGTERM)
        elif kind.endswith("freeze"):
            run.signal(victim, signal.SIGSTOP)
            time.sleep(3 if kind == "short freeze" else 30)
            run.signal(victim, signal.SIGCONT)
        elif kind.endswith("partition"):
            if kind == "one-way partition":
                network.cut(*[(victim, other) for other in others])
            else:
                network.isolate(victim)
            if kind == "short partition":
                time.sleep(3)
                network.heal()

    def _begin_lap(self) -> None:
        self._count = self._random.choice(COUNTS)
        self._is_elastic = self._random.random() < 0.3
        if self._count not in self._undisturbed:
            folder = self._folder / f"{self._count} workers"
            folder.mkdir()
            shutil.copytree(self._folder / "data", folder / "data")
            self._undisturbed[self._count] = Cluster(folder, self._count)
        self._cluster = self._undisturbed[self._count]
        self._cluster.next_run()

    def _end_lap(self) -> None:
        cluster = self._cluster
        if self._is_elastic:
            self.laps["elastic"] += 1
            _check_close(cluster.run_dir, cluster.folder / "run 0")
        else:
            self.laps[f"{self._count} workers"] += 1
            cluster.check_weights()
        self._begin_lap()


def _wait_for_output(run: ClusterRun) -> None:
    """Waits until the workers have met."""
    deadline = time.monotonic() + TIMEOUT_SEC
    while "replicas on" not in run.output(0) and None in run.codes():
        check(time.monotonic() < deadline, "the workers do not meet", run)
        time.sleep(0.02)


def _num_saved(run_dir: pathlib.Path) -> int:
    """Returns how many checkpoints the attempts of a run have saved."""
    log = run_dir / LOG_FILE
    return log.read_text(encoding="utf-8").count("Saved checkpoint ") if log.exists() else 0


def _check_close(run_dir: pathlib.Path, undisturbed: pathlib.Path) -> None:
    """Checks that two finished runs have the same weights, within rounding."""
    if load_summary(run_dir).status != "finished":
        raise FaultError(f"{run_dir}: not finished")
    ours, theirs = (load_checkpoint(checkpoint_paths(d)[-1]).state for d in (run_dir, undisturbed))
    for name, array in theirs.items():
        difference = np.linalg.norm(ours[name].astype(float) - array)
        if not difference <= ROUNDING * np.linalg.norm(array.astype(float)):
            raise FaultError(f"{run_dir}: {name} differs by {difference:.3g}")


def main() -> int:
    """Runs the requested cycles; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    if reason := unavailable():
        raise SystemExit(reason)
    print(f"soak of a cluster: {options.cycles} cycles, --seed={options.seed}", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-cluster-") as folder:
        soak = ClusterSoak(pathlib.Path(folder), options.seed)
        for number in range(1, options.cycles + 1):
            try:
                told = soak.cycle()
            except FaultError as error:
                print(f"cycle {number}: FAILED: {error}")
                return 1
            print(f"cycle {number}: {told}", flush=True)
        soak.finish()
    print(f"{options.cycles} cycles in {time.monotonic() - start:.0f} s; {dict(soak.counts)}")
    print(f"finished trainings, all with the right weights: {dict(soak.laps)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
