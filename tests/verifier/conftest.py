"""Fixtures of the tests of the verifier."""

import pytest

from tests.verifier.recorder_scripts import Scripts


@pytest.fixture(scope="module")
def scripts():
    """Runs scripts of frameworks; each framework is imported once for a file of tests."""
    with Scripts() as scripts:
        yield scripts
