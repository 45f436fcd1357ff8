"""Among workers that are as good otherwise, those that hold a request's LoRAs get it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest

from dispatch import DispatchOptions, IlpDispatcher
from dispatch.policies import make_policy
from dispatch.workers.idle_workers import IdleWorkers
from dispatch.workers.pools import group_into_pools
from profiler import CostModel
from tests.dispatch.cluster import decide, request, worker, workers
from tests.dispatch.policies.scenes import LOAD, TINY, cluster
from tests.profiler.synthetic import table
from tridentserve.protocols import WorkerView

TIMES = CostModel([table()], "gpu")
INK, PASTEL = "one:ink", "one:pastel"


def with_loras(view: WorkerView, *loras: str) -> WorkerView:
    return replace(view, loras=frozenset(loras))


def chosen(views: list[WorkerView], *loras: str) -> str:
    dispatcher = IlpDispatcher(TIMES, DispatchOptions(max_degree=1))
    (one,) = decide(dispatcher, [request("r", TINY, loras=loras)], views, 0.0)
    return one.diffuse[0]


def test_a_holder_comes_before_others_and_more_before_fewer() -> None:
    views = workers(4, "EDC")
    assert chosen(views, INK) == chosen(views) == "n0-w0"
    views[2], views[3] = with_loras(views[2], INK), with_loras(views[3], INK, PASTEL)
    assert chosen(views, INK) == "n0-w2"
    assert chosen(views, INK, PASTEL) == "n0-w3"
    assert chosen(views, "one:chalk") == "n0-w0"
    assert chosen(views, PASTEL, "one:chalk") == "n0-w3"
    assert chosen(views) == "n0-w0"


def test_weights_and_states_count_more_and_idle_workers_too() -> None:
    views = [with_loras(worker("n0-w0", "EDC"), INK), worker("n0-w1", "EDC")]
    cold = replace(views[0], resident=views[0].replicas - {next(iter(views[0].replicas))})
    assert chosen([cold, views[1]], INK) == "n0-w1"
    busy = replace(views[0], idle=False, free_at_s=1.0)
    assert chosen([busy, views[1]], INK) == "n0-w1"


def test_another_node_with_a_holder_comes_before_the_best_fit() -> None:
    views = [worker("n0-w0", "EDC"), *workers(2, "EDC", node="n1")]
    assert chosen(views, INK) == "n0-w0"
    views[2] = with_loras(views[2], INK)
    assert chosen(views, INK) == "n1-w1"


def test_it_is_the_first_of_all_choices_in_order() -> None:
    """By brute force: one worker of any pool, and blocks of one node."""
    drawn = random.Random(1)
    for _ in range(300):
        sizes = [drawn.choice([1, 2, 4, 8]) for _ in range(drawn.randrange(1, 4))]
        views = [
            worker(f"n{node}-w{place}", "EDC", node=f"n{node}", free_at_s=drawn.choice([None, None, 1.0]))
            for node, size in enumerate(sizes)
            for place in range(size)
        ]
        degree = 1 if len(sizes) > 1 else drawn.choice([1, 2, 4])
        names = [view.worker_id for view in views]
        preferred = frozenset(drawn.sample(names, drawn.randrange(len(names))))
        liked = frozenset(drawn.sample(names, drawn.randrange(len(names))))
        (pool,) = group_into_pools(views)
        taken = IdleWorkers(pool).take(degree, preferred, liked)
        idle = [view.worker_id for view in views if view.idle]
        groups = list(combinations(idle, degree)) if len(idle) >= degree else []
        aligned = [tuple(names[start : start + degree]) for start in range(0, len(names), degree)]
        if whole := [group for group in aligned if len(group) == degree and set(group) <= set(idle)]:
            groups = whole
        if not groups:
            assert taken is None
            continue
        assert taken is not None
        best = max((len(preferred & set(group)), len(liked & set(group))) for group in groups)
        assert (len(preferred & set(taken)), len(liked & set(taken))) == best
        if not liked & set(idle):
            assert taken == IdleWorkers(pool).take(degree, preferred)


@pytest.mark.parametrize("name", ["b4", "wo-scheduler"])
def test_greedy_policies_do_so_too(name: str) -> None:
    views = workers(4, "EDC")
    for index in (2, 3):
        views[index] = with_loras(views[index], INK)
    dispatcher = make_policy(name, TIMES, cluster(4), LOAD).dispatcher
    (plain,) = decide(dispatcher, [request("p", TINY)], views, 0.0)
    (one,) = decide(dispatcher, [request("r", TINY, loras=(INK,))], views, 0.0)
    assert (plain.diffuse[0], one.diffuse[0]) == ("n0-w0", "n0-w2")
