"""The Dynamic Orchestrator: which stages of which model each worker holds, from the profile and the load, or as pinned.

Pure: no I/O, no clock, no randomness.
"""

from placement.fixed import fixed_placement
from placement.load import LoadShare
from placement.orchestrator import Orchestrator

__all__ = ["LoadShare", "Orchestrator", "fixed_placement"]
