"""Collectives over hosts and devices that are narrow between hosts and wide inside them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes import ConfigError, PassConfig, verify
from inductor_passes.compress import emit
from inductor_passes.compress.form import form_of
from inductor_passes.compress.levels import Levels, levels_of
from inductor_passes.compress.pass_ import CompressPass
from inductor_passes.compress.prices import as_it_is, in_two_levels
from inductor_passes.compress.two_levels import Way
from inductor_passes.cost.communication import KINDS, GroupLayout
from inductor_passes.cost.profile import CollectiveCost, CostProfile, GroupCost
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.ir.view import Collective, GraphView
from inductor_passes.report import Reason, Verdict
from tests.support.bucket_graphs import Program, check_fakes, inputs_by_rank, output_layouts, run_all_ranks
from tests.support.graphs import aten
from tests.support.world import fake_world
from tests.test_compress import config, run
from tests.test_compress_feedback import SENT

cast = torch.ops.prims.convert_element_type.default
MOVED = ("all_gather", "reduce_scatter", "all_reduce")
NAMES = ("bf16", "int8", "e4m3", "e5m2")
BETWEEN = {"*": "int8/between"}


@contextlib.contextmanager
def hosts(count: int, each: int, rank: int = 0) -> Iterator[str]:
    """A world whose ranks lie on hosts; yields the group of all ranks. A mesh has made those of the levels."""
    with fake_world(count * each, rank) as everybody:
        init_device_mesh("cpu", (count, each), mesh_dim_names=("hosts", "devices"))
        yield everybody


def links(count: int, each: int, between_ns: float = 1.0, inside_ns: float = 0.01) -> CostProfile:
    """Measured links with these times per byte."""

    def group(ranks: int, spans: int, per_byte: float, link: str) -> GroupCost:
        costs = tuple(CollectiveCost(kind, 1_000.0, per_byte, 100.0, 0.0) for kind in KINDS)
        return GroupCost(GroupLayout(ranks, spans, ranks // spans), "test", link, costs)

    whole = group(count * each, count, between_ns, "net")
    levels = [group(count, count, between_ns, "net")] if each > 1 else []
    levels += [group(each, 1, inside_ns, "bus")] if count > 1 else []
    return replace(CostProfile.default("cpu", each), measured=True, groups=(whole, *levels))


def program(kind: str, shape: tuple[int, ...], group: str, dtype: torch.dtype = torch.float32) -> torch.fx.GraphModule:
    p = Program()
    x = p.input(*shape, dtype=dtype)
    return p.done(p.call(aten.neg.default, p.collective(kind, x, group, "avg" if len(shape) % 2 else "sum")))


def collectives(gm: torch.fx.GraphModule) -> list[tuple[str, int, str]]:
    """Kind, ranks and type of each."""
    found = GraphView(gm.graph).collectives
    return [(c.kind.value, c.group.size, str(c.dtypes[0]).removeprefix("torch.")) for c in found]


# -- numbers -----------------------------------------------------------------------------------------------------


def error_of(name: str, block: int, kind: str, values: list[torch.Tensor], each: int) -> float:
    """Largest error of a sum over ranks: of each host's sum, and once more of the whole where it is sent on."""
    error = float(form_of(name, block).error)
    peaks = [float(x.abs().max()) for x in values]
    if kind == "all_gather":
        return error * max(peaks)
    once = error * sum(peaks)
    return once + error * (sum(peaks) + once) if kind == "all_reduce" else once


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", MOVED)
@pytest.mark.parametrize(
    ("shape", "dtype", "count", "each"),
    [((16, 24), torch.float32, 2, 2), ((24, 37), torch.float32, 2, 3), ((8, 2, 60), torch.bfloat16, 4, 2)],
)
def test_on_all_ranks(kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype, count: int, each: int) -> None:
    """Proven; every rank gets what it got, at its place, within the bound."""
    if name == "bf16" and dtype is torch.bfloat16:
        return
    with hosts(count, each) as group:
        gm = program(kind, shape, group, dtype)
        values = inputs_by_rank(gm, count * each)
        expected, layouts = run_all_ranks(gm, values), output_layouts(gm)
        report = run(gm, config({"*": f"{name}/between"}), links(count, each))
        assert report.changed
        check_fakes(gm)
        assert output_layouts(gm) == layouts
        found = run_all_ranks(gm, values)
        wide = str(dtype).removeprefix("torch.")
        narrow = "uint8" if name != "bf16" else "bfloat16"
        by_size = {2: {narrow, wide}} if count == each else {count: {narrow}, each: {wide}}
        for size, types in by_size.items():
            assert {t for _, ranks, t in collectives(gm) if ranks == size} == types
        assert not any(ranks == count * each for _, ranks, _ in collectives(gm))
    allowed = error_of(name, 128, kind, values[0], each) * 1.001
    coarse = 0.0 if dtype is torch.float32 else 2.0**-7 * 3 * sum(float(x.abs().max()) for x in values[0])
    for e, f in zip(expected[0], found[0], strict=True):
        assert float((e.float() - f.float()).abs().max()) <= allowed + coarse
        assert not torch.equal(e, f)
    if kind != "reduce_scatter":
        assert all(torch.equal(f, found[0][0]) for f in found[0])


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(MOVED),
    st.sampled_from(NAMES),
    st.sampled_from([(2, 2), (2, 3), (3, 2)]),
    st.integers(1, 30),
    st.integers(1, 40),
    st.integers(0, 2**31 - 1),
)
def test_random_sizes(kind: str, name: str, mesh: tuple[int, int], rows: int, columns: int, seed: int) -> None:
    """Proven under `verify="strict"`, and within the bound; sizes that no rank divides are filled up."""
    ranks = mesh[0] * mesh[1]
    with hosts(*mesh) as group:
        gm = program(kind, (rows if kind == "all_reduce" else rows * ranks, columns), group)
        values = inputs_by_rank(gm, ranks, seed)
        expected = run_all_ranks(gm, values)
        run(gm, config({"*": f"{name}/between"}), links(*mesh))
        found = run_all_ranks(gm, values)
    allowed = error_of(name, 128, kind, values[0], mesh[1]) * 1.001 + 1e-4
    assert max(float((e - f).abs().max()) for e, f in zip(expected[0], found[0])) <= allowed


@pytest.mark.parametrize("by_host", [True, False])
@pytest.mark.parametrize("inside_first", [True, False])
def test_orders_of_a_gather(by_host: bool, inside_first: bool) -> None:
    """Either hop first, and flat groups that count host by host or place by place: the same elements."""
    with fake_world(6):
        order = [0, 1, 2, 3, 4, 5] if by_host else [0, 3, 1, 4, 2, 5]
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("hosts", "devices"))
        inside, between = (tuple(dist.get_process_group_ranks(mesh.get_group(d))) for d in (1, 0))
        gm = program("all_gather", (5, 40), flat_group(order))
        (collective,) = GraphView(gm.graph).collectives
        levels = levels_of(collective, links(2, 3))
        assert (levels.inside.ranks, levels.between.ranks, levels.by_host) == (inside, between, by_host)
        proven(gm, collective, Way(levels, inside_first), 3)


def flat_group(order: list[int], made_of: list[int] | None = None) -> str:
    group = dist.new_group(made_of or order)
    # A mesh whose dimensions are flattened in another order has such a group.
    dist.distributed_c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(order)}
    return str(group.group_name)


def proven(gm: torch.fx.GraphModule, collective: Collective, way: Way, per_host: int) -> None:
    before = verify.snapshot(gm.graph)
    certificate = emit.replace(gm.graph, collective, form_of("int8", 64), way).certificate
    said = {"certificates": [certificate], "rounding": Fraction(1, 100), "ranks_per_host": per_host}
    assert verify.check(gm.graph, reference=before, **said) == []  # type: ignore[arg-type]


# -- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", ["*=off/between", "*=auto/between", "*=/between", "*=int8/inside"])
def test_only_types_go_between_hosts(rules: str) -> None:
    with pytest.raises(ConfigError, match=r"compress=.*int8/between"):
        PassConfig(compress=rules)
    assert PassConfig(compress="dp=int8/between").narrowing.rules == (("dp", "int8/between"),)
    assert PassConfig(compress="int8/between").narrowing.rules == (("*", "int8/between"),)


# -- choice ------------------------------------------------------------------------------------------------------


def waited_for(group: str) -> torch.fx.GraphModule:
    p = Program()
    whole = p.collective("all_gather", p.input(256, 1024), group)
    return p.done(p.call(aten.mm.default, whole, p.input(1024, 1024)))


def test_auto_takes_two_levels_where_the_network_is_slower_than_the_host() -> None:
    """A flat group is priced by its slowest link. Two levels send a host's share inside."""
    for between, inside, sizes in ((1.0, 0.01, {2, 3}), (1.0, 1.0, {6})):
        with hosts(2, 3) as group:
            gm = waited_for(group)
            report = run(gm, config("auto", "0.01"), links(2, 3, between, inside))
            (taken,) = report.decisions
            assert taken.verdict is Verdict.APPLIED
            assert {ranks for _, ranks, _ in collectives(gm)} == sizes
            assert ("between 2 hosts" in taken.detail) == (sizes == {2, 3})
            assert report.metrics["makespan_after_ns"] < report.metrics["makespan_before_ns"]


def test_auto_leaves_fast_links_alone() -> None:
    with hosts(2, 3) as group:
        gm = waited_for(group)
        assert not run(gm, config("auto", "0.01"), links(2, 3, 0.001, 0.001)).changed


def test_each_hop_is_priced_on_its_own_group() -> None:
    """Hand-made: 1000 ns, and a time for each byte that a ring sends."""
    with hosts(2, 3) as group:
        gm = program("all_gather", (4, 64), group)
        (collective,) = GraphView(gm.graph).collectives
        profile = links(2, 3, 5.0, 0.5)
        levels, form = levels_of(collective, profile), form_of("int8", 64)
        codes, wide = 4 * (64 + 2), 4 * 64 * 4
        first = in_two_levels(collective, form, levels, False, profile)
        assert first.link_ns == (1_000 + 5 * codes) + (1_000 + 2 * 2 * wide // 2)
        last = in_two_levels(collective, form, levels, True, profile)
        assert last.link_ns == (1_000 + 5 * 3 * codes) + (1_000 + 2 * wide // 2)
        assert as_it_is(collective, profile).link_ns == 1_000 + 5 * 5 * wide


def test_the_order_of_gathers_follows_the_price() -> None:
    """A message so small that latency is all: the gather inside comes first, and nothing is transposed."""
    for rows, first in ((4, 3), (4096, 2)):
        with hosts(2, 3) as group:
            gm = program("all_gather", (rows, 64), group)
            assert run(gm, config(BETWEEN), links(2, 3, 0.001 if rows == 4 else 1.0, 0.001)).changed
            assert next(ranks for _, ranks, _ in collectives(gm)) == first


def test_bytes_between_hosts_are_told() -> None:
    with hosts(2, 3) as group:
        gm = program("reduce_scatter", (48, 96), group)
        report = run(gm, config(BETWEEN), links(2, 3))
    (taken,) = report.decisions
    # 48 x 96 / 3 elements of 4 bytes; the same in 12 blocks of 128 bytes and a scale.
    assert "int8 in blocks of 128 between 2 hosts, wide inside each one (3 ranks): 6144 -> " in taken.detail
    assert f"{6 * 2 * (128 + 2)} bytes sent between hosts" in taken.detail
    assert taken.setting == "" and taken.reason is Reason.ASKED


def test_what_is_between_hosts_already_is_narrowed_as_a_whole() -> None:
    """Hybrid sharding: the replicas' dimension has one rank per host, the shards' dimension is inside a host."""
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        replicas, shards = (mesh.get_group(d).group_name for d in (0, 1))
        p = Program()
        near = p.collective("reduce_scatter", p.input(64, 32), shards)
        gm = p.done(p.collective("all_reduce", near, replicas))
        report = run(gm, config(BETWEEN), links(2, 2))
        assert collectives(gm) == [
            ("reduce_scatter", 2, "float32"),
            ("all_to_all", 2, "uint8"),
            ("all_gather", 2, "uint8"),
        ]
    left, taken = sorted(report.decisions, key=lambda d: d.verdict.value, reverse=True)
    assert left.reason is Reason.DISABLED and "on one host" in left.detail
    assert taken.verdict is Verdict.APPLIED


def levels_missing(count: int, each: int, *made: list[int]) -> Any:
    with fake_world(count * each) as group:
        for ranks in made:
            dist.new_group(ranks)
        gm = program("all_gather", (64, 32), group)
        return run(gm, config(BETWEEN), links(count, each)).decisions[0]


def test_a_missing_group_is_named() -> None:
    inside, between = "on one host: [0, 1]", "at one place of every host: [0, 2]"
    for made, said in (((), inside), (([0, 1],), between), (([0, 2],), inside)):
        left = levels_missing(2, 2, *made)
        assert left.reason is Reason.DIFFERENT_GROUP
        assert left.detail == f"no process group of the 2 ranks {said}"
        assert "init_device_mesh" in left.setting
    assert levels_missing(2, 2, [0, 1], [0, 2]).verdict is Verdict.APPLIED


def test_other_refusals_say_why() -> None:
    with hosts(2, 2) as group:
        gm = program("all_to_all", (64, 32), group)
        (left,) = run(gm, config(BETWEEN), links(2, 2)).decisions
        assert left.reason is Reason.UNSUPPORTED and "not sent in two levels" in left.detail
    with hosts(2, 3):
        gm = program("all_gather", (64, 32), flat_group([0, 1, 2, 3]))
        (left,) = run(gm, config(BETWEEN), links(2, 3)).decisions
        assert left.reason is Reason.DIFFERENT_GROUP and "different numbers of its ranks: 3, 1" in left.detail
    with hosts(2, 3):
        gm = program("all_gather", (64, 32), flat_group([0, 3, 4, 1, 2, 5]))
        (left,) = run(gm, config(BETWEEN), links(2, 3)).decisions
        assert left.reason is Reason.DIFFERENT_GROUP and "neither host by host nor place by place" in left.detail
    # A graph that is looked at in another rank's place.
    with hosts(2, 3, rank=3):
        gm = program("all_gather", (64, 32), flat_group([0, 1, 4, 5], made_of=[0, 1, 3, 4]))
        (left,) = run(gm, config(BETWEEN), links(2, 3)).decisions
        assert left.reason is Reason.DIFFERENT_GROUP and "rank 3 is none of its ranks" in left.detail


def test_long_sums_are_cut_by_hosts() -> None:
    """Over 66 ranks no rank adds a term of each; over 33 hosts it does."""
    for mode, narrowed in (("int8", False), ("int8/between", True), ("auto", True)):
        with hosts(33, 2) as group:
            gm = program("reduce_scatter", (66, 512), group)
            (only,) = run(gm, config({"*": mode}), links(33, 2)).decisions
            assert (only.verdict is Verdict.APPLIED) is narrowed
            assert ("between 33 hosts" if narrowed else "a sum over more than 64 ranks") in only.detail
    with hosts(65, 2) as group:
        (left,) = run(program("all_reduce", (66, 512), group), config(BETWEEN), links(65, 2)).decisions
        assert left.reason is Reason.UNSUPPORTED and "a sum over more than 64 hosts" in left.detail


def compensated(p: Program, kind: str, group: str) -> torch.fx.GraphModule:
    """What simple_fsdp writes for a gradient whose losses are kept."""
    residual, gradient = p.input(24, 32), p.input(24, 32)
    value = p.call(aten.add.Tensor, residual, gradient)
    brought = p.collective(kind, value, group)
    lost = p.call(aten.sub.Tensor, value, p.call(SENT, value))
    return p.done(p.call(aten.neg.default, brought), p.call(aten.copy_.default, residual, lost))


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_what_is_kept_is_not_sent_in_two_levels(kind: str) -> None:
    """Nothing says what of a host's sum is whose loss: it stays as it is, or goes as a whole, and nothing is lost."""
    with hosts(2, 2) as group:
        gm = compensated(Program(), kind, group)
        chosen = config(BETWEEN, compress_feedback="on")
        done = run_passes(gm.graph, [CompressPass(chosen.narrowing)], chosen, links(2, 2))
        (left,) = done.report.passes[0].decisions
        assert left.reason is Reason.UNSUPPORTED and "no error feedback" in left.detail
        assert left.setting == 'compress_feedback="off"'
        assert collectives(gm) == [(kind, 4, "float32")]
    with hosts(2, 2) as group:
        # Two levels would be the cheapest form.
        report = run(compensated(Program(), kind, group), config("auto", compress_feedback="on"), links(2, 2, 100.0))
        (taken,) = report.decisions
        assert taken.verdict is Verdict.APPLIED
        assert "between" not in taken.detail and "added to the next one" in taken.detail
    with hosts(2, 2) as group:
        # Feedback that is off keeps nothing.
        report = run(compensated(Program(), kind, group), config(BETWEEN), links(2, 2))
        assert "between 2 hosts" in report.decisions[0].detail


def test_what_is_kept_of_one_rank_per_host_is_narrowed_as_a_whole() -> None:
    """The replicas' dimension of hybrid sharding: one level, with error feedback."""
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        gm = compensated(Program(), "reduce_scatter", mesh.get_group(0).group_name)
        report = run(gm, config(BETWEEN, compress_feedback="on"), links(2, 2))
        assert "added to the next one" in report.decisions[0].detail
        assert collectives(gm) == [("all_to_all", 2, "uint8")]


# -- forgeries ---------------------------------------------------------------------------------------------------


@dataclass
class Forged:
    """A graph in two levels, what it was, and what is said of it."""

    gm: torch.fx.GraphModule
    before: verify.ReferenceSnapshot
    certificate: verify.Certificate
    levels: Levels
    group: str

    @classmethod
    def of(cls, kind: str, group: str, inside_first: bool = False) -> Forged:
        gm = program(kind, (24, 32), group)
        before = verify.snapshot(gm.graph)
        (collective,) = GraphView(gm.graph).collectives
        levels = levels_of(collective, links(2, 2))
        way = Way(levels, inside_first)
        return cls(gm, before, emit.replace(gm.graph, collective, form_of("int8", 64), way).certificate, levels, group)

    def findings(self, per_host: int | None = 2, **stated: Any) -> list[str]:
        names = {node.name for node in self.gm.graph.nodes if node.op == "call_function"}
        given = replace(self.certificate, added=tuple(names - set(self.before.nodes)), **stated)
        self.gm.graph.lint()
        return [
            str(finding)
            for finding in verify.check(
                self.gm.graph,
                reference=self.before,
                certificates=[given],
                rounding=Fraction(1, 100),
                ranks_per_host=per_host,
            )
        ]

    def starts(self, name: str) -> list[torch.fx.Node]:
        """Starts on a group, in order."""
        return [c.start for c in GraphView(self.gm.graph).collectives if c.group.name == name]

    def calls(self, target: object) -> list[torch.fx.Node]:
        return [node for node in self.gm.graph.nodes if node.target is target]


def renamed(start: torch.fx.Node, was: str, now: str) -> None:
    start.args = tuple(now if a == was else a for a in start.args)


def swapped_hosts(made: Forged) -> None:
    """What arrives from the hosts is read in the other order."""
    wide = next(n for n in made.gm.graph.nodes if n.name == made.certificate.narrowed[0].read)
    users = list(wide.users)
    with made.gm.graph.inserting_after(wide):
        rolled = made.gm.graph.call_function(aten.roll.default, (wide, [wide.meta["val"].shape[0] // 2], [0]))
    rolled.meta["val"] = wide.meta["val"]
    for user in users:
        user.replace_input_with(wide, rolled)


def swapped_levels(made: Forged) -> None:
    """Narrow inside the host, wide between hosts."""
    inside, between = made.levels.inside.name, made.levels.between.name
    near, far = made.starts(inside), made.starts(between)
    for start in near:
        renamed(start, inside, between)
    for start in far:
        renamed(start, between, inside)


def wide_on_the_wrong_group(made: Forged) -> None:
    for start in made.starts(made.levels.inside.name):
        renamed(start, made.levels.inside.name, made.levels.between.name)


def codes_on_the_wrong_group(made: Forged) -> None:
    for start in made.starts(made.levels.between.name):
        renamed(start, made.levels.between.name, made.levels.inside.name)


def not_transposed(made: Forged) -> None:
    for node in made.calls(aten.permute.default):
        value = node.args[0].meta["val"]  # type: ignore[union-attr]
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        made.gm.graph.erase_node(node)
        assert value.shape[0] == value.shape[1] == 2, "as many hosts as devices: shapes stay"


def hidden_second_rounding(made: Forged) -> None:
    """What goes inside the host is rounded as well, and nobody says so."""
    start = made.starts(made.levels.inside.name)[0]
    source = start.args[0]
    with made.gm.graph.inserting_before(start):
        low = made.gm.graph.call_function(cast, (source, torch.bfloat16))
        back = made.gm.graph.call_function(cast, (low, torch.float32))
    value = source.meta["val"]  # type: ignore[union-attr]
    low.meta["val"], back.meta["val"] = value.to(torch.bfloat16), value
    start.update_arg(0, back)


def one_host_twice(made: Forged) -> None:
    """The sum has the first host's term in the second one's place."""
    first, second, *_ = made.calls(aten.slice.Tensor)
    second.replace_all_uses_with(first)
    made.gm.graph.erase_node(second)


def another_operator_inside(made: Forged) -> None:
    for start in made.starts(made.levels.inside.name):
        if "sum" in start.args or "avg" in start.args:
            start.args = tuple({"sum": "avg", "avg": "sum"}.get(a, a) if isinstance(a, str) else a for a in start.args)


FORGERIES: list[Callable[[Forged], None]] = [
    swapped_hosts,
    swapped_levels,
    wide_on_the_wrong_group,
    codes_on_the_wrong_group,
    not_transposed,
    hidden_second_rounding,
    one_host_twice,
    another_operator_inside,
]


@pytest.mark.parametrize("kind", MOVED)
@pytest.mark.parametrize("forge", FORGERIES, ids=lambda f: f.__name__)
def test_forgeries_are_found_out(kind: str, forge: Callable[[Forged], None]) -> None:
    if kind == "all_reduce" and forge in (swapped_hosts, not_transposed):
        return  # its hosts are added up, and nothing is transposed
    if kind == "reduce_scatter" and forge is swapped_hosts:
        return  # the same
    if kind == "all_gather" and forge in (one_host_twice, another_operator_inside):
        return  # nothing is added
    # Seen from a rank at another place than the first: what a rank gets is proven on that rank.
    with hosts(2, 2, rank=1) as group:
        made = Forged.of(kind, group)
        assert made.findings() == []
        forge(made)
        assert made.findings()


@pytest.mark.parametrize("kind", MOVED)
def test_what_is_stated_is_held_against_hosts_and_groups(kind: str) -> None:
    with hosts(2, 2) as group:
        made = Forged.of(kind, group)
        (first, *_) = made.certificate.narrowed
        for over in (made.levels.inside.ranks, (0, 1, 2, 3), (0, 3)):
            said = tuple(replace(one, over=over) for one in made.certificate.narrowed)
            assert made.findings(narrowed=said), over
        # All ranks on one host, hosts that nobody knows, and a graph without the narrowing that is stated.
        assert any("not on a host each" in f for f in made.findings(4))
        assert any("nobody says which ranks share a host" in f for f in made.findings(None))
        assert made.findings(narrowed=(first, replace(first, over=())))
        assert made.findings(narrowed=())


def test_codes_that_go_on_inside_a_host_are_found_out() -> None:
    """The bytes of a gather over all ranks, with each rank's own error: fine, but not what is stated."""
    with hosts(2, 2) as group:
        gm = program("all_gather", (24, 32), group)
        before = verify.snapshot(gm.graph)
        (collective,) = GraphView(gm.graph).collectives
        levels = levels_of(collective, links(2, 2))
        whole = emit.replace(gm.graph, collective, form_of("int8", 64)).certificate
        made = Forged(gm, before, whole, levels, group)
        assert made.findings() == []
        said = tuple(replace(one, over=levels.between.ranks) for one in whole.narrowed)
        found = made.findings(narrowed=said)
        assert any("goes between hosts" in one for one in found)
        assert any("not at its place" in one for one in found)


def test_a_sum_in_the_narrow_type_is_found_out() -> None:
    """Hosts' sums are added as they arrive in bfloat16, and widened then."""
    with hosts(2, 2) as group:
        gm = program("reduce_scatter", (24, 32), group)
        before = verify.snapshot(gm.graph)
        (collective,) = GraphView(gm.graph).collectives
        levels = levels_of(collective, links(2, 2))
        given = emit.replace(gm.graph, collective, form_of("bf16", 64), Way(levels)).certificate
        made = Forged(gm, before, given, levels, group)
        assert made.findings() == []
        wide = next(n for n in gm.graph.nodes if n.name == made.certificate.narrowed[0].read)
        terms, (total,) = made.calls(aten.slice.Tensor), made.calls(aten.add.Tensor)
        for term in terms:
            term.update_arg(0, wide.args[0])
        for node in (*terms, total):
            node.meta["val"] = node.meta["val"].to(torch.bfloat16)
        with gm.graph.inserting_after(total):
            widened = gm.graph.call_function(cast, (total, torch.float32))
        widened.meta["val"] = total.meta["val"].float()
        total.replace_all_uses_with(widened, delete_user_cb=lambda user: user is not widened)
        assert made.findings(narrowed=(replace(made.certificate.narrowed[0], read=widened.name),))


def test_ranks_see_the_same_levels() -> None:
    """Every rank takes the two groups that it is in, and they are all of them made alike."""
    seen, issued = [], []
    for rank in range(6):
        with hosts(2, 3, rank) as group:
            gm = program("all_reduce", (64, 32), group)
            (collective,) = GraphView(gm.graph).collectives
            found = levels_of(collective, links(2, 3))
            assert run(gm, config(BETWEEN), links(2, 3)).changed
            seen.append((found.inside.ranks, found.between.ranks))
            issued.append(collectives(gm))
    assert all(one == issued[0] for one in issued)
    rows, columns = zip(*seen)
    assert all(set(a) == set(b) or not set(a) & set(b) for a, b in itertools.combinations(rows, 2))
    assert columns == tuple((r % 3, r % 3 + 3) for r in range(6))
