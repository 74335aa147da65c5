"""The description of a graph: equal where ranks may differ, different where decisions could."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.fx
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes.agreement import lines
from inductor_passes.agreement.difference import first_difference
from inductor_passes.agreement.grid import Grid, participants, segments
from inductor_passes.agreement.lines import Description, describe
from inductor_passes.agreement.roles import IncomparableError
from inductor_passes.ir.view import GraphView
from inductor_passes.simple_fsdp import simple_fsdp
from tests.support.async_tp_programs import Program, ag, ar, rs, trace
from tests.support.models import LlamaConfig, capture_graphs, fake_world, llama, llama_batch, tensor_parallel
from tests.support.verify_graphs import aten, c10d, random_program
from tests.support.world import grouped_world as world_with_groups

WORLD = 2


def described(fn: Callable[..., Any], *shapes: tuple[int, ...], rank: int = 0, **facts: str) -> Description:
    """A program as ``rank`` of two describes it."""
    with fake_world(WORLD, rank):
        gm = trace(Program("program", fn, shapes))
        return describe(GraphView(gm.graph), facts, rank, WORLD)


def fit(descriptions: list[Description]) -> bool:
    """Whether ranks would agree: equal digests, and open numbers that fit to those of the corners."""
    if len({d.digest for d in descriptions}) != 1:
        return False
    corners = [descriptions[rank].literals.values for rank in descriptions[0].grid.corners]
    return all(d.literals.misfit(corners) is None for d in descriptions)


def both(fn: Callable[[int], Callable[..., Any]], *shapes: tuple[int, ...]) -> bool:
    """Whether two ranks agree about ``fn(rank)``."""
    return fit([described(fn(rank), *shapes, rank=rank) for rank in range(WORLD)])


# what other ranks may have otherwise


def test_names_of_nodes_and_groups_do_not_count() -> None:
    digests = set()
    for spare in (0, 3):
        with world_with_groups() as groups:
            for _ in range(spare):
                dist.new_group([0, 1, 2])
            names = dict(groups)
            if spare:
                names["column"] = dist.new_group(list(range(0, 8, 2))).group_name
                names["column"] = groups["column"]
            program = random_program(random.Random(7), names)
            if spare:
                for number, node in enumerate(program.graph.nodes):
                    if node.op == "call_function":
                        node.name = f"renamed_{number}"
            digests.add(describe(GraphView(program.graph), {}, 0, 8).digest)
    # The second world has one more group of the column's ranks, which is told apart by its place among them.
    assert len(digests) == 2


def test_equal_graphs_have_equal_digests_whatever_their_nodes_are_called() -> None:
    with world_with_groups() as groups:
        plain = random_program(random.Random(3), groups)
        other = random_program(random.Random(3), groups)
        for number, node in enumerate(other.graph.nodes):
            node.name = f"n{number}"
        one, two = (describe(GraphView(p.graph), {"k": "v"}, 0, 8) for p in (plain, other))
    assert one.digest == two.digest and one.literals == two.literals


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "fsdp": lambda: (simple_fsdp(llama(LlamaConfig(layers=1)), mesh("dp")), llama_batch(LlamaConfig())),
    "replicate": lambda: (
        simple_fsdp(llama(LlamaConfig(layers=1)), mesh("dp"), mode="replicate"),
        llama_batch(LlamaConfig()),
    ),
    "tp": lambda: (tensor_parallel(llama(LlamaConfig(layers=1)), mesh("tp")), llama_batch(LlamaConfig())),
    "sp": lambda: (
        tensor_parallel(llama(LlamaConfig(layers=1)), mesh("tp"), sequence_parallel=True),
        llama_batch(LlamaConfig()),
    ),
}


def mesh(name: str) -> Any:
    return init_device_mesh("cpu", (WORLD,), mesh_dim_names=(name,))


@pytest.mark.parametrize("name", MODELS)
def test_ranks_of_real_models_agree(name: str) -> None:
    """Rotary embeddings are cut in two halves on both ranks; the embedding's rows are each rank's own."""
    per_rank = []
    for rank in range(WORLD):
        torch._dynamo.reset()
        with fake_world(WORLD, rank):
            model, batch = MODELS[name]()
            graphs = capture_graphs(model, batch[:1])
            views = [GraphView(gm.graph) for gm in (*graphs.forward, *graphs.backward)]
            views = [view for view in views if view.collectives]
            per_rank.append([describe(view, {}, rank, WORLD) for view in views])
    assert len(per_rank[0]) > 0
    for pair in zip(*per_rank):
        assert pair[0].digest == pair[1].digest
        assert fit(list(pair))
    if name == "tp":
        assert per_rank[0][0].literals.values != per_rank[1][0].literals.values


# this rank's own piece


def test_a_ranks_own_slice_agrees() -> None:
    def own(rank: int) -> Callable[..., Any]:
        return lambda x, w: ag(x[rank * 4 : rank * 4 + 4]) @ w

    assert both(own, (8, 4), (4, 4))


def test_an_own_slice_behind_a_reduction_agrees_and_an_equal_one_does_not() -> None:
    """On rank 0 the first half is its own piece: a rewrite may take it for that there, and not on rank 1."""
    assert both(lambda rank: lambda x: ar(x)[rank * 4 : rank * 4 + 4] * 2, (8, 4))
    assert not both(lambda rank: lambda x: ar(x)[:4] * 2, (8, 4))
    assert not both(lambda rank: lambda x: ar(x)[4:] * 2, (8, 4))
    assert not both(lambda rank: lambda x: ag(x[:4]), (8, 4))


@pytest.mark.parametrize("cut", ["split", "select"])
def test_other_ways_to_take_a_piece(cut: str) -> None:
    def piece(x: torch.Tensor, index: int) -> torch.Tensor:
        return x.split(4)[index] if cut == "split" else x.view(2, 4, 4)[index]

    assert both(lambda rank: lambda x: piece(ar(x), rank) * 2, (8, 4))
    assert both(lambda rank: lambda x: ar(piece(x.relu(), 0).relu() + piece(x.relu(), 1)), (8, 4))
    assert not both(lambda rank: lambda x: piece(x.relu(), 1 - rank).relu() + ar(x[:4]), (8, 4))


def test_both_halves_on_every_rank_agree() -> None:
    """Also next to a collective: who reads all pieces takes none for its own."""

    def halves(x: torch.Tensor) -> torch.Tensor:
        a, b = ag(x).chunk(2)
        return a.relu() * b

    assert both(lambda rank: halves, (8, 4))
    assert both(lambda rank: lambda x: ar(torch.cat([-x[:, 2:], x[:, :2]], 1)), (8, 4))


def test_pieces_of_two_equal_splits_are_pieces_of_one() -> None:
    """Found in an evaluation: DTensor splits once for every piece that it packs, and nothing merges the two splits."""

    def packed(x: torch.Tensor) -> torch.Tensor:
        return rs(torch.cat([aten.split.Tensor(x, 2, 1)[0], aten.split.Tensor(x, 2, 1)[1]]))

    assert both(lambda rank: packed, (4, 4))
    # Of splits along another dimension each is read in one piece.
    assert not both(lambda rank: lambda x: ar(torch.cat([x.split(2)[0].t(), x.split(2, 1)[1]])), (4, 4))
    # Pieces of other sizes are no twins: the last one is left over.
    assert not both(lambda rank: lambda x: ar(torch.cat([x.split(2)[0], x.split([2, 1, 1])[1]])), (4, 4))
    # One is the rank's own piece and the other one is not.
    assert not both(lambda rank: lambda x: ar(torch.cat([x.split(2)[0], x.split(2)[rank]])), (4, 4))
    assert both(lambda rank: lambda x: ar(torch.cat([x.split(2)[rank], x.split(2)[rank]])), (4, 4))


@pytest.mark.parametrize("split", [False, True], ids=["cut", "split"])
def test_the_row_that_padding_leaves_is_no_own_piece(split: bool) -> None:
    """A parameter with one row is gathered with padding. A cut takes that off; a split could be a redistribution."""

    def first(x: torch.Tensor) -> torch.Tensor:
        whole = ag(x)
        return (whole.split(1)[0] if split else whole[:1]).relu()

    assert both(lambda rank: first, (1, 4)) is not split
    # Of longer shards it is half of the result, which no padding is.
    assert not both(lambda rank: lambda x: ag(x)[:2].relu(), (2, 4))


def exchanged(sent: list[int], received: list[int]) -> Callable[..., Any]:
    return lambda x: funcol.all_to_all_single(x.relu(), received, sent, dist.group.WORLD)


def test_to_whom_a_rank_hands_all_its_rows_does_not_count() -> None:
    """As in a ring. How many these are counts, and other unequal splits leave it open what ranks hold."""
    assert both(lambda rank: exchanged([0, 8], [0, 8]) if rank == 0 else exchanged([8, 0], [8, 0]), (8, 4))
    digests = {described(exchanged([0, n], [0, n]), (n, 4)).digest for n in (8, 10)}
    assert len(digests) == 2
    assert described(exchanged([4, 4], [4, 4]), (8, 4)).digest not in digests
    for sent, received in (([0, 8], [0, 6]), ([2, 6], [8, 0]), ([0, 8], [2, 6])):
        with pytest.raises(IncomparableError, match="pieces of unequal size"):
            described(exchanged(sent, received), (sum(sent), 4))
    # A ring of nothing has no other side, and is none of something.
    nothing = described(exchanged([0, 0], [0, 0]), (0, 4))
    assert both(lambda rank: exchanged([0, 0], [0, 0]), (0, 4)) and nothing.digest not in digests


def test_rows_that_are_handed_on_may_vary() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def ring(rank: int, scale: int = 1) -> Description:
        with fake_world(WORLD, rank):

            def run(x: torch.Tensor) -> torch.Tensor:
                x = torch.cat([x.relu()] * scale)
                return funcol.permute_tensor(x.reshape(-1), [1, 0], dist.group.WORLD)

            gm = make_fx(run, tracing_mode="symbolic")(torch.ones(6, 4))
            gm.graph.output_node().args = ((gm.graph.output_node().args[0],),)
            return describe(GraphView(gm.graph), {}, rank, WORLD)

    assert fit([ring(0), ring(1)])
    assert ring(0).digest != ring(0, 2).digest


def test_halves_in_another_order_do_not_agree() -> None:
    def halves(rank: int) -> Callable[..., Any]:
        first, second = (slice(0, 4), slice(4, 8)) if rank == 0 else (slice(4, 8), slice(0, 4))
        return lambda x: ar(x[first].relu() - x[second])

    assert not both(halves, (8, 4))


def test_offsets_by_own_position_agree_and_others_do_not() -> None:
    def masked(low: int, high: int) -> Callable[..., Any]:
        def run(x: torch.Tensor) -> torch.Tensor:
            index = x.to(torch.int64)
            inside = (index >= low) & (index < high)
            return ar(torch.where(inside, index - low, 0).to(torch.float32))

        return run

    assert both(lambda rank: masked(rank * 16, rank * 16 + 16), (8, 4))
    assert both(lambda rank: masked(3, 5), (8, 4))
    assert not both(lambda rank: masked(3 + rank * 4, 8 + rank), (8, 4))


def test_numbers_of_floating_point_count() -> None:
    assert not both(lambda rank: lambda x: ar(x * (rank + 2)), (8, 4))
    assert not both(lambda rank: lambda x: ar(x + 0.5 * rank), (8, 4))


# what must not be overlooked


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "a result that one rank alone returns": (
        lambda x: (x.sum(), ag(x).relu()),
        lambda x: (x.sum(), ag(x).sum() * 0),
    ),
    "a result that one rank alone reads": (lambda x: x.sum() + ag(x).sum(), lambda x: (x.sum() + 0 * ag(x).sum())),
    "a cast behind a gather": (lambda x: ag(x).to(torch.bfloat16) * 2, lambda x: ag(x) * 2),
    "a cast before a gather": (lambda x: ag(x.to(torch.bfloat16)) * 2, lambda x: ag(x).to(torch.bfloat16) * 2),
    "the same gather twice": (lambda x: ag(x) + ag(x), lambda x: ag(x) + ag(x + 0)),
    "two gathers in another order": (
        lambda x: (lambda a, b: a @ b.t())(ag(x.relu()), ag(x.sin())),
        lambda x: (lambda b, a: a @ b.t())(ag(x.sin()), ag(x.relu())),
    ),
    "two inputs in another order": (lambda x: (ag(x[:4]), ag(x[4:]) * 2), lambda x: (ag(x[4:]) * 2, ag(x[:4]))),
    "another reduce op": (lambda x: ar(x), lambda x: ar(x, "max")),
    "a reduction of a reduction": (lambda x: ar(ar(x, "max"), "max"), lambda x: ar(ar(x, "max") * 1, "max")),
    "another kind of reduction": (lambda x: ag(rs(x)), lambda x: ar(x)),
    "outputs in another order": (lambda x: (ag(x), ar(x)), lambda x: (lambda a, b: (b, a))(ag(x), ar(x))),
    "another constant": (
        lambda x: ar(x + torch.tensor([1.0, 2, 3, 4])),
        lambda x: ar(x + torch.tensor([1.0, 2, 4, 3])),
    ),
    "another dtype of a constant": (lambda x: ar(x).to(torch.float16), lambda x: ar(x).to(torch.bfloat16)),
    "another layout": (lambda x: ar(x.t().contiguous()).t(), lambda x: ar(x)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_differ(name: str) -> None:
    one, two = PROGRAMS[name]
    assert described(one, (8, 4)).digest == described(one, (8, 4), rank=1).digest
    assert described(one, (8, 4)).digest != described(two, (8, 4), rank=1).digest


def test_sizes_settings_and_participants_count() -> None:
    base = described(lambda x: ag(x), (8, 4), setting="on")
    assert base.digest == described(lambda x: ag(x), (8, 4), setting="on", rank=1).digest
    assert base.digest != described(lambda x: ag(x), (4, 8), setting="on").digest
    assert base.digest != described(lambda x: ag(x), (8, 4), setting="off").digest
    assert base.digest != described(lambda x: ag(x), (8, 4)).digest


def test_what_is_said_about_a_group_counts() -> None:
    with fake_world(WORLD):
        view = GraphView(trace(Program("p", lambda x: ag(x), ((8, 4),))).graph)
        near, far = (describe(view, {}, 0, WORLD, lambda group, how=how: how) for how in ("nvlink", "network"))  # type: ignore[misc]
    assert near.digest != far.digest
    assert "nvlink" in "\n".join(near.lines)


def test_graphs_inside_of_operators_count() -> None:
    def program(scale: float) -> Callable[..., Any]:
        def run(x: torch.Tensor) -> torch.Tensor:
            y = torch.cond(x.sum() > 0, lambda t: t.relu() * scale, lambda t: t.sin(), (x,))
            return ar(y)

        return run

    assert described(program(2.0), (8, 4)).digest == described(program(2.0), (8, 4), rank=1).digest
    assert described(program(2.0), (8, 4)).digest != described(program(3.0), (8, 4)).digest


def test_symbolic_sizes_count_by_expression_and_hint() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def symbolic(rows: int, function: Callable[..., Any]) -> Description:
        with fake_world(WORLD):
            gm = make_fx(function, tracing_mode="symbolic")(torch.ones(rows, 4))
            gm.graph.output_node().args = ((gm.graph.output_node().args[0],),)
            return describe(GraphView(gm.graph), {}, 0, WORLD)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return ar(x.view(-1, 2))

    assert symbolic(8, plain).digest == symbolic(8, plain).digest
    assert symbolic(8, plain).digest != symbolic(16, plain).digest
    assert symbolic(8, plain).digest != symbolic(8, lambda x: ar(x.view(x.shape[0], 4))).digest
    assert "$0*" in "\n".join(symbolic(8, plain).lines) or "2*$0" in "\n".join(symbolic(8, plain).lines)


# what cannot be compared


def test_a_group_that_is_not_there() -> None:
    with fake_world(WORLD):
        view = GraphView(trace(Program("p", lambda x: ag(x), ((8, 4),))).graph)
    with pytest.raises(IncomparableError, match="process group '0' does not exist in this process"):
        describe(view, {}, 0, WORLD)


def test_an_object_that_nobody_knows() -> None:
    with fake_world(WORLD):
        gm = trace(Program("p", lambda x: ag(x), ((8, 4),)))
        start = next(n for n in gm.graph.nodes if n.target is c10d.wait_tensor.default)
        with gm.graph.inserting_after(start):
            gm.graph.call_function(aten.mul.Tensor, (start, object()))
        with pytest.raises(IncomparableError, match="an argument of type object cannot be compared"):
            describe(GraphView(gm.graph), {}, 0, WORLD)


# participants


@pytest.mark.parametrize(
    ("sets", "rank", "world", "expected"),
    [
        ([], 3, 8, (3,)),
        ([[0, 1]], 0, 8, (0, 1)),
        ([[0, 1], [0, 2]], 0, 4, (0, 1, 2, 3)),
        ([[2, 3], [1, 3]], 3, 4, (0, 1, 2, 3)),
        ([[0, 1, 2, 3], [0, 2, 4, 6]], 0, 8, tuple(range(8))),
        ([[4, 5], [0, 4]], 4, 16, (0, 1, 4, 5)),
        ([[0, 1, 4, 5], [0, 2]], 0, 8, tuple(range(8))),
        ([[0, 1, 2, 3], [0, 2]], 0, 4, (0, 1, 2, 3)),
        ([[1, 4, 6]], 4, 8, (1, 4, 6)),
        ([[0, 3], [0, 1, 2, 3]], 3, 4, (0, 1, 2, 3)),
        ([list(range(12)), [0, 5]], 0, 12, tuple(range(12))),
    ],
)
def test_participants(sets: list[list[int]], rank: int, world: int, expected: tuple[int, ...]) -> None:
    found = participants(sets, rank, world)
    assert isinstance(found, Grid) and found.ranks == expected


def meshes() -> Iterator[tuple[int, ...]]:
    yield from [(2, 2), (2, 3), (4, 2, 2), (2, 1, 3), (3, 2, 2, 2)]


@pytest.mark.parametrize("shape", meshes())
def test_all_members_of_a_grid_find_the_same_one(shape: tuple[int, ...]) -> None:
    """For any choice of a mesh's dimensions, also flattened: every member computes the same set, which is closed."""
    rng = random.Random(str(shape))
    everybody = torch.arange(int(torch.tensor(shape).prod())).reshape(shape)
    for _ in range(60):
        count = rng.randrange(1, 4)
        chosen = [sorted(rng.sample(range(len(shape)), rng.randrange(1, len(shape) + 1))) for _ in range(count)]
        groups: dict[int, list[list[int]]] = {}
        for rank in everybody.flatten().tolist():
            place = [int(c) for c in (everybody == rank).nonzero()[0]]
            for dims in chosen:
                index = tuple(slice(None) if d in dims else place[d] for d in range(len(shape)))
                groups.setdefault(rank, []).append(everybody[index].flatten().tolist())
        found = {rank: participants(sets, rank, everybody.numel()) for rank, sets in groups.items()}
        for rank, grid in found.items():
            assert isinstance(grid, Grid) and rank in grid.ranks, (chosen, grid)
            for member in grid.ranks:
                assert found[member] == grid
                assert all(set(group) <= set(grid.ranks) for group in groups[member])
            assert len(set(map(grid.coordinates, grid.ranks))) == grid.size
            for number, group in enumerate(groups[rank]):
                # Where another rank is in its own group follows from where its line meets this one.
                assert all(grid.alike(group, other) == groups[other][number].index(other) for other in grid.ranks)


@pytest.mark.parametrize(
    ("sets", "rank", "message"),
    [
        ([[0, 1], [1, 2]], 1, "are no lines of one grid"),
        ([[0, 1]], 5, "which rank 5 is not in"),
        ([[0, 1, 3], [0, 4]], 0, "are no lines of one grid"),
    ],
)
def test_groups_that_name_no_participants(sets: list[list[int]], rank: int, message: str) -> None:
    found = participants(sets, rank, 16)
    assert isinstance(found, str) and message in found


@pytest.mark.parametrize(
    ("offsets", "axes"),
    [
        ([0], ()),
        ([0, 1, 2, 3], ((1, 4),)),
        ([0, 4, 8], ((4, 3),)),
        ([0, 1, 4, 5], ((1, 2), (4, 2))),
        ([0, 1, 3], None),
        ([0, 1, 2, 4, 5, 6], ((1, 3), (4, 2))),
    ],
)
def test_segments(offsets: list[int], axes: Any) -> None:
    assert segments(offsets) == axes


def test_the_users_source_is_shown_and_does_not_count() -> None:
    with world_with_groups() as groups:
        program = random_program(random.Random(1), groups)
        plain = describe(GraphView(program.graph), {}, 0, 8)
        for node in program.graph.nodes:
            node.meta["stack_trace"] = '  File "/somewhere/model.py", line 3, in forward'
        told = describe(GraphView(program.graph), {}, 0, 8)
    assert plain.digest == told.digest
    assert lines.SOURCE + "/somewhere/model.py:3" in told.lines[-1]


def test_a_difference_in_long_lines_is_shown() -> None:
    """Found: of two lines that begin with the same 300 characters nobody saw what differed."""
    same = ", ".join(f"member {k}" for k in range(200))
    said = first_difference(0, [f"fact groups: {same} one"], 1, [f"fact groups: {same} another"])
    assert "<fact groups: " in said and " one>" in said and " another>" in said
    assert len(said) < 1000


def test_all_facts_that_differ_are_named() -> None:
    ones = ["fact setting bucket: on", "fact setting numerics: exact", "fact torch: 2.13.0", "the graph | model.py:7"]
    others = ["fact setting bucket: off", "fact setting numerics: reassociate", "fact torch: 2.13.0", "another graph"]
    said = first_difference(0, ones, 1, others)
    assert said.startswith("at line 0 rank 0 has <fact setting bucket: on> and rank 1 has <fact setting bucket: off>")
    assert said.endswith("and these differ too: setting numerics")
    assert first_difference(0, ones[2:], 1, others[2:]).endswith("rank 1 has <another graph>")
