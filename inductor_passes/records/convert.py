"""Plain data into typed records and back, by msgspec, with messages for people.

Records are dataclasses; their annotations say what is allowed. Unknown keys are ignored (a newer writer adds some)
unless the caller wants them refused, as in files that people edit. What is wrong is named by its place:
``groups[0].costs[1].alpha_ns is -1; expected a finite number of at least 0``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import threading
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from inductor_passes.records.json_text import RecordError
from inductor_passes.records.text import printable

T = TypeVar("T")
Keys = Literal["any", "known", "all"]

#: Of two threads that convert to a type for the first time one may read what the other has not finished: the process
#: then ends with a segmentation fault. A record may convert another one while it is made.
_lock = threading.RLock()
_SHOWN = 80
_PATH = re.compile(r" - at `(?:key in )?\$?(.*)`$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]|(\[\.\.\.\])")
_MISSING = re.compile(r"Object missing required field `(.+)`")
_LENGTH = re.compile(r"Expected `array` of (?:at most |at least )?length (\d+)")


def convert(value: object, type_: type[T], what: str, *, keys: Keys = "any", place: str = "") -> T:
    """``value`` (plain data) as a ``type_``.

    Args:
        what: what it should be, for messages about the whole: ``a cost profile``.
        keys: ``any`` ignores unknown keys, ``known`` refuses them, ``all`` also wants those that have a default.
        place: where the value stands in its file, before the places in messages.

    Raises:
        RecordError: it is none.
    """
    try:
        with _lock:
            result = msgspec.convert(value, type_)
        if keys != "any":
            _check_keys(value, type_, place, keys == "all")
        return result
    except msgspec.ValidationError as error:
        raise RecordError(_explained(error, value, type_, what, place)) from None


def check_version(value: object, version: int, what: str) -> dict[str, Any]:
    """``value`` as an object of ``version``.

    Raises:
        RecordError: it is no object, says no version or another one.
    """
    if not isinstance(value, dict):
        raise RecordError(f"{what} is {shown(value)}; expected an object")
    if "schema_version" not in value:
        raise RecordError("schema_version is missing")
    found = value["schema_version"]
    if type(found) is not int or found != version:
        raise RecordError(f"{what} has schema_version {shown(found)}; expected {version}")
    return value


def plain(record: Any) -> Any:
    """Plain data that JSON can hold: enums as their values, tuples as lists, no NaN or infinity, the rest as text.

    msgspec's own encoder leaves out fields of a converted dataclass that have their default.
    """
    if record is None or isinstance(record, bool) or type(record) in (str, int):
        return record
    if isinstance(record, Enum):
        return record.value
    if isinstance(record, float):
        return record if math.isfinite(record) else None
    if isinstance(record, Mapping):
        return {str(key): plain(value) for key, value in record.items()}
    if isinstance(record, (list, tuple)):
        return [plain(one) for one in record]
    if isinstance(record, msgspec.Struct) or (dataclasses.is_dataclass(record) and not isinstance(record, type)):
        keys = _keys(type(record))
        return {key: plain(value) for name, key in keys if (value := getattr(record, name)) is not msgspec.UNSET}
    return record if isinstance(record, (str, int)) else str(record)


@functools.cache
def _keys(type_: Any) -> tuple[tuple[str, str], ...]:
    """(attribute, key in JSON) of a record's fields."""
    if dataclasses.is_dataclass(type_):
        return tuple((f.name, f.name) for f in dataclasses.fields(type_))
    return tuple((f.name, f.encode_name) for f in msgspec.structs.fields(type_))


def shown(value: object, most: int = _SHOWN) -> str:
    """A value for a message: printable, at most ``most`` characters."""
    try:
        text = printable(repr(value))
    except ValueError:  # an integer of thousands of digits has no decimal text
        text = f"a number of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__
    return text if len(text) <= most else text[: most - 3] + "..."


def _explained(error: msgspec.ValidationError, value: Any, hint: Any, what: str, place: str) -> str:
    """The sentence for an error of msgspec's: place, value, what was expected."""
    text = str(error)
    match = _PATH.search(text)
    said = text[: match.start()] if match else text
    for name, index, anything in _STEP.findall(match[1] if match else ""):
        children = list(_children(value, hint, place))
        if anything:
            found = next((c for c in children if not _fits(c[0], c[1])), None)
        else:
            key = name or int(index)
            found = next((c for c in children if c[3] == key), None)
        if found is None:
            break
        value, hint, place = found[:3]
    if missing := _MISSING.match(said):
        return f"{_join(place, missing[1])} is missing"
    if isinstance(error.__cause__, ValueError):
        # What a record's own __post_init__ holds against it.
        return f"{place}: {error.__cause__}" if place else str(error.__cause__)
    length = _LENGTH.match(said)
    expected = f"a list of {length[1]} values" if length else phrase(hint) + _most(value, hint)
    return f"{place or what} is {shown(value)}; expected {expected}"


def _fits(value: Any, hint: Any) -> bool:
    try:
        with _lock:
            msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    return True


def _join(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key


Child = tuple[Any, Any, str, Any]


def _children(value: Any, hint: Any, place: str) -> Iterator[Child]:
    """(value, type, place, key or index) of everything directly inside ``value`` whose type is known."""
    hint = _arm(value, hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(value, dict) and _is_record(hint):
        for name, one in _fields(hint).items():
            if name in value:
                yield value[name], one, _join(place, name), name
    elif isinstance(value, dict) and isinstance(origin, type) and issubclass(origin, Mapping):
        for key, child in value.items():
            yield child, arguments[1], _join(place, printable(str(key))), key
    elif isinstance(value, (list, tuple)) and isinstance(origin, type) and issubclass(origin, Sequence):
        fixed = origin is tuple and arguments[-1] is not Ellipsis
        for k, child in enumerate(value):
            yield child, arguments[min(k, len(arguments) - 1)] if fixed else arguments[0], f"{place}[{k}]", k


def _is_record(hint: Any) -> bool:
    return isinstance(hint, type) and (dataclasses.is_dataclass(hint) or issubclass(hint, msgspec.Struct))


def _fields(hint: Any) -> dict[str, Any]:
    """Key in JSON -> type."""
    hints = typing.get_type_hints(hint, include_extras=True)
    return {key: hints[name] for name, key in _keys(hint)}


def _bare(hint: Any) -> tuple[Any, list[msgspec.Meta]]:
    """The type without ``Annotated``, and its bounds."""
    bounds: list[msgspec.Meta] = []
    while get_origin(hint) is Annotated:
        bounds += [m for m in hint.__metadata__ if isinstance(m, msgspec.Meta)]
        hint = hint.__origin__
    return hint, bounds


def _arm(value: Any, hint: Any) -> Any:
    """The member of a union that ``value`` is meant to be."""
    hint, _ = _bare(hint)
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    arms = [_bare(one)[0] for one in get_args(hint) if one is not type(None)]
    if isinstance(value, dict):
        arms = [a for a in arms if _is_record(a) or get_origin(a) is dict] or arms
    elif isinstance(value, list):
        arms = [a for a in arms if get_origin(a) in (list, tuple)] or arms
    return arms[0] if arms else hint


def phrase(hint: Any) -> str:
    """What a type allows, in words."""
    hint, bounds = _bare(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    for bound in bounds:
        if bound.extra and "one_of" in bound.extra:
            return f"one of {', '.join(bound.extra['one_of'])}"
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(phrase(one) for one in arguments if one is not msgspec.UnsetType))
    if origin is Literal:
        return _words(arguments)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _words([one.value for one in hint])
    if hint is type(None):
        return "null"
    if hint in (int, float):
        return ("a whole number" if hint is int else "a finite number") + _limits(bounds)
    if hint in (str, bool):
        return "text" if hint is str else "true or false"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "an object"
    return "a list" if origin in (list, tuple, Sequence) or hint in (list, tuple) else "an object"


def _words(values: Sequence[object]) -> str:
    return f"{'one of ' * (len(values) > 1)}{', '.join(map(str, values))}"


def _limits(bounds: Sequence[msgspec.Meta]) -> str:
    text = ""
    for bound in bounds:
        if bound.gt is not None:
            text += f" above {bound.gt:g}"
        if bound.ge is not None and abs(bound.ge) < 2**53:
            text += f" of at least {bound.ge:g}"
    return text


def _most(value: object, hint: Any) -> str:
    """The largest number that is allowed, in words, where ``value`` is above it; "" else."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return ""
    largest = [bound.le for bound in _bare(hint)[1] if bound.le is not None]
    return f", at most {largest[0]:g}" if largest and value > largest[0] else ""


def _check_keys(value: Any, hint: Any, place: str, all_of_them: bool) -> None:
    """Refuse keys that no field has, and fields that no key has when ``all_of_them`` are wanted."""
    bare = _arm(value, hint)
    if isinstance(value, dict) and _is_record(bare):
        known = _fields(bare)
        for key in value:
            if key not in known:
                name = _join(place, printable(str(key)))
                raise RecordError(f"{name} is unknown; expected one of {', '.join(sorted(known))}")
        for key in known if all_of_them else ():
            if key not in value:
                raise RecordError(f"{_join(place, key)} is missing")
    for child, one, where, _ in _children(value, hint, place):
        if isinstance(child, (dict, list)):
            _check_keys(child, one, where, all_of_them)
