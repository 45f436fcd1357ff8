"""Units of memory."""

MIB = 2**20
"""Bytes of a mebibyte."""
