"""Nodes that compute symbolic sizes, out of the graph's inputs.

A symbolic size in an argument becomes a node: an input that is that size, the size of an input tensor, or sums,
products and quotients of such. So a graph that is planned once is right for every size of its range.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable

import sympy
import torch
import torch.fx

from inductor_passes import _torch

#: How a node is made: target and arguments.
Make = Callable[..., torch.fx.Node]
_MAX_POWER = 8


class Numbers:
    """What the inputs of a graph say about sizes.

    Args:
        nodes: of the graph; inputs are looked for until the first other node.
    """

    def __init__(self, nodes: Iterable[torch.fx.Node]) -> None:
        self._inputs: dict[sympy.Expr, tuple[torch.fx.Node, int | None]] = {}
        for node in nodes:
            if node.op not in ("placeholder", "get_attr"):
                break
            self._note(node)

    def has(self, value: torch.SymInt) -> bool:
        """Whether the size can be computed."""
        return self._made(_torch.size_expression(value), lambda *_: True) is not None

    def make(self, value: torch.SymInt, call: Make) -> torch.fx.Node | int:
        """A node that computes the size.

        Args:
            call: makes a node that calls a function.

        Raises:
            ValueError: it does not follow from the inputs.
        """
        found = self._made(_torch.size_expression(value), call)
        if found is None:
            raise ValueError(f"the size {value} does not follow from the sizes of the graph's inputs")
        return found

    def _note(self, node: torch.fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            # A number itself is read rather than a tensor's size.
            self._inputs[_torch.size_expression(value)] = (node, None)
        elif isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    self._inputs.setdefault(_torch.size_expression(size), (node, dim))

    def _made(self, expr: sympy.Expr, call: Callable[..., object]) -> object | None:
        if expr.is_Integer:
            return int(expr)
        if expr in self._inputs:
            node, dim = self._inputs[expr]
            return node if dim is None else call(torch.ops.aten.sym_size.int, node, dim)
        division = _torch.floor_division(expr)
        if expr.is_Add or expr.is_Mul:
            function = operator.add if expr.is_Add else operator.mul
            operands = expr.args
        elif expr.is_Pow and expr.args[1].is_Integer and 1 < expr.args[1] <= _MAX_POWER:
            function, operands = operator.mul, (expr.args[0],) * int(expr.args[1])
        elif division is not None:
            function, operands = operator.floordiv, division
        else:
            return None
        parts = [self._made(operand, call) for operand in operands]
        if any(part is None for part in parts):
            return None
        return functools.reduce(lambda a, b: call(function, a, b), parts)
