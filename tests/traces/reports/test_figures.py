"""Figures show what they are given: read back from their artists, not from pixels."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from matplotlib.figure import Figure
from PIL import Image

from traces.reports.figures import Bars, choose_colour, draw_bar_panels, draw_lines, draw_timeline, write_png


def labels_of(figure: Figure) -> set[str]:
    legends = [*figure.legends, *(axis.get_legend() for axis in figure.axes)]
    return {text.get_text() for legend in legends if legend for text in legend.get_texts()}


def bars_figure() -> Figure:
    values: dict[str, dict[str, float | None]] = {
        "default": {"light": 99.0, "heavy": 80.0},
        "b1": {"light": 50.0, "heavy": None},
    }
    bound = {"light": 100.0, "heavy": 90.0}
    spreads = {"default": {"light": (97.0, 100.0)}}
    attainment = Bars("on time, %", values, bound, "upper bound", spreads)
    latency = Bars("mean, s", values, hatched={("b1", "light")})
    return draw_bar_panels("flux", ["light", "heavy"], [attainment, latency])


def test_bars_have_their_heights_the_bound_and_a_legend() -> None:
    figure = bars_figure()
    above, below = figure.axes
    assert sorted(height for bars in above.containers for height in getattr(bars, "datavalues", ())) == [
        50.0,
        80.0,
        99.0,
    ]
    assert [tick.get_text() for tick in below.get_xticklabels()] == ["light", "heavy"]
    assert (above.get_ylabel(), below.get_ylabel()) == ("on time, %", "mean, s")
    assert labels_of(figure) == {"default", "b1", "upper bound"}
    assert [bar.get_hatch() for bar in below.patches] == [None, None, "////"]


def test_a_missing_value_is_a_cross_and_not_a_bar() -> None:
    above = bars_figure().axes[0]
    crosses = [line for line in above.lines if line.get_marker() == "x" and len(line.get_xdata())]  # type: ignore[arg-type]
    assert len(crosses) == 1
    assert crosses[0].get_color() == choose_colour("b1")


def test_a_policy_that_was_not_run_on_a_group_has_neither_bar_nor_cross_there() -> None:
    values: dict[str, dict[str, float | None]] = {"default": {"light": 99.0, "heavy": 80.0}, "b1": {"heavy": 50.0}}
    (axis,) = draw_bar_panels("flux", ["light", "heavy"], [Bars("on time, %", values)]).axes
    assert not [line for line in axis.lines if len(line.get_xdata())]  # type: ignore[arg-type]
    places = {bars.get_label(): [round(bar.get_center()[0]) for bar in bars] for bars in axis.containers}
    assert places == {"default": [0, 1], "b1": [1]}


def test_lines_and_their_bound() -> None:
    series = {"default": [(1.0, 40.0), (2.5, 90.0)], "b6": [(1.0, 20.0), (2.5, 60.0)]}
    figure = draw_lines("sweep", "SLO scale", "on time, %", series, bound=[(1.0, 70.0), (2.5, 100.0)])
    (axis,) = figure.axes
    assert [list(map(float, line.get_ydata())) for line in axis.lines] == [[40, 90], [20, 60], [70, 100]]  # type: ignore[arg-type]
    assert labels_of(figure) == {"default", "b6", "upper bound"}


def test_timeline_is_in_minutes_and_stacks_all_gpus() -> None:
    placement = [(0.0, {"EDC": 6, "E": 2}), (120.0, {"EDC": 8})]
    figure = draw_timeline("flux dynamic", {"default": [(0.0, 1.0), (60.0, 2.0)]}, placement, "default", end_s=300.0)
    above, below = figure.axes
    assert list(map(float, above.lines[0].get_xdata())) == [0.0, 1.0]  # type: ignore[arg-type]
    tops = [area.get_paths()[0].get_extents().y1 for area in below.collections]
    assert tops == [8, 8]
    assert below.get_xlim()[1] == 5.0
    assert "minutes" in below.get_xlabel()


@pytest.mark.parametrize("make", [bars_figure, lambda: draw_timeline("empty", {}, [], "default", 0.0)])
def test_png_is_a_image_and_always_the_same(make: Callable[[], Figure]) -> None:
    first, second = write_png(make()), write_png(make())
    assert first == second
    assert min(Image.open(io.BytesIO(first)).size) > 300


def test_every_policy_has_a_steady_colour() -> None:
    assert choose_colour("default") != choose_colour("b1")
    assert choose_colour("my-policy") == choose_colour("my-policy")
