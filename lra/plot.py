"""Accuracy against speed as a picture: one panel for each column, a bubble for each backend."""

import io
import math
import textwrap

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation
from matplotlib.ticker import LogLocator, NullFormatter
from matplotlib.transforms import Bbox

from lra.cells import Cell, Column, sections

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B8860B", "#56B4E9", "#7A5195", "#5C5C5C")
"""After Okabe and Ito, told apart by colour-blind readers; yellows and black changed for labels on white."""
MEBIBYTE = 2**20
SMALLEST, LARGEST = 36.0, 800.0
"""Bubble areas in square points; the largest bubble of a panel has the most memory there."""
LOG_FROM = 5
"""Speeds further apart than this factor get a logarithmic axis."""
INK, PALE = "#333333", "#777777"
MAJORITY = "majority class"


def draw(cells: list[Cell]) -> bytes:
    """The picture as PNG."""
    # names of backends and devices are text, whatever dollar signs they hold
    style = {"font.size": 9, "axes.edgecolor": "#999999", "font.family": "DejaVu Sans", "text.parse_math": False}
    style |= dict.fromkeys(("axes.labelcolor", "text.color", "xtick.color", "ytick.color"), INK)
    with mpl.rc_context(style):
        return _draw(cells)


def _draw(cells: list[Cell]) -> bytes:
    every = list(dict.fromkeys(column for section in sections(cells) for column in section.columns))
    columns = [column for column in every if any(cell.column == column and _has_point(cell) for cell in cells)]
    if not columns:
        return _png(_nothing(every))
    backends = list(dict.fromkeys(cell.backend for cell in cells))
    colours = {backend: PALETTE[at % len(PALETTE)] for at, backend in enumerate(backends)}
    across = min(len(columns), 3 if len(columns) <= 9 else 4)
    down = math.ceil(len(columns) / across)
    size = (7.6, 5.6) if len(columns) == 1 else (4.8 * across, 4.5 * down + 0.3)

    figure = Figure(figsize=size, dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    panels = figure.subplots(down, across, squeeze=False).ravel()
    labels = {
        panel: _panel(panel, column, [cell for cell in cells if cell.column == column], colours)
        for panel, column in zip(panels, columns, strict=False)
    }
    for panel in panels[len(columns) :]:
        panel.remove()
    notes = "Bars: ± one standard deviation over seeds, or the 95 % Wilson interval of a single run."
    notes += " Bubble area: peak training memory."
    if empty := [column for column in every if column not in columns]:
        notes += f"\n{_without_point(empty)}"
    figure.supxlabel(notes, fontsize=7.5, color=PALE)
    # label positions depend on the final layout
    figure.draw_without_rendering()
    for panel, found in labels.items():
        _place(panel, found)
    return _png(figure)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _has_point(cell: Cell) -> bool:
    return cell.accuracy is not None and bool(cell.tokens_per_second)


def _without_point(columns: list[Column]) -> str:
    names = ", ".join(f"{column.task} {column.length}" for column in columns)
    return textwrap.fill(f"No run with an accuracy and a speed, so no panel: {names}.", 110)


def _nothing(columns: list[Column]) -> Figure:
    """A picture that says why there is none."""
    figure = Figure(figsize=(7.6, 5.6), dpi=150)
    FigureCanvasAgg(figure)
    figure.text(0.5, 0.5, f"Nothing to draw.\n{_without_point(columns)}", ha="center", va="center", wrap=True)
    return figure


def _panel(axes: Axes, column: Column, cells: list[Cell], colours: dict[str, str]) -> list[Annotation]:
    """One column; returns the labels of the bubbles, not yet in place."""
    drawn = [cell for cell in cells if _has_point(cell)]
    most = max((cell.peak_memory_bytes or 0.0 for cell in drawn), default=0.0)
    _titles(axes, column, cells)
    _ranges(axes, drawn)
    # the largest first, so that a small bubble is never hidden
    drawn.sort(key=lambda cell: -(cell.peak_memory_bytes or 0))
    labels = [_bubble(axes, cell, colours[cell.backend], most) for cell in drawn]
    if most:
        _size_legend(axes, most)
    absent = [f"{c.backend} ({c.failures or 'no accuracy or no speed'})" for c in cells if c not in drawn]
    if absent:
        text = textwrap.fill(f"not shown: {', '.join(absent)}", 62)
        axes.text(0.01, 0.012, text, transform=axes.transAxes, fontsize=7.5, style="italic", color=PALE)
    return labels


def _bubble(axes: Axes, cell: Cell, colour: str, most: float) -> Annotation:
    """Bubble, error bar and label of a backend; a hollow bubble where memory is unknown."""
    x, y = cell.tokens_per_second, 100 * cell.accuracy
    area, (low, high) = _area(cell.peak_memory_bytes, most), _error_bar(cell)
    known = cell.peak_memory_bytes is not None
    face, edge = (colour, "white") if known else ("white", colour)
    axes.scatter(x, y, s=area, facecolor=face, edgecolor=edge, alpha=0.85, linewidth=1, zorder=3)
    bar = {"color": INK, "alpha": 0.75, "linewidth": 0.9, "capsize": 2.5, "zorder": 4}
    axes.errorbar(x, y, yerr=[[y - low], [high - y]], **bar)
    failures = "STUCK" if cell.stuck else cell.failures
    label = axes.annotate(
        f"{cell.backend} ({failures})" if failures else cell.backend,
        (x, y),
        xytext=(math.sqrt(area) / 2 + 4, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        weight="bold",
        color=colour,
        zorder=5,
    )
    label.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
    return label


def _titles(axes: Axes, column: Column, cells: list[Cell]) -> None:
    """What was run and where, the axes, and the line that a constant answer reaches."""
    axes.set_title(f"{column.task}, length {column.length} ({column.regime})", loc="left", weight="bold", pad=26)
    devices = ", ".join(sorted({name for cell in cells for name in cell.device_names}))
    protocol = f"protocol {column.protocol} [{column.protocol_hash[:10]}], task version {column.task_version}"
    small = {"transform": axes.transAxes, "fontsize": 7.5, "color": PALE, "va": "bottom", "linespacing": 1.25}
    axes.text(0, 1.015, f"{protocol}\n{textwrap.shorten(devices or 'device not recorded', 62)}", **small)
    axes.set_xlabel("training speed, tokens/s")
    axes.set_ylabel("test accuracy, %")
    axes.grid(color="#e8e8e8", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    majority = next((100 * cell.majority for cell in cells if cell.majority is not None), None)
    if majority is not None:
        axes.axhline(majority, color="#888888", linestyle="--", linewidth=1, zorder=1)
        place = dict(xycoords=axes.get_yaxis_transform(), xytext=(0, 0), textcoords="offset points")
        axes.annotate(MAJORITY, (1, majority), **place, fontsize=7.5, color=PALE)


def _error_bar(cell: Cell) -> tuple[float, float]:
    """Ends of the error bar in %: one standard deviation over seeds, or a single run's Wilson interval."""
    mean = 100 * cell.accuracy
    if cell.accuracy_std is not None:
        return mean - 100 * cell.accuracy_std, mean + 100 * cell.accuracy_std
    if cell.interval:
        return min(mean, 100 * cell.interval[0]), max(mean, 100 * cell.interval[1])
    return mean, mean


def _ranges(axes: Axes, drawn: list[Cell]) -> None:
    """Room around the bubbles for their radius and their label, and plain numbers on the axis."""
    speeds = [cell.tokens_per_second for cell in drawn]
    low, high = min(speeds), max(speeds)
    if high > LOG_FROM * low:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
        room = (high / low) ** 0.14
        axes.set_xlim(low / room, high * room**1.8)
    else:
        room = 0.14 * (high - low) or 0.3 * high
        axes.set_xlim(low - room, high + 1.8 * room)
    axes.xaxis.set_major_formatter(lambda value, _: _short(value))
    axes.xaxis.set_minor_formatter(NullFormatter())
    ends = [end for cell in drawn for end in _error_bar(cell)]
    ends += [100 * cell.majority for cell in drawn if cell.majority is not None]
    room = max(0.14 * (max(ends) - min(ends)), 0.5)
    axes.set_ylim(min(ends) - 1.4 * room, max(ends) + room)


def _place(axes: Axes, labels: list[Annotation]) -> None:
    """Put each label where it covers the least: right of its bubble, left, above, below, then further off.

    That of the majority class comes first, as it has its line to move along.
    """
    renderer = axes.figure.canvas.get_renderer()
    frame = axes.get_window_extent(renderer)
    solid = [_disc(dots) for dots in axes.collections if isinstance(dots, PathCollection)]
    # an error bar may be crossed at a price
    bars = [_bar(lines) for lines in axes.collections if isinstance(lines, LineCollection)]
    line = next((text for text in axes.texts if text.get_text() == MAJORITY and text not in labels), None)
    solid += [text.get_window_extent(renderer) for text in axes.texts if text not in (*labels, line)]
    if line is not None:
        solid.append(_place_on_line(line, frame, solid, bars))
    for label in sorted(labels, key=lambda label: (label.xy[1], label.xy[0])):
        gap = label.xyann[0]
        spots = [(gap, 0, "left"), (-gap, 0, "right"), (0, gap + 5, "center"), (0, -gap - 5, "center")]
        spots += [(side * gap, step * 7, "left" if side > 0 else "right")
                  for step in (1, -1, 2, -2, 3, -3, 5, -5, 7, -7) for side in (1, -1)]  # fmt: skip
        costs = []
        for x, y, align in spots:
            label.set(ha=align)
            label.xyann = (x, y)
            box = label.get_window_extent(renderer).padded(1)
            outside = box.width * box.height - _overlap(box, frame)
            costs.append(sum(4 * _overlap(box, other) for other in solid) + 40 * outside
                         + sum(_overlap(box, other) for other in bars) + 0.1 * (abs(x) + abs(y)))  # fmt: skip
        x, y, align = spots[costs.index(min(costs))]
        label.set(ha=align)
        label.xyann = (x, y)
        solid.append(label.get_window_extent(renderer).padded(1))


def _place_on_line(label: Annotation, frame: Bbox, solid: list[Bbox], bars: list[Bbox]) -> Bbox:
    """Put the label of a horizontal line where the fewest things are: at its right end if free; returns its box."""
    renderer = label.figure.canvas.get_renderer()
    spots = [(at, side) for at in (1, 0, 0.75, 0.25, 0.5) for side in ("top", "bottom")]
    boxes = []
    for at, side in spots:
        _set_on_line(label, at, side)
        boxes.append(label.get_window_extent(renderer).padded(1))
    costs = [
        4 * sum(_overlap(box, other) for other in solid)
        + 2 * sum(_overlap(box, other) for other in bars)
        + 40 * (box.width * box.height - _overlap(box, frame.padded(2)))
        for box in boxes
    ]
    best = costs.index(min(costs))
    _set_on_line(label, *spots[best])
    return boxes[best]


def _set_on_line(label: Annotation, at: float, side: str) -> None:
    """At a share of the width of the panel, with ``side`` of the text at the line."""
    label.xy = (at, label.xy[1])
    label.set(ha={0: "left", 1: "right"}.get(at, "center"), va=side)
    label.xyann = ({0: 2, 1: -2}.get(at, 0), -3 if side == "top" else 3)


def _disc(dots: PathCollection) -> Bbox:
    """Box of a single bubble in pixels; matplotlib's own extent ignores the size of scatter marks."""
    ((x, y),) = dots.axes.transData.transform(dots.get_offsets())
    radius = math.sqrt(dots.get_sizes()[0]) / 2 * dots.figure.dpi / 72
    return Bbox([[x - radius, y - radius], [x + radius, y + radius]])


def _bar(lines: LineCollection) -> Bbox:
    """Box of an error bar in pixels, 6 wide; matplotlib's own extent of an upright line is empty."""
    ((low, high),) = lines.get_segments()
    return Bbox(lines.axes.transData.transform([low, high])).padded(3)


def _overlap(one: Bbox, other: Bbox) -> float:
    common = Bbox.intersection(one, other)
    return common.width * common.height if common else 0.0


def _area(memory: float | None, most: float) -> float:
    """Bubble area in proportion to memory; the smallest stays visible."""
    return max(SMALLEST, LARGEST * memory / most) if memory and most else SMALLEST


def _size_legend(axes: Axes, most: float) -> None:
    """Three round sizes in MiB below the panel."""
    top = 10 ** math.floor(math.log10(most / MEBIBYTE))
    top *= max((step for step in (1, 2, 5) if step * top <= most / MEBIBYTE), default=1)
    handles = []
    for size in (top / 10, top / 2, top):
        diameter = math.sqrt(_area(size * MEBIBYTE, most))
        look = {"marker": "o", "linestyle": "", "color": "#c4c4c4", "markeredgecolor": "white"}
        handles.append(Line2D([], [], markersize=diameter, label=f"{size:,.10g} MiB", **look))
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, frameon=False,
                fontsize=8, handletextpad=1.2, columnspacing=2.4, borderpad=0.9)  # fmt: skip


def _short(value: float) -> str:
    """12000 -> 12k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
