"""Contenders over memory: every combination of today's settings, and ours with one budget each.

A user of today sweeps who orders, what is kept after forward, torch's ``activation_memory_budget`` and checkpointed
blocks. Ours has one setting, ``memory_budget``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal

from inductor_passes import _torch
from inductor_passes.engine import checkpointing
from tools.link.lab import ALL_CONTENDERS, IN_TREE_ORDER, Contender


class _Mended(_torch.partitioner_base()):  # type: ignore[misc]
    """torch's partitioner, with opaque saved values where the runtime expects them: ours mends that in any case.

    Without it, torch 2.12 and 2.13 cannot run checkpointed blocks whose parameters are DTensors.
    """

    def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        forward, backward = _torch.default_partitioner()(gm, joint_inputs, **kwargs)
        checkpointing.put_right(forward, backward, kwargs["num_fwd_outputs"])
        return forward, backward

    def uuid(self) -> str:
        return "opaque values last"


def _sweep() -> Iterator[Contender]:
    """What a user can combine today: who orders, what is kept after forward, and how much of activations is saved."""
    orders: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
        ("inductor", "default Inductor", {}),
        ("reorder", "in-tree reorder", IN_TREE_ORDER),
        ("ours", "our order", None),
    )
    keeps: tuple[tuple[bool | Literal["auto"], str, str], ...] = (
        (True, "", ""),
        (False, "-keep", ", kept"),
        ("auto", "-auto", ', "auto"'),
    )
    for (who, order, options), (reshard, kept, said) in itertools.product(orders, keeps):
        family = {"reorder": "in-tree"}.get(who, who)
        # Who decides where it is left to the partitioner is ours alone.
        if reshard == "auto" and who != "ours":
            continue
        for share in (100, *SAVED):
            # One of ours with one budget, the default.
            if (reshard, share) == ("auto", 100):
                continue
            name = f"{who}{kept}" if share == 100 else f"{who}{kept}-saved-{share}"
            title = f"{order}{said}, {share}% saved"
            yield Contender(name, title, family, options, reshard=reshard, saved=share / 100)
        name, title = f"{who}{kept}-blocks", f"{order}{said}, blocks checkpointed"
        mended = None if options is None else {**options, "custom_partitioner_fn": _Mended()}
        yield Contender(name, title, family, mended, reshard=reshard, checkpointed=True)


def _budgets() -> Iterator[Contender]:
    """Ours with one setting, the memory budget; parameters are left to it."""
    for less in (10, 20, 30, 40, 50, 60):
        budget = f"-{less}%"
        yield Contender(
            f"ours-less-{less}", f'ours, "{budget}"', "ours", None, {"memory_budget": budget}, reshard="auto"
        )
    for within in (100, 110, 125, 150):
        yield Contender(
            f"ours-within-{within}", f'ours, "=..." of {within}%', "ours", None, reshard="auto", within=within
        )
    for more in (0, 5, 10, 15, 25, 50):
        budget = f"+{more}%" if more else "0"
        name = "ours-auto" if more == 5 else f"ours-auto-{more}"
        yield Contender(name, f'ours, "{budget}"', "ours", None, {"memory_budget": budget}, reshard="auto")


#: Shares in percent of what it would save that torch may save.
SAVED = (85, 70, 50, 30, 10)
#: Every combination of settings of today, by name.
SWEEP = {c.name: c for c in _sweep()}
#: Ours with one memory budget each, those below the peak first: what ``within`` is relative to comes from them.
BUDGETS = {c.name: c for c in _budgets()}
#: All contenders by name.
EVERY = {**SWEEP, **BUDGETS, **ALL_CONTENDERS}
