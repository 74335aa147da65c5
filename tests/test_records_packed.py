"""Data as text: back again, bounded, and an error where it is none."""

from __future__ import annotations

import pytest

from inductor_passes.records.packed import pack, unpack


def test_there_and_back() -> None:
    data = {"a": [1, 2.5, None, True], "b": {"c": 'quotes " and \' and \\'}}
    text = pack(data)
    assert unpack(text) == data and unpack(text.encode()) == data
    assert text == pack(dict(data)) and not {'"', "'", "\\", "\n"} & set(text)


@pytest.mark.parametrize("text", ["", "no text of ours", "é", pack([1])[:-3]])
def test_what_is_none(text: str) -> None:
    with pytest.raises(ValueError):
        unpack(text)


def test_what_takes_too_much() -> None:
    text = pack("0" * 100_000)
    assert len(text) < 1000
    with pytest.raises(ValueError, match="larger than 1000 bytes"):
        unpack(text, 1000)
