"""Tests of the strategies and models: parity, collectives, the numerical contract."""
