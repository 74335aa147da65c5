"""Numbers of bytes and shares of memory as text."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
# Numbers of thousands of digits are no sizes, and converting them raises errors of other kinds.
_NUMBER = r"(\d{1,15}(?:\.\d{1,15})?)"
_BYTES = re.compile(_NUMBER + r"\s*([a-zA-Z]+)", re.ASCII)
_SHARE = re.compile(r"([+-])\s*" + _NUMBER + r"\s*%", re.ASCII)


def bytes_of(text: str) -> int | None:
    """The bytes in text such as "512MiB" or "2 GB"; None where it is no size with a unit."""
    match = _BYTES.fullmatch(text)
    if match is None or match[2].upper() not in _UNITS:
        return None
    return int(Fraction(match[1]) * _UNITS[match[2].upper()])


def share_of(text: str) -> Fraction | None:
    """The share in text such as "+5%" or "-30%"; None where it is none with a sign."""
    match = _SHARE.fullmatch(text)
    return None if match is None else Fraction(match[1] + match[2]) / 100
