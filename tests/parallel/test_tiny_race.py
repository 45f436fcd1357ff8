"""Several processes that want the same tiny model at once."""

from __future__ import annotations

from pathlib import Path

from tests.parallel.members import Member, Pool
from tridentserve.pipelines import load_adapter
from tridentserve.pipelines.tiny.build import ensure_tiny
from tridentserve.stages import Stage


def make_and_load(member: Member, cache_dir: Path) -> tuple[Path, str]:
    folder = ensure_tiny("sd3", cache_dir)
    return folder, load_adapter(folder, frozenset(Stage)).family


def test_all_get_the_same_whole_model_folder(pool: Pool, tmp_path: Path) -> None:
    cache_dir = tmp_path / "models"
    assert pool.run(make_and_load, 4, cache_dir) == [(cache_dir / "tiny-sd3-v1", "sd3")] * 4
    assert [path.name for path in cache_dir.iterdir()] == ["tiny-sd3-v1"]
