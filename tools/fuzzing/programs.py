"""Programs of the fuzzer as FX graphs with fake tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx

from tools.fuzzing.cases import Case
from tools.fuzzing.unusual_steps import UnusualSteps


class _Builder(UnusualSteps):
    """Writes a graph step by step."""

    def step(self, name: str, a: int, b: int, c: int) -> None:
        getattr(self, f"_{name}")(a, b, c)

    def finish(self) -> torch.fx.GraphModule:
        while self.flights:
            self.land(0)
        self._write_back()
        unusual = [*self.scalars[::2], *self.eights[::2], *self.empties[::2], *self.extra]
        outputs = list(dict.fromkeys([*self.values[-1:], *self.values[::3], *unusual]))
        self.graph.output(tuple(outputs)).meta["val"] = tuple(o.meta["val"] for o in outputs)
        self.graph.lint()
        return torch.fx.GraphModule(self.root, self.graph)


def build(case: Case, groups: Sequence[str], variant: int = 0) -> torch.fx.GraphModule:
    """The case's program.

    Args:
        variant: where ranks differ, 0: as the first rank has it; 1: as all others have it.
    """
    builder = _Builder(groups, case.backward, variant, case.compressed)
    # Messages of a few elements get no smaller.
    columns = 32 if case.compressed else 4
    builder.input(8, columns, torch.float32)
    builder.input(8, columns, torch.float32)
    builder.input(4, 2 * columns, torch.bfloat16)
    for step in case.steps:
        builder.step(*step)
    return builder.finish()
