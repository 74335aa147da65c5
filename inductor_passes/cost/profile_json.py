"""Reading JSON that people may have edited: each accessor checks one value and says where it is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any


class ProfileError(ValueError):
    """A cost profile that cannot be used; the message names the file and the place in it."""


def _at(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _wrong(where: str, value: object, expected: str) -> ProfileError:
    shown = repr(value)
    return ProfileError(f"{where} is {shown if len(shown) <= 80 else shown[:77] + '...'}; expected {expected}")


def table(value: object, where: str, keys: set[str]) -> dict[str, Any]:
    """An object with exactly ``keys``."""
    if not isinstance(value, dict):
        raise _wrong(where or "the cost profile", value, "an object")
    for missing in sorted(keys - value.keys()):
        raise ProfileError(f"{_at(where, missing)} is missing")
    for unknown in sorted(value.keys() - keys):
        raise ProfileError(f"{_at(where, unknown)} is unknown; expected one of {', '.join(sorted(keys))}")
    return value


def items(row: dict[str, Any], where: str, key: str) -> Iterator[tuple[str, object]]:
    """The elements of a list with their places."""
    value = row[key]
    if not isinstance(value, (list, tuple)):
        raise _wrong(_at(where, key), value, "a list")
    for i, item in enumerate(value):
        yield f"{_at(where, key)}[{i}]", item


def text(row: dict[str, Any], where: str, key: str) -> str:
    """A string."""
    value = row[key]
    if not isinstance(value, str):
        raise _wrong(_at(where, key), value, "text")
    return value


def switch(row: dict[str, Any], where: str, key: str) -> bool:
    """true or false."""
    value = row[key]
    if not isinstance(value, bool):
        raise _wrong(_at(where, key), value, "true or false")
    return value


def whole(row: dict[str, Any], where: str, key: str, least: int | None = None) -> int:
    """A whole number, at least ``least``."""
    value = row[key]
    limit = "" if least is None else f" of at least {least}"
    if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
        raise _wrong(_at(where, key), value, f"a whole number{limit}")
    return value


def number(row: dict[str, Any], where: str, key: str, least: float | None = None, above: float | None = None) -> float:
    """A finite number, at least ``least`` and above ``above``."""
    value = row[key]
    limit = "" if least is None else f" of at least {least}"
    limit += "" if above is None else f" above {above}"
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if good:
        try:
            good = math.isfinite(float(value))
        except OverflowError:
            good = False
    if not good or (least is not None and value < least) or (above is not None and value <= above):
        raise _wrong(_at(where, key), value, f"a finite number{limit}")
    return float(value)
