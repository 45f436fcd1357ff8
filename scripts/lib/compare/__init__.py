"""Simulator against live service, behind scripts/compare_simulation.py.

`workload` makes the traces, `warm_up` asks the service what things cost, `calibration` makes figures of the answers.
"""
