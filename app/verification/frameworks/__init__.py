"""Runs the programs of other frameworks and reads their recordings."""
