"""A line chart as self-contained SVG text, readable on light and dark backgrounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

_COLORS = ("#4a86d8", "#2f9e77", "#d5473f", "#8462c7", "#b07a1e")
_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 20, 46, 78


def line_chart(
    title: str,
    x_label: str,
    x_values: Sequence[str],
    series: Mapping[str, Sequence[float]],
    show: Callable[[float], str],
) -> str:
    """One polyline per series over equally spaced ``x_values``; ``show`` writes a value on the vertical axis.

    Raises:
        ValueError: a series has another length than ``x_values``, or there is no value at all.
    """
    for name, values in series.items():
        if len(values) != len(x_values):
            raise ValueError(f"series {name} has {len(values)} values for {len(x_values)} positions")
    top = max((v for values in series.values() for v in values), default=None)
    if top is None:
        raise ValueError("a chart needs at least one value")
    top = float(top) or 1.0

    def x(k: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (k + 0.5) / len(x_values)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / (top * 1.05)

    def text(px: float, py: float, content: str, anchor: str = "middle") -> str:
        return f'<text x="{px:.1f}" y="{py:.1f}" text-anchor="{anchor}">{escape(content)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">',
        "<style>text{font:12px system-ui,sans-serif;fill:#222}.g{stroke:#8884;stroke-width:1}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}}</style>",
        text(_WIDTH / 2, 20, title),
    ]
    for k in range(5):
        value = top * k / 4
        parts.append(f'<line class="g" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        parts.append(text(_LEFT - 8, y(value) + 4, show(value), "end"))
    for k, label in enumerate(x_values):
        parts.append(text(x(k), _HEIGHT - _BOTTOM + 18, label))
    parts.append(text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - _BOTTOM + 40, x_label))
    for number, (name, values) in enumerate(series.items()):
        color = _COLORS[number % len(_COLORS)]
        points = " ".join(f"{x(k):.1f},{y(v):.1f}" for k, v in enumerate(values))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        for k, v in enumerate(values):
            parts.append(
                f'<circle cx="{x(k):.1f}" cy="{y(v):.1f}" r="3" fill="{color}"><title>{escape(name)}: '
                f"{escape(show(v))}</title></circle>"
            )
        px = _LEFT + number * 200
        parts.append(f'<rect x="{px}" y="{_HEIGHT - 22}" width="12" height="12" fill="{color}"/>')
        parts.append(text(px + 18, _HEIGHT - 12, name, "start"))
    return "\n".join([*parts, "</svg>\n"])
