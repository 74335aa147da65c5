"""What one node does: its role, its effects, which memory it writes to, whose memory its results are.

Unknown means fence, as for the passes. An operator that cannot be run without data counts as waiting for data. One that
is not trusted or not known may do anything. One that neither returns nor writes anything has an effect that we do not
see.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from inductor_passes import _torch
from inductor_passes.ir.ops import Role
from inductor_passes.verify.facts import communication, higher_order, roles, running
from inductor_passes.verify.facts.known import Known
from inductor_passes.verify.facts.operators import Part, by_name, nodes_in, operator_of
from inductor_passes.verify.facts.places import LookInside, NodeFacts, Places
from inductor_passes.verify.facts.storages import Place, flat

#: Functional operators that Inductor may turn into their in-place form once the first argument has no later reader.
_REINPLACED = frozenset(
    {
        *("aten::index_put", "aten::_unsafe_index_put"),
        *("_c10d_functional::all_reduce", "_c10d_functional::all_reduce_coalesced"),
    }
)


class Reader(Places):
    """Reads the nodes of one graph in order."""

    def __init__(self, look_inside: LookInside, known: Known | None = None) -> None:
        super().__init__(look_inside, known)
        self._attributes: dict[object, Place] = {}

    def read(self, node: torch.fx.Node) -> NodeFacts:
        """Facts about a node whose operands have been read; its place and its writes are entered."""
        facts = self.facts[node] = self._facts(node)
        self.storages.put(node, facts.place)
        for written in facts.writes:
            self.storages.write(node, written, facts.reshapes)
        return facts

    def _facts(self, node: torch.fx.Node) -> NodeFacts:
        if node.op == "placeholder":
            return self.made(node, Role.INPUT)
        if node.op == "get_attr":
            return NodeFacts(Role.INPUT, place=self._attribute(node))
        if node.op == "output":
            return NodeFacts(Role.OUTPUT)
        if node.op != "call_function":
            return self.unknown(node)
        if _torch.is_op(node.target):
            return self._operator(node)
        name = higher_order.name_of(node)
        return running.facts(self, node, name) if name else self._python_function(node)

    def _attribute(self, node: torch.fx.Node) -> Place:
        held = higher_order.attribute(node)
        if isinstance(held, torch.nn.Module):
            return ()
        key: object = str(node.target)
        if isinstance(held, torch.Tensor) and held.layout is torch.strided:
            key = _torch.storage_identity(held)
        if key not in self._attributes:
            self._attributes[key] = self.storages.new(node, node.meta.get("val", held))
        return self._attributes[key]

    # -- places

    def _place_of(self, value: object) -> Place:
        """Place of an argument."""
        if isinstance(value, (list, tuple)):
            return [self._place_of(v) for v in value]
        return self.storages.place(value) if isinstance(value, torch.fx.Node) else ()

    def _seen(self, node: torch.fx.Node, parts: list[Part], seen: _torch.Observed) -> Place:
        """Where the results of an operator are, as its run showed."""
        value = node.meta.get("val")
        if not parts:
            return self.storages.new(node, value)
        if isinstance(seen.results, frozenset) and not seen.results and isinstance(value, torch.Tensor):
            return self.storages.new(node, value)

        def place(results: Any, own: Any, value: object) -> Place:
            if isinstance(results, tuple):
                fits = isinstance(value, (list, tuple)) and len(value) == len(results)
                values: Any = value if fits else [None] * len(results)
                return [place(r, o, v) for r, o, v in zip(results, own, values)]
            if results is None:
                return ()
            places = [self.storages.place(parts[i].node, parts[i].path) for i in sorted(results)]
            shared = tuple(dict.fromkeys(block for one in places for block in flat(one)))
            if shared and not own:
                return shared
            size = _torch.storage_bytes(value) if isinstance(value, torch.Tensor) else None
            return (*shared, *self.storages.block(node, size))

        return place(seen.results, seen.own, value)

    # -- operators

    def _operator(self, node: torch.fx.Node) -> NodeFacts:
        name = operator_of(node.target).name
        form = communication.form_of(name)
        if form is not None or not name.startswith(communication.NAMESPACE):
            facts = self._called(node) if form is None else self._start(node, form)
            if name in _REINPLACED:
                facts.reinplaced = tuple(nodes_in(_first(node)))
            return facts
        if communication.is_wait(name):
            return NodeFacts(Role.WAIT, place=self._place_of(_first(node)))
        if communication.is_transfer(name):
            return self._transfer(node, communication.received(name, by_name(node.target, node.args, node.kwargs)))
        return self._called(node)

    def _called(self, node: torch.fx.Node) -> NodeFacts:
        """Facts about a call to an operator that is no collective."""
        what = operator_of(node.target)
        signature, parts = self.known.call(node, self.values)
        seen = signature.observed
        if seen is None:
            return self._unseen(node, signature.draws)
        writes = tuple(dict.fromkeys([parts[i].node for i in signature.written]))
        place = self._seen(node, parts, seen)
        if seen.rebound:
            sources = [parts[i].node for i in sorted(seen.rebound)]
            self.storages.join(sources)
            place = self.union(sources)
        # Nobody would call what returns and writes nothing but for something that we do not see.
        hidden = not what.checks and not writes and not what.returns
        if hidden and what.trusted:
            writes = self.given(node)
        if hidden or seen.rebound or not what.trusted or roles.leaves_the_device(node, self.values):
            role = Role.FENCE
        elif what.checks or writes or signature.draws or (not signature.view and any(True for _ in flat(place))):
            role = Role.COMPUTE
        else:
            role = Role.FREE
        channel = "fence" if role is Role.FENCE else "assert" if what.checks else ""
        if signature.draws:
            channel = "random"
        return NodeFacts(
            role, channel, place, writes, copies=seen.copies, reshapes=seen.reshaped, certain=signature.certain
        )

    def _unseen(self, node: torch.fx.Node, draws: bool) -> NodeFacts:
        """An operator that cannot be run: it may return any of its operands, and writes what it says."""
        arguments = by_name(node.target, node.args, node.kwargs)
        declared = sorted(_torch.declared_writes(node.target))
        writes = tuple(dict.fromkeys(n for name in declared for n in nodes_in(arguments.get(name))))
        channel = "random" if draws else "fence"
        return self.made(node, Role.FENCE, channel, shared=self.given(node), writes=writes)

    def _start(self, node: torch.fx.Node, form: communication.Form) -> NodeFacts:
        if not form.in_place and not form.out:
            return self.made(node, Role.START)
        written = _first(node) if form.in_place else by_name(node.target, node.args, node.kwargs).get("out")
        return NodeFacts(Role.START, "", self._place_of(written), tuple(dict.fromkeys(nodes_in(written))))

    def _transfer(self, node: torch.fx.Node, buffers: list[torch.fx.Node | None]) -> NodeFacts:
        value = node.meta.get("val")
        several = isinstance(value, (list, tuple))
        values: Any = value if several else [value] * len(buffers)
        places: list[Place] = [
            self.storages.new(node, one) if buffer is None else self.storages.place(buffer)
            for buffer, one in zip(buffers, values)
        ]
        place = places if several else places[0] if places else ()
        return NodeFacts(Role.FENCE, "fence", place, tuple(dict.fromkeys(b for b in buffers if b is not None)))

    # -- Python functions

    def _python_function(self, node: torch.fx.Node) -> NodeFacts:
        target: Any = node.target
        if target is operator.getitem and len(node.args) == 2 and isinstance(node.args[0], torch.fx.Node):
            source, index = node.args
            if not isinstance(source.meta.get("val"), torch.Tensor):
                place = self.storages.place(source, (index,))
                return NodeFacts(Role.FREE, place=place or self.storages.new(node, node.meta.get("val")))
        given = self.given(node)
        if not given and roles.only_calculates(target):
            return NodeFacts(Role.FREE)
        facts = self.unknown(node)
        if str(getattr(target, "__module__", "")) in ("_operator", "operator"):
            # iadd, imul ... and setitem write; what has no in-place name does not
            name = str(getattr(target, "__name__", ""))
            plain = name in ("index", "inv", "invert", "is_", "is_not")
            in_place = name == "setitem" or (name.startswith("i") and hasattr(operator, f"__{name}__") and not plain)
            facts.writes = tuple(n for n in nodes_in(node.args[:1]) if n in given) if in_place else ()
        return facts


def _first(node: torch.fx.Node) -> object:
    """The first argument of an operator."""
    if node.args:
        return node.args[0]
    return node.kwargs.get(operator_of(node.target).arguments[0]) if node.kwargs else None
