"""Bounds of rounding."""
