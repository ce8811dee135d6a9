"""Runs a campaign: `python -m tests.campaigns kills --cycles=20 --seed=1`.

Prints what each cycle did, and one last line with counts; exits with 1 if a cycle failed.
"""

import argparse
import collections
import importlib
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
import traceback

from . import Options

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# Campaign → cycles by default, what one cycle is; 0: each that there is, once.
CAMPAIGNS = {
    "kills": (100, "a training that is disturbed by a signal or a failing disk, and resumed"),
    "fuzz": (20, "500 damaged inputs of each kind"),
    "mutations": (0, "a bug of mutations.toml; or so many drawn at random"),
}


def main() -> int:
    """Runs the campaign of the command line; returns the exit code."""
    told = "; ".join(f"{name}: {each[1]}" for name, each in CAMPAIGNS.items())
    parser = argparse.ArgumentParser(description=f"One cycle of {told}.")
    parser.add_argument("campaign", choices=CAMPAIGNS)
    parser.add_argument("--cycles", type=int)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--only", default="", help="names or kinds, as worker-killed,SIGKILL")
    parser.add_argument("--all", action="store_true", help="mutations: with slow tests, too")
    given = parser.parse_args()
    cycles = CAMPAIGNS[given.campaign][0] if given.cycles is None else given.cycles
    only = [kind.replace("-", " ") for kind in given.only.split(",") if kind]
    options = Options(cycles, given.seed, only, given.all)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Removes files.
    campaign = importlib.import_module(f".{given.campaign}", __package__)
    counts: collections.Counter[str] = collections.Counter()
    start, verdict = time.monotonic(), "all held"
    with tempfile.TemporaryDirectory(prefix="campaign-", ignore_cleanup_errors=True) as folder:
        try:
            for line in campaign.run(pathlib.Path(folder).resolve(), options, counts):
                print(line, flush=True)
        except Exception:  # A failed check.
            verdict = "FAILED"
            traceback.print_exc()
    shown = ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items()))
    minutes = (time.monotonic() - start) / 60
    print(f"{given.campaign} --seed={given.seed}: {verdict}; {shown}; {minutes:.1f} min")
    return int(verdict == "FAILED")


if __name__ == "__main__":
    sys.exit(main())
