"""Compares two recordings of a training: claim, place, formula, name.

`verify` is the entrance. It judges, for each step, whether the two trainings make the same of the
same state (the claim); where not, it looks for the first node of the step that differs (the place),
solves for what the wrong arrays are made of (the formula), and looks up the table of known mistakes
(the name). What comes later never changes what was decided before.
"""

from lockstep.engine.verdict import Verdict
from lockstep.engine.verify import verify

__all__ = ["Verdict", "verify"]
