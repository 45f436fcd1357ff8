from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "house_figures.py"


@pytest.fixture
def code_base(tmp_path: Path) -> Path:
    (tmp_path / "wide").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "one.py").write_text("def f(a: int) -> int:\n    return a\n")
    (tmp_path / "wide" / "__init__.py").write_text("")
    (tmp_path / "wide" / "two.py").write_text("class A:\n    def g(self, b):\n        c = b\n        return c\n")
    (tmp_path / "wide" / "three.py").write_text("async def h(*d: int) -> None:\n    pass\n\n\nX = 1\nY = 2\n")
    (tmp_path / "tests" / "test_one.py").write_text("def test(a, b, c):\n" + "    assert a\n" * 50)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *roots: Path) -> int:
    monkeypatch.setattr(sys, "argv", ["house_figures.py", *map(str, roots)])
    status = runpy.run_path(str(SCRIPT))["main"]()
    assert isinstance(status, int)
    return status


def test_the_figures_of_this_tree_stand_in_the_architecture() -> None:
    root = SCRIPT.parents[1]
    page = (root / "docs" / "architecture.md").read_text(encoding="utf-8")
    filled = runpy.run_path(str(SCRIPT))["fill_house_figures"](page, root)
    assert filled == page, "the page is out of date; run python scripts/write_docs.py"


def test_the_figures_are_counted_by_hand(
    code_base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, code_base) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])[code_base.name]
    assert figures == {
        "name": code_base.name,
        "files": 4,
        "file_median": 3,
        "file_p90": 6,
        "file_max": 6,
        "function_median": 2,
        "function_p95": 3,
        "function_max": 3,
        "typed_percent": 66.7,
        "widest_directory": "wide",
        "widest": 2,
    }


def test_a_directory_without_code_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for root in (tmp_path, tmp_path / "absent"):
        with pytest.raises(SystemExit) as stopped:
            run(monkeypatch, root)
        assert stopped.value.code == 2
        assert str(root) in capsys.readouterr().err
