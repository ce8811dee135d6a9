"""Checks a machine before training."""
