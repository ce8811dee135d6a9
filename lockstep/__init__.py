"""Verifies that a distributed training is the same training as on one device."""
