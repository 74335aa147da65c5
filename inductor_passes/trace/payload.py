"""JSON as every artifact and report file uses it: no NaN, no infinity, enums as their values, plain ASCII."""

from __future__ import annotations

import json
from typing import Any

from inductor_passes.records.convert import plain


def dumps(value: Any, *, indent: int | None = 0) -> str:
    """``value`` as strict JSON text. With ``indent=0`` every element has its own line, which keeps lines short.

    Strict JSON has no spelling for NaN and infinity, and tlparse's multi-rank mode stops at the first one.
    """
    return json.dumps(plain(value), allow_nan=False, indent=indent)


def dumps_records(head: dict[str, Any], key: str, records: list[str]) -> str:
    """An object of ``head`` plus the list ``key`` of already encoded records, one per line.

    Tens of thousands of events are encoded once instead of being walked again by :func:`plain`.
    """
    text = json.dumps(plain(head), allow_nan=False, separators=(",", ":"))
    opening = text[:-1] + ("," if head else "")
    return f"{opening}{json.dumps(key)}:[\n" + ",\n".join(records) + "\n]}"
