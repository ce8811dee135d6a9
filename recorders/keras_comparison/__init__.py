"""Compares recorded training steps of Keras with one device, stage by stage."""

from .check_evaluation import compare_evaluation
from .comparison import compare
from .findings import BY_DESIGN, CLEAN, FAULT, STAGES, Finding, Report
from .remedies import REMEDIES

__all__ = [
    "BY_DESIGN",
    "CLEAN",
    "FAULT",
    "REMEDIES",
    "STAGES",
    "Finding",
    "Report",
    "compare",
    "compare_evaluation",
]
