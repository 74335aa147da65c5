"""What was found out about single nodes, for the next look at the same graph.

A graph is looked at several times while it is compiled, and each pass changes a few of its nodes. What is kept about a
node depends on nothing but its own operator and arguments and on the values of its operands. It is used while these are
the very objects that they were (torch.fx never changes arguments in place) and while fake tensors have the dtype, sizes
and strides that they had. Whatever depends on other nodes or on their order is found out anew: places in memory,
writers, waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.fx

from inductor_passes.verify.facts import operators
from inductor_passes.verify.facts.operators import Part, Signature, Value, Values


class Words(NamedTuple):
    """Arguments and value of a node as text.

    Attributes:
        target: what it calls.
        operands: nodes among the arguments, in order, repeated as often as they occur.
        literals: everything else among the arguments.
        value: dtypes, shapes and devices of the result.
    """

    target: str
    operands: tuple[torch.fx.Node, ...]
    literals: str
    value: str


class _Call(NamedTuple):
    node: tuple[object, object, object]
    operands: tuple[tuple[torch.fx.Node, Value], ...]
    signature: Signature
    parts: list[Part]


class _Said(NamedTuple):
    node: tuple[object, object, object]
    value: Value
    words: Words


class Known:
    """Facts about single nodes; to be handed to the looks at one graph, and dropped when it is compiled."""

    def __init__(self) -> None:
        self._values: dict[torch.fx.Node, Value] = {}
        self._calls: dict[torch.fx.Node, _Call] = {}
        self._said: dict[torch.fx.Node, _Said] = {}

    def values(self) -> Values:
        """Values for one look."""
        return Values(self._values)

    def call(self, node: torch.fx.Node, values: Values) -> tuple[Signature, list[Part]]:
        """See :func:`operators.call`."""
        known = self._calls.get(node)
        if known is not None and _is(known.node, node):
            for operand, value in known.operands:
                if values.of(operand) is not value:
                    break
            else:
                return known.signature, known.parts
        signature, parts = operators.call(node.target, node.args, node.kwargs, values)
        operands = tuple((n, values.of(n)) for n in node.all_input_nodes)
        self._calls[node] = _Call((node.target, node.args, node.kwargs), operands, signature, parts)
        return signature, parts

    def words(self, node: torch.fx.Node, values: Values, make: Callable[[], tuple[Words, bool]]) -> Words:
        """Arguments and value of a node as text.

        Args:
            make: the words, and whether they stay as they are for as long as the arguments do.
        """
        if node.op != "call_function":
            return make()[0]
        known, value = self._said.get(node), values.of(node)
        if known is not None and known.value is value and _is(known.node, node):
            return known.words
        words, lasting = make()
        if lasting and value.lasting:
            self._said[node] = _Said((node.target, node.args, node.kwargs), value, words)
        return words


def _is(known: tuple[Any, Any, Any], node: torch.fx.Node) -> bool:
    """Whether a node calls what it called, with the very arguments."""
    target, args, kwargs = known
    return target is node.target and args is node.args and kwargs is node.kwargs
