"""Plain data as text without quotes, for statements in generated code and for what ranks tell each other."""

from __future__ import annotations

import json
import zlib
from base64 import b85decode, b85encode
from typing import Any

#: More than any report, plan or claim takes.
MOST_BYTES = 1 << 28


def pack(data: Any) -> str:
    """Data that JSON can hold, compressed; equal for equal data."""
    return b85encode(zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 6)).decode()


def unpack(text: str | bytes, limit: int = MOST_BYTES) -> Any:
    """Inverse of :func:`pack`.

    Args:
        limit: bytes that it may take as JSON: a short text can be made to take any number.

    Raises:
        ValueError: it is none, or takes more.
    """
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(b85decode(text), limit)
        if stream.unconsumed_tail:
            raise ValueError(f"it is larger than {limit} bytes")
        if not stream.eof:
            raise ValueError("it is cut off")
        return json.loads(data)
    except (zlib.error, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
