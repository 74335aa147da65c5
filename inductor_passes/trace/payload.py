"""JSON as every artifact and report file uses it: no NaN, no infinity, enums as their values, plain ASCII."""

from __future__ import annotations

import json
import math
from enum import Enum
from typing import Any


def finite(value: Any) -> Any:
    """A copy of plain data in which a NaN or an infinity is ``None`` and an enum is its value.

    Strict JSON has no spelling for NaN and infinity, and tlparse's multi-rank mode stops at the first one.
    """
    if isinstance(value, Enum):
        return finite(value.value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if value is None or isinstance(value, (str, int)):
        return value
    return str(value)


def dumps(value: Any, *, indent: int | None = 0) -> str:
    """``value`` as strict JSON text. With ``indent=0`` every element has its own line, which keeps lines short."""
    return json.dumps(finite(value), allow_nan=False, indent=indent)


def dumps_records(head: dict[str, Any], key: str, records: list[str]) -> str:
    """An object of ``head`` plus the list ``key`` of already encoded records, one per line.

    Tens of thousands of events are encoded once instead of being walked again by :func:`finite`.
    """
    text = json.dumps(finite(head), allow_nan=False, separators=(",", ":"))
    opening = text[:-1] + ("," if head else "")
    return f"{opening}{json.dumps(key)}:[\n" + ",\n".join(records) + "\n]}"
