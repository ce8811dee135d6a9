"""A short run of each campaign; what they need of the machine is a reason to skip it."""

import collections
import random
import shutil
import subprocess
import sys

import pytest

from campaigns import fuzz, network
from campaigns.disk import Disk, Operation
from conftest import ROOT

CREATE, WRITE = Operation("create", ".a"), Operation("write", ".a", data=b"new")
SYNC, RENAME = Operation("sync", ".a"), Operation("rename", ".a", target="a")


def contents_of(path, *operations):
    """Returns the possible contents of a file after a power cut; None if it does not exist."""
    disk = Disk({})
    for operation in operations:
        disk.apply(operation)
    trees = list(disk.states(random.Random(0)))
    return {disk.contents[tree[path]] if path in tree else None for tree in trees}


def test_what_a_power_cut_may_leave():
    assert contents_of(".a", CREATE, WRITE) == {None, b"", b"new", b"\0\0\0", b"n"}
    assert contents_of(".a", CREATE, WRITE, SYNC) == {None, b"new"}
    assert contents_of(".a", CREATE, WRITE, SYNC, Operation("sync", "")) == {b"new"}
    assert b"" in contents_of("a", CREATE, WRITE, RENAME)
    assert contents_of("a", CREATE, WRITE, SYNC, RENAME) == {None, b"new"}


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_bad_input_is_refused_in_a_line(target):
    outcomes = fuzz.fuzz(target, max_examples=100, seed=1)
    assert outcomes["refused"] > 20 and outcomes["accepted"] > 0


def test_the_guard_of_the_fuzzer_sees_what_it_has_to(tmp_path):
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    for act in (
        lambda: outside.write_text("x"),
        lambda: (tmp_path / "new").mkdir(),
        lambda: __import__("pickle").loads(b"cos\nsystem\n."),
    ):
        with pytest.raises(AssertionError), fuzz.guarded(inside):
            act()
    assert not outside.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "needs"),
    [
        ("kills --cycles=4 --seed=3 --only=manual", ""),
        ("power --cycles=1 --seed=1 --only=short", "strace"),
        ("bits --cycles=50 --seed=7", ""),
        ("network --only=worker-killed", "namespaces"),
    ],
)
def test_a_short_campaign(words, needs):
    if needs == "strace" and not shutil.which("strace"):
        pytest.skip("needs strace")
    if needs == "namespaces" and (reason := network.unavailable()):
        pytest.skip(reason)
    command = [sys.executable, "-m", "tests.campaigns", *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": all held; " in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_a_failed_check_ends_a_campaign_with_1(tmp_path, monkeypatch):
    from campaigns import __main__, kills
    from campaigns.harness import CampaignError

    def fail(folder, cycles, seed, only, counts: collections.Counter):
        yield "one"
        raise CampaignError("lost")

    monkeypatch.setattr(kills, "run", fail)
    monkeypatch.setattr(sys, "argv", ["campaigns", "kills"])
    assert __main__.main() == 1
