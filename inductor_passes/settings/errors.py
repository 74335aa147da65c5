"""The error of a bad setting."""

from __future__ import annotations

from inductor_passes.records.convert import shown
from inductor_passes.records.errors import MeantError

#: Longer values are cut in messages.
MOST_SHOWN = 500


class ConfigError(MeantError, ValueError):
    """A setting that does not exist or has a value that is not allowed. Names key, value and what is allowed."""

    def __init__(self, key: str, value: object, allowed: str) -> None:
        super().__init__(f"inductor_passes: {key}={shown(value, MOST_SHOWN)} is not allowed; expected {allowed}")
        self.key = key
        self.value = value
        self.allowed = allowed
