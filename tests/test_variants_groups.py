"""Groups of one rank whose other ranks run other variants: tensor parallelism inside of data parallelism.

All ranks of a tensor parallel group have batches of one size. Those of another group may have another size at the same
time, and both share the gathers and reductions of data parallelism.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from inductor_passes import adopt
from inductor_passes.engine import variants
from inductor_passes.engine.following import Earlier, Part, Variant, kinds_of
from inductor_passes.engine.variants import About
from inductor_passes.ir.view import GraphView
from inductor_passes.rewriting.messages import counterparts, group_of, messages, within, without_sizes
from inductor_passes.simple_fsdp import simple_fsdp
from inductor_passes.trace.collector import collect
from tests.support import wrapped
from tests.support.device import DEVICE, on_device
from tests.support.models import capture_graphs
from tests.support.ranks import Ranks
from tests.support.world import fake_world
from tests.support.wrapped import Net, tensor_parallel, whole

#: Rows of the batches of both tensor parallel groups, step by step: all sizes are first met together.
TOGETHER = [(5, 5), (9, 9), (5, 9), (9, 5), (5, 5)]
#: One group alone meets a size that the other one meets later, or never.
ALONE = [(5, 5), (9, 5), (5, 9), (9, 7), (7, 9), (8, 5)]
#: The sizes differ from the first step on.
EARLY = [(5, 9), (9, 5), (5, 5), (9, 9), (5, 9)]
#: The same, further apart than one of several plans for symbolic sizes reaches.
FAR = [(4, 64), (64, 4), (4, 4), (64, 64), (4, 64)]


def own_gathers(model: Any) -> Any:
    mesh = init_device_mesh(DEVICE, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return simple_fsdp(model, mesh["dp"])


def adopted(model: Any) -> Any:
    return adopt(tensor_parallel(model))


def steps(model: Any, called: Any, row: int, rows: list[tuple[int, int]], dynamic: bool = False) -> list[float]:
    def batches() -> Iterator[torch.Tensor]:
        for step, sizes in enumerate(rows):
            drawn = torch.Generator().manual_seed(100 * step + row)
            batch = on_device(torch.randn(sizes[row], wrapped.WIDTH, generator=drawn))
            if dynamic:
                torch._dynamo.mark_dynamic(batch, 0)
            yield batch

    return wrapped.losses_on(model, called, batches())


def own_sizes(
    rank: int, world_size: int, wrap: Any, rows: list[tuple[int, int]], settings: dict[str, str]
) -> tuple[float, list[str], int, list[str]]:
    """How far losses and parameters are off, what data parallelism sends by graph, merges, and who planned.

    Args:
        settings: other ones for each case, or what ranks found of its graphs in other cases would count.
    """
    torch.manual_seed(0)
    torch._dynamo.reset()
    plain = Net()
    reference, ours = (wrap(on_device(copy.deepcopy(plain))) for _ in range(2))
    settings = {"codegen": "aot_eager", "rank_agreement": "20s", "verify": "strict", **settings}
    options = {f"inductor_passes.{key}": value for key, value in settings.items()}
    expected = steps(reference, reference, rank // 2, rows)
    with collect(what_if=False) as reports:
        dynamic = "dynamic_plans" in settings
        how = {} if dynamic else {"dynamic": False}
        called = torch.compile(ours, backend="inductor_passes", options=options, **how)  # type: ignore[call-overload]
        found = steps(ours, called, rank // 2, rows, dynamic)
    off = [abs(a - b) for a, b in zip(expected, found)]
    states = reference.state_dict(), ours.state_dict()
    off += [(whole(states[0][k]) - whole(states[1][k])).abs().max().item() for k in states[0]]
    peers = {rank, (rank + 2) % world_size}

    def sends(report: Any) -> str:
        own = [c for c in report.collectives if {*c.ranks} == peers]
        return f"{report.phase}: " + "; ".join(f"{c.kind} {c.size_bytes}" for c in own)

    merged = sum(bool(c.members) for r in reports for c in r.collectives)
    led = [note for r in reports for note in r.notes if note.startswith("planned as rank")]
    return max(off), [sends(r) for r in reports], merged, led


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("wrap", "rows", "settings"),
    [
        (own_gathers, TOGETHER, {"memory_budget": "unlimited"}),
        (own_gathers, ALONE, {"memory_budget": "1GiB"}),
        (adopted, TOGETHER, {"memory_budget": "unlimited", "numerics": "reassociate"}),
        (adopted, ALONE, {"memory_budget": "unlimited"}),
    ],
    ids=["together", "alone", "adopted-together-reassociate", "adopted-alone"],
)
def test_tensor_parallel_groups_may_have_batches_of_their_own_size(
    four_ranks: Ranks, wrap: Any, rows: list[tuple[int, int]], settings: dict[str, str]
) -> None:
    same_for_all(four_ranks.run(own_sizes, wrap, rows, settings, timeout=300), led=False)


@pytest.mark.ranks
@pytest.mark.parametrize(("rows", "settings"), [(EARLY, {}), (FAR, {"dynamic_plans": "3"})], ids=["static", "ranges"])
def test_groups_whose_batches_differ_from_the_first_step_on_are_planned_together(
    rows: list[tuple[int, int]], settings: dict[str, str]
) -> None:
    # In other ranks, what earlier cases found of the same function would count.
    with Ranks(4) as ranks:
        found = ranks.run(own_sizes, own_gathers, rows, {"memory_budget": "unlimited", **settings}, timeout=300)
    same_for_all(found, led=True)


def same_for_all(found: list[tuple[float, list[str], int, list[str]]], *, led: bool) -> None:
    for off, sends, merged, notes in found:
        assert off <= 1e-5, off
        # Several variants were compiled, and data parallelism sends the same in all of them.
        assert merged > 0 and len(sends) > len(set(sends)) == 2, set(sends)
        assert bool(notes) == led
    assert len({frozenset(sends) for _, sends, _, _ in found}) == 1


GATHER = "dp | all_gather float32 | 8 | of ('one',)"
REDUCE = "dp | reduce_scatter float32 | 8 | of ('one',)"


def activations(group: str, size: int, name: str = "all_reduce") -> str:
    return f"{group} | all_reduce sum float32 | {size} | 1 starts: ('{name}',)"


def test_each_group_follows_what_came_in_it() -> None:
    variants._forget()
    about = About("3/0", "forward", "settings")
    small, large = ((GATHER, activations("tp", size)) for size in (8, 4096))
    first = Variant(small, small, (), phase="forward")
    assert variants.earlier(about, kinds_of(small, ()), together=True) is None
    variants.remember(about, first)
    second = About("3/1", "forward", "settings")
    found = variants.earlier(second, kinds_of(large, ()), together=True)
    assert found is not None and [(p.variant, p.groups) for p in found.parts] == [(first, {"dp"})]
    assert found.is_sent(large) and found.is_sent(large[::-1]) and not found.is_sent(large[1:])
    variants.remember(second, Variant(large, large[::-1], (), phase="forward"))
    # Each group from another graph: the one that most messages come from first.
    mixed = (GATHER, REDUCE, activations("tp", 4096))
    variants.remember(About("4/0", "forward", "settings"), Variant(mixed[:2], mixed[1::-1], ()))
    found = variants.earlier(About("5/0", "forward", "settings"), kinds_of(mixed, ()), together=False)
    assert found is not None and [part.groups for part in found.parts] == [{"dp"}, {"tp"}]
    assert found.is_sent((*mixed[1::-1], mixed[2])) and not found.is_sent(mixed)
    only = found.within({"tp"})
    assert only is not None and only.is_sent(mixed) and only.within({"dp"}) is None
    variants._forget()


def test_code_out_of_a_cache_is_right_group_by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    variants._forget()
    settings = About("", "forward", "settings")
    small, large = ((GATHER, REDUCE, activations("tp", size)) for size in (8, 4096))

    def fits(number: int, variant: Variant, *, alone: tuple[str, ...] = (), agreed: bool = True) -> bool:
        monkeypatch.setattr(variants._torch, "compile_id", lambda: f"6/{number}")
        refuse, keep = variants.statements(settings, variant, alone=alone, agreed=agreed)
        module: dict[str, Any] = {}
        try:
            exec(refuse, module)
            exec(keep, module)
        except variants.agreement.StaleVerdictError:
            return False
        return True

    like, unlike = (Variant(large, sent, (), phase="forward") for sent in (large, (large[1], large[0], large[2])))
    assert not fits(1, like, alone=("dp",), agreed=False), "nothing is known of what it has to send"
    assert fits(0, Variant(small, small, (), phase="forward"))
    assert fits(1, like, alone=("dp",), agreed=False)
    assert not fits(1, unlike) and not fits(1, unlike, agreed=False)
    # What it sends in the group of its own is remembered since.
    other = (*large[:2], large[2].replace("float32", "bfloat16"))
    assert not fits(2, Variant(large, other, (), phase="forward"))
    variants._forget()


def test_sizes_of_what_carries_parameters_count() -> None:
    assert without_sizes(GATHER) == GATHER != GATHER.replace("8", "16")
    assert without_sizes(activations("tp", 8)) == without_sizes(activations("tp", 4096, "all_reduce_7"))
    assert without_sizes(activations("tp", 8)) != without_sizes(activations("dp", 8))
    assert group_of(GATHER) == "dp" and within((GATHER, activations("tp", 8)), {"dp"}) == (GATHER,)


def test_messages_of_another_size_stand_for_each_other_in_their_order() -> None:
    ours = [activations("tp", 8, "a"), GATHER, activations("tp", 16, "b")]
    assert counterparts(ours, [ours[2], ours[0], GATHER]) == [2, 0, 1]
    others = [GATHER, activations("tp", 32, "c"), activations("tp", 64, "d")]
    assert counterparts(ours, others) == [1, 0, 2]
    assert counterparts(ours, others[:2]) is None and counterparts(ours, [GATHER] * 3) is None


def test_what_another_graph_sends_in_further_groups_is_no_matter() -> None:
    """Its messages that this graph does not have cannot be sent; those of the shared groups can."""
    with fake_world(2):
        graph = capture_graphs(adopt(wrapped.sharded(Net())), [torch.randn(5, wrapped.WIDTH)]).forward[0].graph
    view = GraphView(graph)
    came = messages(view)
    (group,) = {*map(group_of, came)}
    bucket = ((0, 1),)
    (way,) = Earlier.of(Variant(came, came, bucket)).ways(view, 0)
    assert way.like == (came,) and len(way.pins.graph.buckets or ()) == 1
    more = (*came, activations("another group", 8))
    found = Earlier((Part(Variant(more, more, bucket), frozenset((group,))),)).ways(view, 0)
    assert [one.like for one in found] == [(came,), (came,)] and [one.rewrite for one in found] == [True, False]
    assert all(one.pins.graph.buckets == way.pins.graph.buckets for one in found)
