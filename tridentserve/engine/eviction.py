"""Chooses the replicas that leave a worker's memory when a plan needs room. Pure; live and simulated workers use it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from tridentserve.plans import Replica


def choose_victims(
    resident: Iterable[Replica],
    needed: Collection[Replica],
    wanted: Collection[Replica],
    queued: Collection[Replica],
    size_bytes: Callable[[Replica], int],
    excess_bytes: int,
) -> list[Replica]:
    """Replicas to evict, in order, until `excess_bytes` are free or nothing is left that may go.

    `resident` has the longest unused first. What the plan at hand needs stays. First goes what neither the placement
    wants nor a plan in the queue needs, then what the placement wants. What a plan in the queue needs goes only where
    the plan at hand could not run at all otherwise: it comes back for that plan.
    """
    others = [replica for replica in resident if replica not in needed]
    chosen = []
    for replica in sorted(others, key=lambda replica: 2 * (replica in queued) + (replica in wanted)):
        if excess_bytes <= 0:
            break
        chosen.append(replica)
        excess_bytes -= size_bytes(replica)
    return chosen
