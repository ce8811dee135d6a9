"""Runs `main.py` with a failing disk: `python driver.py CALL:N:ACTION WORDS…`.

CALL is one of `fsync`, `replace`, `unlink`, `mkdir` of Python's `os`. At its Nth call the ACTION
happens: `kill`; or, there and at all later calls, an error (`ENOSPC`, `EROFS`, `EIO`) or `slow`.
"""

import errno
import itertools
import os
import pathlib
import runpy
import signal
import sys
import time

if __name__ == "__main__":
    name, first, action = sys.argv[1].split(":")
    original, numbers = getattr(os, name), itertools.count(1)

    def call(*arguments, **options):
        number = next(numbers)
        if action == "kill" and number == int(first):
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "slow" and number >= int(first):
            time.sleep(0.2)
        elif action.isupper() and number >= int(first):
            code = getattr(errno, action)
            raise OSError(code, os.strerror(code), str(arguments[0]))
        return original(*arguments, **options)

    setattr(os, name, call)
    root = pathlib.Path(__file__).parents[2]
    sys.argv[:] = [str(root / "main.py"), *sys.argv[2:]]
    sys.path.insert(0, str(root))
    runpy.run_path(sys.argv[0], run_name="__main__")
