"""Legal rewrites pass with a certificate that says what they did, and not without one."""

from __future__ import annotations

import pytest
import torch

from inductor_passes import verify
from inductor_passes.verify import Certificate, Claim
from tests.support.verify_graphs import Builder, aten, c10d, unknown
from tests.support.world import grouped_world


@pytest.fixture(scope="module")
def groups():
    with grouped_world() as names:
        yield names


def rules(findings) -> set[str]:
    return {f.rule for f in findings}


def gathers(groups, fences: tuple[int, ...] = ()) -> Builder:
    """Two all-gathers of one group, each read after its wait; an unknown op after the n-th for n in ``fences``."""
    b = Builder(groups)
    xs = [b.input(16, 16), b.input(16, 16)]
    waits = []
    for number, x in enumerate(xs, 1):
        start, spans = b.start(c10d.all_gather_into_tensor.default, x, 4, group="row", inputs=[x])
        waits.append(b.wait(start, spans))
        if number in fences:
            b.outputs.append(b.compute(unknown, x))
    b.outputs += [b.compute(aten.relu.default, w) for w in waits]
    return b


def merge(b: Builder) -> Certificate:
    """Turn the two all-gathers into one over the concatenation, by hand."""
    graph = b.graph
    starts = [n for n in graph.nodes if n.target is c10d.all_gather_into_tensor.default]
    waits = [n for n in graph.nodes if n.target is c10d.wait_tensor.default]
    readers = [next(iter(w.users)) for w in waits]
    with graph.inserting_before(readers[0]):
        cat = b.call(aten.cat.default, [s.args[0] for s in starts], 1)
        start = b.call(c10d.all_gather_into_tensor.default, cat, *starts[0].args[1:])
        wait = b.call(c10d.wait_tensor.default, start)
        parts = [b.call(aten.slice.Tensor, wait, 1, 16 * i, 16 * (i + 1)) for i in range(2)]
    for reader, part in zip(readers, parts):
        reader.args = (part,)
    removed = (*waits, *starts)
    for node in removed:
        graph.erase_node(node)
    added = (cat, start, wait, *parts)
    return Certificate("bucket", tuple(n.name for n in removed), tuple(n.name for n in added), claim=Claim.MERGE)


def test_a_merge_passes_with_its_certificate_only(groups):
    b = gathers(groups)
    graph = b.finish().graph
    before = verify.snapshot(graph)
    certificate = merge(b)
    assert verify.check(graph, reference=before, certificates=[certificate]) == []
    assert {"collective-lost", "wait-lost"} <= rules(verify.check(graph, reference=before))


def test_added_communication_stays_between_the_fences_of_what_it_replaces(groups):
    b = gathers(groups, fences=(1, 2))
    graph = b.finish().graph
    before = verify.snapshot(graph)
    certificate = merge(b)
    found = verify.check(graph, reference=before, certificates=[certificate])
    assert rules(found) == {"fence"} and all("moved across" in f.message for f in found)


def test_a_certificate_names_what_exists(groups):
    graph = gathers(groups).finish().graph
    before = verify.snapshot(graph)
    found = verify.check(graph, reference=before, certificates=[Certificate("x", ("nothing",), ("nobody",))])
    assert [f.rule for f in found] == ["certificate"] * 2


def test_users_may_be_redirected_only_as_certified(groups):
    """Two equal gathers become one: the second's reader is redirected to the first's wait."""
    b = Builder(groups)
    x = b.input(16, 16)
    waits = []
    for _ in range(2):
        start, spans = b.start(c10d.all_gather_into_tensor.default, x, 4, group="row", inputs=[x])
        waits.append(b.wait(start, spans))
    other = b.compute(aten.clone.default, waits[0])
    b.outputs = [b.compute(aten.relu.default, w) for w in waits]
    b.outputs.append(other)
    graph = b.finish().graph
    before = verify.snapshot(graph)
    gone = (waits[1].name, waits[1].args[0].name)
    second = waits[1].args[0]
    waits[1].replace_all_uses_with(waits[0])
    graph.erase_node(waits[1])
    graph.erase_node(second)
    right = Certificate("R14", gone, replaced=((gone[0], waits[0].name),), claim=Claim.REMOVE)
    wrong = Certificate("R14", gone, replaced=((gone[0], other.name),), claim=Claim.REMOVE)
    assert verify.check(graph, reference=before, certificates=[right]) == []
    assert rules(verify.check(graph, reference=before, certificates=[wrong])) == {"operand-changed"}


def test_dead_code_may_go_and_views_may_come(groups):
    b = Builder(groups)
    x = b.input(16, 16)
    dead = b.compute(aten.mm.default, x, x)
    deader = b.compute(aten.relu.default, dead)
    b.outputs = [b.compute(aten.relu.default, x)]
    graph = b.finish().graph
    before = verify.snapshot(graph)
    graph.erase_node(deader)
    graph.erase_node(dead)
    with graph.inserting_after(x):
        b.call(aten.t.default, x)
    assert verify.check(graph, reference=before) == []


def test_renamed_nodes_are_matched_by_what_they_compute(groups):
    graph = gathers(groups).finish().graph
    before = verify.snapshot(graph)
    copy = torch.fx.Graph()
    names: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        name = node.name if node.op in ("placeholder", "output") else f"renamed_{node.name}"
        args = torch.fx.node.map_arg(node.args, names.__getitem__)
        names[node] = copy.create_node(node.op, node.target, args, dict(node.kwargs), name=name)
        names[node].meta = dict(node.meta)
    assert verify.check(copy, reference=before) == []


def test_findings_of_the_reference_are_not_repeated(groups):
    b = Builder(groups)
    x = b.input(16, 16)
    start, _ = b.start(c10d.all_gather_into_tensor.default, x, 4, group="row", inputs=[x])
    b.outputs = [start]
    graph = b.finish().graph
    assert rules(verify.check(graph)) == {"unwaited-output"}
    assert verify.check(graph, reference=verify.snapshot(graph)) == []


def test_a_wait_for_what_the_caller_started(groups):
    b = Builder(groups)
    x = b.input(16, 16)
    early = b.compute(aten.relu.default, x)
    w = b.wait(x, [])
    b.outputs = [b.compute(aten.relu.default, w), early]
    graph = b.finish().graph
    assert rules(verify.check(graph)) == {"read-before-wait"}
    w.append(early)
    assert verify.check(graph) == []


def test_snapshot_of_an_illegal_graph(groups):
    graph = gathers(groups).finish().graph
    nodes = list(graph.nodes)
    nodes[-2].append(nodes[2])
    with pytest.raises(ValueError, match="illegal graph"):
        verify.snapshot(graph)
    with pytest.raises(ValueError, match="group_order='some'"):
        verify.check(graph, group_order="some")


def test_a_buffer_that_is_read_later_is_not_taken_over(groups):
    """Two collectives of one buffer may overlap when somebody reads it after them."""

    def program(later: bool) -> torch.fx.Graph:
        b = Builder(groups)
        x = b.compute(aten.clone.default, b.input(16, 16))
        first, spans = b.start(c10d.broadcast.default, x, 0, group="row", inputs=[x])
        second, more = b.start(c10d.all_reduce.default, x, "sum", group="column", inputs=[x])
        b.outputs = [b.wait(first, spans), b.wait(second, more)]
        if later:
            b.outputs.append(b.compute(aten.relu.default, x))
        return b.finish().graph

    assert rules(verify.check(program(later=False))) == {"write-in-flight"}
    assert verify.check(program(later=True)) == []
