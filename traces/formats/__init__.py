"""Trace files: our own formats, and readers of public traces."""
