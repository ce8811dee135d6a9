"""Verifies recordings of users' scripts, from any framework; needs only NumPy."""
