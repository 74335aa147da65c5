"""``redistribute`` and ``numerics``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from inductor_passes.settings.errors import ConfigError
from inductor_passes.settings.sizes import bytes_of

Numerics = Literal["exact", "reassociate"]
Tier = Literal["exact", "reassociate", "off"]
#: A setting with this value follows ``numerics``.
FOLLOWS = "numerics"


@dataclass(frozen=True)
class Redistribution:
    """What may be rewritten, and which redistributions are refused.

    Attributes:
        tier: ``exact``, ``reassociate`` or ``off``; None: what ``numerics`` says.
        limit_bytes: implicit redistributions that send more than this per rank are an error; None: none is.
    """

    tier: Tier | None = None
    limit_bytes: int | None = None

    ALLOWED = (
        '"numerics", "exact", "reassociate" or "off", each alone or with an error limit as in '
        '"exact,error-above:64MiB"; "error-above:64MiB" stands for "numerics,error-above:64MiB"'
    )

    @staticmethod
    def parse(value: object, key: str = "redistribute") -> Redistribution:
        """Parse a tier, an error limit or both, separated by a comma.

        Raises:
            ConfigError: anything else, a part given twice included.
        """
        tier, limit = "", None
        for part in value.split(",") if isinstance(value, str) else [""]:
            part = part.strip()
            size = bytes_of(part.removeprefix("error-above:").strip())
            if part in (FOLLOWS, *get_args(Tier)) and not tier:
                tier = part
            elif part.startswith("error-above:") and size is not None and limit is None:
                limit = size
            else:
                raise ConfigError(key, value, Redistribution.ALLOWED)
        return Redistribution(None if tier in ("", FOLLOWS) else tier, limit)  # type: ignore[arg-type]
