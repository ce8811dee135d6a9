"""Chooses, limits and sets up devices."""
