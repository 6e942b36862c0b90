"""Line plots: what is drawn, where its names stand, and that the same data give the same file."""

import struct
import sys

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from plots import COLOURS, DASHES, MARKERS, ROW, draw, line_plot, spread

BUDGETS = (64, 128, 256, 512, 1024)


def lines(n, intervals=True):
    """`n` series whose ends lie close together."""
    wide = 0.03 if intervals else 0.0
    return {
        f"policy {i}": [(x, y := 0.2 + 0.001 * x + 0.002 * i, y - wide, y + wide) for x in BUDGETS]
        for i in range(n)
    }


def drawn(series, log_x=False, log_y=False):
    figure = draw("title", "budget", "accuracy", series, log_x, log_y)
    FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    return figure.axes[0]


def test_the_file_is_a_png_that_is_wide_enough(tmp_path):
    line_plot(tmp_path / "plot.png", "title", "budget", "accuracy", lines(3), log_x=True)
    content = (tmp_path / "plot.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    assert 1600 <= width < 3000 and 1000 <= height < 2000
    assert b"matplotlib" not in content.lower()  # nor a version, which would change the bytes


def test_the_same_data_give_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        line_plot(tmp_path / name, "title", "budget", "accuracy", lines(4), log_y=True)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("n", [1, 3, 25])
@pytest.mark.parametrize("log", [False, True])
def test_every_name_stands_once_and_alone(n, log):
    axes = drawn(lines(n), log, log)
    names = axes.texts
    assert sorted(text.get_text() for text in names) == sorted(lines(n))
    boxes = sorted((text.get_window_extent() for text in names), key=lambda box: box.y0)
    for below, above in zip(boxes, boxes[1:], strict=False):
        assert below.y1 <= above.y0
    assert min(box.x0 for box in boxes) > axes.bbox.x1  # clear of the lines
    assert axes.bbox.height >= len(names) * ROW * axes.figure.dpi - 1e-6


def test_a_name_has_the_colour_of_its_line_and_no_two_lines_look_alike():
    axes = drawn(lines(25))
    looks = {}
    for line in axes.lines[:25]:  # before the leaders and the pieces beside the names
        looks[line.get_color(), str(line.get_linestyle()), line.get_marker()] = line
    assert len(looks) == 25
    colours = dict(zip(lines(25), (line.get_color() for line in axes.lines), strict=False))
    assert {text.get_text(): text.get_color() for text in axes.texts} == colours
    assert len(COLOURS) * len(DASHES) >= 25 and len(MARKERS) > 3


def test_neighbouring_series_differ_in_all_three():
    first, second = drawn(lines(2)).lines[:2]
    assert first.get_color() != second.get_color()
    assert first.get_linestyle() != second.get_linestyle()
    assert first.get_marker() != second.get_marker()


def test_ticks_are_the_data_written_out():
    axes = drawn({"full": [(x, x, x, x) for x in (1024, 65536, 4096)]}, True, True)
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1,024", "4,096", "65,536"]
    assert list(axes.get_xticks()) == [1024, 4096, 65536]
    assert len(axes.xaxis.get_minorticklocs()) == 0


def test_tick_labels_never_run_into_each_other():
    axes = drawn({"full": [(x, 1, 1, 1) for x in (1024, 2048, 4096, 65536)]})
    assert list(axes.get_xticks()) == [1024, 2048, 4096, 65536]
    shown = [label for label in axes.get_xticklabels() if label.get_text()]
    assert [label.get_text() for label in shown] == ["1,024", "65,536"]
    boxes = [label.get_window_extent() for label in drawn(lines(1)).get_xticklabels()]
    assert all(a.x1 < b.x0 for a, b in zip(boxes, boxes[1:], strict=False) if b.width)


def test_a_series_of_one_point_is_drawn():
    axes = drawn({"one": [(4096, 3.0, 2.0, 5.0)]}, True, True)
    assert axes.lines[0].get_xydata().tolist() == [[4096, 3]]
    assert axes.texts[0].get_text() == "one"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [0.01, 1, 7, 64])
@pytest.mark.parametrize("log", [False, True])
def test_a_constant_lies_within_the_axes(value, log):
    axes = drawn({"a": [(value, value, value, value)]}, log, log)
    for low, high in (axes.get_xlim(), axes.get_ylim()):
        assert low < value < high


def test_intervals_go_from_low_to_high_side_by_side():
    axes = drawn({name: [(64, 3.0, 2.0, 5.0), (128, 1.0, 0.5, 1.5)] for name in "abc"})
    at = []
    for bars in axes.collections:
        (first, _) = bars.get_segments()
        assert first[:, 1].tolist() == [2, 5]
        at.append(first[0, 0])
    assert len(set(at)) == 3
    assert all(abs(x - 64) <= 0.015 * 64 for x in at) and at[1] == 64


@pytest.mark.parametrize("log", [False, True])
def test_without_intervals_no_line_is_moved(log):
    for line in drawn(lines(3, intervals=False), log).lines[:3]:
        assert tuple(line.get_xdata()) == pytest.approx(BUDGETS, rel=1e-12)


def test_dollars_are_no_formula():
    axes = drawn({"$5 or $6": [(1, 1, 1, 1)]})
    assert not axes.texts[0].get_parse_math()


@pytest.mark.parametrize(
    "series, log, message",
    [
        ({}, False, "nothing to plot"),
        ({"a": []}, False, "nothing to plot"),
        ({"a": [(1, 1, 1, 1)], "b": []}, False, "nothing to plot"),
        ({"a": [(1, float("nan"), 1, 1)]}, False, "not finite"),
        ({"a": [(1, 1, 0, 1)]}, True, "not above 0"),
        ({"a": [(0, 1, 1, 1)]}, True, "not above 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, series, log, message):
    with pytest.raises(ValueError, match=message):
        line_plot(tmp_path / "plot.png", "title", "x", "y", series, log, log)
    assert not (tmp_path / "plot.png").exists()


def test_a_missing_matplotlib_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"plots need matplotlib: pip install -e \.\[eval\]"):
        line_plot(tmp_path / "plot.png", "title", "x", "y", lines(1))


@pytest.mark.parametrize(
    "wanted, expected",
    [
        ([0.2, 0.8], [0.2, 0.8]),  # as wanted
        ([0.5, 0.5], [0.45, 0.55]),  # apart by the same on both sides
        ([0.0, 0.0, 0.0], [0.0, 0.1, 0.2]),  # within the axes
        ([1.0, 1.0], [0.9, 1.0]),
    ],
)
def test_positions_are_spread(wanted, expected):
    assert spread(wanted, 0.1) == pytest.approx(expected)
