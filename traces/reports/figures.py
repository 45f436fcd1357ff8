"""The figures of an evaluation, as matplotlib figures of plain numbers: nothing here knows how the numbers came to be.

Each function returns a `Figure` (no display and no global state); `png` makes bytes of it.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

# The default is dark blue wherever it appears; the others keep their colour over all figures of a report.
_COLOURS = {
    "default": "#1f3a93",
    "b1": "#f4b183",
    "b2": "#e07b39",
    "b3": "#a9d18e",
    "b4": "#548235",
    "b5": "#c9a0dc",
    "b6": "#7b3fa0",
    "wo-switch": "#2e9cca",
    "wo-stage-aware": "#7fb7be",
    "wo-scheduler": "#aaabb8",
    "tetriserve": "#c0392b",
    "genserve": "#d4ac0d",
    "dit-serve": "#16a085",
    "patchedserve": "#8e5572",
    "edf": "#5d6d7e",
    # Not policies: percentiles of ours, and what the paper states.
    "p50": "#1f3a93",
    "p99": "#2e9cca",
    "paper": "#e07b39",
}
_TYPE_COLOURS = {
    "EDC": "#1f3a93",
    "DC": "#2e9cca",
    "ED": "#7fb7be",
    "D": "#a9d18e",
    "E": "#f4b183",
    "C": "#c0392b",
    "none": "#d9d9d9",
}
_FALLBACK = colormaps["tab20"]
BOUND_COLOUR = "#111111"
_DPI = 110


@dataclass(frozen=True, slots=True)
class Bars:
    """One panel of bars."""

    label: str
    values: Mapping[str, Mapping[str, float | None]]
    """The heights of the bars, as `values[policy][group]`; None where there is none (drawn as a cross). Where a
    policy has no entry for a group, it was not run there and nothing is drawn."""
    marks: Mapping[str, float] | None = None
    """A line over each group, such as an upper bound."""
    mark_label: str = ""
    spreads: Mapping[str, Mapping[str, tuple[float, float]]] | None = None
    """The lowest and the highest of several seeds, by policy and group."""
    hatched: Collection[tuple[str, str]] = ()
    """The bars that are not to be compared with the others, as (policy, group)."""


def choose_colour(policy: str) -> str | tuple[float, ...]:
    """The colour of a policy in all figures."""
    if policy in _COLOURS:
        return _COLOURS[policy]
    return tuple(_FALLBACK(sum(policy.encode()) % 20))


def draw_bar_panels(title: str, groups: Sequence[str], panels: Sequence[Bars]) -> Figure:
    """Panels above one another over the same groups; one bar per policy in each group."""
    figure = Figure(figsize=(max(7.0, 1.9 * len(groups) + 2.5), 2.5 * len(panels) + 0.8), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        _draw_bars(axis, groups, panel)
    axes[-1].set_xticks(range(len(groups)), groups)
    figure.suptitle(title)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(8, max(1, len(labels))), frameon=False)
    return figure


def _draw_bars(axis: Axes, groups: Sequence[str], panel: Bars) -> None:
    width = 0.84 / max(1, len(panel.values))
    for index, (policy, by_group) in enumerate(panel.values.items()):
        offset = (index - (len(panel.values) - 1) / 2) * width
        known = [(place + offset, group, by_group[group]) for place, group in enumerate(groups) if group in by_group]
        heights = [(x, group, value) for x, group, value in known if value is not None]
        xs, tops = [x for x, *_ in heights], [value for *_, value in heights]
        bars = axis.bar(xs, tops, width * 0.94, label=policy, color=choose_colour(policy))
        for bar, (_, group, _) in zip(bars, heights, strict=True):
            if (policy, group) in panel.hatched:
                bar.set(hatch="////", alpha=0.35, edgecolor="black", linewidth=0.0)
        if panel.spreads is not None:
            _draw_spreads(axis, heights, panel.spreads.get(policy, {}))
        missing = [x for x, _, value in known if value is None]
        axis.plot(
            missing, [0.02] * len(missing), "x", color=choose_colour(policy), transform=axis.get_xaxis_transform()
        )
    if panel.marks:
        places = [place for place, group in enumerate(groups) if group in panel.marks]
        levels = [panel.marks[groups[place]] for place in places]
        starts, ends = [place - 0.46 for place in places], [place + 0.46 for place in places]
        axis.hlines(levels, starts, ends, color=BOUND_COLOUR, linestyle="--", linewidth=1.2, label=panel.mark_label)
    axis.set_ylabel(panel.label)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)


def _label_log_axis(axis: Axis) -> None:
    """Ticks at 1, 2, 5, 10, ... as plain numbers; only at powers of ten where there would be too many."""
    low, high = axis.get_view_interval()
    is_long = low > 0 and high / low > 300
    axis.set_major_locator(LogLocator(subs=(1.0,) if is_long else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _draw_spreads(
    axis: Axes, heights: Sequence[tuple[float, str, float]], spreads: Mapping[str, tuple[float, float]]
) -> None:
    for x, group, value in heights:
        low, high = spreads.get(group, (value, value))
        if high > low:
            axis.errorbar([x], [value], yerr=[[value - low], [high - value]], color="black", capsize=2, linewidth=0.9)


def draw_lines(
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    bound: Sequence[tuple[float, float]] = (),
    log_x: bool = False,
    log_y: bool = False,
    markers: bool = True,
) -> Figure:
    """One line per policy; `bound` is dashed and black."""
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axis = figure.subplots()
    for name, points in series.items():
        width, order = (2.4, 3) if name == "default" else (1.4, 2)
        xs, ys = [x for x, _ in points], [y for _, y in points]
        marker = "o" if markers else ""
        axis.plot(
            xs, ys, label=name, color=choose_colour(name), marker=marker, markersize=4, linewidth=width, zorder=order
        )
    if bound:
        axis.plot(*zip(*bound, strict=True), "--", color=BOUND_COLOUR, linewidth=1.2, label="upper bound")
    if log_x:
        axis.set_xscale("log")
        _label_log_axis(axis.xaxis)
    if log_y:
        axis.set_yscale("log")
        _label_log_axis(axis.yaxis)
    else:
        axis.set_ylim(bottom=0)
    _finish(axis, title, x_label, y_label)
    return figure


def draw_timeline(
    title: str,
    throughput: Mapping[str, Sequence[tuple[float, float]]],
    placement: Sequence[tuple[float, Mapping[str, int]]],
    placement_of: str,
    end_s: float,
) -> Figure:
    """Above: results per second over time, one line per policy; its last point is where the line ends. Below: how many
    GPUs held which stages, by `(since_s, {placement type: GPUs})`, for the policy `placement_of`. Times in seconds,
    drawn in minutes."""
    figure = Figure(figsize=(8.5, 6.0), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for name, points in throughput.items():
        width = 2.4 if name == "default" else 1.3
        xs, ys = [time_s / 60 for time_s, _ in points], [rate for _, rate in points]
        above.plot(xs, ys, label=name, color=choose_colour(name), linewidth=width)
    above.set_ylim(bottom=0)
    _finish(above, title, "", "requests finished per second")
    kinds = [kind for kind in _TYPE_COLOURS if any(counts.get(kind) for _, counts in placement)]
    since_min = [time_s / 60 for time_s, _ in placement] + [end_s / 60]
    stacks = [[counts.get(kind, 0) for _, counts in placement] for kind in kinds]
    if kinds:
        stacked = [[*counts, counts[-1]] for counts in stacks]
        below.stackplot(since_min, stacked, labels=kinds, colors=[_TYPE_COLOURS[kind] for kind in kinds], step="post")
    below.set_xlim(0, max(end_s / 60, 1e-6))
    _finish(below, f"placement ({placement_of})", "time, minutes", "GPUs by stages held")
    return figure


def _finish(axis: Axes, title: str, x_label: str, y_label: str) -> None:
    axis.set_title(title)
    axis.set_xlabel(x_label)
    axis.set_ylabel(y_label)
    axis.grid(alpha=0.3)
    axis.set_axisbelow(True)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)


def write_png(figure: Figure) -> bytes:
    """The figure as a PNG file; the same numbers give the same bytes."""
    with io.BytesIO() as file:
        figure.savefig(file, format="png", dpi=_DPI, metadata={"Software": None})
        return file.getvalue()
