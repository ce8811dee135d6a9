"""Measures the cost of a step, with intervals, and breaks it down."""
