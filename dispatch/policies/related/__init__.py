"""Policies of related systems."""
