"""Verification of recordings of users' own scripts, from any framework; needs NumPy alone."""
