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

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from .harness import CampaignError

# Campaign → cycles by default, and what one cycle is.
CAMPAIGNS = {
    "kills": (100, "a training that is disturbed by a signal or a failing disk, and resumed"),
    "bits": (1000, "a flipped bit in memory"),
    "network": (0, "a training with one network fault (root; 0: each fault once)"),
    "fuzz": (20, "500 damaged inputs of each kind"),
}


def main() -> int:
    """Runs the campaign of the command line; returns the exit code."""
    cycles = "; ".join(f"{name}: {told[1]}" for name, told in CAMPAIGNS.items())
    parser = argparse.ArgumentParser(prog="make campaign", description=f"One cycle of {cycles}.")
    parser.add_argument("campaign", choices=CAMPAIGNS)
    parser.add_argument("--cycles", type=int)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument(
        "--only", default="", help="kinds of faults, separated by commas: worker-killed"
    )
    options = parser.parse_args()
    if options.cycles is None:
        options.cycles = CAMPAIGNS[options.campaign][0]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Removes files and namespaces.
    campaign = importlib.import_module(f".{options.campaign}", __package__)
    counts: collections.Counter[str] = collections.Counter()
    start, failure = time.monotonic(), None
    with tempfile.TemporaryDirectory(prefix="campaign-", ignore_cleanup_errors=True) as folder:
        only = [kind.replace("-", " ") for kind in options.only.split(",") if kind]
        try:
            for told in campaign.run(
                pathlib.Path(folder).resolve(), options.cycles, options.seed, only, counts
            ):
                print(told, flush=True)
        except CampaignError as error:
            failure = error
            print(f"FAILED: {error}", flush=True)
        except Exception as error:  # Hypothesis raises those of the program, and its own groups.
            failure = error
            traceback.print_exc()
    shown = ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items()))
    minutes = (time.monotonic() - start) / 60
    verdict = "FAILED" if failure else "all held"
    print(f"{options.campaign} --seed={options.seed}: {verdict}; {shown}; {minutes:.1f} min")
    return int(failure is not None)


if __name__ == "__main__":
    sys.exit(main())
