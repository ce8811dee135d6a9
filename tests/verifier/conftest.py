"""Fixtures of the tests of the verifier."""

import pytest

from tests.verifier.recorder_scripts import Scripts


@pytest.fixture(scope="module")
def scripts():
    """Runs scripts of frameworks; each framework is imported once for a file of tests."""
    with Scripts() as scripts:
        yield scripts


@pytest.fixture
def run(scripts, tmp_path):
    """Returns a function that runs a script of a framework, which has to end well."""

    def run_script(package, script, *arguments, **options):
        options |= {"folder": tmp_path, "HF_HUB_OFFLINE": "1"}
        code, printed = scripts(package, script, *arguments, **options)
        assert code == 0, f"exit code {code}: {printed[-3000:]}"

    return run_script
