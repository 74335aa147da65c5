"""Settings that are a number: seconds, steps, plans."""

from __future__ import annotations

import re

from inductor_passes.settings.errors import ConfigError

RANK_AGREEMENT = 'seconds from "0.1s" to "3600s", e.g. "10s", or "trust"'
_SECONDS = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)\s*s")


def rank_timeout_s(value: object) -> float | None:
    """Parse ``rank_agreement``."""
    text = value.strip() if isinstance(value, str) else ""
    match = _SECONDS.fullmatch(text)
    if text == "trust":
        return None
    if match is None or not 0.1 <= float(match[1]) <= 3600:
        raise ConfigError("rank_agreement", value, RANK_AGREEMENT)
    return float(match[1])


#: The most steps that may be timed: their times are kept until the last of them.
MOST_STEPS = 1000
STEPS = f"a whole number of steps from 0 to {MOST_STEPS}"


def steps(value: object) -> int:
    """Parse ``tune``."""
    text = str(value).strip() if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
    if not re.fullmatch(r"\d{1,4}", text, re.ASCII) or int(text) > MOST_STEPS:
        raise ConfigError("tune", value, STEPS)
    return int(text)


#: The most plans of one function. Torch compiles it up to ``recompile_limit`` times, 8 unless that is set.
MOST_PLANS = 64
PLANS = f"a whole number of plans from 1 to {MOST_PLANS}"


def plans(value: object) -> int:
    """Parse ``dynamic_plans``."""
    text = str(value).strip() if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
    if not re.fullmatch(r"\d{1,2}", text, re.ASCII) or not 1 <= int(text) <= MOST_PLANS:
        raise ConfigError("dynamic_plans", value, PLANS)
    return int(text)
