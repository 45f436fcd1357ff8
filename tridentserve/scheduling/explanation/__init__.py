"""Explains, from a decision log, why a request ended when it did."""
