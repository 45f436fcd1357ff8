"""Under load that never ends, every request has its turn: long overdue ones go first, and width is kept for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dispatch import DispatchOptions, IlpDispatcher, ValueOptions
from dispatch.candidates.survey import TickView
from dispatch.holding.overdue import OverdueTurns
from tests.dispatch.cluster import decide, request, worker, workers
from tests.profiler.synthetic import MIB, SHAPES, cost_model, step_seconds
from tridentserve.protocols import PendingRequest, WorkerView
from tridentserve.requests import Shape
from tridentserve.stages import Stage

SMALL, LARGE = SHAPES[0], SHAPES[2]
TIMES = cost_model()
# So that tests are short: by default it is 50 runtimes.
OBJECTIVE = ValueOptions(overdue_runs=9.0)
OPTIONS = DispatchOptions(objective=OBJECTIVE, segment_s=1e9)
WITHOUT_RULE = replace(OPTIONS, overdue_share=0.0)
# For 1024x1024, D alone needs 800 + 391 MiB at degree 1 and 800 + 196 at degree 2; 256x256 fits at any degree.
WIDE_ONLY_BYTES = 1100 * MIB
# It could end 9 of its own runtimes after its deadline at best.
RUN_S = 0.02 + 20 * step_seconds(LARGE, 1) + TIMES.seconds("one", Stage.DECODE, LARGE)
LONG_OVERDUE_S = 1.0 + 10 * RUN_S


def leaves_at_s(cluster: list[WorkerView], slo_s: float, options: DispatchOptions = OPTIONS) -> float:
    """The time at which an overdue large request is dispatched while three small ones with this SLO always wait."""
    dispatcher = IlpDispatcher(TIMES, options)
    pending, made, now_s = [request("large", LARGE, 1.0)], 0, 0.0
    free_s = {view.worker_id: 0.0 for view in cluster}
    while now_s < 2 * LONG_OVERDUE_S:
        while sum(entry.spec.request_id != "large" for entry in pending) < 3:
            made += 1
            pending.append(request(f"s{made}", SMALL, slo_s, steps=100 + made % 3 * 30, arrival_s=now_s))
        views = [
            replace(view, idle=free_s[view.worker_id] <= now_s, free_at_s=max(now_s, free_s[view.worker_id]))
            for view in cluster
        ]
        for assignment in decide(dispatcher, pending, views, now_s):
            if assignment.request_ids[0] == "large":
                return now_s
            chosen = next(entry for entry in pending if entry.spec.request_id == assignment.request_ids[0])
            pending.remove(chosen)
            seconds = step_seconds(SMALL, len(assignment.diffuse)) * chosen.spec.num_inference_steps
            free_s.update(dict.fromkeys(assignment.diffuse, now_s + seconds))
        now_s = min((free for free in free_s.values() if free > now_s), default=now_s + 0.1)
    return float("inf")


def apart(n: int, kind: str, *auxiliaries: str, memory_bytes: int = 3000 * MIB) -> list[WorkerView]:
    return [*workers(n, kind, memory_bytes=memory_bytes), *(worker(each, each) for each in auxiliaries)]


@pytest.mark.parametrize(
    "cluster",
    [apart(2, "EDC"), apart(2, "DC", "E"), apart(2, "ED", "C"), apart(2, "D", "E", "C")],
    ids=["V0", "V1", "V2", "V3"],
)
@pytest.mark.parametrize("slo_s", [30.0, 0.0], ids=["in time", "late"])
def test_small_requests_that_keep_coming_do_not_starve_a_large_one(cluster: list[WorkerView], slo_s: float) -> None:
    assert leaves_at_s(cluster, slo_s) < LONG_OVERDUE_S + 1.0
    assert leaves_at_s(cluster, slo_s, WITHOUT_RULE) == float("inf")


@pytest.mark.parametrize("slo_s", [30.0, 0.0], ids=["in time", "late"])
def test_width_that_never_comes_by_itself_is_kept_for_a_request_that_needs_it(slo_s: float) -> None:
    assert leaves_at_s(apart(2, "D", "E", "C", memory_bytes=WIDE_ONLY_BYTES), slo_s) < LONG_OVERDUE_S + 1.0


def served(pending: list[PendingRequest], views: list[WorkerView], now_s: float = 1000.0) -> dict[str, tuple[str, ...]]:
    return {
        entry.request_ids[0]: entry.diffuse for entry in decide(IlpDispatcher(TIMES, OPTIONS), pending, views, now_s)
    }


@pytest.mark.parametrize("order", [("large", "small"), ("small", "large")])
def test_of_several_overdue_requests_the_longest_overdue_goes_first(order: tuple[str, str]) -> None:
    shapes = {"large": LARGE, "small": SMALL}
    pending = [request(name, shapes[name], 1.0 + rank) for rank, name in enumerate(order)]
    assert served(pending, apart(1, "D", "E", "C")) == {order[0]: ("n0-w0",)}


def test_each_model_has_its_longest_overdue_request() -> None:
    views = [*workers(1, "EDC"), worker("two", "two:EDC")]
    pending = [
        *(request(f"{model} late", LARGE, 1.0, model=model) for model in ("one", "two")),
        *(request(f"{model} fresh", SMALL, model=model, arrival_s=1000.0) for model in ("one", "two")),
    ]
    assert served(pending, views) == {"one late": ("n0-w0",), "two late": ("two",)}


def half_busy(free_at_s: dict[str, float]) -> list[WorkerView]:
    """Per node one idle D worker and one that is busy, and auxiliaries elsewhere."""
    views = [worker("e", "E", node="x"), worker("c", "C", node="x")]
    for node, until_s in free_at_s.items():
        views.append(worker(f"{node}-idle", "D", node=node, memory_bytes=WIDE_ONLY_BYTES))
        views.append(worker(f"{node}-busy", "D", node=node, free_at_s=until_s, memory_bytes=WIDE_ONLY_BYTES))
    return views


def fresh(n: int) -> list[PendingRequest]:
    return [request(f"fresh {i}", SMALL, arrival_s=1000.0) for i in range(n)]


def test_only_the_node_where_the_width_comes_first_is_held_back() -> None:
    views = half_busy({"a": 1050.0, "b": 1005.0})
    overdue = request("large", LARGE, 1.0)
    assert served([overdue, *fresh(2)], views) == {"fresh 0": ("a-idle",)}
    assert served([replace(overdue, deadline_s=995.0), *fresh(2)], views).keys() == {"fresh 0", "fresh 1"}


def test_the_kept_worker_is_used_as_soon_as_the_other_is_free() -> None:
    views = [replace(view, idle=True) if view.worker_id == "b-busy" else view for view in half_busy({"b": 1005.0})]
    assert served([request("large", LARGE, 1.0), *fresh(2)], views) == {"large": ("b-busy", "b-idle")}


def test_a_worker_is_kept_until_the_overdue_request_would_be_done() -> None:
    views, large = half_busy({"b": 1005.0}), request("large", LARGE, 1.0)
    tick = TickView(TIMES, OPTIONS, views, 1000.0)
    turns = OverdueTurns(0.1)
    overdue = turns.choose([large], tick)
    assert overdue == [large]
    kept = {view.worker_id: view for view in views} | turns.hold_back(overdue, tick)
    assert not kept["b-idle"].idle
    done_s = 1005.0 + 0.02 + 20 * step_seconds(LARGE, 2)
    assert kept["b-idle"].free_at_s == kept["b-busy"].free_at_s == pytest.approx(done_s)
    assert [kept[name] for name in ("e", "c")] == views[:2]


def test_what_no_worker_can_run_holds_nothing_back() -> None:
    pending = [request("unknown", Shape(64, 64), 1.0), request("other", LARGE, 1.0, model="three"), *fresh(1)]
    assert served(pending, apart(1, "D", "E", "C")) == {"fresh 0": ("n0-w0",)}


def overdue_ids(turns: OverdueTurns, names: str, views: list[WorkerView], now_s: float) -> list[str]:
    """The requests whose turn it is, of large ones that are long overdue in this order."""
    tick = TickView(TIMES, OPTIONS, views, now_s)
    pending = [request(name, LARGE, 1.0 + rank) for rank, name in enumerate(names)]
    return [each.spec.request_id for each in turns.choose(pending, tick)]


def take(turns: OverdueTurns, name: str, views: list[WorkerView], now_s: float, seconds: float) -> None:
    """Has a request run on one worker for some seconds."""
    (made,) = decide(IlpDispatcher(TIMES, WITHOUT_RULE), [request(name, LARGE)], views[:1], now_s)
    turns.note([replace(made, expected_finish_s=now_s + seconds)], now_s)


def test_a_turn_is_paid_for_by_the_share_of_the_workers_before_the_next_one() -> None:
    turns, views = OverdueTurns(0.25), workers(4, "EDC")
    assert overdue_ids(turns, "ab", views, 1000.0) == ["a"]
    take(turns, "a", views, 1000.0, seconds=8.0)
    assert overdue_ids(turns, "b", views, 1007.9) == []
    assert overdue_ids(turns, "b", views, 1008.1) == ["b"]


def test_nothing_is_saved_up_while_nothing_is_overdue() -> None:
    turns, views = OverdueTurns(0.25), workers(4, "EDC")
    assert overdue_ids(turns, "a", views, 1000.0) == ["a"]
    take(turns, "a", views, 1000.0, seconds=8.0)
    assert overdue_ids(turns, "", views, 1001.0) == []
    assert overdue_ids(turns, "b", views, 2000.0) == ["b"]
    take(turns, "b", views, 2000.0, seconds=8.0)
    assert overdue_ids(turns, "c", views, 2007.9) == []
    assert overdue_ids(turns, "c", views, 2008.1) == ["c"]


def test_workers_that_are_kept_idle_for_a_turn_are_paid_for_and_it_goes_on_until_it_runs() -> None:
    views, turns, large = half_busy({"b": 1009.0}), OverdueTurns(0.25), request("a", LARGE, 1.0)
    for now_s in (1000.0, 1004.0, 1008.0):
        tick = TickView(TIMES, OPTIONS, views, now_s)
        assert turns.hold_back(turns.choose([large], tick), tick).keys() == {"b-idle", "b-busy"}
    other = request("b", LARGE, 2.0)
    # 9 s of an idle worker against a quarter of two.
    assert turns.choose([other], TickView(TIMES, OPTIONS, views, 1009.0)) == []
    assert turns.choose([other], TickView(TIMES, OPTIONS, views, 1017.9)) == []
    assert turns.choose([other], TickView(TIMES, OPTIONS, views, 1018.1)) == [other]


def test_pools_of_other_models_have_accounts_of_their_own() -> None:
    turns, views = OverdueTurns(0.25), [*workers(1, "EDC"), worker("two", "two:EDC")]
    tick = TickView(TIMES, OPTIONS, views, 1000.0)
    one, two = (request(model, LARGE, 1.0, model=model) for model in ("one", "two"))
    assert turns.choose([one, two], tick) == [one, two]
    take(turns, "one", views, 1000.0, seconds=8.0)
    assert turns.choose([one, two], TickView(TIMES, OPTIONS, views, 1010.0)) == [two]


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_without_end_of_overdue_requests_the_others_keep_what_the_share_leaves(share: float) -> None:
    """Large requests are long overdue, more than can be served, and small ones that can be in time always wait."""
    dispatcher = IlpDispatcher(TIMES, replace(OPTIONS, overdue_share=share))
    cluster, now_s, made, passed_s = workers(4, "EDC"), 1000.0, 0, 100.0
    pending = [request(f"large {rank:03}", LARGE, 1.0 + rank / 100) for rank in range(200)]
    free_s, given_s = {view.worker_id: 0.0 for view in cluster}, {"large": 0.0, "small": 0.0}
    order = []
    while now_s < 1000.0 + passed_s:
        while sum(entry.spec.request_id.startswith("small") for entry in pending) < 6:
            made += 1
            pending.append(request(f"small {made}", SMALL, 30.0, arrival_s=now_s))
        views = [
            replace(view, idle=free_s[view.worker_id] <= now_s, free_at_s=max(now_s, free_s[view.worker_id]))
            for view in cluster
        ]
        for assignment in decide(dispatcher, pending, views, now_s):
            (name,) = assignment.request_ids
            pending = [entry for entry in pending if entry.spec.request_id != name]
            given_s[name.split()[0]] += len(assignment.diffuse) * (assignment.expected_finish_s - now_s)
            free_s.update(dict.fromkeys(assignment.diffuse, assignment.expected_finish_s))
            order += [name] if name.startswith("large") else []
        now_s = min(free for free in free_s.values() if free > now_s)
    assert order == sorted(order), "in order of deadlines"
    given = given_s["large"] / (given_s["large"] + given_s["small"])
    one_turn = RUN_S / (passed_s * len(cluster))  # it takes most GPU-seconds at degree 1
    assert share - 2 * one_turn <= given <= share + 2 * one_turn
    assert pending[0].spec.request_id.startswith("large"), "there were always some"


def test_without_the_rule_values_alone_decide() -> None:
    """A hopeless request is worth next to nothing beside one that can be in time."""
    pending = [request("large", LARGE, 1.0), request("small", SMALL, arrival_s=1000.0)]
    (with_rule,) = decide(IlpDispatcher(TIMES, OPTIONS), pending, apart(1, "D", "E", "C"), 1000.0)
    (without,) = decide(IlpDispatcher(TIMES, WITHOUT_RULE), pending, apart(1, "D", "E", "C"), 1000.0)
    assert (with_rule.request_ids, without.request_ids) == (("large",), ("small",))
