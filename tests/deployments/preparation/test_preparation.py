"""The preparation of a service, with seats that run their tasks here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deployments.assembly.measured_tables import name_measured_table
from deployments.config.app import AppArgs
from deployments.config.host_memory import count_host_bytes, share_host_bytes
from deployments.preparation.profiling import find_size_range, measure_unprofiled
from deployments.preparation.worker_memory import settle_memory
from deployments.preparation.worker_seat import WorkerSeats
from profiler import ProfileRow, ProfileTable, WeightsRow, read_table
from profiler.measure.sizes import SizeRange
from profiler.measure.stages import Sample, Source
from tests.deployments.assembly.test_measured_tables import make_args
from tridentserve.byte_sizes import MIB
from tridentserve.errors import ConfigError, ProfileError
from tridentserve.requests import Shape
from tridentserve.stages import Stage


class FakeSeats:
    """Seats whose tasks run here; `answers` stand for what each would find."""

    def __init__(self, *answers: Any) -> None:
        self.bundles = tuple(range(1, len(answers) + 1)) or (1,)
        self._answers = answers

    async def run(self, index: int, function: Callable[..., Any], *args: Any) -> Any:
        return self._answers[index] if self._answers else function(*args)


def as_seats(seats: FakeSeats) -> WorkerSeats:
    return cast(WorkerSeats, seats)


class FakeNews:
    """Keeps all news."""

    def __init__(self) -> None:
        self.heard: list[Mapping[str, Any]] = []
        self.tell = SimpleNamespace(remote=self.heard.append)


def make_auto(cache: Path, **more: Any) -> AppArgs:
    return make_args(cache, cluster={"workers_per_node": 2}, **more)


async def test_auto_is_the_least_that_a_node_has(tmp_path: Path) -> None:
    args = make_auto(tmp_path)
    settled = await settle_memory(args, as_seats(FakeSeats(900 * MIB, 800 * MIB)))
    assert settled.cluster.memory_mb == 800
    assert settled.models == args.models
    number = make_args(tmp_path)
    assert await settle_memory(number, as_seats(FakeSeats(1))) is number
    with pytest.raises(ConfigError, match=r"^handoff.capacity_mb: not below cluster.memory_mb \(`auto`: 64\)"):
        await settle_memory(args, as_seats(FakeSeats(64 * MIB)))


async def test_the_workers_of_a_machine_share_its_memory(tmp_path: Path) -> None:
    args = make_auto(tmp_path)
    assert 2 * share_host_bytes(2) < count_host_bytes()
    assert args.cluster.memory_bytes == share_host_bytes(2)
    settled = await settle_memory(args, as_seats(FakeSeats()))
    assert settled.cluster.memory_bytes == share_host_bytes(2) // MIB * MIB


def test_a_limit_of_the_control_group_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits = (tmp_path / "memory.max", tmp_path / "none")
    monkeypatch.setattr("deployments.config.host_memory._LIMITS", limits)
    limits[0].write_text("max\n")
    whole = count_host_bytes()
    limits[0].write_text("1048576\n")
    assert count_host_bytes() == MIB < whole


def test_the_memory_of_gpus_is_not_known_beforehand(tmp_path: Path) -> None:
    args = make_args(tmp_path, cluster={"workers_per_node": 2, "device": "cuda", "device_name": "Some GPU"})
    with pytest.raises(ConfigError, match=r"cluster.memory_mb: `auto` is known only where the service runs"):
        _ = args.cluster.memory_bytes


@pytest.fixture
def news(monkeypatch: pytest.MonkeyPatch) -> FakeNews:
    news = FakeNews()

    @contextmanager
    def open_news(topic: str) -> Iterator[FakeNews]:
        assert topic == "profiling"
        yield news

    monkeypatch.setattr("deployments.preparation.profiling.open_start_news", open_news)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "kept")
    return news


def fake_measurement(
    source: Source, model: str, sizes: SizeRange, degrees: Any, num_threads: int, budget_s: float, on_point: Any
) -> ProfileTable:
    on_point("encode 64x64", Sample(0.02, 0.0, 1, 1))
    rows = tuple(
        ProfileRow(model, "cpu", stage, shape, 1, 1, 0.5, 1, "measured: here")
        for stage in Stage
        for shape in (sizes.smallest, sizes.largest)
    )
    return ProfileTable(model, rows, tuple(WeightsRow(model, stage, 1 << 20, "measured: here") for stage in Stage))


async def test_a_model_is_measured_and_its_table_written(
    tmp_path: Path, news: FakeNews, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("profiler.measure.quick.measure_quickly", fake_measurement)
    monkeypatch.setattr("deployments.preparation.profiling.prepare_logs", lambda: None)
    args = make_args(tmp_path, cluster={"workers_per_node": 1, "memory_mb": 1024, "device_name": "my cores"})
    with caplog.at_level("INFO", "deployments"):
        await measure_unprofiled(args, as_seats(FakeSeats()))
    table = read_table(name_measured_table(args.models[0], args))
    assert {(row.model, row.gpu) for row in table.rows} == {("own", "my cores")}
    assert [news.heard[0]["model"], news.heard[-1]["latest"]] == ["own", "encode 64x64"]
    assert "no profile has rows of own for my cores" in caplog.text
    assert "encode 500 ms at 64x64 to 500 ms at 512x512" in caplog.text
    num_heard = len(news.heard)
    await measure_unprofiled(args, as_seats(FakeSeats()))
    assert len(news.heard) == num_heard, "it is measured once"


async def test_a_model_that_cannot_be_measured_is_named(
    tmp_path: Path, news: FakeNews, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> ProfileTable:
        raise ProfileError("no point of own could be measured")

    monkeypatch.setattr("profiler.measure.quick.measure_quickly", fail)
    monkeypatch.setattr("deployments.preparation.profiling.prepare_logs", lambda: None)
    with pytest.raises(ConfigError, match=r"own could not be measured .*; profile it with scripts/profile_model.py"):
        await measure_unprofiled(make_args(tmp_path), as_seats(FakeSeats()))


def test_the_range_is_that_of_the_limits(tmp_path: Path) -> None:
    (model,) = make_args(tmp_path, {"defaults": {"side": 256}}).models
    assert find_size_range(model) == SizeRange(Shape(64, 64), Shape(256, 256), Shape(512, 512))
