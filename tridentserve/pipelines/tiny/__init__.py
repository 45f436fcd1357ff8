"""Tiny models of the real classes with random weights, one recipe per family."""
