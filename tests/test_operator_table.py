"""The table of operators: complete, fixed, and equal to what the verifier derives by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives
import torch.distributed._symmetric_memory
import torch.fx
from torch._subclasses import FakeTensorMode

import inductor_passes.async_tp.kernel_ops
import inductor_passes.async_tp.ops
import inductor_passes.rewriting.cpu_calls  # noqa: F401  registers operators
from inductor_passes import _torch
from inductor_passes import operators as table
from inductor_passes.cost.communication import ALGORITHMS, communication_estimate, wire_bytes
from inductor_passes.cost.fused import operator_ns
from inductor_passes.cost.profile import CostProfile
from inductor_passes.ir import ops
from inductor_passes.operators import CollectiveKind, OperatorFacts, Price, Role
from inductor_passes.problems.kernels import build
from inductor_passes.records.convert import plain
from inductor_passes.verify.facts import communication
from inductor_passes.verify.facts.view import alone
from tests.support.inductor_orders import lower
from tests.support.world import fake_world

_LIBRARY = torch.library.Library("inductor_passes", "FRAGMENT")
_LIBRARY.define("not_in_the_table(Tensor x) -> Tensor")
_LIBRARY.impl("not_in_the_table", lambda x: x + 1, "CompositeExplicitAutograd")
_LIBRARY.impl("not_in_the_table", lambda x: torch.empty_like(x), "Meta")


def registered(*namespaces: str) -> dict[str, Any]:
    """``namespace::name`` -> an overload, of every operator that torch knows now."""
    found: dict[str, Any] = {}
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        base, _, overload = name.partition(".")
        namespace, _, short = base.partition("::")
        if namespace in namespaces and base not in found:
            op = _torch.registered_op(namespace, short, overload)
            if op is not None:
                found[base] = op
    return found


def ours(operators: Mapping[str, OperatorFacts], name: str) -> str:
    """What the passes' table says of an operator, in words that the verifier's can be compared with."""
    facts = operators.get(name)
    if facts is None:
        return "nothing known"
    if facts.role is Role.START:
        return f"starts {facts.kind}{' coalesced' * facts.coalesced}{' in place' * facts.in_place}"
    words = {"waits": facts.role is Role.WAIT, "transfers": facts.transfer, "blocks": facts.blocks}
    return next((word for word, holds in words.items() if holds), "nothing known")


def theirs(name: str) -> str:
    """What the verifier derives from the operator's name, in the same words."""
    form = communication.form_of(name)
    if form is not None:
        return f"starts {form.kind}{' coalesced' * form.coalesced}{' in place' * (form.in_place or form.out)}"
    words = {
        "waits": communication.is_wait(name),
        "transfers": communication.is_transfer(name),
        "blocks": communication.blocks(name),
    }
    return next((word for word, holds in words.items() if holds), "nothing known")


def differences(operators: Mapping[str, OperatorFacts], names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Operator -> (what the passes' table says, what the verifier says) where that differs."""
    return {name: pair for name in names if len(set(pair := (ours(operators, name), theirs(name)))) > 1}


def all_names() -> list[str]:
    namespaces = {name.partition("::")[0] for name in table.OPERATORS}
    return sorted({*registered(*namespaces), *table.OPERATORS})


def test_the_verifier_derives_the_same() -> None:
    assert differences(table.OPERATORS, all_names()) == {}


def test_every_missing_row_is_a_named_difference() -> None:
    compute = {name for name, facts in table.OPERATORS.items() if facts.role is Role.COMPUTE}
    for name in table.OPERATORS.keys() - compute:
        without = {n: facts for n, facts in table.OPERATORS.items() if n != name}
        assert differences(without, all_names()) == {name: ("nothing known", theirs(name))}


def test_what_communicates_takes_a_group() -> None:
    known = registered("_c10d_functional", "inductor_passes", "symm_mem", "_dtensor")
    for name, facts in table.OPERATORS.items():
        if name in known:
            takes = communication.takes_a_group(known[name])
            assert takes == (facts.kind is not None or facts.transfer), name


def test_every_functional_collective_is_known_or_a_fence() -> None:
    for name, op in registered("_c10d_functional").items():
        assert name in table.OPERATORS or ops.op_role(op) is Role.FENCE, name


def test_an_operator_of_ours_that_the_table_does_not_have_is_a_fence() -> None:
    op = torch.ops.inductor_passes.not_in_the_table.default
    assert ops.op_role(op) is Role.FENCE
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(op, (x,))
    x.meta["val"] = node.meta["val"] = torch.empty(4, device="meta")
    assert ops.role(node) is Role.FENCE and alone(node).role is Role.FENCE
    node.target = torch.ops.inductor_passes.unpack.default
    assert ops.op_role(node.target) is Role.COMPUTE


def test_our_registered_operators_are_known_or_fences() -> None:
    names = registered("inductor_passes")
    assert {"inductor_passes::unpack", "inductor_passes::gathered_mm"} <= names.keys()
    for name, op in names.items():
        assert ops.op_role(op) is (table.role_of(name) or Role.FENCE), name


def test_kinds_are_complete() -> None:
    assert table.KIND_FACTS.keys() == ALGORITHMS.keys() == set(CollectiveKind)
    assert len({kind.label for kind in CollectiveKind}) == len(CollectiveKind)
    assert set(table.SINGLE) == set(table.GROUP_KINDS)
    for kind, name in {**table.SINGLE, **table.COALESCED}.items():
        assert table.COLLECTIVES[f"{table.FUNCTIONAL}::{name}"] is kind
    assert {facts.kind for facts in table.OPERATORS.values() if facts.blocks} <= set(CollectiveKind)


def test_kinds_are_text() -> None:
    for kind in CollectiveKind:
        value = str(kind.value)
        assert (str(kind), f"{kind}", f"{kind:>20}", repr(kind)) == (value, value, f"{value:>20}", repr(value))
        assert json.dumps({"kind": kind, kind: 1}) == json.dumps({"kind": value, value: 1})
        assert {value: 1}[kind] == 1 and plain(kind) == value and type(plain(kind)) is str
        assert table.kind_of(value) is kind


def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="collective kind is 'gossip'; expected one of all_gather, reduce_scatter"):
        wire_bytes("gossip", 1, 1, 2)


def test_ring_bytes_and_messages_by_kind() -> None:
    """Thakur, Rabenseifner, Gropp 2005: what one of 4 ranks sends, for a message of 400 bytes."""
    expected = {"all_gather": 300, "reduce_scatter": 300, "all_reduce": 600, "all_to_all": 300, "broadcast": 400}
    shares = {"all_gather": (100, 400), "reduce_scatter": (400, 100)}
    found = {kind: wire_bytes(kind, *shares.get(kind, (400, 400)), 4) for kind in table.GROUP_KINDS}
    assert found == expected


_SCRIPT = """
import importlib, json, pkgutil, sys
from inductor_passes.cost import communication, fused
from inductor_passes import operators as table

tables = (table.OPERATORS, table.KIND_FACTS, table.COLLECTIVES, table.SINGLE, table.COALESCED, fused._PRICES)
before = [dict(one) for one in tables]
assert not any(name.startswith("inductor_passes.async_tp") for name in sys.modules)
import inductor_passes
for module in pkgutil.walk_packages(inductor_passes.__path__, "inductor_passes."):
    if not module.name.startswith(("inductor_passes.kernels", "inductor_passes.models")):
        importlib.import_module(module.name)
assert any(name.startswith("inductor_passes.async_tp") for name in sys.modules)
assert before == [dict(one) for one in tables]
for one in tables:
    try:
        one["x"] = None
    except TypeError:
        continue
    raise AssertionError("a table can be written to")
print("unchanged")
"""


def test_importing_a_module_changes_no_table() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip().endswith("unchanged"), done.stderr[-2000:]


def _fake(*shape: int) -> torch.Tensor:
    return torch.empty(*shape)


def _blocking_graph(group: str) -> torch.fx.GraphModule:
    """A matmul with a gather inside, an exchange, and a norm behind an all-reduce."""
    graph = torch.fx.Graph()
    with FakeTensorMode():

        def call(op: Any, *args: Any) -> torch.fx.Node:
            node = graph.call_function(op, args)
            node.meta["val"] = op(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]))
            return node

        shard, right = graph.placeholder("shard"), graph.placeholder("right")
        shard.meta["val"], right.meta["val"] = _fake(64, 128), _fake(128, 256)
        product = call(torch.ops.inductor_passes.gathered_mm.default, shard, right, 2, group, 1)
        moved = call(torch.ops._dtensor.shard_dim_alltoall.default, product, 0, 1, group)
        graph.output((moved,))
    return torch.fx.GraphModule({}, graph)


def test_both_levels_price_what_blocks_alike() -> None:
    profile = CostProfile.default("cpu")
    with fake_world(2) as group:
        gm = _blocking_graph(group)
        wanted = {n.name: operator_ns(n, profile) for n in gm.graph.nodes if operator_ns(n, profile) is not None}
        assert len(wanted) == 2
        priced: list[int] = []

        def hook(nodes: list[Any]) -> list[Any]:
            tasks = build(nodes, profile, backward=False).problem.tasks
            priced.extend(task.duration_ns for task in tasks if task.fence)
            return nodes

        lower(gm, hook)
    assert sorted(priced) == sorted(ns for ns in wanted.values() if ns is not None)


def test_an_exchange_that_blocks_takes_the_link() -> None:
    profile = CostProfile.default("cpu")
    with fake_world(2) as group:
        gm = _blocking_graph(group)
        exchange = next(n for n in gm.graph.nodes if "alltoall" in n.name)
        size = 128 * 256 * 4
        link = profile.communication_ns(CollectiveKind.ALL_TO_ALL, size, size, (0, 1))
        assert link > 0
        assert operator_ns(exchange, profile) == link + profile.compute_ns(0, 2 * size, "float32", 1)
        assert operator_ns(next(iter(gm.graph.nodes)), profile) is None


def test_a_group_that_is_not_known_has_a_price() -> None:
    profile = CostProfile.default("cpu")
    with fake_world(2) as group:
        gm = _blocking_graph(group)
        for node in gm.graph.nodes:
            if operator_ns(node, profile) is not None:
                node.args = tuple("gone" if a == group else a for a in node.args)
                assert operator_ns(node, profile) > 0


def test_every_price_has_its_function() -> None:
    blocking = {facts.price for facts in table.OPERATORS.values() if facts.blocks}
    assert blocking == {Price.MATMUL, Price.NORM, Price.BLOCKING_LINK}
    for facts in table.OPERATORS.values():
        assert (facts.matmul is not None) == (facts.price is Price.MATMUL)
        assert facts.role is not Role.START or facts.price is Price.LINK


def test_algorithms_price_every_kind() -> None:
    profile = CostProfile.default("cpu")
    for kind in CollectiveKind:
        ns, name = communication_estimate(kind, 1024, 1024, profile.layout((0, 1)), profile.spec)
        assert ns > 0 and name in ALGORITHMS[kind]
