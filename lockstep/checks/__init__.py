"""Checks one stage of a step each."""
