"""What the fuzzer runs: programs as lists of steps, and how each is compiled.

A program is a list of steps, each a name and three integers; whatever the integers are, the builder makes a legal graph
of them (indices count modulo what there is, steps that do not fit are left out). So every sublist of steps is a program
too, and a failure shrinks by leaving steps out.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from tests.support.world import fake_world

Step = tuple[str, int, int, int]

#: Steps and how often they are drawn. Those of :data:`RANK_STEPS` make graphs that differ between ranks.
STEPS = {
    "input": 2,
    "pointwise": 6,
    "add": 5,
    "mm": 4,
    "cast": 2,
    "view": 4,
    "draw": 1,
    "temporary": 2,
    "update": 3,
    "written_back": 3,
    "wait": 18,
    "wait_again": 2,
    "all_gather": 6,
    "all_gather_out": 2,
    "all_gather_coalesced": 2,
    "reduce_scatter": 6,
    "reduce_scatter_coalesced": 2,
    "all_reduce": 5,
    "all_reduce_in_place": 2,
    "all_reduce_coalesced": 2,
    "all_to_all": 4,
    "all_reduce_coalesced_in_place": 1,
    "reduce_scatter_out": 2,
    "broadcast": 2,
    "broadcast_in_place": 2,
    "exchange": 2,
    "send_and_receive": 2,
    "unknown": 1,
    "scribble": 1,
    "host": 1,
    "check": 1,
    "matmul_chain": 2,
    "feedback": 2,
    "split": 3,
    "unbind": 2,
    "update_member": 3,
    "twins": 2,
    "nested_gather": 2,
    "scalar": 2,
    "scalar_used": 2,
    "float8": 2,
    "float8_back": 2,
    "empty": 1,
    "empty_joined": 1,
    "cond": 1,
    "loop": 1,
}
#: Steps that write to memory that other nodes share.
WRITES = {
    *("update", "update_member", "temporary", "scribble", "exchange", "send_and_receive", "broadcast_in_place"),
    *("all_reduce_in_place", "all_reduce_coalesced_in_place", "all_gather_out", "reduce_scatter_out"),
}
RANK_STEPS = {"rank_reader": 4, "rank_constant": 3, "rank_cast": 3}
BUDGETS = ("0", "0", "+1%", "+5%", "+20%", "100B", "1KiB", "unlimited")
BELOW = ("-10%", "-30%", "-60%", "=1KiB", "=4KiB", "=1GiB")
#: ``mesh_a`` and ``mesh_b`` are the dimensions of the mesh.
COMPRESS = (
    *("auto", "auto", "*=bf16", "*=int8", "*=int8", "*=e4m3", "*=e5m2", "*=int8/between", "*=bf16/between"),
    *("*=e4m3/between", "mesh_a=int8,mesh_b=bf16,*=auto", "mesh_a=off,*=int8", "b=e4m3,a=auto"),
)


@dataclass(frozen=True)
class Case:
    """A program and how it is compiled.

    Attributes:
        steps: the program.
        ranks: size of the world; 4 or 8.
        settings: fields of ``PassConfig``.
        async_tp: whether every region that can be cut into parts is.
        device, ranks_per_host: of the cost profile.
        backward: whether the graph's inputs are named as those of a backward.
        vandal: position among the passes of one that breaks off half way, or -1 for none.
        alternatives: up to how many nodes a graph is planned again in other ways.
        search: states that the planner's local search may look at.
        differs: whether ranks have graphs of their own.
        link_ns: per byte between hosts, on measured links; 0: what the device's datasheet says.
        special: seed of the numbers among the inputs that are not finite; 0: there are none.
    """

    steps: tuple[Step, ...]
    ranks: int = 4
    settings: dict[str, Any] = field(default_factory=dict)
    async_tp: bool = False
    device: str = "cpu"
    ranks_per_host: int = 8
    backward: bool = False
    vandal: int = -1
    alternatives: int = 0
    search: int = 500
    differs: bool = False
    link_ns: float = 0.0
    special: int = 0

    @property
    def compressed(self) -> bool:
        """Whether messages may be narrowed, which changes results."""
        return self.settings.get("compress", "off") != "off"

    @property
    def backs(self) -> bool:
        """Whether inputs get values at the end, and nothing else is written to, as in graphs of AOTAutograd."""
        names = {step[0] for step in self.steps}
        return bool(names & {"written_back", "feedback"}) and not names & WRITES


@contextlib.contextmanager
def world(ranks: int) -> Iterator[tuple[str, ...]]:
    """A world without processes; yields the names of the group of all ranks and of the two dimensions of a mesh."""
    with fake_world(ranks) as everybody:
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("a", "b"))
        yield (everybody, *(mesh.get_group(d).group_name for d in (0, 1)))


def random_case(rng: random.Random, ranks: int = 4) -> Case:
    """A case; every choice from ``rng``."""
    names = rng.sample(list(STEPS), k=rng.randint(len(STEPS) // 4, len(STEPS))) + ["wait"]
    differs = rng.random() < 0.15
    known = STEPS | (RANK_STEPS if differs else {})
    names += RANK_STEPS if differs else ()
    weights = [known[name] for name in names]
    steps = [
        (name, rng.randrange(64), rng.randrange(64), rng.randrange(64))
        for name in rng.choices(names, weights, k=rng.randint(4, 26))
    ]
    settings: dict[str, Any] = {
        "memory_budget": rng.choice(BUDGETS),
        "bucket": rng.choice(["on", "on", "off"]),
        "schedule": rng.choice(["on", "on", "off"]),
        "redistribute": rng.choice(["off", "exact"]),
    }
    case = Case(
        tuple(steps),
        ranks,
        settings,
        async_tp=rng.random() < 0.35,
        device=rng.choice(["cpu", "cuda"]),
        ranks_per_host=rng.choice([1, 2, 8]),
        backward=rng.random() < 0.3,
        vandal=rng.randrange(4) if rng.random() < 0.1 else -1,
        # Local search and planning again take most of the time and find legal orders of the same kind.
        alternatives=800 if rng.random() < 0.03 else 0,
        search=60_000 if rng.random() < 0.03 else 500,
        differs=differs,
    )
    return _narrowed(rng, _below(rng, case))


def _below(rng: random.Random, case: Case) -> Case:
    """Now and then a budget below the peak. A graph on its own keeps to the least that it needs."""
    if rng.random() >= 0.15:
        return case
    return replace(case, settings={**case.settings, "memory_budget": rng.choice(BELOW)})


def _narrowed(rng: random.Random, case: Case) -> Case:
    """Settings of narrower messages; half of the cases leave them off, some with the others that belong to it."""
    drawn = rng.random()
    if drawn >= 0.5:
        return case
    settings = {
        "compress": rng.choice(COMPRESS) if drawn < 0.45 else "off",
        "compress_dtypes": rng.choice(["bf16,int8", "int8", "e4m3,e5m2", "bf16,int8,e4m3,e5m2"]),
        "compress_block": rng.choice(["64", "128", "256"]),
        "compress_error": rng.choice(["0.003", "0.004", "0.01", "0.04", "0.08"]),
    }
    if settings["compress"] != "off":
        settings["compress_feedback"] = rng.choice(["on", "off"])
    # What is no number does not equal itself, which a program may check.
    plain = settings["compress"] == "off" or any(step[0] == "check" for step in case.steps)
    special = rng.randrange(1, 1000) * (rng.random() < 0.3) * (not plain)
    link_ns = rng.choice([0.0, 1.0, 100.0])
    return replace(case, settings={**case.settings, **settings}, link_ns=link_ns, special=special)
