"""Standalone files to copy beside a script, which record and compare its training steps."""
