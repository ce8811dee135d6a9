"""Runs trainings, and verifies their recordings."""
