"""Field types of records: numbers that later arithmetic can take, and closed sets of words.

They are ordinary ``int``, ``float`` and ``str`` to type checkers. :func:`inductor_passes.records.convert.convert`
checks the bounds, and messages and schemas name them.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

#: Nanoseconds or bytes beyond this are nonsense (146 years, 4 EiB), and what sums them stays exact enough.
MOST = 2**62
_LARGEST = 1e300

Integer: TypeAlias = Annotated[int, Meta(ge=-MOST, le=MOST)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=MOST)]
AtLeastOne: TypeAlias = Annotated[int, Meta(ge=1, le=MOST)]
Number: TypeAlias = Annotated[float, Meta(ge=-_LARGEST, le=_LARGEST)]
NotNegative: TypeAlias = Annotated[float, Meta(ge=0, le=_LARGEST)]
Positive: TypeAlias = Annotated[float, Meta(gt=0, le=_LARGEST)]


def one_of(*words: str) -> Meta:
    """For ``Annotated[str, one_of("a", "b")]``: text that is one of ``words``."""
    return Meta(pattern=f"^(?:{'|'.join(words)})$", extra={"one_of": words})
