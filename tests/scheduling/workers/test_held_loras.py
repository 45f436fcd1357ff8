"""The scheduler knows which LoRAs its workers hold, as far as they have told."""

from __future__ import annotations

from tests.scheduling.fakes import workers_of
from tridentserve.plans import StageSpan
from tridentserve.scheduling import events as ev
from tridentserve.scheduling.decision_log import LogEntry, decode_entry, encode_entry
from tridentserve.scheduling.workers.worker_pool import WorkerPool
from tridentserve.stages import PlacementType, Stage


def held(pool: WorkerPool) -> dict[str, frozenset[str]]:
    return {view.worker_id: view.loras for view in pool.list_views()}


def test_they_come_with_reports_and_go_with_the_worker_or_the_model() -> None:
    specs, placement = workers_of({"a": PlacementType.EDC, "b": PlacementType.EDC})
    pool = WorkerPool(specs, placement)
    for spec in specs:
        pool.join(spec, 0)
    before = pool.list_views()
    pool.note_loras("a", ("one:ink", "two:ink@0"))
    assert held(pool) == {"a": {"one:ink", "two:ink@0"}, "b": frozenset()}
    assert pool.list_views()[1] is before[1]
    pool.unload("one")
    assert held(pool)["a"] == {"two:ink@0"}
    pool.lose("a")
    pool.join(specs[0], 1)
    assert held(pool) == {"a": frozenset(), "b": frozenset()}


def test_the_log_has_them() -> None:
    spans = (StageSpan(Stage.DIFFUSE, 0.0, 1.0, ("a",), 4),)
    entry = LogEntry(1.0, ev.StageFinished(1, spans, None, (("a", ("one:ink",)),)), [])
    assert decode_entry(encode_entry(entry)) == entry
