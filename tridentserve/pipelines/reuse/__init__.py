"""Patches of images whose results are used again at later steps."""
