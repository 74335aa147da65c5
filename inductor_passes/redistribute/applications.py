"""Certificates of a pass that rewrites its own results: one per connected set of applications.

The verifier compares the graph before the pass with the graph after it, so an application that removes what an earlier
one added is told as one step. Certificates are joined small into large: near-linear in the number of nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from inductor_passes.verify import Certificate, Claim


@dataclass
class _Step:
    """A certificate in the making; dicts keep insertion order."""

    subjects: dict[str, None] = field(default_factory=dict)
    removed: dict[str, None] = field(default_factory=dict)
    added: dict[str, None] = field(default_factory=dict)
    replaced: dict[tuple[str, str], None] = field(default_factory=dict)
    claims: set[Claim] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.removed) + len(self.added) + len(self.replaced)


class Applications:
    """What has been applied so far."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._of_added: dict[str, int] = {}
        self._next = 0

    def add(
        self,
        subject: str,
        removed: list[str],
        added: list[str],
        replaced: list[tuple[str, str]],
        claim: Claim = Claim.REPLACE,
    ) -> None:
        """One application. Users redirected to a node that an earlier one added become that one's."""
        touched = {self._of_added[n] for n in removed if n in self._of_added}
        touched |= {self._of_added[new] for _, new in replaced if new in self._of_added}
        number = self._next
        self._next += 1
        self._steps[number] = _Step({subject: None}, claims={claim})
        for other in sorted(touched):
            number = self._join(number, other)
        step = self._steps[number]
        for name in removed:
            if name in step.added:
                del step.added[name]
                del self._of_added[name]
            else:
                step.removed[name] = None
        for name in added:
            step.added[name] = None
            self._of_added[name] = number
        step.replaced.update(dict.fromkeys(replaced))

    def _join(self, a: int, b: int) -> int:
        large, small = (a, b) if len(self._steps[a]) >= len(self._steps[b]) else (b, a)
        into, step = self._steps[large], self._steps.pop(small)
        into.subjects.update(step.subjects)
        into.removed.update(step.removed)
        into.added.update(step.added)
        into.replaced.update(step.replaced)
        into.claims |= step.claims
        for name in step.added:
            self._of_added[name] = large
        return large

    def certificates(self) -> list[Certificate]:
        """One certificate per connected set of applications, in order."""
        return [
            Certificate(
                "+".join(sorted(step.subjects)),
                tuple(step.removed),
                tuple(step.added),
                tuple(step.replaced),
                next(iter(step.claims)) if len(step.claims) == 1 else Claim.REPLACE,
            )
            for _, step in sorted(self._steps.items())
        ]
