"""Verifies strategies: each step is recorded, and compared with the same step on one device."""
