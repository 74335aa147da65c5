"""Agreement on real ranks: what may be decided when ranks have equal graphs, and what happens when they have not."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes import _torch
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine import agreeing
from inductor_passes.engine.compilation import Known
from inductor_passes.engine.passes import passes_of
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.ir.view import GraphView
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.trace.collector import collect
from tests.support import gated, ranks
from tests.support.gated import DIFFER, Gate, Told, ag, alike, ar, inputs, right
from tests.support.models import LlamaConfig, fake_world, llama, llama_batch, tensor_parallel
from tests.support.ranks import RankError, Ranks
from tests.test_uneven_ranks import Layers

pytestmark = pytest.mark.ranks

REASSOCIATING = PassConfig(codegen="aot_eager", verify="strict", redistribute="reassociate")


def run_program(rank: int, world_size: int, program: Callable[..., Any], name: str) -> tuple[bool, list[Told]]:
    """Whether a rank's results are those of its program, and what it was told."""
    gate = Gate(REASSOCIATING, facts={"test": name})
    compiled = gate.compiled(lambda x: program(rank, x))
    return right(compiled, program, rank), gate.told


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as pool:
        yield pool


def test_a_group_without_ranks_does_not_exist() -> None:
    """Found: torch lists no ranks of a group that came and went in this process, and a size of zero is divided by."""
    with fake_world(2), mock.patch.object(dist, "get_process_group_ranks", return_value=[]):
        assert _torch.resolve_group_ranks(dist.group.WORLD.group_name) is None


def test_ranks_with_one_program_agree_and_it_is_rewritten(two: Ranks) -> None:
    results = two.run(run_program, alike, "alike")
    for correct, (told,) in results:
        assert correct and told.agreed and told.why == "" and told.participants == (0, 1)
        assert told.applied >= 2
        # Of four gathers nobody reads one, two are one, and what is left travels in one message.
        assert len(told.collectives) == 1
    assert results[0][1][0].digest == results[1][1][0].digest


@pytest.mark.parametrize("program", DIFFER, ids=lambda p: p.__name__)
def test_where_programs_differ_collectives_stay(two: Ranks, program: Callable[..., Any]) -> None:
    """And the results are right on both ranks; neither waits for long, and each sees the first difference."""
    for rank, (correct, (told,)) in enumerate(two.run(run_program, program, program.__name__)):
        assert correct and not told.agreed
        assert told.seconds < gated.PATIENT_S / 2
        assert f"rank {rank} has <" in told.why and f"rank {1 - rank} has <" in told.why
        assert "gated.py:" in told.why


@pytest.mark.parametrize("program", DIFFER, ids=lambda p: p.__name__)
def test_each_of_these_would_go_wrong_without_an_agreement(program: Callable[..., Any]) -> None:
    """Taken to agree, the ranks plan other collectives: one would wait for the other, or take its data for its own."""
    planned = []
    for rank in range(2):
        with fake_world(2, rank):
            found: list[str] = []

            def plan(graph: torch.fx.Graph, is_inference: bool, found: list[str] = found) -> None:
                run_passes(
                    graph,
                    passes_of(REASSOCIATING),
                    REASSOCIATING,
                    CostProfile.default("cpu"),
                    known=Known("inference", agreed=True),
                )
                found += [f"{c.kind} {c.dtypes} {c.input_bytes}" for c in GraphView(graph).collectives]

            torch._dynamo.reset()
            gate = Gate(REASSOCIATING)
            gate.plan = plan  # type: ignore[assignment, method-assign]
            # Wide enough for bytes to matter.
            gate.compiled(lambda x, rank=rank: program(rank, x))(inputs(rank, 4096))
            planned.append(found)
    assert planned[0] != planned[1]


def said_of_sums(rank: int, world_size: int) -> tuple[bool, list[str]]:
    """Whether the results of ranks that reduce in different ways are right; the warnings."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return ar(ar(x, "max" if rank else "sum") + 1) * 2

    torch._dynamo.reset()
    settings = {"inductor_passes.codegen": "aot_eager", "inductor_passes.rank_agreement": "60s"}
    compiled, x = torch.compile(program, backend="inductor_passes", options=settings), torch.arange(8.0)
    with mock.patch.object(logging.getLogger("inductor_passes"), "warning") as warned:
        found = compiled(x)
    return torch.equal(found, program(x)), [call.args[-1] for call in warned.call_args_list]


def test_ranks_that_send_other_messages_are_told_what_may_happen(two: Ranks) -> None:
    """Found: the warning named a difference, and not that the job may hang."""
    for correct, said in two.run(said_of_sums):
        assert correct
        (hang,) = [text for text in said if "may wait for each other for ever" in text]
        assert "max" in hang and "sum" in hang


@pytest.mark.parametrize("what", ["settings", "source", "schedule"])
def test_what_ranks_bring_along_has_to_be_equal(two: Ranks, what: str) -> None:
    for correct, (told,) in two.run(other_facts, what):
        assert correct and not told.agreed and "<fact" in told.why
        if what == "settings":
            # Found: the sentence showed the beginning of all settings, which was equal.
            assert "<fact setting redistribute: " in told.why


def other_facts(rank: int, world_size: int, what: str) -> tuple[bool, list[Told]]:
    gate = Gate(REASSOCIATING, facts={"test": f"facts {what}"})
    if rank == 1 and what == "settings":
        gate.settings = PassConfig(codegen="aot_eager", verify="strict")
    elif rank == 1 and what == "schedule":
        gate.settings = PassConfig(codegen="aot_eager", verify="strict", redistribute="reassociate", schedule="off")
    elif rank == 1:
        gate.facts["source"] = "another version of this package"
    return right(gate.compiled(lambda x: alike(rank, x)), alike, rank), gate.told


# a rank's own piece


def own_piece(rank: int, world_size: int, own: bool) -> tuple[bool, list[Told]]:
    gate = Gate(REASSOCIATING, facts={"test": f"own piece {own}"})
    at = 4 * rank if own else 0

    def program(_: int, x: torch.Tensor) -> torch.Tensor:
        return ar(x)[at : at + 4] * 2 + ag(x * 2)[at : at + 4].sum()

    return right(gate.compiled(lambda x: program(rank, x)), program, rank), gate.told


@pytest.mark.parametrize("own", [True, False])
def test_own_pieces_agree_and_equal_ones_do_not(two: Ranks, own: bool) -> None:
    for correct, (told,) in two.run(own_piece, own):
        assert correct and told.agreed is own
        if not own:
            assert "own on some ranks only" in told.why and "of length 4" in told.why


# waiting


def late(rank: int, world_size: int, by: float) -> tuple[bool, list[Told]]:
    gate = Gate(REASSOCIATING, facts={"test": f"late by {by}"})
    compiled = gate.compiled(lambda x: alike(rank, x))
    if rank == 1:
        time.sleep(by)
    return right(compiled, alike, rank), gate.told


def too_late(rank: int, world_size: int, decided: Path) -> tuple[bool, list[Told]]:
    """Rank 1 asks when rank 0 has its answer, which ``decided`` tells by being there."""
    gate = Gate(REASSOCIATING, 0.5, {"test": "too late"})
    plan = gate.plan

    def tell(graph: torch.fx.Graph, is_inference: bool) -> Any:
        verdict = plan(graph, is_inference)
        decided.touch()
        return verdict

    gate.plan = tell  # type: ignore[method-assign]
    compiled = gate.compiled(lambda x: alike(rank, x))
    while rank == 1 and not decided.exists():
        time.sleep(0.05)
    return right(compiled, alike, rank), gate.told


def test_a_rank_that_is_too_late_finds_everybody_alone(two: Ranks, tmp_path: Path) -> None:
    (correct, (early,)), (also_correct, (tardy,)) = two.run(too_late, tmp_path / "decided")
    assert correct and also_correct
    assert not early.agreed and not tardy.agreed
    assert "1 of 2 ranks answered in time" in early.why or "have asked for this in time" in early.why
    assert early.collectives == tardy.collectives and len(early.collectives) == 4


def test_a_rank_that_is_a_little_late_is_waited_for(two: Ranks) -> None:
    for correct, (told,) in two.run(late, 2.0):
        assert correct and told.agreed


def slow_host(rank: int, world_size: int, compiled_for_s: float, late_s: float, decided: Path) -> bool:
    """Whether ranks agree that have compiled for so long when they ask.

    Rank 1 comes so late, or when rank 0 has waited in vain, which ``decided`` tells by being there.
    """
    torch._dynamo.reset()
    options = {"inductor_passes.codegen": "aot_eager", "inductor_passes.rank_agreement": "0.5s"}
    reach, began = agreeing.reach, decided.with_suffix(".begun")

    def tell(*args: Any, **kwargs: Any) -> Any:
        began.touch()
        found = reach(*args, **kwargs)
        decided.touch()
        return found

    with (
        mock.patch.object(_torch, "compiling_for_s", lambda: compiled_for_s),
        mock.patch.object(agreeing, "reach", tell),
        collect(what_if=False) as reports,
    ):
        compiled = torch.compile(lambda x: alike(rank, x), backend="inductor_passes", options=options)
        while rank == 1 and not began.exists():
            time.sleep(0.05)
        asked = time.monotonic()
        while rank == 1 and not decided.exists() and time.monotonic() < asked + late_s:
            time.sleep(0.05)
        assert right(compiled, alike, rank)
    (report,) = reports
    return bool(next(p for p in report.passes if p.name == "agreement").metrics["agreed"])


def test_large_graphs_are_waited_for_as_long_as_they_take_to_compile(tmp_path: Path) -> None:
    # Ranks of their own: nobody may have waited in vain before.
    for compiled_for_s, late_s, agreed in ((9.0, 600.0, False), (31.0, 3.0, True)):
        with Ranks(2) as pool:
            assert pool.run(slow_host, compiled_for_s, late_s, tmp_path / f"decided {agreed}") == [agreed] * 2


def test_how_long_a_compilation_has_taken() -> None:
    told: list[float] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        told.append(_torch.compiling_for_s())
        time.sleep(0.02)
        told.append(_torch.compiling_for_s())
        return gm

    torch._dynamo.reset()
    assert _torch.compiling_for_s() == 0.0
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert 0 < told[0] < told[1] and told[1] - told[0] >= 0.02
    assert _torch.compiling_for_s() == 0.0


class Seen(Exception):
    """A graph has been asked about; it is not going to run."""


def only_ask(gate: Gate, program: Callable[..., Any], x: torch.Tensor) -> Told:
    """Compile a program as far as to the verdict."""
    plan = gate.plan

    def stop(graph: torch.fx.Graph, is_inference: bool) -> None:
        plan(graph, is_inference)
        raise Seen

    gate.plan = stop  # type: ignore[assignment, method-assign]
    try:
        with pytest.raises(Exception, match="Seen"):
            gate.compiled(program)(x)
    finally:
        gate.plan = plan  # type: ignore[method-assign]
    return gate.told[-1]


def again(rank: int, world_size: int) -> list[Told]:
    """Rank 0 compiles the same function three times, rank 1 once."""
    gate = Gate(REASSOCIATING, facts={"test": "again"})
    for _ in range(3 if rank == 0 else 1):
        torch._dynamo.reset()
        only_ask(gate, lambda x: alike(rank, x), inputs(rank))
    return gate.told


def test_compiling_again_on_one_rank_gets_the_same_answer_at_once(two: Ranks) -> None:
    first, other = two.run(again)
    assert len(first) == 3 and len(other) == 1
    assert all(told.agreed for told in first + other)
    assert len({told.operations for told in first}) == 1, "nobody is asked again"


def dies(rank: int, world_size: int) -> None:
    """Rank 2 dies before the others ask; in a set of its own rank 1 agrees with rank 0 all the same."""
    pair = dist.new_group([0, 1])
    if rank == 2:
        os._exit(9)
    gate = Gate(REASSOCIATING, facts={"test": "dies"})
    compiled = gate.compiled(lambda x: ar(x, group=pair) + ar(x, group=pair))
    assert torch.equal(compiled(inputs(rank)), (inputs(0) + inputs(1)) * 2)
    assert gate.told[0].agreed and gate.told[0].participants == (0, 1)
    gate.timeout_s = 3.0
    told = only_ask(gate, lambda x: ag(x) + ag(x * 2), inputs(rank))
    assert not told.agreed and len(told.collectives) == 2
    assert "in time" in told.why


def test_a_rank_that_dies_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 120.0)
    with Ranks(3) as pool, pytest.raises(RankError) as raised:
        pool.run(dies)
    message = str(raised.value)
    assert "rank 0: finished" in message and "rank 1: finished" in message and "exit status 9" in message


# several groups


def stages(rank: int, world_size: int) -> tuple[bool, list[Told]]:
    """Ranks 0 and 1 have another graph than ranks 2 and 3, and a group of their own."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]

    def program(_: int, x: torch.Tensor) -> Any:
        if rank < 2:
            return ag(x, mine) + ag(x, mine)
        return ar(ar(x, "max", mine), "max", mine).sin()

    gate = Gate(REASSOCIATING, facts={"test": "stages"})
    return right(gate.compiled(lambda x: program(rank, x)), program, rank), gate.told


def test_stages_of_a_pipeline_agree_each_for_itself(four: Ranks) -> None:
    for rank, (correct, (told,)) in enumerate(four.run(stages)):
        assert correct and told.agreed and told.applied
        assert told.participants == ((0, 1) if rank < 2 else (2, 3))


def grid(rank: int, world_size: int, odd: bool) -> tuple[bool, list[Told]]:
    """Collectives along both dimensions of a mesh, and own pieces of both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    a, b = mesh["a"].get_group(), mesh["b"].get_group()
    row, column = rank // 2, rank % 2

    def program(_: int, x: torch.Tensor) -> Any:
        both = ar(x, group=a)[4 * row : 4 * row + 4] + ar(x, group=b)[4 * column : 4 * column + 4]
        gathered = ag(x, a) + ag(x, a)
        return both.sum() + gathered.sum() if not (odd and rank == 3) else both.sum() * gathered.sum()

    gate = Gate(REASSOCIATING, facts={"test": f"grid {odd}"})
    return right(gate.compiled(lambda x: program(rank, x)), program, rank), gate.told


@pytest.mark.parametrize("odd", [False, True])
def test_a_mesh_of_two_dimensions_agrees_as_a_whole(four: Ranks, odd: bool) -> None:
    for correct, (told,) in four.run(grid, odd):
        assert correct and told.participants == (0, 1, 2, 3)
        assert told.agreed is not odd
        if odd:
            assert "rank 3 has <" in told.why


def models(rank: int, world_size: int, name: str) -> list[Told]:
    """One step of a real model, forward and backward."""
    config = LlamaConfig(layers=1)
    gate = Gate(PassConfig(codegen="aot_eager", verify="strict"), facts={"test": f"model {name}"})
    if name == "fsdp x tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model: nn.Module = simple_fsdp(tensor_parallel(llama(config), mesh["tp"]), mesh["dp"])
        batch: Any = llama_batch(config)[0]
    elif name == "hybrid":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model, batch = simple_fsdp(llama(config), mesh, mode="hybrid_shard"), llama_batch(config)[0]
    else:
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        model, batch = simple_fsdp(Layers(), mesh, reshard_after_forward="auto"), torch.ones(8, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gate.compiled(model)(batch).sum().backward()
    return gate.told


@pytest.mark.parametrize("name", ["fsdp x tp", "hybrid", "uneven shards"])
def test_real_models_agree_forward_and_backward(four: Ranks, name: str) -> None:
    per_rank = four.run(models, name)
    assert len(per_rank[0]) == 2
    for graphs in zip(*per_rank):
        assert all(told.agreed for told in graphs), [told.why for told in graphs]


# sizes that differ


def other_sizes(rank: int, world_size: int) -> list[Told]:
    """All ranks first have one size, then rank 1 has another one."""
    gate = Gate(REASSOCIATING, facts={"test": "sizes"})

    def program(x: torch.Tensor) -> torch.Tensor:
        return ar(x.sum(0)) + ar(x.sum(0))

    gate.compiled(program)(torch.ones(8, 4))
    if rank == 1:
        gate.timeout_s = 0.5
        only_ask(gate, program, torch.ones(6, 4))
    return gate.told


def test_a_function_of_which_ranks_agree_on_some_graphs_only_is_named(two: Ranks) -> None:
    (one,), (first, second) = two.run(other_sizes)
    assert one.agreed and first.agreed and not first.mixed
    assert not second.agreed and second.mixed
