"""Runs a training, from its specification to its last checkpoint."""
