"""``async_tp`` and the settings that say where another mode applies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from inductor_passes.settings.errors import ConfigError
from inductor_passes.settings.sizes import bytes_of

AsyncTp = Literal["auto", "force", "off"]
AsyncTpLowering = Literal["auto", "decompose", "op", "symm_mem", "kernels"]


@dataclass(frozen=True)
class AsyncTpOverrides:
    """Where another mode than ``async_tp`` applies, and how many parts may be made.

    Attributes:
        groups: (name or description of a process group, mode).
        sizes: (bytes, mode) for collectives whose full message has at least so many bytes.
        parts: numbers of parts to choose from.
    """

    groups: tuple[tuple[str, AsyncTp], ...] = ()
    sizes: tuple[tuple[int, AsyncTp], ...] = ()
    parts: tuple[int, ...] = ()

    GROUPS = 'pairs "name=mode" separated by commas, e.g. "mesh_tp=force,mesh_dp=off", mode "auto", "force" or "off"'
    SIZES = 'pairs "size=mode" separated by commas, e.g. "0B=off,1MiB=auto", mode "auto", "force" or "off"'
    PARTS = 'integers from 2 to 999999999 separated by commas, e.g. "2,4,8"'

    @staticmethod
    def parse(groups: object, sizes: object, parts: object) -> AsyncTpOverrides:
        """Parse the fields ``async_tp_groups``, ``async_tp_sizes`` and ``async_tp_parts``.

        Raises:
            ConfigError: text of another form, a name or size given twice, no part.
        """
        named = _modes("async_tp_groups", groups, AsyncTpOverrides.GROUPS)
        sized: dict[int, AsyncTp] = {}
        for text, mode in _modes("async_tp_sizes", sizes, AsyncTpOverrides.SIZES):
            size = bytes_of(text)
            if size is None:
                raise ConfigError("async_tp_sizes", sizes, AsyncTpOverrides.SIZES)
            if size in sized:
                raise ConfigError("async_tp_sizes", sizes, f"every size once; {AsyncTpOverrides.SIZES}")
            sized[size] = mode
        numbers = [part.strip() for part in parts.split(",")] if isinstance(parts, str) else [""]
        if not all(part.isdecimal() and len(part) <= 9 and int(part) >= 2 for part in numbers):
            raise ConfigError("async_tp_parts", parts, AsyncTpOverrides.PARTS)
        if len(set(map(int, numbers))) < len(numbers):
            raise ConfigError("async_tp_parts", parts, f"every number once; {AsyncTpOverrides.PARTS}")
        return AsyncTpOverrides(tuple(named), tuple(sorted(sized.items())), tuple(sorted(map(int, numbers))))


def _modes(key: str, value: object, allowed: str) -> list[tuple[str, AsyncTp]]:
    if not isinstance(value, str):
        raise ConfigError(key, value, allowed)
    found: dict[str, AsyncTp] = {}
    for entry in value.split(",") if value.strip() else []:
        name, separator, mode = (part.strip() for part in entry.rpartition("="))
        if not name or not separator or mode not in get_args(AsyncTp):
            raise ConfigError(key, value, allowed)
        if name in found:
            raise ConfigError(key, value, f"every name once; {allowed}")
        found[name] = mode  # type: ignore[assignment]
    return list(found.items())
