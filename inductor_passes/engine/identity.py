"""What a compiled graph depends on besides the graph: the key under which Inductor may cache it."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from inductor_passes import _torch, config
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile, RecordedProfile
from inductor_passes.engine.barrier import guarded
from inductor_passes.engine.ours import Ours
from inductor_passes.groups import availability
from inductor_passes.pin import file as plan_file
from inductor_passes.settings.errors import ConfigError


@functools.cache
def source_hash() -> str:
    """SHA-256 of the package's source: a new version of a pass never meets an old cache entry."""
    root = Path(__file__).parent.parent
    hasher = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        hasher.update(str(path.relative_to(root)).encode())
        hasher.update(path.read_bytes())
    return hasher.hexdigest()


@functools.lru_cache(maxsize=8)
def _profile(path: str, modified_ns: int) -> CostProfile:
    del modified_ns
    return CostProfile.load(path)


def load_profile(config: PassConfig) -> CostProfile:
    """The cost profile that ``config`` names, or the defaults of the current accelerator.

    Where Inductor records CUDA graphs, it is that of what they replay.

    Raises:
        ConfigError: the file does not exist.
        ValueError: it is no valid profile; the message names the file.
    """
    if not config.cost_profile:
        name, kind = _torch.accelerator()
        return _as_run(CostProfile.default(name, device_type=kind))
    path = Path(config.cost_profile)
    if not path.is_file():
        raise ConfigError("cost_profile", config.cost_profile, "the path of an existing file")
    return _as_run(_profile(str(path), path.stat().st_mtime_ns))


#: Once per profile: it remembers its answers.
_recorded = functools.lru_cache(maxsize=8)(RecordedProfile.of)


def _as_run(profile: CostProfile) -> CostProfile:
    recorded = profile.spec.device_type == "cuda" and _torch.inductor_option("triton.cudagraphs", False)
    return _recorded(profile) if recorded else profile


def load_plan(config: PassConfig) -> plan_file.PlanFile | None:
    """The plan file that ``config`` pins, None without one.

    Raises:
        PlanFileError: it does not exist or is no valid plan; the message names the file.
    """
    return plan_file.load(config.plan) if config.plan else None


def cache_key(config: PassConfig, profile: CostProfile) -> str | None:
    """Key of everything that our passes depend on; None (do not cache) for an estimator without an id.

    The package's source, the settings, the cost profile, the pinned plans, torch's version, the process groups and what
    was established about them. The rank, too: what it takes for its own piece of a tensor may be another rank's number
    in the same graph, and ranks of one host share a cache.
    """
    if config.estimator is not None and not isinstance(
        getattr(config.estimator, "inductor_passes_uuid", None), str
    ):
        return None
    plans = load_plan(config)
    content = {
        "plan": plans.digest if plans is not None else "",
        "source": source_hash(),
        "config": config.to_json(),
        "profile": profile.hash(),
        "torch": torch.__version__,
        "rank": _torch.rank_and_world_size()[0],
        "groups": {name: list(ranks) for name, ranks in sorted(_torch.group_layout().items())},
        "descriptions": _torch.group_descriptions(),
        "availability": availability.established(),
        "solver": version("ortools") if config.effort == "exact" else "",
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class Configured(Ours):
    """A hook of Inductor that runs with settings of its own or, without any, those of the process at each compilation.

    The user's hooks in it are part of its key.

    Attributes:
        label: what tells this hook from others with the same settings.
    """

    label = ""

    def __init__(self, settings: PassConfig | None = None, others: Sequence[Any] = ()) -> None:
        super().__init__(others)
        self._settings = settings

    def __eq__(self, other: object) -> bool:
        # Dynamo uses what it compiled for one region again for an equal one only if their options are equal.
        if not isinstance(other, Configured) or type(other) is not type(self):
            return NotImplemented
        return (self._settings, self.others) == (other._settings, other.others)

    def __hash__(self) -> int:
        return hash((type(self).__name__, self._settings))

    @property
    def settings(self) -> PassConfig:
        """What this hook runs with."""
        return self._settings or config.current()

    def uuid(self) -> Any:
        """Cache key; None keeps Inductor from caching."""
        keys = [_torch.pass_uuid(one) for one in self.others]
        own = None
        with guarded("working out the cache key", "the graph is not cached", lambda: self.settings):
            own = cache_key(self.settings, load_profile(self.settings))
        if own is None or None in keys:
            return None
        return (own, self.label, *keys) if self.label or keys else own
