"""Damage for files that commands read: to the JSON inside, value by value, and to the bytes."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

#: Texts that a terminal, rich, HTML, SVG or JSON would act on.
EVIL_TEXTS = (
    "\x1b[31m\x1b]0;owned\x07",
    "\x9b2J",
    "a\r\nb\x00\x08",
    "\u202eevil\u2066",
    "[red]x[/red] [/] [link=file:///etc/passwd]",
    ":bomb: :warning:",
    "</script><script>alert(1)</script><img src=x onerror=alert(1)>",
    "]]>&amp;\"'<!--",
    "{{ 7*7 }} {% x %}",
    "%s%n{0}{evil}",
    "\ud800",
    "\U000e0041",
    "../../etc/passwd",
    "x" * 5000,
    "",
    " ",
    "NaN",
    "1e400",
    "9" * 5000,
)
#: Values of every type, and those at which arithmetic ends.
EVIL_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**53 + 1,
    2**62,
    2**63,
    2**64,
    -(2**63),
    10**400,
    0.5,
    -0.0,
    1e308,
    -1e308,
    5e-324,
    float("nan"),
    float("inf"),
    float("-inf"),
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"node": "nowhere"},
    {"text": "\x1b[2J"},
    [1, "x", None, {}],
)
Place = tuple[Any, Any]


def places(value: Any) -> list[Place]:
    """(container, key or index) of everything inside ``value``."""
    found: list[Place] = []
    waiting = [value]
    while waiting:
        one = waiting.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        for key in keys:
            found.append((one, key))
            waiting.append(one[key])
    return found


def _nested(rng: random.Random) -> Any:
    value: Any = "x"
    for _ in range(rng.choice((5, 30, 45, 300))):
        value = [value] if rng.random() < 0.5 else {"node": value}
    return value


def _replace(rng: random.Random, place: Place) -> None:
    container, key = place
    container[key] = rng.choice((rng.choice(EVIL_VALUES), rng.choice(EVIL_TEXTS), _nested(rng)))


def _swap(rng: random.Random, place: Place, other: Place) -> None:
    (a, k), (b, j) = place, other
    # Copies: one may stand inside the other.
    a[k], b[j] = copy.deepcopy(b[j]), copy.deepcopy(a[k])


def _number(rng: random.Random, place: Place) -> None:
    container, key = place
    if type(container[key]) in (int, float):
        changes: tuple[Callable[[Any], Any], ...] = (
            lambda x: -x,
            lambda x: x + 1,
            lambda x: x - 1,
            lambda x: x * 10**6,
            lambda x: x * 10**15,
            float,
            str,
            lambda x: 0,
        )
        container[key] = rng.choice(changes)(container[key])


def _text(rng: random.Random, place: Place) -> None:
    container, key = place
    if isinstance(container[key], str):
        text, at = container[key], rng.randrange(len(container[key]) + 1)
        container[key] = text[:at] + rng.choice(EVIL_TEXTS)[:200] + text[at:]


def _drop(rng: random.Random, place: Place) -> None:
    container, key = place
    if isinstance(container, dict) or len(container) > key:
        del container[key]


def _rename(rng: random.Random, place: Place) -> None:
    container, key = place
    if isinstance(container, dict) and key in container:
        container[rng.choice((f"{key}_", key[:-1], rng.choice(EVIL_TEXTS)))] = container.pop(key)


def _list(rng: random.Random, place: Place) -> None:
    container, key = place
    value = container[key]
    if isinstance(value, list) and value:
        what = rng.randrange(5)
        if what == 0:
            value.reverse()
        elif what == 1:
            rng.shuffle(value)
        elif what == 2:
            del value[rng.randrange(len(value)) :]
        elif what == 3:
            value.append(value[rng.randrange(len(value))])
        else:
            container[key] = value * rng.choice((2, 3, 50))


def damage(value: Any, rng: random.Random, changes: int) -> Any:
    """``value`` (plain data, changed in place) with some changes; may become anything."""
    for _ in range(changes):
        found = places(value)
        if not found:
            return rng.choice(EVIL_VALUES)
        place, other = rng.choice(found), rng.choice(found)
        kind = rng.choice((_replace, _replace, _number, _text, _drop, _rename, _list, None))
        if kind is None:
            _swap(rng, place, other)
        else:
            kind(rng, place)
        if rng.random() < 0.01:
            return rng.choice(EVIL_VALUES)
        if len(found) > 20_000:
            break
    return value


def twist(value: Any, rng: random.Random, changes: int) -> Any:
    """``value`` (changed in place) with changes that keep types: such files are read and reach what works with them."""
    for _ in range(changes):
        found = places(value)
        if not found:
            break
        container, key = rng.choice(found)
        one = container[key]
        if type(one) is int:
            container[key] = rng.choice((0, 1, 2, 3, one + 1, max(0, one - 1), one * 2, 10**6))
        elif isinstance(one, float):
            container[key] = rng.choice((0.0, 0.5, 1.0, one * 2, one / 3))
        elif isinstance(one, bool):
            container[key] = not one
        elif isinstance(one, str):
            others = [c[k] for c, k in found if isinstance(c[k], str)]
            container[key] = rng.choice(others)
        elif isinstance(one, list) and one:
            at, other = rng.randrange(len(one)), rng.randrange(len(one))
            what = rng.randrange(4)
            if what == 0:
                one[at], one[other] = one[other], one[at]
            elif what == 1:
                del one[at]
            elif what == 2:
                one.insert(at, one[other])
            else:
                container[key] = one[:at] + one[at : at + 4][::-1] + one[at + 4 :]
        elif isinstance(one, dict) and one:
            others = [c[k] for c, k in found if isinstance(c[k], dict) and c[k].keys() == one.keys()]
            container[key] = json.loads(json.dumps(rng.choice(others)))
    return value


def encoded(value: Any, rng: random.Random) -> bytes:
    """``value`` as JSON text, now and then as other writers would write it."""
    try:
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, None, 0, 1)))
    except (ValueError, RecursionError):
        return b"[" * 2000
    return text.encode("utf-8", "surrogatepass")


def damaged_bytes(data: bytes, rng: random.Random) -> bytes:
    """Cut off, flipped, with foreign bytes, repeated, or with numbers of thousands of digits."""
    if not data:
        return b"\x00"
    at, end = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    what = rng.randrange(9)
    if what == 0:
        return data[:at]
    if what == 1:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if what == 2:
        return data[:at] + rng.randbytes(rng.randrange(1, 20)) + data[at:]
    if what == 3:
        return data[:at] + data[end:]
    if what == 4:
        return data[:end] + data[at:end] * rng.choice((1, 3)) + data[end:]
    if what == 5:
        return data[:at] + b"9" * 5000 + data[at:]
    if what == 6:
        return rng.choice((b"\xef\xbb\xbf", b"\xff\xfe", b"\x00", b" " * 1000)) + data
    if what == 7:
        return rng.choice((b"", b"null", b"[]", b"{}", b"[" * 100_000, b'{"a":' * 100_000, b"\x80\x04\x95."))
    return data.replace(b"0", rng.choice((b"-1", b"1e400", b"NaN", b"0.5", b'"0"')), 1)
