"""Runs `main.py` with a failing disk: `python driver.py CALL:N:ACTION WORDS…`.

CALL is one of `fsync`, `replace`, `unlink`, `mkdir` of Python's `os`. At its Nth call the ACTION
happens: `kill`; or, there and at all later calls, an error (`ENOSPC`, `EROFS`, `EIO`) or `slow`.
"""

import errno
import os
import pathlib
import runpy
import signal
import sys
import time


def main() -> None:
    """Patches the call and runs the program."""
    name, number, action = sys.argv[1].split(":")
    original, count = getattr(os, name), 0

    def call(*arguments, **options):
        nonlocal count
        count += 1
        if action == "slow" and count >= int(number):
            time.sleep(0.2)
        elif count == int(number) and action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif count >= int(number) and action != "kill":
            code = getattr(errno, action)
            raise OSError(code, os.strerror(code), str(arguments[0]))
        return original(*arguments, **options)

    setattr(os, name, call)
    root = pathlib.Path(__file__).parents[2]
    sys.argv[:] = [str(root / "main.py"), *sys.argv[2:]]
    sys.path.insert(0, str(root))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
