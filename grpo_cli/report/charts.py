"""Charts as plain records, drawn as inline SVG. Colours are classes of page.html, so that light and dark are one file."""

import math
from dataclasses import dataclass
from html import escape

import numpy as np

WIDTH, HEIGHT = 420, 270
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 38
COLOURS = 8
MOST_POINTS = 160
MOST_MARKED = 40


@dataclass
class Series:
    name: str
    x: list[float]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None
    dashed: bool = False
    faint: bool = False
    """One of many: grey, and not in the legend."""


@dataclass
class Lines:
    title: str
    x_label: str
    y_label: str
    series: list[Series]
    note: str = ""
    stacked: bool = False
    """Shares on top of each other, low to high, instead of lines."""


@dataclass
class Cells:
    """A table of numbers as colours: a heat map, or with many rows a map of problems."""

    title: str
    x_label: str
    y_label: str
    columns: list[str]
    rows: list[str]
    values: list[list[float | None]]
    note: str = ""
    labelled: bool = True
    """The number in each cell, and the name of each row."""


def thinned(x: np.ndarray, y: np.ndarray) -> tuple[list[float], list[float]]:
    """At most MOST_POINTS points, each the mean of its neighbours."""
    if len(x) <= MOST_POINTS:
        return x.tolist(), y.tolist()
    parts = np.array_split(np.arange(len(x)), MOST_POINTS)
    return [float(x[part].mean()) for part in parts], [float(y[part].mean()) for part in parts]


def svg(chart: Lines | Cells) -> str:
    body = _cells(chart) if isinstance(chart, Cells) else _lines(chart)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}">{body}</svg>'


def legend(chart: Lines | Cells) -> list[tuple[str, str]]:
    """(class, name) of each series that has a colour of its own; one series alone needs none."""
    named = [] if isinstance(chart, Cells) else [s for s in chart.series if not s.faint]
    return [(f"s{n % COLOURS}", s.name) for n, s in enumerate(named)] if len(named) > 1 else []


def tick_text(value: float) -> str:
    size = abs(value)
    return f"{value / 1e6:g}M" if size >= 1e6 else f"{value / 1e3:g}k" if size >= 1e4 else f"{value:.4g}"


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers in low..high, at most about `most` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    unit = 10 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw * 0.999)
    return [round(n * step, 12) for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _range(values: list[float]) -> tuple[float, float]:
    known = [value for value in values if value is not None and math.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if low >= 0 and low < 0.4 * high:
        low = 0.0
    if high == low:
        return low - (abs(low) or 1) * 0.1, high + (abs(high) or 1) * 0.1
    return low - (0 if low == 0 else 0.04 * (high - low)), high + 0.04 * (high - low)


def _lines(chart: Lines) -> str:
    xs = [x for s in chart.series for x in s.x]
    bounds = [bound for s in chart.series for side in (s.low, s.high, s.y) if side is not None for bound in side]
    (x0, x1), (y0, y1) = (min(xs, default=0), max(xs, default=1)), ((0.0, 1.0) if chart.stacked else _range(bounds))
    x1 = x1 if x1 > x0 else x0 + 1
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT

    def px(x: float) -> float:
        return round(LEFT + (x - x0) / (x1 - x0) * (right - LEFT), 1)

    def py(y: float) -> float:
        return round(bottom - (min(max(y, y0), y1) - y0) / (y1 - y0) * (bottom - TOP), 1)

    def path(points: list[tuple[float, float]]) -> str:
        return " ".join(f"{px(x)},{py(y)}" for x, y in points if math.isfinite(y))

    parts = [f'<path class="grid" d="M{LEFT} {py(y)}H{right}"/>{_text(LEFT - 6, py(y) + 4, tick_text(y), "end")}' for y in ticks(y0, y1)]
    for x in ticks(x0, x1):
        at_edge = px(x) > right - 12
        parts.append(_text(right if at_edge else px(x), bottom + 15, tick_text(x), "end" if at_edge else "mid"))
    parts.append(f'<path class="axis" d="M{LEFT} {bottom}H{right}"/>{_text((LEFT + right) / 2, HEIGHT - 5, chart.x_label, "mid")}')
    coloured = iter(range(len(chart.series)))
    for series in sorted(chart.series, key=lambda s: not s.faint):
        kind = "faint" if series.faint else f"s{next(coloured) % COLOURS}"
        points = [(x, y) for x, y in zip(series.x, series.y, strict=True) if math.isfinite(y)]
        drawn = ""
        if series.low is not None and series.high is not None:
            around = [*zip(series.x, series.low, strict=True), *reversed(list(zip(series.x, series.high, strict=True)))]
            drawn += f'<polygon class="{"area" if chart.stacked else "band"}" points="{path(around)}"/>'
        if not chart.stacked:
            drawn += f'<polyline class="line{" dashed" if series.dashed else ""}" points="{path(points)}"/>'
            for x, y in points if len(points) <= MOST_MARKED and not series.faint else []:
                told = escape(f"{series.name}: {y:.4g} at {tick_text(x)}")
                drawn += f'<circle cx="{px(x)}" cy="{py(y)}" r="2.4"><title>{told}</title></circle>'
        parts.append(f'<g class="{kind}"><title>{escape(series.name)}</title>{drawn}</g>')
    return "".join(parts)


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'


def _cells(chart: Cells) -> str:
    known = [value for row in chart.values for value in row if value is not None and math.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    left = min(120, 14 + 6.4 * max((len(row) for row in chart.rows), default=0)) + 12 if chart.labelled else 20
    width, height = (WIDTH - left - RIGHT) / max(1, len(chart.columns)), (HEIGHT - TOP - BOTTOM) / max(1, len(chart.rows))
    gap = 1 if min(width, height) > 8 else 0
    every = math.ceil(len(chart.columns) * max(map(len, chart.columns), default=1) * 10 / (WIDTH - left - RIGHT))
    parts = []
    for r, (name, row) in enumerate(zip(chart.rows, chart.values, strict=True)):
        y = TOP + r * height
        if chart.labelled and height > 9:
            parts.append(_text(left - 6, y + height / 2 + 4, name[:18], "end"))
        for c, value in enumerate(row):
            x = left + c * width
            if value is None or not math.isfinite(value):
                continue
            share = (value - low) / (high - low) if high > low else 0.5
            box = f'x="{x:.1f}" y="{y:.1f}" width="{width - gap:.2f}" height="{height - gap:.2f}"'
            told = f"{name}, {chart.x_label} {chart.columns[c]}: {value:.4g}"
            parts.append(f'<rect class="cell" {box} fill-opacity="{0.06 + 0.9 * share:.2f}"><title>{escape(told)}</title></rect>')
            if chart.labelled and height > 12 and width > 30:
                parts.append(_text(x + width / 2, y + height / 2 + 4, f"{value:.3g}", "mid on" if share > 0.7 else "mid off"))
    for c, name in enumerate(chart.columns):
        if c % every == 0:
            parts.append(_text(left + (c + 0.5) * width, HEIGHT - BOTTOM + 15, name, "mid"))
    parts.append(_text((left + WIDTH - RIGHT) / 2, HEIGHT - 5, chart.x_label, "mid"))
    parts.append(f'<text transform="translate(11 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" class="mid">{escape(chart.y_label)}</text>')
    return "".join(parts)
