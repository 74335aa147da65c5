"""Times and sizes for people: three significant digits, the unit that fits."""

from __future__ import annotations

_TIMES = ((10**9, "s"), (10**6, "ms"), (10**3, "us"))
_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def duration(ns: int | float) -> str:
    """``1234567`` -> ``1.23 ms``."""
    return _scaled(ns, _TIMES, "ns")


def size(size_bytes: int | float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    return _scaled(size_bytes, _SIZES, "B")


def percent(fraction: float | None) -> str:
    """``0.0312`` -> ``3.1%``; a dash when unknown."""
    return "-" if fraction is None else f"{100 * fraction:.1f}%"


def change(before: int, after: int) -> str:
    """Relative change, ``-12.3%``; a dash when there is nothing to relate to."""
    return "-" if before == 0 else f"{100 * (after - before) / before:+.1f}%"


def _scaled(value: int | float, units: tuple[tuple[int, str], ...], base: str) -> str:
    for factor, unit in units:
        if abs(value) >= factor:
            return f"{value / factor:.3g} {unit}" if abs(value) < 999.5 * factor else f"{value / factor:.0f} {unit}"
    return f"{value:.0f} {base}"
