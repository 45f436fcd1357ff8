"""Dispatchers that decide anew at step boundaries."""
