"""The list of bugs of `make mutations` follows the program."""

import tomllib

import pytest

from conftest import ROOT

MUTATIONS = tomllib.loads((ROOT / "tests/mutations/mutations.toml").read_text("utf-8"))["mutation"]


@pytest.mark.parametrize("number", range(1, len(MUTATIONS) + 1))
def test_each_bug_can_be_made_in_one_place(number):
    mutation = MUTATIONS[number - 1]
    source = (ROOT / mutation["file"]).read_text("utf-8")
    assert source.count(mutation["old"]) == 1
    changed = source.replace(mutation["old"], mutation["new"])
    assert changed != source
    compile(changed, mutation["file"], "exec")


def test_every_package_of_the_program_has_one():
    packages = {
        *(path.parent.name for path in (ROOT / "app").glob("*/__init__.py")),
        *("strategies", "lockstep"),
    } - {"doctor"}  # It changes nothing.
    named = {mutation["file"].removeprefix("app/").split("/")[0] for mutation in MUTATIONS}
    assert len(MUTATIONS) >= 80 and named == packages
