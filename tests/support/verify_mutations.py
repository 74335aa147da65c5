"""Illegal changes to a legal graph; for each the verifier must name one of its rules.

A change raises :class:`NoPlace`, or returns False, where the graph offers no place for it.

``ALONE`` marks what must be found without a reference graph too.
"""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from inductor_passes.verify import Certificate, Claim
from tests.support.verify_graphs import Program, aten, c10d, scribble

WAIT = c10d.wait_tensor.default
GROUPS = ("world", "row", "column", "other")


class NoPlace(Exception):
    """The graph has nothing that this change could be made to."""


class Case:
    """A copy of a program's graph to damage, with look-ups."""

    def __init__(self, program: Program, groups: dict[str, str], rng: random.Random) -> None:
        self.graph = torch.fx.Graph()
        self.graph.owning_module = program.graph.owning_module
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        self.graph.output(self.graph.graph_copy(program.graph, copies))
        self.touched: dict[torch.fx.Node, list] = {}
        self.written: dict[torch.fx.Node, set[int]] = {}
        for access in program.accesses:
            self.touched.setdefault(copies[access.node], []).append(access)
            if access.writes:
                self.written.setdefault(copies[access.node], set()).add(access.buffer)
        self.groups = groups
        self.rng = rng
        #: what a pass would hand in along with the change
        self.certificates: tuple[Certificate, ...] = ()
        self.nodes = list(self.graph.nodes)
        self.position = {n: i for i, n in enumerate(self.nodes)}
        self.output = self.nodes[-1]
        self.starts = [n for n in self.nodes if is_start(n)]
        self.waits = [n for n in self.nodes if n.target is WAIT]
        self.fences = [copies[n] for n in program.fences]
        self.random = [copies[n] for n in program.chains.get("random", [])]
        self.asserts = [copies[n] for n in program.chains.get("assert", [])]

    def pick(self, candidates: list) -> Any:
        if not candidates:
            raise NoPlace
        return self.rng.choice(candidates)

    def start_of(self, wait: torch.fx.Node) -> torch.fx.Node:
        node = wait
        while not is_start(node):
            node = node.args[0]
        return node

    def waits_of(self, start: torch.fx.Node) -> list[torch.fx.Node]:
        return [w for w in self.waits if self.start_of(w) is start]

    def group(self, start: torch.fx.Node) -> str:
        return start.args[-1]

    def input_of(self, start: torch.fx.Node) -> torch.fx.Node:
        first = start.args[0]
        return first[0] if isinstance(first, (list, tuple)) else first

    def after(self, place: torch.fx.Node, target, *args, like: torch.fx.Node | None = None, **kwargs) -> torch.fx.Node:
        with self.graph.inserting_after(place):
            node = self.graph.call_function(target, args, kwargs)
        if like is not None:
            node.meta["val"] = like.meta["val"]
        return node

    def plain(self) -> list[torch.fx.Node]:
        """Starts that have memory of their own and one result."""
        return [s for s in self.starts if s.target in _OUT_OF_PLACE]


_OUT_OF_PLACE = {
    c10d.all_gather_into_tensor.default,
    c10d.reduce_scatter_tensor.default,
    c10d.all_reduce.default,
    c10d.all_to_all_single.default,
    c10d.broadcast.default,
}


def is_start(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and str(node.target).startswith("_c10d") and node.target is not WAIT


def is_placeholder(node: torch.fx.Node) -> bool:
    return node.op == "placeholder"


@dataclass(frozen=True)
class Mutation:
    name: str
    apply: Callable[[Case], bool]
    rules: frozenset[str]
    alone: bool


MUTATIONS: list[Mutation] = []


def inject(mutation: Mutation, case: Case) -> bool:
    """Make the change; whether there was a place for it."""
    try:
        return mutation.apply(case)
    except NoPlace:
        return False


def mutation(*rules: str, alone: bool = False):
    def register(function: Callable[[Case], bool]) -> Callable[[Case], bool]:
        MUTATIONS.append(Mutation(function.__name__, function, frozenset(rules), alone))
        return function

    return register


# -- waits ---------------------------------------------------------------------------------------------------


@mutation("read-before-wait", "missing-wait", "unwaited-output", alone=True)
def drop_every_wait_of_a_collective(case: Case) -> bool:
    start = case.pick(case.starts)
    for wait in case.waits_of(start):
        wait.replace_all_uses_with(wait.args[0])
        case.graph.erase_node(wait)
    return True


@mutation("wait-lost")
def drop_one_wait(case: Case) -> bool:
    wait = case.pick(case.waits)
    wait.replace_all_uses_with(wait.args[0])
    case.graph.erase_node(wait)
    return True


@mutation("missing-wait", "read-before-wait", "unwaited-output", alone=True)
def drop_the_waits_of_one_result_of_a_coalesced_collective(case: Case) -> bool:
    items = [n for n in case.nodes if n.target is operator.getitem and is_start(n.args[0])]
    item = case.pick(items)
    for wait in [w for w in case.waits if w.args[0] is item]:
        wait.replace_all_uses_with(item)
        case.graph.erase_node(wait)
    return True


@mutation("topology", alone=True)
def swap_wait_and_reader(case: Case) -> bool:
    wait = case.pick([w for w in case.waits if w.users])
    reader = min(wait.users, key=case.position.__getitem__)
    reader.append(wait)
    return True


@mutation("topology", alone=True)
def use_before_definition(case: Case) -> bool:
    node = case.pick([n for n in case.nodes if n.op == "call_function" and n.users])
    case.nodes[-2].append(node)
    return node is not case.nodes[-2] and any(case.position[u] < len(case.nodes) - 1 for u in node.users)


@mutation("read-before-wait", alone=True)
def read_between_start_and_wait(case: Case) -> bool:
    start = case.pick(case.plain())
    case.after(start, aten.relu.default, start, like=start)
    return True


@mutation("read-before-wait", alone=True)
def read_through_views_between_start_and_wait(case: Case) -> bool:
    start = case.pick(case.plain())
    view = case.after(start, aten.slice.Tensor, start, 0, 0, 1, like=start)
    again = case.after(view, aten.t.default, view, like=start)
    case.after(again, aten.relu.default, again, like=start)
    return True


@mutation("read-before-wait", alone=True)
def read_the_memory_of_an_in_place_collective(case: Case) -> bool:
    start = case.pick([s for s in case.starts if s.target is c10d.all_reduce_.default])
    case.after(start, aten.relu.default, start.args[0], like=start)
    return True


@mutation("read-before-wait", alone=True)
def read_the_out_buffer_of_a_collective(case: Case) -> bool:
    start = case.pick([s for s in case.starts if "out" in s.kwargs])
    case.after(start, aten.relu.default, start.kwargs["out"], like=start)
    return True


@mutation("read-before-wait", alone=True)
def chain_a_collective_on_an_unwaited_result(case: Case) -> bool:
    start = case.pick(case.plain())
    second = case.after(start, c10d.all_reduce.default, start, "sum", case.groups["row"], like=start)
    case.after(second, WAIT, second, like=start)
    return True


@mutation("read-before-wait", alone=True)
def copying_reshape_of_an_unwaited_result(case: Case) -> bool:
    start = case.pick(case.plain())
    case.after(start, aten.reshape.default, start, [-1], like=start)
    return True


@mutation("operand-changed")
def reader_bypasses_the_wait(case: Case) -> bool:
    wait = case.pick([w for w in case.waits if w.users])
    wait.replace_all_uses_with(wait.args[0])
    return True


@mutation("wait-without-start", alone=True)
def wait_for_something_else(case: Case) -> bool:
    wait = case.pick(case.waits)
    others = [n for n in case.nodes if n.target in (aten.relu.default, aten.mm.default, aten.add.Tensor)]
    other = case.pick([n for n in others if case.position[n] < case.position[wait]])
    wait.args = (other,)
    return True


@mutation("unwaited-output", alone=True)
def return_a_result_without_a_wait(case: Case) -> bool:
    start = case.pick(case.plain())
    for wait in case.waits_of(start):
        wait.replace_all_uses_with(start)
        case.graph.erase_node(wait)
    case.output.args = ((*case.output.args[0], start),)
    return True


# -- collectives ---------------------------------------------------------------------------------------------


@mutation("collective-lost")
def lose_a_collective(case: Case) -> bool:
    start = case.pick([s for s in case.starts if s.target is c10d.all_reduce.default])
    for node in [*case.waits_of(start), start]:
        node.replace_all_uses_with(start.args[0])
        case.graph.erase_node(node)
    return True


@mutation("collective-duplicated")
def duplicate_a_collective(case: Case) -> bool:
    start = case.pick(case.plain())
    copy = case.after(start, start.target, *start.args, like=start)
    case.after(copy, WAIT, copy, like=copy)
    return True


@mutation("missing-wait", alone=True)
def duplicate_a_start(case: Case) -> bool:
    start = case.pick(case.plain())
    case.after(start, start.target, *start.args, like=start)
    return True


@mutation("collective-added")
def add_a_collective(case: Case) -> bool:
    place = case.pick([n for n in case.nodes if is_placeholder(n)])
    start = case.after(place, c10d.all_reduce.default, place, "max", case.groups["world"], like=place)
    case.after(start, WAIT, start, like=place)
    return True


@mutation("collective-changed")
def change_the_group(case: Case) -> bool:
    start = case.pick([s for s in case.starts if case.group(s) != case.groups["world"]])
    others = [case.groups[g] for g in GROUPS[1:] if case.groups[g] != case.group(start)]
    start.args = (*start.args[:-1], case.pick(others))
    return True


@mutation("collective-changed")
def change_the_reduce_op(case: Case) -> bool:
    start = case.pick([s for s in case.starts if "reduce" in str(s.target)])
    start.args = (start.args[0], "max", *start.args[2:])
    return True


@mutation("collective-changed")
def change_the_kind(case: Case) -> bool:
    start = case.pick([s for s in case.starts if s.target is c10d.all_reduce.default])
    start.target = c10d.broadcast.default
    start.args = (start.args[0], 0, start.args[2])
    return True


@mutation("collective-changed")
def change_the_source_of_a_broadcast(case: Case) -> bool:
    start = case.pick([s for s in case.starts if s.target is c10d.broadcast.default])
    start.args = (start.args[0], 1, start.args[2])
    return True


@mutation("collective-changed")
def change_the_splits(case: Case) -> bool:
    start = case.pick([s for s in case.starts if s.target is c10d.all_to_all_single.default])
    splits = list(start.args[1])
    splits[0], splits[1] = splits[0] + 1, splits[1] - 1
    start.args = (start.args[0], splits, *start.args[2:])
    return True


@mutation("metadata", alone=True)
def change_the_group_size(case: Case) -> bool:
    start = case.pick([s for s in case.starts if "all_gather" in str(s.target)])
    start.args = (start.args[0], start.args[1] * 2, *start.args[2:])
    return True


@mutation("operand-changed")
def send_something_else(case: Case) -> bool:
    start = case.pick(case.plain())
    others = [n for n in case.nodes if is_placeholder(n) and n is not start.args[0]]
    start.args = (case.pick(others), *start.args[1:])
    return True


@mutation("metadata", alone=True)
def change_the_dtype_of_a_result(case: Case) -> bool:
    start = case.pick(case.plain())
    start.meta = {**start.meta, "val": start.meta["val"].to(torch.float16)}
    return True


@mutation("metadata", alone=True)
def change_the_shape_of_a_result(case: Case) -> bool:
    start = case.pick(case.plain())
    start.meta = {**start.meta, "val": start.meta["val"].new_empty(17, 16)}
    return True


@mutation("metadata", alone=True)
def lose_a_fake_tensor(case: Case) -> bool:
    node = case.pick([n for n in case.nodes if n.users and (is_start(n) or n.target is WAIT)])
    node.meta = {k: v for k, v in node.meta.items() if k != "val"}
    return True


@mutation("group-order")
def swap_starts_of_a_group(case: Case) -> bool:
    pairs = [
        (a, b)
        for a in case.starts
        for b in case.starts
        if case.group(a) == case.group(b)
        and case.position[a] < case.position[b]
        and all(case.position[o] < case.position[a] for o in b.all_input_nodes)
    ]
    pair = case.pick(pairs)
    pair[0].prepend(pair[1])
    return True


# -- writes to what is in flight -----------------------------------------------------------------------------


@mutation("write-in-flight", alone=True)
def write_an_input_in_flight(case: Case) -> bool:
    start = case.pick(case.plain())
    case.after(start, aten.mul_.Tensor, case.input_of(start), 2, like=case.input_of(start))
    return True


@mutation("write-in-flight", alone=True)
def write_an_input_in_flight_through_a_view(case: Case) -> bool:
    start = case.pick(case.plain())
    given = case.input_of(start)
    view = case.after(start, aten.slice.Tensor, given, 0, 0, 2, like=given)
    again = case.after(view, aten.t.default, view, like=given)
    case.after(again, aten.add_.Tensor, again, 1, like=given)
    return True


@mutation("write-in-flight", alone=True)
def copy_into_an_input_in_flight(case: Case) -> bool:
    start = case.pick(case.plain())
    case.after(start, aten.copy_.default, case.input_of(start), case.nodes[0], like=case.input_of(start))
    return True


@mutation("write-in-flight", alone=True)
def custom_op_writes_an_input_in_flight(case: Case) -> bool:
    start = case.pick(case.starts)
    case.after(start, scribble, case.input_of(start), case.nodes[0])
    return True


@mutation("write-in-flight", alone=True)
def write_a_result_in_flight(case: Case) -> bool:
    start = case.pick(case.plain())
    case.after(start, aten.mul_.Tensor, start, 2, like=start)
    return True


@mutation("write-in-flight", alone=True)
def functionalised_op_writes_an_input_in_flight(case: Case) -> bool:
    start = case.pick(case.plain())
    hop = torch.ops.higher_order.auto_functionalized
    case.after(start, hop, scribble, x=case.input_of(start), y=case.nodes[0])
    return True


@mutation("write-in-flight", alone=True)
def second_functionalised_form_writes_an_input_in_flight(case: Case) -> bool:
    start = case.pick(case.plain())
    hop = torch.ops.higher_order.auto_functionalized_v2
    bases = [case.input_of(start)]
    case.after(start, hop, scribble, _x_base_index=0, y=case.nodes[0], _all_bases=bases)
    return True


@mutation("write-in-flight", alone=True)
def triton_kernel_writes_an_input_in_flight(case: Case) -> bool:
    start = case.pick(case.plain())
    hop = torch.ops.higher_order.triton_kernel_wrapper_mutation
    kernel = {"kernel_idx": 0, "constant_args_idx": 0, "grid": [(1, 1, 1)], "tma_descriptor_metadata": {}}
    case.after(start, hop, **kernel, kwargs={"in_out_ptr": case.input_of(start)})
    return True


@mutation("write-in-flight", alone=True)
def out_variant_writes_an_input_in_flight(case: Case) -> bool:
    start = case.pick(case.plain())
    given = case.input_of(start)
    case.after(start, aten.mm.out, case.nodes[0], case.nodes[1], out=given, like=given)
    return True


@mutation("write-in-flight", alone=True)
def foreach_op_writes_an_input_in_flight(case: Case) -> bool:
    start = case.pick(case.plain())
    case.after(start, aten._foreach_mul_.Scalar, [case.input_of(start)], 2)
    return True


@mutation("write-in-flight", alone=True)
def in_place_collective_on_an_input_in_flight(case: Case) -> bool:
    start = case.pick(case.plain())
    given = case.input_of(start)
    second = case.after(start, c10d.all_reduce_.default, given, "sum", case.groups["row"], like=given)
    case.after(second, WAIT, second, like=given)
    return True


@mutation("write-in-flight", alone=True)
def last_use_of_an_input_in_flight_can_be_done_in_place(case: Case) -> bool:
    """Inductor turns an all-reduce of a dying buffer into one in place; here the buffer is still being gathered."""
    place = case.pick(case.nodes[6:-2])
    given = case.after(place, aten.clone.default, case.nodes[0], like=case.nodes[0])
    first = case.after(given, c10d.broadcast.default, given, 0, case.groups["row"], like=given)
    second = case.after(first, c10d.all_reduce.default, given, "sum", case.groups["column"], like=given)
    done = case.after(second, WAIT, first, like=given)
    case.after(done, WAIT, second, like=given)
    return True


@mutation("write-in-flight", alone=True)
def python_operator_writes_an_input_in_flight(case: Case) -> bool:
    start = case.pick(case.plain())
    given = case.input_of(start)
    case.after(start, operator.iadd, given, 1, like=given)
    return True


@mutation("write-in-flight", alone=True)
def method_writes_an_input_in_flight(case: Case) -> bool:
    start = case.pick(case.plain())
    with case.graph.inserting_after(start):
        case.graph.call_method("zero_", (case.input_of(start),))
    return True


# -- fences, random draws, effects ---------------------------------------------------------------------------


@mutation("fence")
def move_a_start_across_a_fence(case: Case) -> bool:
    pairs = [
        (s, f)
        for s in case.starts
        for f in case.fences
        if case.position[f] < case.position[s] and all(case.position[o] < case.position[f] for o in s.all_input_nodes)
    ]
    pair = case.pick(pairs)
    pair[1].prepend(pair[0])
    return True


@mutation("fence")
def move_a_wait_across_a_fence(case: Case) -> bool:
    pairs = [
        (w, f)
        for w in case.waits
        for f in case.fences
        if case.position[w] < case.position[f] and all(case.position[f] < case.position[u] for u in w.users)
    ]
    pair = case.pick(pairs)
    pair[1].append(pair[0])
    return True


@mutation("fence-order")
def swap_fences(case: Case) -> bool:
    pairs = [
        (a, b)
        for a, b in zip(case.fences, case.fences[1:])
        if all(case.position[o] < case.position[a] for o in b.all_input_nodes)
    ]
    pair = case.pick(pairs)
    pair[0].prepend(pair[1])
    return True


@mutation("side-effect-lost")
def lose_a_fence(case: Case) -> bool:
    fence = case.pick(case.fences)
    fence.replace_all_uses_with(fence.args[0])
    case.graph.erase_node(fence)
    return True


@mutation("rng-order")
def swap_random_draws(case: Case) -> bool:
    pairs = [
        (a, b)
        for a in case.random
        for b in case.random
        if case.position[a] < case.position[b] and all(case.position[o] < case.position[a] for o in b.all_input_nodes)
    ]
    pair = case.pick(pairs)
    pair[0].prepend(pair[1])
    return True


@mutation("rng-lost")
def lose_a_random_draw(case: Case) -> bool:
    draw = case.pick(case.random)
    draw.replace_all_uses_with(draw.args[0])
    case.graph.erase_node(draw)
    return True


@mutation("rng-added")
def draw_twice(case: Case) -> bool:
    draw = case.pick(case.random)
    case.after(draw, draw.target, *draw.args, like=draw)
    return True


@mutation("side-effect-lost")
def lose_the_update_of_an_input(case: Case) -> bool:
    copies = [n for n in case.nodes if n.target is aten.copy_.default and is_placeholder(n.args[0])]
    case.graph.erase_node(case.pick(copies))
    return True


@mutation("side-effect-added")
def write_an_input_of_the_caller(case: Case) -> bool:
    given = case.pick([n for n in case.nodes if is_placeholder(n)])
    with case.graph.inserting_before(case.output):
        node = case.graph.call_function(aten.mul_.Tensor, (given, 2))
    node.meta["val"] = given.meta["val"]
    return True


@mutation("side-effect-lost")
def lose_an_assert(case: Case) -> bool:
    case.graph.erase_node(case.pick(case.asserts))
    return True


@mutation("side-effect-order")
def swap_asserts(case: Case) -> bool:
    pairs = [
        (a, b)
        for a in case.asserts
        for b in case.asserts
        if case.position[a] < case.position[b] and all(case.position[o] < case.position[a] for o in b.all_input_nodes)
    ]
    pair = case.pick(pairs)
    pair[0].prepend(pair[1])
    return True


@mutation("memory-order")
def read_after_the_write_instead_of_before(case: Case) -> bool:
    writers = [n for n in case.nodes if n.target in (aten.copy_.default, aten.mul_.Tensor, scribble)]
    pairs = [
        (reader, writer)
        for writer in writers
        for reader in case.nodes
        if _touches_before(case, reader, writer) and all(case.position[u] > case.position[writer] for u in reader.users)
    ]
    pair = case.pick(pairs)
    pair[1].append(pair[0])
    return True


def _touches_before(case: Case, reader: torch.fx.Node, writer: torch.fx.Node) -> bool:
    """Whether the builder's books say that a compute node reads before what the writer writes after."""
    if case.position[reader] >= case.position[writer] or is_start(reader) or reader.target is WAIT:
        return False
    return any(a.buffer in case.written[writer] for a in case.touched.get(reader, ()))


@mutation("memory-order")
def write_before_the_read_instead_of_after(case: Case) -> bool:
    writers = [n for n in case.nodes if n.target in (aten.copy_.default, aten.mul_.Tensor)]
    pairs = [
        (reader, writer)
        for writer in writers
        for reader in case.nodes
        if all(case.position[o] < case.position[reader] for o in writer.all_input_nodes)
        and _touches_before(case, reader, writer)
    ]
    pair = case.pick(pairs)
    pair[0].prepend(pair[1])
    return True


# -- computation ---------------------------------------------------------------------------------------------


def _compute(case: Case) -> list[torch.fx.Node]:
    return [n for n in case.nodes if n.users and n.target in (aten.mm.default, aten.add.Tensor, aten.relu.default)]


@mutation("compute-lost")
def lose_a_computation(case: Case) -> bool:
    node = case.pick(_compute(case))
    node.replace_all_uses_with(node.args[0])
    case.graph.erase_node(node)
    return True


@mutation("compute-added")
def compute_twice(case: Case) -> bool:
    node = case.pick(_compute(case))
    copy = case.after(node, node.target, *node.args, like=node)
    if case.rng.random() < 0.5:
        next(iter(node.users)).replace_input_with(node, copy)
    return True


@mutation("node-changed")
def change_an_op(case: Case) -> bool:
    node = case.pick([n for n in case.nodes if n.target is aten.mm.default])
    node.target = aten.mul.Tensor
    return True


@mutation("node-changed")
def change_a_constant(case: Case) -> bool:
    node = case.pick([n for n in case.nodes if n.target is aten.mul_.Tensor])
    node.args = (node.args[0], 3)
    return True


@mutation("operand-changed")
def swap_operands(case: Case) -> bool:
    node = case.pick([n for n in case.nodes if n.target is aten.mm.default and n.args[0] is not n.args[1]])
    node.args = (node.args[1], node.args[0])
    return True


@mutation("operand-changed", "node-changed")
def swap_outputs(case: Case) -> bool:
    before = case.output.args[0]
    case.output.args = ((*before[1:], before[0]),)
    return case.output.args[0] != tuple(before)


@mutation("node-changed")
def drop_an_output(case: Case) -> bool:
    case.output.args = (case.output.args[0][:-1],)
    return True


@mutation("signature")
def swap_inputs(case: Case) -> bool:
    first, second = case.rng.sample([n for n in case.nodes if is_placeholder(n)], 2)
    swapped = [second if n is first else first if n is second else n for n in case.nodes]
    for a, b in itertools.pairwise(swapped):
        a.append(b)
    return True


@mutation("metadata-changed")
def change_the_dtype_of_a_value(case: Case) -> bool:
    node = case.pick(_compute(case))
    node.meta = {**node.meta, "val": node.meta["val"].to(torch.float64)}
    return True


# -- certificates --------------------------------------------------------------------------------------------


@mutation("certificate")
def claim_a_merge_that_loses_bytes(case: Case) -> bool:
    start = case.pick([s for s in case.plain() if s.target is c10d.all_reduce.default])
    with case.graph.inserting_before(start):
        small = case.graph.call_function(aten.slice.Tensor, (start.args[0], 0, 0, 1))
        new = case.graph.call_function(start.target, (small, *start.args[1:]))
    small.meta["val"] = new.meta["val"] = start.args[0].meta["val"][:1]
    removed = [start.name]
    for wait in case.waits_of(start):
        wait.args = (new,)
        wait.meta = dict(new.meta)
        removed.append(wait.name)
    case.graph.erase_node(start)
    case.certificates = (
        Certificate("bucket", tuple(removed), (small.name, new.name, *removed[1:]), claim=Claim.MERGE),
    )
    return True


@mutation("certificate")
def claim_a_merge_across_groups(case: Case) -> bool:
    start = case.pick([s for s in case.plain() if case.group(s) != case.groups["world"]])
    others = [case.groups[g] for g in GROUPS[1:] if case.groups[g] != case.group(start)]
    start.args = (*start.args[:-1], case.pick(others))
    case.certificates = (Certificate("bucket", (start.name,), (start.name,), claim=Claim.MERGE),)
    return True


@mutation("certificate")
def claim_to_remove_and_keep(case: Case) -> bool:
    start = case.pick(case.starts)
    case.certificates = (Certificate("R15", (start.name,), (start.name,), claim=Claim.REMOVE),)
    return True


@mutation("collective-lost")
def certify_one_removal_and_do_two(case: Case) -> bool:
    starts = [s for s in case.starts if s.target is c10d.all_reduce.default]
    broadcasts = [s for s in case.starts if s.target is c10d.broadcast.default]
    said, silent = case.pick(starts), case.pick(broadcasts)
    gone = [(start, [*case.waits_of(start), start]) for start in (said, silent)]
    removed = [n.name for n in gone[0][1]]
    pairs = tuple((name, said.args[0].name) for name in removed)
    for start, nodes in gone:
        for node in nodes:
            node.replace_all_uses_with(start.args[0])
            case.graph.erase_node(node)
    case.certificates = (Certificate("R15", tuple(removed), replaced=pairs, claim=Claim.REMOVE),)
    return True
