"""The two ways in which `replay_trace.py` replays a trace: `live` against a service, `simulated` without one.

Each is imported only when it is wanted: one brings an HTTP client, the other the planners and their solver.
"""
