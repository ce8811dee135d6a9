"""Tests: what each folder must notice stands in README.md."""
