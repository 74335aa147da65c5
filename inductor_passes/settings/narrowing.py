"""``compress`` and the settings that belong to it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from inductor_passes.settings.errors import ConfigError

#: What a message may be narrowed to, the most accurate first, and how many elements share a scale.
NARROW = ("bf16", "int8", "e4m3", "e5m2")
BLOCKS = (64, 128, 256)
#: Behind a type: narrow between hosts only.
BETWEEN = "/between"


@dataclass(frozen=True)
class Narrowing:
    """Which messages may be sent in a narrower type, to which, and how exact they have to stay.

    Attributes:
        rules: (group, mesh dimension or pattern of parameter names, mode); the first that fits counts, and where none
            does the mode is ``off``. A mode is ``off``, ``auto`` or one of :data:`NARROW`, with or without
            :data:`BETWEEN` behind it.
        dtypes: what ``auto`` chooses from.
        block: how many elements share a scale.
        error: largest error that one rounding may make, relative to the largest element of its block.
        feedback: what a message loses of a value with a residual is kept there.
    """

    rules: tuple[tuple[str, str], ...] = ()
    dtypes: tuple[str, ...] = ()
    block: int = 128
    error: Fraction = Fraction(0)
    feedback: bool = False

    ALLOWED = (
        'a mode, or modes by group, mesh dimension or pattern of parameter names: a dictionary, or text as in '
        '"*.norm.weight=off,dp=int8,*=auto"; a mode is "off", "auto", '
        + ", ".join(f'"{name}"' for name in NARROW)
        + f', or one of these types with "{BETWEEN}" behind it, as in "int8{BETWEEN}": between hosts only'
    )
    DTYPES = "some of " + ", ".join(NARROW) + ", separated by commas"
    BLOCK = ", ".join(f'"{size}"' for size in BLOCKS)
    ERROR = 'a number above 0 and below 1 as text, e.g. "0.01"'
    MEASURE = '"off", or a whole number of runs as text, "1" to "999999", e.g. "100"'

    @property
    def is_off(self) -> bool:
        """Whether nothing may be narrowed."""
        return all(mode == "off" for _, mode in self.rules)

    @staticmethod
    def parse(rules: object, dtypes: object = "bf16", block: object = "128", error: object = "0.01") -> Narrowing:
        """Parse the fields ``compress``, ``compress_dtypes``, ``compress_block`` and ``compress_error``.

        Raises:
            ConfigError: text of another form, a name given twice, a number out of range.
        """
        if not isinstance(dtypes, str) or not (names := [name.strip() for name in dtypes.split(",")]):
            raise ConfigError("compress_dtypes", dtypes, Narrowing.DTYPES)
        if not set(names) <= set(NARROW):
            raise ConfigError("compress_dtypes", dtypes, Narrowing.DTYPES)
        if len(set(names)) < len(names):
            raise ConfigError("compress_dtypes", dtypes, f"every dtype once; {Narrowing.DTYPES}")
        if block not in {str(size) for size in BLOCKS}:
            raise ConfigError("compress_block", block, Narrowing.BLOCK)
        if not isinstance(error, str) or not _ERROR.fullmatch(error.strip()) or not Fraction(error.strip()):
            raise ConfigError("compress_error", error, Narrowing.ERROR)
        ordered = tuple(name for name in NARROW if name in names)
        return Narrowing(_narrowed(rules), ordered, int(str(block)), Fraction(error.strip()))


_ERROR = re.compile(r"0?\.\d{1,9}", re.ASCII)
_RUNS = re.compile(r"[1-9]\d{0,5}", re.ASCII)


def measured_every(value: object) -> int:
    """``compress_measure`` as a number of runs; 0: never."""
    text = value.strip() if isinstance(value, str) else ""
    if text != "off" and not _RUNS.fullmatch(text):
        raise ConfigError("compress_measure", value, Narrowing.MEASURE)
    return 0 if text == "off" else int(text)


def _narrowed(value: object) -> tuple[tuple[str, str], ...]:
    """The rules in ``compress``."""
    modes = ("off", "auto", *NARROW, *(f"{name}{BETWEEN}" for name in NARROW))
    if isinstance(value, str) and value.strip() in modes:
        return (("*", value.strip()),)
    found: dict[str, str] = {}
    for entry in value.split(",") if isinstance(value, str) else [""]:
        name, separator, mode = (part.strip() for part in entry.rpartition("="))
        if not name or not separator or mode not in modes:
            raise ConfigError("compress", value, Narrowing.ALLOWED)
        if name in found:
            raise ConfigError("compress", value, f"every name once; {Narrowing.ALLOWED}")
        if "*" in found:
            raise ConfigError("compress", value, f'"*" as the last entry: "{name}" behind it fits nothing')
        found[name] = mode
    return tuple(found.items())


def rules_as_text(value: object) -> str:
    """``compress`` as text: a dictionary becomes its rules in order."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping) or not value:
        raise ConfigError("compress", value, Narrowing.ALLOWED)
    if not all(isinstance(part, str) and "," not in part for entry in value.items() for part in entry):
        raise ConfigError("compress", value, Narrowing.ALLOWED)
    return ",".join(f"{name}={mode}" for name, mode in value.items())
