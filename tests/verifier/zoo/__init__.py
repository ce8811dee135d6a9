"""Publicly reported bugs of data-parallel training in Keras, rebuilt, each with its correction."""

from .data_and_layers import CASES as _OF_DATA
from .losses_and_updates import CASES as _OF_LOSSES
from .small import Case, Program

CASES = _OF_LOSSES | _OF_DATA
__all__ = ["CASES", "Case", "Program"]
