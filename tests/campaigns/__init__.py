"""Campaigns: random faults against small trainings, as `make campaign ARGS="kills --cycles=20"`."""
