"""Runs the program so that one of its compiled calls takes longer.

python failing_steps.py PROGRAM CALL SEC WORDS…
"""

import itertools
import runpy
import sys
import time

if __name__ == "__main__":
    program, number, sec, *words = sys.argv[1:]
    sys.path.insert(0, program)
    sys.argv = [f"{program}/main.py", *words]
    from app.progress import TrainingProgress

    show, calls = TrainingProgress.step, itertools.count(1)

    def step(*arguments):
        show(*arguments)
        if next(calls) == int(number):
            time.sleep(float(sec))

    TrainingProgress.step = step
    runpy.run_path(sys.argv[0], run_name="__main__")
