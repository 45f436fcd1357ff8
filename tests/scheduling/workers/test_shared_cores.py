"""Of workers that share cores, a policy sees no more with D than the cores keep at full speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.scheduling.fakes import FixedDispatcher
from tridentserve.cluster import WorkerSpec
from tridentserve.plans import DispatchPlan, PlacementPlan, PlanMember, Replica
from tridentserve.protocols import PendingRequest, WorkerView
from tridentserve.requests import RequestSpec, Shape
from tridentserve.scheduling.workers.shared_cores import SharedCores, list_coreless
from tridentserve.scheduling.workers.worker_pool import WorkerPool
from tridentserve.stages import PlacementType, Stage

Held = dict[str, str]
"""The type of a worker for each model that it holds."""


class CountingDispatcher(FixedDispatcher):
    """Says that every request needs `least` workers with D."""

    def __init__(self, least: int = 1) -> None:
        super().__init__("", "", "")
        self.least = least

    def can_ever_run(self, spec: RequestSpec, workers: Sequence[WorkerView]) -> str | None:
        return None if sum(_holds_diffuse(view, spec.model) for view in workers) >= self.least else "too few"


def _make_pool(held: Sequence[Held], limit: int | None, nodes: int = 1) -> WorkerPool:
    specs = [WorkerSpec(f"w{i}", f"n{i % nodes}", 100, place=i, max_denoising=limit) for i in range(len(held))]
    replicas = {
        spec.worker_id: frozenset(
            Replica(model, stage) for model, kind in types.items() for stage in PlacementType(kind).stages
        )
        for spec, types in zip(specs, held, strict=True)
    }
    pool = WorkerPool(specs, PlacementPlan(replicas))
    for spec in specs:
        pool.join(spec, 0)
    return pool


def _start(pool: WorkerPool, worker_id: str, number: int) -> None:
    member = PlanMember(f"busy-{number}", steps=(0, 1), input_id=None, source=None, push_to=None)
    pool.start(DispatchPlan(number, "m", (Stage.DIFFUSE,), (worker_id,), (member,)), 1.0, 0.0)


def _wait(*models: str) -> list[PendingRequest]:
    """A request for each of these models, the most urgent first."""
    shape = Shape(64, 64)
    return [PendingRequest(RequestSpec(f"r{i}", model, shape, 4), 0.0, 10.0 + i) for i, model in enumerate(models)]


def _holds_diffuse(view: WorkerView, model: str | None = None) -> bool:
    return any(one.stage is Stage.DIFFUSE and model in (None, one.model) for one in view.replicas)


def _list_diffuse(views: Sequence[WorkerView]) -> list[str]:
    return [view.worker_id for view in views if _holds_diffuse(view)]


def test_workers_with_devices_of_their_own_are_all_seen() -> None:
    pool = _make_pool([{"m": "EDC"}] * 4, limit=None)
    assert SharedCores(pool, CountingDispatcher()).list_views(_wait("m")) == pool.list_views()
    _start(pool, "w0", 0)
    assert list_coreless(pool) == frozenset()


def test_cores_are_offered_on_workers_that_are_not_shunned() -> None:
    """A request that waits for another worker than the first would else never be offered one."""
    pool = _make_pool([{"m": "EDC"}] * 4, limit=2)
    cores = SharedCores(pool, CountingDispatcher())
    seen = cores.list_views(_wait("m"), frozenset({"w0"}))
    assert [view.worker_id for view in seen] == ["w1", "w2", "w3"]
    assert _list_diffuse(seen) == ["w1", "w2"]
    _start(pool, "w0", 0)
    assert _list_diffuse(cores.list_views(_wait("m"), frozenset({"w0"}))) == ["w1"], "it has its core"


def test_those_that_do_most_alone_are_seen_first_and_the_others_without_diffuse() -> None:
    pool = _make_pool([{"m": "D"}, {"m": "DC"}, {"m": "EDC"}, {"m": "E"}], limit=2)
    views = SharedCores(pool, CountingDispatcher()).list_views(_wait("m"))
    assert [PlacementType.of(one.stage for one in view.replicas) for view in views] == [None, "DC", "EDC", "E"]


def test_busy_workers_take_room_and_auxiliaries_none() -> None:
    pool = _make_pool([{"m": "EDC"}, {"m": "EDC"}, {"m": "EDC"}, {"m": "C"}], limit=2)
    cores = SharedCores(pool, CountingDispatcher())
    _start(pool, "w3", 0)
    assert _list_diffuse(cores.list_views(_wait("m"))) == ["w0", "w1"]
    _start(pool, "w2", 1)
    assert _list_diffuse(cores.list_views(_wait("m"))) == ["w0", "w2"]
    _start(pool, "w1", 2)
    assert _list_diffuse(cores.list_views(_wait("m"))) == ["w1", "w2"]
    _start(pool, "w0", 3)
    assert _list_diffuse(cores.list_views(_wait("m"))) == ["w0", "w1", "w2"]


def test_nothing_is_hidden_from_a_request_that_needs_more_workers_than_cores() -> None:
    pool = _make_pool([{"m": "EDC"}] * 4, limit=2)
    assert SharedCores(pool, CountingDispatcher(least=3)).list_views(_wait("m")) == pool.list_views()
    assert len(_list_diffuse(SharedCores(pool, CountingDispatcher(least=2)).list_views(_wait("m")))) == 2


def test_models_take_turns_where_there_is_less_room_than_models() -> None:
    """However long one of them waits."""
    pool = _make_pool([{"a": "EDC"}, {"b": "EDC"}, {"c": "EDC"}], limit=1)
    cores = SharedCores(pool, CountingDispatcher())
    seen = [_list_diffuse(cores.list_views(_wait("a", "b", "c"))) for _ in range(6)]
    assert seen == [["w0"], ["w1"], ["w2"]] * 2
    assert _list_diffuse(cores.list_views(_wait("b"))) == ["w1"]


def test_a_new_placement_is_seen() -> None:
    pool = _make_pool([{"m": "EDC"}, {"m": "EDC"}], limit=1)
    cores = SharedCores(pool, CountingDispatcher())
    assert _list_diffuse(cores.list_views(_wait("m"))) == ["w0"]
    pool.place(replace(pool.placement, replicas={"w1": frozenset(Replica("m", stage) for stage in Stage)}))
    assert _list_diffuse(cores.list_views(_wait("m"))) == ["w1"]


_KINDS: st.SearchStrategy[Held] = st.dictionaries(st.sampled_from("ab"), st.sampled_from(list(PlacementType)))


@given(
    held=st.lists(_KINDS, min_size=1, max_size=8),
    limit=st.integers(1, 4),
    nodes=st.integers(1, 2),
    busy=st.sets(st.integers(0, 7)),
    models=st.lists(st.sampled_from("ab"), min_size=1, max_size=4),
)
def test_as_many_as_there_is_room_for(
    held: list[Held], limit: int, nodes: int, busy: set[int], models: list[str]
) -> None:
    """Per node: all busy ones, as many idle ones of use as there is room for; E and C are never hidden, the order
    stays, and a view stays the same object."""
    pool = _make_pool(held, limit, nodes)
    for number in range(len(held)):
        if number in busy:
            _start(pool, f"w{number}", number)
    cores, everything = SharedCores(pool, CountingDispatcher(least=0)), pool.list_views()
    seen = cores.list_views(_wait(*models))
    assert [view.worker_id for view in seen] == [view.worker_id for view in everything]
    for view, whole in zip(seen, everything, strict=True):
        hidden = whole.replicas - view.replicas
        assert replace(view, replicas=whole.replicas) == whole
        assert not hidden or (whole.idle and {one.stage for one in hidden} == {Stage.DIFFUSE})
    for node in {view.node_id for view in everything}:
        mine = [view for view in everything if view.node_id == node and _holds_diffuse(view)]
        useful = [view for view in mine if view.idle and any(_holds_diffuse(view, model) for model in models)]
        idle = [view for view in mine if view.idle]
        room = max(0, limit - (len(mine) - len(idle)))
        offered = [view for view in seen if view.node_id == node and view.idle and _holds_diffuse(view)]
        assert len(offered) == (len(idle) if room >= len(idle) else min(room, len(useful)))
        assert {view.worker_id for view in idle if not room} == {view.worker_id for view in idle} & list_coreless(pool)
    again = cores.list_views(_wait(*models))
    assert [view for view, other in zip(seen, again, strict=True) if view == other and view is not other] == []
