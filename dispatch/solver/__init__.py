"""The integer program of a tick, and its solver."""
