"""The first difference between the descriptions that two ranks give of a graph, shown in one sentence.

Lines of another rank come out of the store. They are data of limited size, and are only compared and shown.
"""

from __future__ import annotations

import json
import zlib
from base64 import b85decode, b85encode
from collections.abc import Sequence

_MAX_PACKED = 1 << 20
_MAX_UNPACKED = 1 << 24
_MAX_SHOWN = 300
SOURCE = " | "


def packed(lines: Sequence[str], limit: int = _MAX_PACKED) -> str:
    """Lines as text of at most ``limit`` characters; as many of the first ones as that admits."""
    kept = list(lines)
    while True:
        text = b85encode(zlib.compress(json.dumps(kept).encode(), 6)).decode()
        if len(text) <= limit or not kept:
            return text
        kept = kept[: len(kept) // 2]


def unpacked(text: bytes) -> list[str] | None:
    """Inverse of :func:`packed`; None when that is not what it is."""
    if len(text) > _MAX_PACKED:
        return None
    try:
        stream = zlib.decompressobj()
        data = stream.decompress(b85decode(text), _MAX_UNPACKED)
        lines = None if stream.unconsumed_tail else json.loads(data)
    except (ValueError, zlib.error, RecursionError):
        return None
    return lines if isinstance(lines, list) and all(isinstance(line, str) for line in lines) else None


def first_difference(rank: int, mine: Sequence[str], other: int, theirs: Sequence[str]) -> str:
    """One sentence; lines are compared without the user's source line behind the bar, and shown with it."""
    for number in range(max(len(mine), len(theirs))):
        left = mine[number] if number < len(mine) else "nothing more"
        right = theirs[number] if number < len(theirs) else "nothing more"
        if left.partition(SOURCE)[0] != right.partition(SOURCE)[0]:
            return f"at line {number} rank {rank} has {shown(left)} and rank {other} has {shown(right)}"
    return f"ranks {rank} and {other} differ, but not in what they list"


def shown(line: str) -> str:
    """A line for people: printable, of limited length, with its source line."""
    text, _, source = line.partition(SOURCE)
    text, source = ("".join(c if c.isprintable() else "?" for c in part) for part in (text, source))
    text = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]} ..."
    return f"<{text}>" + (f" ({source[:_MAX_SHOWN]})" if source else "")
