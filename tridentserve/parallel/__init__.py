"""Sequence parallelism: process groups without a global world, and the exact Ulysses all-to-all that runs over them.

A plan brings its group; `with sequence_parallel(group): adapter.step(state)` runs on all members together.
"""

from tridentserve.parallel.group_cache import GroupCache, abandon
from tridentserve.parallel.groups import SequenceGroup, connect_store, make_group
from tridentserve.parallel.ulysses import sequence_parallel

__all__ = ["GroupCache", "SequenceGroup", "abandon", "connect_store", "make_group", "sequence_parallel"]
