"""Files for the next run: the corrected cost profile, and beside it the second plans that stayed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inductor_passes import _torch
from inductor_passes.cost.profile import CostProfile
from inductor_passes.pin import file as plan_file
from inductor_passes.tuning.plan import Planned


def _path(planned: Planned) -> Path:
    about = planned.about
    path = Path(about.tune_file or Path(_torch.compile_cache_dir()) / "inductor_passes" / "tuned.json")
    if len(about.participants) != _torch.rank_and_world_size()[1]:
        # Parts of a program whose ranks compile different graphs measure different things.
        path = path.with_name(f"{path.stem}.ranks{about.participants[0]}_{about.participants[-1]}{path.suffix}")
    return path


def _writes(planned: Planned, rank: int) -> bool:
    """Whether this rank writes: the first rank of the graph, and one rank of every other host."""
    return rank == planned.about.participants[0] or os.environ.get("LOCAL_RANK") == "0"


def save(planned: Planned, profile: CostProfile, rank: int) -> str:
    """Write the profile, where this rank does; its path."""
    path = _path(planned)
    if _writes(planned, rank):
        _replace(path, profile.save)
    return str(path)


class Plans:
    """Second plans that stayed, by file."""

    def __init__(self) -> None:
        self._plans: dict[Path, list[dict[str, Any]]] = {}

    def add_plan(self, planned: Planned, made: dict[str, Any], rank: int) -> str:
        """Write a plan with those before it, where this rank does; the path of the file."""
        path = _path(planned)
        path = path.with_name(f"{path.stem}.plan.json")
        plans = self._plans.setdefault(path, [])
        plans.append(made)
        if _writes(planned, rank):
            text = plan_file.text_of([plan_file.GraphPlan.from_json(one, str(one.get("phase", ""))) for one in plans])
            _replace(path, lambda partial: partial.write_text(text, encoding="utf-8"))
        return str(path)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file as a whole or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        stack.callback(partial.unlink, missing_ok=True)
        write(partial)
        os.replace(partial, path)
