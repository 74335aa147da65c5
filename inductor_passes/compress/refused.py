"""A collective that is left alone, and why."""

from __future__ import annotations

from inductor_passes.report import Reason


class RefusedError(Exception):
    """It stays as it is; the fields are those of a decision."""

    def __init__(self, reason: Reason, detail: str = "", setting: str = "", gain_ns: int = 0) -> None:
        super().__init__(detail)
        self.reason, self.detail, self.setting, self.gain_ns = reason, detail, setting, gain_ns
