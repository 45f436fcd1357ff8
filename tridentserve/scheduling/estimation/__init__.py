"""Estimates that plans carry: their expected seconds and memory, and the names of their process groups."""
