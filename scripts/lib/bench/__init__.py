"""The common part of the benchmarks of the live engine: real stage workers, driven plan by plan without a scheduler.

The numbers are medians over runs in one process tree on this machine; ratios say more than absolute times.
"""
