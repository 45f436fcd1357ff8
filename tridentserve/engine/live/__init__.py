"""The live engine: stage workers as Ray actors, driven by the scheduler's effects.

Ray is imported here and in `deployments/`, nowhere else.
"""
