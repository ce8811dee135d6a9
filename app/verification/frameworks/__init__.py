"""Runs the programs of other frameworks, and reads what they recorded."""
