"""Helpers for tests of policies that are written outside the repository: small clusters, stage times that can be added
up by hand, simulations with the real scheduler, and the rules that every simulation must keep.

    result, workers = simulate_dispatcher(MyDispatcher(times), {"a": "EDC", "b": "EDC"}, {"r0": 0.0, "r1": 1.0}, times)
    assert find_violations(result, workers) == []
    assert result.attainment == 1.0
"""

from tridentserve.testing.clusters import MODEL, make_cluster, make_request, simulate_dispatcher
from tridentserve.testing.fixed_times import FixedTimes
from tridentserve.testing.violations import find_violations

__all__ = ["MODEL", "FixedTimes", "find_violations", "make_cluster", "make_request", "simulate_dispatcher"]
