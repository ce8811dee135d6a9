"""Verifies that two trainings are the same."""
