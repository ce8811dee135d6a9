"""Devices: chosen, limited and set up."""
