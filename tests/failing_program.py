"""Runs the program so that a call fails: `python failing_program.py PROGRAM CALL:N:ACTION WORDS…`.

CALL is `step`, which follows each compiled call, or one of `fsync`, `replace`, `unlink`, `mkdir` of
Python's `os`. At its Nth call the ACTION happens: `kill`, or seconds to wait; or, there and at all
later calls, an error (`ENOSPC`, `EROFS`, `EIO`) or `slow`.
"""

import errno
import itertools
import os
import runpy
import signal
import sys
import tempfile
import time

if __name__ == "__main__":
    program, fault, *words = sys.argv[1:]
    name, first, action = fault.split(":")
    sys.path.insert(0, program)
    sys.argv = [f"{program}/main.py", *words]
    owner = os
    if name == "step":
        from app.progress import TrainingProgress as owner

    tempfile.gettempdir()  # It removes a file to find the folder; that shall not fail.
    original, numbers = getattr(owner, name), itertools.count(1)

    def call(*arguments, **options):
        later = next(numbers) - int(first)
        if action == "kill" and later == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        elif action.isdigit() and later == 0:
            time.sleep(int(action))
        elif action == "slow" and later >= 0:
            time.sleep(0.2)
        elif action.isupper() and later >= 0:
            code = getattr(errno, action)
            raise OSError(code, os.strerror(code), str(arguments[0]))
        return original(*arguments, **options)

    setattr(owner, name, call)
    runpy.run_path(sys.argv[0], run_name="__main__")
