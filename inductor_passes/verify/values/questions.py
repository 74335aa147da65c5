"""What a proof asks, and what the modules that answer a part of it need from the proof."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from inductor_passes.verify.values.access import Access
from inductor_passes.verify.values.affine import Affine, Space
from inductor_passes.verify.values.communication import Groups
from inductor_passes.verify.values.heads import Resolver


class Question(NamedTuple):
    """Whether two reads give the same value.

    Attributes:
        where: index in the value that the proof began with.
        freely: up to the roundings that an operator is documented to leave out.
    """

    old: Access
    new: Access
    where: tuple[Affine, ...]
    freely: bool = False

    def put(self, variable: int, value: Affine) -> Question:
        """With a variable replaced."""
        where = tuple(f.put(variable, value) for f in self.where)
        return Question(self.old.put(variable, value), self.new.put(variable, value), where, self.freely)

    def has(self, variable: int) -> bool:
        """Whether it depends on a variable."""
        return variable in self.old.variables() or variable in self.new.variables()


class Prover(Protocol):
    """A proof, as those see it who answer some of its questions."""

    space: Space
    groups: Groups
    old: Resolver
    new: Resolver

    def holds(self, questions: list[Question]) -> bool:
        """Whether all of these have the answer yes."""
        ...
