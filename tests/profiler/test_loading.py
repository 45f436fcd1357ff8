"""The sources of tables, and the table of D alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiler import INSTANT_LINKS, keep_diffuse_only, load_cost_model, load_tables, read_table, write_table
from tests.profiler.synthetic import SHAPES, table
from tridentserve.errors import ProfileError
from tridentserve.stages import Stage


def test_names_files_directories_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_table("mine/a.csv", keep_diffuse_only(table(("one",))))
    write_table("mine/b.csv", table(("two",)))
    Path("tiny-cpu").mkdir()  # a shipped name is one, whatever lies here
    found = load_tables(["tiny-cpu", "mine", "mine/b.csv", Path("mine/a.csv"), table()])
    assert [each.name for each in found] == ["tiny-cpu.csv", "a.csv", "b.csv", "b.csv", "a.csv", "synthetic.csv"]
    assert load_cost_model(["mine"], "gpu").models == ("one", "two")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("empty", "empty: no profile table is in this directory"),
        ("none.csv", "none.csv: no such file"),
        (Path("none"), "none: no such file"),
        ("none", "no shipped profile table is named 'none'"),
    ],
)
def test_what_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | Path, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    with pytest.raises(ProfileError, match=message):
        load_tables([source])


def test_diffuse_alone_takes_time(tmp_path: Path) -> None:
    write_table(tmp_path / "d.csv", keep_diffuse_only(table()))
    times, whole = load_cost_model([tmp_path / "d.csv"], "gpu"), load_cost_model([table()], "gpu")
    assert times.links == INSTANT_LINKS
    assert read_table(tmp_path / "d.csv").weights == table().weights
    for shape in SHAPES:
        step_s = times.seconds("one", Stage.DIFFUSE, shape, 2)
        assert step_s == pytest.approx(whole.seconds("one", Stage.DIFFUSE, shape, 2), rel=1e-5)
        for stage in (Stage.ENCODE, Stage.DECODE):
            assert times.seconds("one", stage, shape) == 0
            assert times.peak_bytes("one", stage, shape) == whole.peak_bytes("one", stage, shape)
            times.observe("one", stage, shape, 1, 1, 5.0)
            assert times.seconds("one", stage, shape) == 0
            assert times.optimal_degree("one", stage, shape) == 1
            assert times.optimal_batch("one", stage, shape) == 1
        for stage in Stage:
            assert times.transfer_seconds("one", stage, shape, same_node=False) == 0
            assert times.load_seconds("one", stage, "disk") == 0
