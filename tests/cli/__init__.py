"""Tests of commands, options, messages and pages."""
