# SPDX-License-Identifier: Apache-2.0
"""Line plots for print: every line is named at its end, and told by colour, dashes and marker."""

import math
from itertools import accumulate
from pathlib import Path

# Okabe and Ito's colours, for colour-blind readers; not the yellow, in which text is illegible on
# white. Seven colours and four dashes make 28 lines that differ.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
MARKERS = "osD^vPX<>"
DPI, WIDTH, ROW = 300, 5.6, 0.19  # width of the axes alone and height of a name, in inches


def line_plot(
    path: Path,
    title: str,
    x_label: str,
    y_label: str,
    series: dict[str, list[tuple[float, float, float, float]]],
    log_x: bool = False,
    log_y: bool = False,
    shaded: dict[str, tuple[float, float]] | None = None,
) -> None:
    """Write a PNG with a line for each of `series`; the same data give the same bytes.

    series: points (x, y, low, high) by name; from low to high goes an interval, of none if equal.
    shaded: ranges of x by name.
    Raises ValueError for a series without points, for numbers that are not finite or, on a
    logarithmic axis, not above 0, and where matplotlib is missing.
    """
    figure = draw(title, x_label, y_label, series, log_x, log_y)
    for name, (first, last) in (shaded or {}).items():
        shade(figure.axes[0], name, first, last)
    figure.savefig(path, format="png", bbox_inches="tight", metadata={"Software": None})


def need_matplotlib() -> None:
    """Raises ValueError where there is none, to be told before a long run and not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("plots need matplotlib: pip install -e .[eval]") from None


def draw(title: str, x_label: str, y_label: str, series: dict, log_x: bool, log_y: bool):
    """The figure of `line_plot`. The axes fill it and texts lie outside: to be cut around them."""
    need_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator

    if not series or not all(series.values()):
        raise ValueError("nothing to plot: no series, or one without points")
    points = [point for line in series.values() for point in line]
    for x, *y in points:
        if not all(map(math.isfinite, (x, *y))) or (log_x and x <= 0) or (log_y and min(y) <= 0):
            raise ValueError(f"cannot plot {x, *y}: not finite, or not above 0 on a log axis")
    figure = Figure((WIDTH, max(3.6, ROW * len(series))), DPI, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), facecolor="white", axisbelow=True)
    scales = ["log" if log else "linear" for log in (log_x, log_y)]
    axes.set(xscale=scales[0], yscale=scales[1], xlabel=x_label, ylabel=y_label)
    axes.set_title(title, loc="left", fontsize=11, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.tick_params(labelsize=8)
    ticks = sorted({x for x, *_ in points})
    levels = [level for _, *y in points for level in y]
    for log, values, set_limits in ((log_x, ticks, axes.set_xlim), (log_y, levels, axes.set_ylim)):
        if log and min(values) == max(values):  # from which matplotlib takes no limits
            set_limits(values[0] / 2, values[0] * 2)
    span = ticks[-1] / ticks[0] if log_x else ticks[-1] - ticks[0]
    # Intervals lie side by side, so lines are moved by up to 1.5 % of the axis.
    reach = min(0.015, 0.003 * len(series)) * any(low < high for _, _, low, high in points)
    ends = []  # the last point of each line, its name and style
    for i, (name, line) in enumerate(series.items()):
        x, y, low, high = zip(*sorted(line), strict=True)
        shift = reach * (2 * i / max(1, len(series) - 1) - 1)
        x = [value * span**shift if log_x else value + span * shift for value in x]
        colour, dashes = COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)]
        style = dict(color=colour, ls=dashes, lw=1.3, marker=MARKERS[i % len(MARKERS)], ms=4)
        axes.plot(x, y, **style)
        axes.vlines(x, low, high, color=colour, linewidth=0.7)
        ends.append(((x[-1], y[-1]), name, style))
    axes.set_xticks(ticks, tick_labels(axes, ticks))
    if log_y:
        low, high = axes.get_ylim()
        near = high < 5 * low
        axes.yaxis.set_major_locator(MaxNLocator(6) if near else LogLocator(subs=[1, 2, 5]))
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.minorticks_off()
    write_names(axes, ends)
    return figure


def shade(axes, name: str, first: float, last: float) -> None:
    """A grey range of x with its name above."""
    axes.axvspan(first, last, color="#EEEEEE", zorder=0)
    place = dict(transform=axes.get_xaxis_transform(), fontsize=8, ha="center", va="top")
    axes.text((first + last) / 2, 0.99, name, parse_math=False, **place)


def tick_labels(axes, ticks: list[float]) -> list[str]:
    """The numbers written out, without those that would run into the one before."""
    axes.autoscale_view()
    labels, taken = [], -math.inf
    for value in ticks:
        label = f"{value:,.10g}"
        middle, half = axes.transData.transform((value, 1))[0] / DPI, 0.035 * len(label)
        labels.append(label if middle - half > taken else "")
        taken = middle + half if labels[-1] else taken
    return labels


def write_names(axes, ends: list[tuple]) -> None:
    """Name each line in a column on the right, with a piece of it and a leader to its end."""
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = [(to_axes.transform(point).tolist(), name, style) for point, name, style in ends]
    ends.sort(key=lambda end: end[0][1])
    rows = spread([y for (_, y), *_ in ends], ROW / axes.figure.get_figheight())
    place = dict(transform=axes.transAxes, clip_on=False)
    font = dict(fontsize=8, va="center", parse_math=False)
    for row, ((x, y), name, style) in zip(rows, ends, strict=True):
        axes.plot([x, 1.04], [y, row], color=style["color"], linewidth=0.4, zorder=1, **place)
        axes.plot([1.04, 1.07, 1.10], [row] * 3, markevery=[1], **style, **place)
        axes.text(1.115, row, name, color=style["color"], **font, **place)


def spread(wanted: list[float], step: float) -> list[float]:
    """Positions from 0 to 1 at least `step` apart, near the rising `wanted`."""
    places = [place - i * step for i, place in enumerate(wanted)]
    pushed = zip(accumulate(places, max), [*accumulate(places[::-1], min)][::-1], strict=True)
    top = 1 - (len(wanted) - 1) * step
    return [min(max((a + b) / 2, 0), top) + i * step for i, (a, b) in enumerate(pushed)]
