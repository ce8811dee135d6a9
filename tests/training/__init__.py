"""Tests of data, training, files and processes."""
