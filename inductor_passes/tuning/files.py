"""Files for the next run: the corrected cost profile, and beside it plans that were measured to be the faster ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inductor_passes import _torch
from inductor_passes.config import plans_beside
from inductor_passes.cost.profile import CostProfile
from inductor_passes.pin import file as plan_file
from inductor_passes.records.whole_file import write_whole
from inductor_passes.tuning.plan import Planned

#: Of a larger set of ranks a name holds the first one, the last one and how many they are.
_NAMED = 8


def path_of(planned: Planned, home: tuple[int, ...]) -> Path:
    """Where the cost profile goes.

    Args:
        home: the ranks in whose name it is written: the stated name is that of the ranks that rank 0 is one of.
    """
    path = Path(planned.about.tune_file or Path(_torch.compile_cache_dir()) / "inductor_passes" / "tuned.json")
    if not home or 0 in home:
        return path
    named = "_".join(map(str, home)) if len(home) <= _NAMED else f"{home[0]}_to_{home[-1]}_{len(home)}"
    return path.with_name(f"{path.stem}.ranks{named}{path.suffix}")


def plan_path_of(planned: Planned, home: tuple[int, ...]) -> Path:
    """Where plans go; see :func:`path_of`."""
    return Path(plans_beside(str(path_of(planned, home))))


def writes(planned: Planned, rank: int) -> bool:
    """Whether this rank writes what its set found: the first one of the set, and one rank of every other host."""
    return rank == planned.about.participants[0] or writes_for_host()


def writes_for_host() -> bool:
    """Whether this rank is the one that writes on its host."""
    return os.environ.get("LOCAL_RANK") == "0"


def save(path: Path, profile: CostProfile) -> None:
    """Write a profile in the place of what is there.

    Raises:
        OSError: it cannot be written.
    """
    profile.save(path)


def save_plans(path: Path, plans: Sequence[dict[str, Any]]) -> None:
    """The same for plans, in the order in which their graphs were compiled: they become known in any order."""
    graphs = [plan_file.GraphPlan.from_json(one, str(one.get("phase", ""))) for one in plans]
    text = plan_file.text_of(sorted(graphs, key=lambda one: -1 if one.graph_index is None else one.graph_index))
    write_whole(path, lambda partial: partial.write_text(text, encoding="utf-8"))
