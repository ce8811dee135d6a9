"""The states of a disk after a power cut, and the first attempts of `make power-loss`."""

import random
import shutil

import pytest

from crash_states import Disk, Operation
from power_loss import Campaign

CREATE, WRITE = Operation("create", ".a"), Operation("write", ".a", data=b"new")
SYNC, RENAME = Operation("sync", ".a"), Operation("rename", ".a", target="a")


def states_after(*operations):
    """Returns the possible contents of the files after a power cut, as dictionaries."""
    disk = Disk({})
    for operation in operations:
        disk.apply(operation)
    trees = list(disk.states(random.Random(0)))
    return [{path: disk.contents[content] for path, content in tree.items()} for tree in trees]


def contents_of(path, *operations):
    return {state.get(path) for state in states_after(*operations)}


def test_what_is_not_synced_may_be_there_in_part_or_not_at_all():
    contents = contents_of(".a", CREATE, WRITE)
    assert {None, b"", b"new", b"\0\0\0", b"n", b"n\0\0", b"\0ew"} < contents
    assert len(contents) == 8  # One has other bytes.


def test_what_is_synced_is_there_once_its_name_is():
    assert contents_of(".a", CREATE, WRITE, SYNC) == {None, b"new"}
    assert contents_of(".a", CREATE, WRITE, SYNC, Operation("sync", "")) == {b"new"}


def test_a_rename_without_a_sync_of_the_file_may_name_anything():
    assert b"" in contents_of("a", CREATE, WRITE, RENAME)
    assert contents_of("a", CREATE, WRITE, SYNC, RENAME) == {None, b"new"}
    assert contents_of("a", CREATE, WRITE, SYNC, RENAME, Operation("sync", "")) == {b"new"}


def test_names_that_are_not_synced_may_change_in_another_order():
    first, second = Operation("create", "a"), Operation("create", "b")
    names = {frozenset(state) for state in states_after(first, second)}
    assert names == {frozenset(), frozenset("a"), frozenset("b"), frozenset("ab")}


def test_an_exchange_shows_both_directories_or_none_of_the_changes():
    made = [Operation("mkdir", "a"), Operation("mkdir", "b"), Operation("create", "a/x")]
    made += [Operation("sync", ""), Operation("sync", "a")]
    names = {
        frozenset(state) - {"a", "b"}
        for state in map(dict, _names_after(*made, Operation("exchange", "a", target="b")))
    }
    assert names == {frozenset({"a/x"}), frozenset({"b/x"})}


def _names_after(*operations):
    disk = Disk({})
    for operation in operations:
        disk.apply(operation)
    return disk.states(random.Random(0))


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
def test_a_power_cut_at_any_operation_loses_nothing_that_was_reported(tmp_path):
    campaign = Campaign(tmp_path, seed=1, num_attempts=2)
    campaign.check_states()
    assert not campaign.problems
    assert campaign.counts["distinct states"] > 100
