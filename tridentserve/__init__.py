"""TridentServe's vocabulary and runtime: stages, requests, plans, the pure scheduler and its engines.

Imports nothing of its sibling rooms; what it needs of them comes in through `tridentserve.protocols`.
"""
