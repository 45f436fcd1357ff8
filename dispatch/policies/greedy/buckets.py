"""Degree buckets: the cluster cut in advance into groups of workers that serve one degree (appendix D.2, B2 and B5)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from dispatch.policies.greedy.work import WorkTimes, choose_closest_degree, find_covered_degrees, make_fresh_request
from dispatch.policies.policy import make_example_request
from tridentserve.cluster import WorkerSpec
from tridentserve.errors import ConfigError
from tridentserve.load import LoadShare
from tridentserve.plans import WorkerId


def assign_buckets(
    work: WorkTimes, workers: Sequence[WorkerSpec], load: Sequence[LoadShare], max_degree: int | None
) -> dict[WorkerId, int]:
    """The bucket of each worker. Shares are the GPU-seconds that the load brings at each optimal degree: all stages at
    pipeline level, D alone at stage work."""
    largest_node = max(Counter(worker.node_id for worker in workers).values())
    widest = min(largest_node, max_degree or largest_node)
    shares: defaultdict[int, float] = defaultdict(float)
    for kind in load:
        spec = make_example_request(kind)
        degrees = find_covered_degrees(work.times, spec, widest)
        if degrees:
            degree = choose_closest_degree(degrees, work.optimal_degree(spec))
            seconds = work.run_s if work.aligned else work.diffuse_s
            shares[degree] += kind.weight * degree * seconds(make_fresh_request(spec), degree)
    return cut_into_buckets(compute_bucket_sizes(shares, len(workers)), workers)


def compute_bucket_sizes(shares: Mapping[int, float], total: int) -> dict[int, int]:
    """Workers per degree: N_k is the multiple of k nearest to its share of `total` (ties downward), then adjusted so
    that they sum to `total` (D.2).

    A degree in demand has the workers of one group at least. Where there are too few workers for that, the
    widest joins the next narrower. What is left and is no multiple of any degree goes to the narrowest.
    """
    wanted = {degree: share for degree, share in sorted(shares.items()) if share > 0}
    if not wanted or total < min(wanted):
        raise ConfigError(f"no degree buckets can be made of {total} workers for a load at degrees {sorted(wanted)}")
    while sum(wanted) > total:
        *_, narrower, widest = wanted
        wanted[narrower] += wanted.pop(widest)
    whole = sum(wanted.values())
    exact = {degree: share / whole * total for degree, share in wanted.items()}
    sizes = {degree: degree * max(1, math.ceil(exact[degree] / degree - 0.5)) for degree in wanted}
    while (excess := sum(sizes.values()) - total) > 0:
        # A wide bucket may give up more than the excess; a narrower one gets the difference back below.
        able = [degree for degree in sizes if sizes[degree] > degree]
        chosen = max(able, key=lambda degree: (degree <= excess, sizes[degree] - exact[degree], degree))
        sizes[chosen] -= chosen
    while fitting := [degree for degree in sizes if degree <= total - sum(sizes.values())]:
        chosen = max(fitting, key=lambda degree: (exact[degree] - sizes[degree], degree))
        sizes[chosen] += chosen
    sizes[min(sizes)] += total - sum(sizes.values())
    return sizes


def cut_into_buckets(sizes: Mapping[int, int], workers: Sequence[WorkerSpec]) -> dict[WorkerId, int]:
    """Cut the workers into buckets, the widest degrees first, block by block inside a node. Blocks that no node has
    room for are left to narrower degrees."""
    nodes: defaultdict[str, list[WorkerId]] = defaultdict(list)
    for worker in sorted(workers, key=lambda worker: (worker.node_id, worker.place, worker.worker_id)):
        nodes[worker.node_id].append(worker.worker_id)
    bucket_of: dict[WorkerId, int] = {}
    for degree in sorted(sizes, reverse=True):
        blocks = sizes[degree] // degree
        for free in nodes.values():
            while blocks and len(free) >= degree:
                bucket_of.update(dict.fromkeys(free[:degree], degree))
                del free[:degree]
                blocks -= 1
    rest = [worker_id for free in nodes.values() for worker_id in free]
    return bucket_of | dict.fromkeys(rest, min(sizes))
