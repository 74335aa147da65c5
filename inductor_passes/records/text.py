"""Untrusted text, made safe to show.

Every text that comes from a file passes through :func:`printable` while it is read
(:func:`inductor_passes.records.json_text.parse`), and whatever a command writes to a terminal passes through it again.
So nothing in a trace, a problem or a graph can steer a terminal, hide or reorder other text, or make a page, an SVG or
a JSON file that cannot be written.
"""

from __future__ import annotations

import re

#: Control characters, lone surrogates, and what is invisible, breaks lines or turns the direction of text.
UNPRINTABLE = (
    "\x00-\x1f\x7f-\x9f\xad\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u2028-\u202f\u205f-\u206f\u3164\ud800-\udfff"
    "\ufeff\uffa0\ufff0-\ufffb\ufffe\uffff\U000e0000-\U000e0fff"
)
_ONE = re.compile(f"[{UNPRINTABLE}]")


def printable(text: str) -> str:
    """One line of text; what a terminal would act on is written as an escape, e.g. ``\\x1b``."""
    return _ONE.sub(_escape, text)


def printable_lines(text: str) -> str:
    """As :func:`printable`, with line breaks kept."""
    return "\n".join(map(printable, text.split("\n")))


def _escape(match: re.Match[str]) -> str:
    return escaped(ord(match[0]))


def escaped(code: int) -> str:
    """How a character that cannot be shown is written."""
    if code in _SHORT:
        return _SHORT[code]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


_SHORT = {0x09: "\\t", 0x0A: "\\n", 0x0D: "\\r"}
