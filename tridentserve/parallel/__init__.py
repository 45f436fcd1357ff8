"""Sequence parallelism: process groups without a global world, exact Ulysses over them, and decoders shared by rows.

Each plan names its group; `with sequence_parallel(group): adapter.step(state)` runs on all members together.
"""

from tridentserve.parallel.group_cache import GroupCache, abandon
from tridentserve.parallel.group_memory import GroupMemory
from tridentserve.parallel.groups import SequenceGroup, connect_store, make_group
from tridentserve.parallel.step_patience import StepPatience
from tridentserve.parallel.ulysses import is_first, sequence_parallel

__all__ = [
    "GroupCache",
    "GroupMemory",
    "SequenceGroup",
    "StepPatience",
    "abandon",
    "connect_store",
    "is_first",
    "make_group",
    "sequence_parallel",
]
