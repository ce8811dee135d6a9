"""Datasets and the input pipeline; independent of devices and strategies."""
