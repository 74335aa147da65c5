"""Bytes per parameter, whatever collective carries them: on made-up messages, and on real ranks with exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from inductor_passes.cost.communication import GroupLayout, wire_bytes
from inductor_passes.cost.profile import CollectiveCost, CostProfile, GroupCost
from inductor_passes.emulation import link as emulated_link
from inductor_passes.emulation.link_model import Message, Record
from tests.support.ranks import Ranks
from tools.link.census import Tally, census, judged, tally
from tools.link.lab import local

RANKS = 2


def _message(kind: str, sent: torch.Tensor, arrived: torch.Tensor) -> Message:
    taken, given = 4 * sent.numel(), 4 * arrived.numel()
    wire = wire_bytes(kind, taken, given, RANKS)
    return Message(Record(0, kind, "g", RANKS, "intra", taken, given, wire, 1), [sent], [arrived])


class Step:
    """A step of two parameters on rank 0, as messages."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.a, self.b, self.other = (torch.randn(n, generator=generator) for n in (64, 40, 104))
        #: What each rank adds to the gradients of both shards of rank 0.
        self.parts = [torch.randn(104, generator=generator) for _ in range(RANKS)]
        self.mean = (self.parts[0] + self.parts[1]) / RANKS

    def gather(self, *shards: torch.Tensor) -> Message:
        flat = torch.cat(shards)
        return _message("all_gather", flat, torch.cat([flat, self.other[: len(flat)]]))

    def scatter(self, begin: int = 0, end: int = 104) -> Message:
        total = (self.parts[0] + self.parts[1])[begin:end]
        return _message("reduce_scatter", torch.cat([self.parts[0][begin:end], self.other[begin:end]]), total)

    def exchange(self, begin: int = 0, end: int = 104) -> Message:
        pieces = torch.cat([part[begin:end] for part in self.parts])
        return _message("all_to_all", pieces.roll(1), pieces)

    def everywhere(self) -> Message:
        whole = torch.cat([self.parts[0] + self.parts[1], self.other])
        return _message("all_reduce", whole * 3, whole)

    def tally(self, *messages: Message) -> list[Tally]:
        shards = {"a": self.a, "b": self.b}
        return tally(messages, shards, {"a": self.mean[:64], "b": self.mean[64:]}, RANKS)


GOOD: dict[str, Callable[[Step], list[Message]]] = {
    "one by one": lambda s: [s.gather(s.a), s.gather(s.b), s.scatter(64), s.scatter(0, 64)],
    "merged": lambda s: [s.gather(s.a, s.b), s.scatter()],
    "merged, other order": lambda s: [s.gather(s.b, s.a), s.scatter()],
    "padded": lambda s: [s.gather(s.a, torch.zeros(1), s.b), s.scatter()],
    "in parts": lambda s: [s.gather(s.a[:9]), s.gather(s.a[9:60]), s.gather(s.a[60:], s.b), s.scatter()],
    "exchanged": lambda s: [s.gather(s.a, s.b), s.exchange()],
    "some exchanged": lambda s: [s.gather(s.a, s.b), s.exchange(0, 64), s.scatter(64)],
    "gathered again": lambda s: [s.gather(s.a, s.b), s.gather(s.a), s.scatter(), s.gather(s.b)],
}


@pytest.mark.parametrize("name", GOOD)
def test_the_same_work_is_recognised(name: str) -> None:
    step = Step()
    found = step.tally(*GOOD[name](step))
    twice = 2 if name == "gathered again" else 1
    assert found == [Tally("a", 256, twice * 256, 256), Tally("b", 160, twice * 160, 160)]
    assert judged([found, found]) == {"wrong": [], "known_bytes": (twice + 1) * 416}


BAD: dict[str, tuple[Callable[[Step], list[Message]], str]] = {
    "not gathered": (lambda s: [s.gather(s.a), s.scatter()], "sent 0 bytes of b per step; expected 160 to 320"),
    "three times": (lambda s: [s.gather(s.a, s.b)] * 3 + [s.scatter()], "sent 768 bytes of a per step"),
    "not reduced": (
        lambda s: [s.gather(s.a, s.b), s.scatter(0, 64)],
        "sent 0 bytes of the gradient of b per step; expected 160",
    ),
    "reduced twice": (
        lambda s: [s.gather(s.a, s.b), s.scatter(), s.exchange(64)],
        "sent 320 bytes of the gradient of b per step; expected 160",
    ),
    "reduced everywhere": (
        lambda s: [s.gather(s.a, s.b), s.everywhere()],
        "sent 512 bytes of the gradient of a per step; expected 256",
    ),
    "another tensor in its place": (
        lambda s: [s.gather(s.a, s.other[:40]), s.scatter()],
        "sent 0 bytes of b per step",
    ),
    "half of it": (lambda s: [s.gather(s.a[:30], s.b), s.scatter()], "sent 0 bytes of a per step"),
    "a sum that lacks a rank": (
        lambda s: [s.gather(s.a, s.b), _message("reduce_scatter", s.other, s.parts[0])],
        "sent 0 bytes of the gradient of a per step",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_other_work_is_named(name: str) -> None:
    step = Step()
    make, message = BAD[name]
    wrong = judged([step.tally(*GOOD["merged"](step)), step.tally(*make(step))])["wrong"]
    assert any(message in one for one in wrong), wrong


def test_values_that_identify_nothing_are_left_out() -> None:
    step = Step()
    ones = torch.ones(64)
    (found,) = tally([step.gather(ones)], {"norm": ones}, {"norm": torch.zeros(64)}, RANKS)
    assert found == Tally("norm", 256, None, None)
    assert judged([[found]]) == {"wrong": [], "known_bytes": None}
    twins = tally([step.gather(step.a, step.a)], {"x": step.a, "y": step.a.clone()}, {}, RANKS)
    assert [one.gathered for one in twins] == [None, None]


def test_many_wrong_parameters_are_counted() -> None:
    wrong = judged([[Tally(f"p{k}", 4, 0, 4) for k in range(8)]])["wrong"]
    assert len(wrong) == 4 and wrong[-1] == "and 5 more of this kind"


def _setup(rank: int, world_size: int) -> None:
    emulated_link.register()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(RANKS, backend="emulated", setup=_setup) as pool:
        yield pool


def _profile(exchange_ns_per_byte: float) -> CostProfile:
    """A measured link on which a reduce_scatter takes 10 ns per byte."""
    per_byte = {"all_gather": 10.0, "reduce_scatter": 10.0, "all_to_all": exchange_ns_per_byte}
    costs = tuple(CollectiveCost(kind, 1_000.0, ns, 100.0, 0.0) for kind, ns in per_byte.items())
    group = GroupCost(GroupLayout(RANKS, 1, RANKS), "test", "wire", costs)
    return replace(CostProfile.default("cpu", RANKS), measured=True, groups=(group,))


def _step(rank: int, world_size: int, folder: str, exchange_ns_per_byte: float) -> tuple[dict[str, int], Any]:
    """Collectives by kind of a compiled step, and its tallies."""
    from inductor_passes.models import LlamaConfig, language_batch, language_model
    from inductor_passes.simple_fsdp import simple_fsdp

    path = Path(folder, f"profile-{exchange_ns_per_byte:g}.json")
    if rank == 0:
        _profile(exchange_ns_per_byte).save(path)
    dist.barrier()
    config = LlamaConfig(vocab=64, dim=64, layers=1, heads=2, kv_heads=2, hidden=96, batch=2, seq=16, std=0.06)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))
    model = simple_fsdp(language_model(config), mesh)
    generator = torch.Generator().manual_seed(7 + rank)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms start as ones, which tell nothing.
            shard = local(parameter)
            shard.add_(0.01 * torch.randn(shard.shape, generator=generator))
    torch._dynamo.reset()
    settings = {"cost_profile": str(path), "memory_budget": "unlimited", "verify": "strict", "codegen": "aot_eager"}
    options = {f"inductor_passes.{name}": value for name, value in settings.items()}
    step = torch.compile(model, backend="inductor_passes", options=options, fullgraph=True)
    batch = language_batch(config, rank)
    with emulated_link.watch() as messages:
        step(*batch).backward()
    counts: dict[str, int] = {}
    for message in messages:
        if message.record.wire_bytes:
            counts[message.record.kind] = counts.get(message.record.kind, 0) + 1
    model.zero_grad(set_to_none=True)
    return counts, census(model, lambda: step(*batch))


@pytest.mark.ranks
def test_reductions_that_became_exchanges_are_counted(ranks: Ranks, tmp_path: Path) -> None:
    """Measured costs decide whether a gradient is scattered or exchanged; its bytes are the same."""
    found = {ns: ranks.run(_step, str(tmp_path), ns, timeout=600) for ns in (11.0, 2.0)}
    plain, exchanged = (found[ns][0][0] for ns in (11.0, 2.0))
    assert plain.get("reduce_scatter") and not plain.get("all_to_all")
    assert exchanged.get("all_to_all") and exchanged.get("reduce_scatter", 0) < plain["reduce_scatter"]
    for of_ranks in found.values():
        tallies = [tallies for _, tallies in of_ranks]
        assert judged(tallies)["wrong"] == []
        assert all(one.reduced == one.once for of_rank in tallies for one in of_rank)
    total = [judged([tallies for _, tallies in of_ranks])["known_bytes"] for of_ranks in found.values()]
    assert total[0] == total[1] and total[0] > 0
