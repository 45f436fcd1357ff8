"""Predictions of when requests will have ended, and how they learn from those that have."""
