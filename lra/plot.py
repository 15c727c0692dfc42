"""Accuracy against speed as a picture: one panel for each column, a bubble for each backend."""

import io
import math
import textwrap

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation

from lra.cells import Cell, Column, sections

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#5C5C5C")
"""Okabe and Ito's colours, told apart by colour-blind readers; yellow and black replaced for bubbles on white."""
MEBIBYTE = 2**20
SMALLEST, LARGEST = 40.0, 900.0
"""Bubble areas in square points; the largest bubble has the most memory of the whole picture."""
LOG_FROM = 5
"""Speeds further apart than this factor get a logarithmic axis."""
INK = "#333333"


def draw(cells: list[Cell]) -> bytes:
    """The picture as PNG."""
    style = {"font.size": 9, "axes.edgecolor": "#999999", "axes.labelcolor": INK, "text.color": INK,
             "xtick.color": INK, "ytick.color": INK, "font.family": "DejaVu Sans"}  # fmt: skip
    with mpl.rc_context(style):
        return _draw(cells)


def _draw(cells: list[Cell]) -> bytes:
    columns = list(dict.fromkeys(column for section in sections(cells) for column in section.columns))
    backends = list(dict.fromkeys(cell.backend for cell in cells))
    colours = {backend: PALETTE[at % len(PALETTE)] for at, backend in enumerate(backends)}
    most_memory = max((cell.peak_memory_bytes or 0 for cell in cells), default=0)

    across = min(len(columns), 3 if len(columns) <= 9 else 4)
    down = math.ceil(len(columns) / across)
    width = 7.2 if across == 1 else 4.6 * across
    figure = Figure(figsize=(width, (4.8 if down == 1 else 4.0 * down) + 0.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    panels = figure.subplots(down, across, squeeze=False).ravel()
    marks = {}
    for panel, column in zip(panels, columns, strict=False):
        marks[panel] = _panel(panel, column, [c for c in cells if c.column == column], colours, most_memory)
    for panel in panels[len(columns) :]:
        panel.remove()
    _legend(figure, colours, most_memory)
    figure.draw_without_rendering()
    for panel, labels in marks.items():
        _spread(panel, labels)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _panel(
    axes: Axes, column: Column, cells: list[Cell], colours: dict[str, str], most_memory: float
) -> list[Annotation]:
    """One column; returns the labels, not yet moved apart."""
    drawn = [cell for cell in cells if cell.accuracy is not None and cell.tokens_per_second]
    _titles(axes, column, cells)
    axes.grid(color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    labels = []
    for cell in sorted(drawn, key=lambda cell: -(cell.peak_memory_bytes or 0)):
        x, y = cell.tokens_per_second, 100 * cell.accuracy
        area = _area(cell.peak_memory_bytes, most_memory)
        known = cell.peak_memory_bytes is not None
        colour = colours[cell.backend]
        low, high = _spread_of(cell)
        axes.errorbar(x, y, yerr=[[y - low], [high - y]], color=colour, linewidth=1.2, capsize=3, zorder=2)
        axes.scatter(x, y, s=area, facecolor=colour if known else "white", edgecolor=colour if not known else "white",
                     alpha=0.85, linewidth=1.0, zorder=3)  # fmt: skip
        text = cell.backend + (f" ({cell.failures})" if cell.failures else "")
        labels.append(axes.annotate(text, (x, y), xytext=(math.sqrt(area) / 2 + 3, 0), va="center",
                                    textcoords="offset points", fontsize=8.5, color=colour, weight="bold", zorder=4))  # fmt: skip
    _axes_range(axes, drawn)
    absent = [f"{c.backend} ({c.failures or 'no accuracy or speed'})" for c in cells if c not in drawn]
    if absent:
        axes.text(0.01, 0.01, textwrap.fill("not shown: " + ", ".join(absent), 60), transform=axes.transAxes,
                  fontsize=7.5, style="italic", color="#777777", va="bottom")  # fmt: skip
    return labels


def _titles(axes: Axes, column: Column, cells: list[Cell]) -> None:
    devices = (
        ", ".join(sorted({name for cell in cells for name in cell.device_names})) or "device not recorded"
    )
    axes.set_title(
        f"{column.task}, length {column.length} ({column.regime})", loc="left", weight="bold", pad=26
    )
    protocol = f"protocol {column.protocol} [{column.protocol_hash[:10]}], task version {column.task_version}"
    axes.text(0, 1.015, f"{protocol}\n{textwrap.shorten(devices, 62)}", transform=axes.transAxes,
              fontsize=7.5, color="#777777", va="bottom", linespacing=1.25)  # fmt: skip
    axes.set_xlabel("training speed, tokens/s  (right is faster)")
    axes.set_ylabel("test accuracy, %")
    majority = next((cell.majority for cell in cells if cell.majority is not None), None)
    if majority is not None:
        axes.axhline(100 * majority, color="#888888", linestyle="--", linewidth=1, zorder=1)
        axes.annotate("majority class", (0.995, 100 * majority), xycoords=("axes fraction", "data"), fontsize=7.5,
                      xytext=(0, -3), textcoords="offset points", color="#777777", ha="right", va="top")  # fmt: skip


def _spread_of(cell: Cell) -> tuple[float, float]:
    """Ends of the error bar in %: one standard deviation over seeds, or the Wilson interval of a single run."""
    mean = 100 * cell.accuracy
    if cell.accuracy_std is not None:
        return mean - 100 * cell.accuracy_std, mean + 100 * cell.accuracy_std
    if cell.interval:
        return min(mean, 100 * cell.interval[0]), max(mean, 100 * cell.interval[1])
    return mean, mean


def _axes_range(axes: Axes, drawn: list[Cell]) -> None:
    """Room around the bubbles for their radius and their label, and tick labels in plain numbers."""
    if not drawn:
        axes.set_xticks([])
        axes.set_ylim(0, 100)
        return
    speeds = [cell.tokens_per_second for cell in drawn]
    low, high = min(speeds), max(speeds)
    if high > LOG_FROM * low:
        axes.set_xscale("log")
        room = (high / low) ** 0.14
        axes.set_xlim(low / room, high * room**2.2)
    else:
        room = 0.14 * (high - low) or 0.3 * high
        axes.set_xlim(low - room, high + 2.2 * room)
    axes.xaxis.set_major_formatter(lambda value, _: _short(value))
    axes.xaxis.set_minor_formatter("")
    ends = [end for cell in drawn for end in _spread_of(cell)]
    ends += [100 * cell.majority for cell in drawn if cell.majority is not None]
    room = max(0.14 * (max(ends) - min(ends)), 0.5)
    axes.set_ylim(min(ends) - 1.4 * room, max(ends) + room)


def _spread(axes: Axes, labels: list[Annotation]) -> None:
    """Move labels up or down, the lowest first, until none covers another."""
    renderer = axes.figure.canvas.get_renderer()
    placed = []
    for label in sorted(labels, key=lambda label: (label.xy[1], label.xy[0])):
        x, y = label.xyann
        for step in sorted(range(-12, 13), key=abs):
            label.xyann = (x, y + 5 * step)
            box = label.get_window_extent(renderer).padded(1)
            if not any(box.overlaps(other) for other in placed):
                break
        placed.append(box)


def _area(memory: float | None, most: float) -> float:
    """Bubble area, in proportion to memory; the smallest stays visible. A hollow dot where it is unknown."""
    return max(SMALLEST, LARGEST * memory / most) if memory and most else SMALLEST


def _legend(figure: Figure, colours: dict[str, str], most_memory: float) -> None:
    """Bubble sizes in MiB and what the bars mean, below the panels."""
    handles = []
    if most_memory:
        top = 10 ** math.floor(math.log10(most_memory / MEBIBYTE))
        top *= max(step for step in (1, 2, 5) if step * top <= most_memory / MEBIBYTE)
        for size in (top / 10, top / 2, top):
            diameter = math.sqrt(_area(size * MEBIBYTE, most_memory))
            handles.append(Line2D([], [], marker="o", linestyle="", markersize=diameter, color="#bbbbbb",
                                  markeredgecolor="white", label=f"{size:,.10g} MiB"))  # fmt: skip
    bars = "bars: ± standard deviation over seeds, or 95 % Wilson interval of one run"
    title = "bubble area: peak memory" if handles else "memory not measured"
    handles.append(Line2D([], [], marker="|", linestyle="", markersize=11, color="#888888", label=bars))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, title=title,
                  fontsize=8, title_fontsize=8, handletextpad=1.4, columnspacing=2.2, borderpad=0.9)  # fmt: skip


def _short(value: float) -> str:
    """12000 -> 12k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
