"""JSON text from outside into plain data, within bounds.

Strict JSON only (no NaN, no trailing commas), and no more of it than memory holds: bytes, nested values and containers
are counted before or right after they are made. Texts in it become printable (:mod:`inductor_passes.records.text`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from inductor_passes.records.text import UNPRINTABLE, escaped, printable

#: Default for files and artifacts: the timelines of a graph of 36,000 tasks have 10 MiB.
MAX_BYTES = 64 * 2**20
#: Deeper nesting than any record has.
MAX_DEPTH = 40
#: Objects and lists, and values between commas; each takes up to 30 times as much memory as text.
MAX_CONTAINERS = 3_000_000
MAX_VALUES = 16_000_000
#: Escapes and characters that may have to be replaced, one by one.
MAX_ESCAPES = 1_000_000


class RecordError(ValueError):
    """Data that is no record of the kind that was expected; the message names place, value and what was expected."""


def read(path: Path, what: str, *, max_bytes: int = MAX_BYTES) -> Any:
    """The JSON in a file as plain data.

    Args:
        what: what the file should be, for messages: ``a cost profile``.

    Raises:
        RecordError: it does not exist, cannot be read, is larger than ``max_bytes`` or no JSON within bounds.
    """
    return parse(content(path, what, max_bytes=max_bytes), what)


def content(path: Path, what: str, *, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of a regular file. Raises :class:`RecordError` as :func:`read` does."""
    try:
        if not path.is_file():
            found = "a directory" if path.is_dir() else "no regular file" if path.exists() else "missing"
            raise RecordError(f"cannot be read as {what}: it is {found}; expected a file")
        with path.open("rb") as stream:
            data = stream.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, RecordError):
            raise
        raise RecordError(f"cannot be read as {what}: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > max_bytes:
        raise RecordError(f"{path.stat().st_size} bytes are too many for {what}; expected at most {max_bytes}")
    return data


def parse(data: bytes, what: str, *, verbatim: bool = False) -> Any:
    """JSON text as plain data.

    Args:
        verbatim: leave texts as they are; whoever shows them has to make them printable.

    Raises:
        RecordError: no UTF-8, no strict JSON, or above a bound.
    """
    containers, values = data.count(b"{") + data.count(b"["), data.count(b",")
    for count, most, name in ((containers, MAX_CONTAINERS, "objects and lists"), (values, MAX_VALUES, "values")):
        if count > most:
            raise RecordError(f"not {what}: it has {count} {name}; expected at most {most}")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecordError(f"cannot be read as {what}: no UTF-8 text at byte {error.start}") from None
    try:
        value = msgspec.json.decode(text if verbatim else _without_controls(text, what))
    except RecursionError:
        raise RecordError(f"not {what}: nested too deeply; expected at most {MAX_DEPTH} levels") from None
    except RecordError:
        raise
    except (msgspec.DecodeError, UnicodeError, ValueError) as error:
        raise RecordError(f"cannot be read as {what}: {_why_no_json(text, error)}") from None
    check_depth(value, what)
    return value


def check_depth(value: Any, what: str) -> None:
    """Refuse plain data that is nested more than ``MAX_DEPTH`` levels deep; O(values)."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for one in level
            for child in (one.values() if type(one) is dict else one if type(one) is list else ())
            if type(child) in (dict, list)
        ]
        if not level:
            return
    raise RecordError(f"not {what}: nested too deeply; expected at most {MAX_DEPTH} levels")


# What is written raw and must not be; below \x20 it is no JSON anyway.
_RAW = f"[{UNPRINTABLE.removeprefix(chr(0) + '-' + chr(0x1F))}]"
# An odd number of backslashes before a letter, or a raw character: something may have to be replaced.
_ANY = re.compile(rf"(?<!\\)(?:\\\\)*\\[bfnrtu]|{_RAW}")
# A pair of surrogates, another \u escape, other escapes (a whole run of harmless ones), or a raw character.
_SUSPECT = re.compile(
    r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|(?:\\[^bfnrtu])+|\\(.)"
    rf"|({_RAW})",
    re.DOTALL,
)
_LETTERS = {"b": 0x08, "f": 0x0C, "n": 0x0A, "r": 0x0D, "t": 0x09}


def _without_controls(text: str, what: str) -> str:
    """JSON text whose strings hold printable characters only."""
    if _ANY.search(text) is None:
        return text
    cleaned, count = _SUSPECT.subn(_cleaned, text, MAX_ESCAPES)
    if count == MAX_ESCAPES:
        raise RecordError(f"not {what}: it has {count} escapes or more; expected fewer")
    return cleaned


def _cleaned(match: re.Match[str]) -> str:
    high, low, single, letter, raw = match.groups()
    if high is not None:
        code = 0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00
    elif single is not None:
        code = int(single, 16)
    elif letter in _LETTERS:
        code = _LETTERS[letter]
    elif raw is not None:
        code = ord(raw)
    else:
        return match[0]
    if printable(chr(code)) == chr(code):
        return match[0]
    return escaped(code).replace("\\", "\\\\")


def _why_no_json(text: str, error: Exception) -> str:
    """A reason that people can use: where a NaN is, or what the parser said."""
    if len(text) < 2**20:
        try:
            found = next(_not_finite(json.loads(text), ""), "")
        except (ValueError, RecursionError):
            found = ""
        if found:
            return f"{found}; expected a finite number"
    return str(error).removeprefix("JSON is malformed: ").replace("Input data was truncated", "the text is cut off")


def _not_finite(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{place or 'the value'} is {value}"
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from _not_finite(child, f"{place}.{printable(key)}" if place else printable(key))
    elif isinstance(value, list):
        for k, child in enumerate(value):
            yield from _not_finite(child, f"{place}[{k}]")
