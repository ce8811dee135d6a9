"""Makes a training fail, or do something else, after one of its steps."""

import contextlib
import itertools
import runpy
import sys
import time

import pytest


class InjectedError(RuntimeError):
    """The failure that a test asks for."""


def fail():
    raise InjectedError


@contextlib.contextmanager
def after_call(owner, name, number=1, action=fail):
    """Calls `action` when a method has been called for the `number`th time."""
    original, calls = getattr(owner, name), itertools.count(1)

    def replaced(*arguments, **options):
        result = original(*arguments, **options)
        if next(calls) == number:
            action()
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, replaced)
        yield


def after_step(number, action=fail):
    """Calls `action` after the `number`th compiled call, before its steps are shown or saved."""
    from app.training.training_state import TrainingState

    return after_call(TrainingState, "add_steps", number, action)


if __name__ == "__main__":  # failing_steps.py PROGRAM STEP SEC WORDS…: a step takes longer.
    program, step, sec, *words = sys.argv[1:]
    sys.path.insert(0, program)
    sys.argv = [f"{program}/main.py", *words]
    with after_step(int(step), lambda: time.sleep(float(sec))):
        runpy.run_path(sys.argv[0], run_name="__main__")
