"""Tests of what a service finds out at its start."""
