"""What a rank states about one graph, as plain data. It is used when the graph is compiled, and again when its code is
loaded from a cache, by processes that do not have the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from inductor_passes.agreement import difference
from inductor_passes.agreement.consensus import Ballot, is_refusal
from inductor_passes.agreement.literals import Literals
from inductor_passes.records.packed import pack, unpack

#: Lines travel in generated code to show a difference; a beginning of this many characters, compressed, will do.
_MAX_LINES = 1 << 15
_MAX_CLAIM = 1 << 22


@dataclass(frozen=True)
class Claim:
    """One rank's description of one graph, and the verdict under which the graph was compiled.

    Attributes:
        rank / world_size: of the process that compiled it, in the default process group.
        participants: the ranks that have to agree; empty where nobody could be asked.
        corners: see ``Grid.corners``.
        digest / values / kinds / roles / places: see ``Description`` and ``Literals``.
        graph: name that AOTAutograd gave the graph.
        phase: name within its compilation.
        lines: what the digest is made of, packed.
        timeout_s: how long to wait for the others.
        agreed: the verdict; None where the code is right under either.
        settings: see ``Ballot``.
    """

    rank: int
    world_size: int
    participants: tuple[int, ...]
    corners: tuple[int, ...]
    digest: str
    values: tuple[int, ...]
    kinds: str
    roles: tuple[tuple[int, ...], ...]
    places: tuple[int, ...]
    graph: str
    phase: str
    lines: str
    timeout_s: float
    agreed: bool | None
    settings: str = ""

    @property
    def refused(self) -> bool:
        """Whether the rank cannot describe its graph, and only tells the others so; its first line says why."""
        return is_refusal(self.digest)

    def ballot(self, compile_id: str, lines: Sequence[str] | None = None) -> Ballot:
        """What to vote for; ``lines`` where they are at hand."""
        literals = Literals(self.values, self.kinds, self.roles, self.places)

        def shown() -> Sequence[str]:
            return lines if lines is not None else difference.unpacked(self.lines.encode()) or []

        return Ballot(
            self.digest,
            literals,
            self.corners,
            f"{compile_id} {self.graph} {self.phase}",
            shown,
            first=opens_a_function(compile_id),
            compilation=compile_id,
            settings=self.settings,
        )

    def text(self) -> str:
        """For a statement in generated code; equal for equal claims."""
        return pack(asdict(self))

    @staticmethod
    def parse(text: str) -> Claim:
        """Inverse of :meth:`text`.

        Raises:
            ValueError: it is not one.
        """
        try:
            return _checked(unpack(text, _MAX_CLAIM))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"no claim: {type(error).__name__}: {error}") from None


def _checked(data: dict[str, Any]) -> Claim:
    def integers(key: str) -> tuple[int, ...]:
        return tuple(int(value) for value in data[key])

    claim = Claim(
        rank=int(data["rank"]),
        world_size=int(data["world_size"]),
        participants=integers("participants"),
        corners=integers("corners"),
        digest=str(data["digest"]),
        values=integers("values"),
        kinds=str(data["kinds"]),
        roles=tuple(tuple(int(value) for value in row) for row in data["roles"]),
        places=integers("places"),
        graph=str(data["graph"]),
        phase=str(data["phase"]),
        lines=str(data["lines"]),
        timeout_s=float(data["timeout_s"]),
        agreed=None if data["agreed"] is None else data["agreed"] is True,
        settings=str(data["settings"]),
    )
    named = (claim.digest.isalnum() or not claim.participants) and (claim.settings.isalnum() or not claim.settings)
    if not named or len(claim.kinds) != len(claim.values):
        raise ValueError("no claim: its fields do not fit together")
    return claim


def opens_a_function(compile_id: str) -> bool:
    """Whether a compile id of torch's (``7/0``, ``7/0_1``) is that of a function's first graph; true for none."""
    return compile_id.rpartition("/")[2].partition("_")[0] in ("", "0")


def packed_lines(lines: Sequence[str]) -> str:
    """Lines as they travel in a claim."""
    return difference.packed(lines, _MAX_LINES)
