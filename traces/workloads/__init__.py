"""Workloads by name: arrivals and mixes."""
