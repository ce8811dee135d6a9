"""Predicts what known faults would leave in a recording."""
