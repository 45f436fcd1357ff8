"""Turns a solution into assignments to named workers."""
