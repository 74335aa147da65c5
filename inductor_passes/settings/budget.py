"""``memory_budget``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from inductor_passes.settings.errors import ConfigError
from inductor_passes.settings.sizes import bytes_of, share_of

#: A share alone would leave a small graph no room for a second message: its whole peak is a few of them.
DEFAULT_BUDGET = "+5% or 1MiB"
_LARGER = re.compile(r"(\+.*?)\s+or\s+(.*)", re.ASCII)


@dataclass(frozen=True)
class MemoryBudget:
    """How far the peak of a plan may go above what its input needs, or how far it has to stay below.

    Exactly one of the forms is set: ``fraction`` of that on top of it ("0" is the fraction 0, "-30%" is -3/10),
    ``extra_bytes`` on top of it ("2GiB"), ``absolute_bytes`` in all ("=12GiB"), or ``unlimited``. Beside a fraction
    ``floor_bytes`` on top are always allowed ("+5% or 1MiB": the larger of both).
    """

    fraction: Fraction | None = None
    extra_bytes: int | None = None
    unlimited: bool = False
    absolute_bytes: int | None = None
    floor_bytes: int = 0

    ALLOWED = (
        '"0", "+5%" (of the input\'s peak), "2GiB" (on top of it), "+5% or 1MiB" (the larger of both), "unlimited", '
        '"-30%" (below the step\'s peak; less than 100%) or "=12GiB" (the step\'s peak)'
    )

    @property
    def shrinks(self) -> bool:
        """Whether the step may have to need less than as it came: then activations are computed again."""
        return self.absolute_bytes is not None or (self.fraction is not None and self.fraction < 0)

    @staticmethod
    def parse(value: object, key: str = "memory_budget") -> MemoryBudget:
        """Parse "0", "+5%", "512MiB", "2GiB", "+5% or 1MiB", "unlimited", "-30%" or "=12GiB".

        Raises:
            ConfigError: anything else; a bare number other than 0 has no unit and is refused.
        """
        text = str(value).strip() if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
        if text == "0":
            return MemoryBudget(fraction=Fraction(0))
        if text.lower() == "unlimited":
            return MemoryBudget(unlimited=True)
        larger = _LARGER.fullmatch(text)
        if larger is not None:
            share, floor = share_of(larger[1]), bytes_of(larger[2])
            if share is not None and floor is not None:
                return MemoryBudget(fraction=share, floor_bytes=floor)
        share = share_of(text)
        if share is not None and share > -1:
            return MemoryBudget(fraction=share)
        sign = text[0] if text.startswith(("+", "=")) else ""
        size = bytes_of(text.removeprefix(sign).strip())
        if size is not None and sign != "=":
            return MemoryBudget(extra_bytes=size)
        if size:
            return MemoryBudget(absolute_bytes=size)
        raise ConfigError(key, value, MemoryBudget.ALLOWED)

    def limit_bytes(self, least_peak_bytes: int) -> int | None:
        """The cap on the peak in bytes for a program that needs ``least_peak_bytes``."""
        if self.unlimited:
            return None
        if self.absolute_bytes is not None:
            return self.absolute_bytes
        if self.extra_bytes is not None:
            return least_peak_bytes + self.extra_bytes
        assert self.fraction is not None
        share = int(least_peak_bytes * self.fraction)
        return least_peak_bytes + (max(share, self.floor_bytes) if self.floor_bytes else share)
