"""Builds and runs a training."""
