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
    #: node -> those whose readers read it now
    stands_for: dict[str, dict[str, None]] = field(default_factory=dict)
    claims: set[Claim] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.removed) + len(self.added) + len(self.stands_for)


class Applications:
    """What has been applied so far."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        #: added or standing node -> its step
        self._of: dict[str, int] = {}
        #: everything ever added: the verifier has never seen it as something to be replaced
        self._made: set[str] = set()
        self._next = 0

    def add(
        self,
        subject: str,
        removed: list[str],
        added: list[str],
        replaced: list[tuple[str, str]],
        claim: Claim = Claim.REPLACE,
    ) -> None:
        """One application; ``replaced`` says whose readers read which node now.

        What touches a node of an earlier application becomes one step with it: the graph that the verifier knows has
        only the first and the last of a row of replacements.
        """
        touched = {self._of[n] for n in removed if n in self._of}
        touched |= {self._of[name] for pair in replaced for name in pair if name in self._of}
        number = self._next
        self._next += 1
        self._steps[number] = _Step({subject: None}, claims={claim})
        for other in sorted(touched):
            number = self._join(number, other)
        step = self._steps[number]
        for old, new in replaced:
            self._of[new] = number
            olds = dict(step.stands_for.get(old, {}))
            if old not in self._made:
                olds[old] = None
            step.stands_for.setdefault(new, {}).update(olds)
        for name in removed:
            if name in step.added:
                del step.added[name]
            else:
                step.removed[name] = None
            # Readers of what this node stood for read what was added for it: all of them are one step.
            step.removed.update(step.stands_for.pop(name, {}))
            self._of.pop(name, None)
        for name in added:
            step.added[name] = None
            self._of[name] = number
            self._made.add(name)

    def forget(self, name: str) -> None:
        """A node that nobody read any more is gone: if it was added here, it no longer is."""
        number = self._of.pop(name, None)
        if number is not None:
            self._steps[number].added.pop(name, None)

    def _join(self, a: int, b: int) -> int:
        large, small = (a, b) if len(self._steps[a]) >= len(self._steps[b]) else (b, a)
        into, step = self._steps[large], self._steps.pop(small)
        into.subjects.update(step.subjects)
        into.removed.update(step.removed)
        into.added.update(step.added)
        for name, olds in step.stands_for.items():
            into.stands_for.setdefault(name, {}).update(olds)
        into.claims |= step.claims
        for name in (*step.added, *step.stands_for):
            self._of[name] = large
        return large

    def certificates(self) -> list[Certificate]:
        """One certificate per connected set of applications, in order."""
        return [
            Certificate(
                "+".join(sorted(step.subjects)),
                tuple(step.removed),
                tuple(step.added),
                tuple((old, new) for new, olds in step.stands_for.items() for old in olds),
                next(iter(step.claims)) if len(step.claims) == 1 else Claim.REPLACE,
            )
            for _, step in sorted(self._steps.items())
        ]
