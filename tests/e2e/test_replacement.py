"""Re-placement in a live service: the load shifts, the Monitor sees it, the placement follows while requests run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from lib.bench.service import run_service
from lib.bench.shifting import DECODE_HEAVY, DIFFUSE_HEAVY, ShiftingLoad, make_shift_args

from tests.support.decision_log import read_log
from tests.support.waiting import until
from tridentserve.engine.live.updates import CompletedUpdate
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.scheduling import events as ev

GAP_S = 0.1
# More requests in the window than the Monitor needs to see the shift.
MOST_SENT = 200


@pytest.mark.parametrize(
    ("policy", "after"),
    [
        # Weights come and go, or auxiliaries stay auxiliaries. Of the first two, which one depends on what the Monitor
        # has seen of the load when the trigger comes.
        ("default", [{"ED": 3, "C": 1}, {"EDC": 4}]),
        pytest.param("wo-pooling", [{"ED": 3, "C": 1}], marks=pytest.mark.slow),
    ],
)
async def test_a_shift_to_denoising_moves_workers_from_decoding(
    ray_cluster: None, tiny_cache: Path, tmp_path: Path, policy: str, after: list[dict[str, int]]
) -> None:
    before = {"ED": 2, "C": 2}
    log = tmp_path / "decisions.jsonl"
    args = {**make_shift_args(4, tiny_cache, policy), "decision_log": str(log)}
    folder = ensure_tiny("sd3", tiny_cache)
    async with run_service(args, folder, tiny_cache / "host", lambda dispatcher: dispatcher) as service:
        load = ShiftingLoad(service)
        assert load.count_kinds() == before
        for _ in range(10):
            await load.send(DECODE_HEAVY, GAP_S)
        await until(lambda: len(load.ends_s) >= 5)
        assert load.count_kinds() == before
        while load.count_kinds() == before:
            assert len(load.tasks) < MOST_SENT, "the placement does not follow"
            await load.send(DIFFUSE_HEAVY, GAP_S)
        assert len(load.ends_s) < len(load.tasks), "none was under way at the switch"
        for _ in range(5):
            await load.send(DIFFUSE_HEAVY, GAP_S)
        answers = await asyncio.gather(*load.tasks)
        assert load.count_kinds() in after
    assert all(isinstance(answer, CompletedUpdate) and answer.retries == 0 for answer in answers)
    check_log(log, most_switches=len(after))


def check_log(log: Path, most_switches: int) -> None:
    """The placement changed, by the trigger each time and never back; weights were loaded for it; requests ended before
    and after."""
    decisions = read_log(log)
    places = [
        (index, effect)
        for index, decision in enumerate(decisions)
        for effect in decision.effects
        if isinstance(effect, ev.Place)
    ]
    assert all("fastest over slowest stage" in place.plan.reason for _, place in places)
    assert 1 <= len(places) <= most_switches
    switched = places[0][0]
    ended = [index for index, one in enumerate(decisions) for effect in one.effects if isinstance(effect, ev.Finish)]
    assert min(ended) < switched < max(ended)
    assert any(isinstance(one.event, ev.ReplicaLoaded) for one in decisions[switched:])
