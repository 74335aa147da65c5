"""The first difference between the descriptions that two ranks give of a graph, shown in one sentence.

Lines of another rank come out of the store. They are data of limited size, and are only compared and shown.
"""

from __future__ import annotations

from collections.abc import Sequence

from inductor_passes.records.packed import pack, unpack

_MAX_PACKED = 1 << 20
_MAX_UNPACKED = 1 << 24
_MAX_SHOWN = 300
#: Of two long lines: characters shown of their beginning, and before the first one that differs.
_NAME, _BEFORE = 24, 40
#: How a line begins that states what decisions depend on besides the graph.
FACT = "fact "
SOURCE = " | "
#: Facts that belong to one question of a compilation, or that a rank may learn in the middle of it.
OF_ONE_QUESTION = frozenset({"phase", "sizes", "step", "groups", "results of the user"})


def packed(lines: Sequence[str], limit: int = _MAX_PACKED) -> str:
    """Lines as text of at most ``limit`` characters; as many of the first ones as that admits."""
    kept = list(lines)
    while True:
        text = pack(kept)
        if len(text) <= limit or not kept:
            return text
        kept = kept[: len(kept) // 2]


def unpacked(text: bytes) -> list[str] | None:
    """Inverse of :func:`packed`; None when that is not what it is."""
    if len(text) > _MAX_PACKED:
        return None
    try:
        lines = unpack(text, _MAX_UNPACKED)
    except ValueError:
        return None
    return lines if isinstance(lines, list) and all(isinstance(line, str) for line in lines) else None


def first_difference(rank: int, mine: Sequence[str], other: int, theirs: Sequence[str]) -> str:
    """One sentence; lines are compared without the user's source line behind the bar, and shown with it.

    Where facts differ it names all of them: somebody who makes one setting equal would be told of the next.
    """
    for number in range(max(len(mine), len(theirs))):
        left = mine[number] if number < len(mine) else "nothing more"
        right = theirs[number] if number < len(theirs) else "nothing more"
        if _differ(left, right):
            same = _beginning(left, right)
            sentence = f"at line {number} rank {rank} has {shown(left, same)} and rank {other} has {shown(right, same)}"
            more = [_fact(one) for one, two in zip(mine[number + 1 :], theirs[number + 1 :]) if _facts_differ(one, two)]
            return sentence + (f", and these differ too: {', '.join(more)[:_MAX_SHOWN]}" if more else "")
    return f"ranks {rank} and {other} differ, but not in what they list"


def shared_facts(lines: Sequence[str]) -> list[str]:
    """The facts that all questions of a compilation have in common."""
    return [line for line in lines if _fact(line) and _fact(line) not in OF_ONE_QUESTION]


def _differ(left: str, right: str) -> bool:
    return left.partition(SOURCE)[0] != right.partition(SOURCE)[0]


def _fact(line: str) -> str:
    """What a line states a fact about, "" for other lines."""
    head, _, _ = line.partition(": ")
    return head.removeprefix(FACT) if head.startswith(FACT) else ""


def _facts_differ(left: str, right: str) -> bool:
    return bool(_fact(left)) and _fact(left) == _fact(right) and _differ(left, right)


def _beginning(left: str, right: str) -> int:
    """Characters that both begin with."""
    return next((k for k, (one, two) in enumerate(zip(left, right)) if one != two), min(len(left), len(right)))


def shown(line: str, same: int = 0) -> str:
    """A line for people: printable, of limited length, with its source line.

    Args:
        same: so many characters are those of the line that it is shown beside. Of a long one they are left out.
    """
    text, _, source = line.partition(SOURCE)
    text, source = ("".join(c if c.isprintable() else "?" for c in part) for part in (text, source))
    if len(text) > _MAX_SHOWN and same > _BEFORE + _NAME:
        text = f"{text[:_NAME]} ... {text[same - _BEFORE :]}"
    text = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]} ..."
    return f"<{text}>" + (f" ({source[:_MAX_SHOWN]})" if source else "")
