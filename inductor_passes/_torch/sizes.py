"""Fake tensors: their sizes, symbolic ones by their hints or for their whole range, and calls on them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import sympy
import torch
import torch.fx

#: Values at the lower end of a range that are looked at one by one.
_RULED_OUT = 8


def size_hint(value: object) -> int | None:
    """An int for an int or symbolic int, by its hint; None when it has none."""
    if isinstance(value, int):
        return value
    if isinstance(value, torch.SymInt):
        node = value.node
        hint = getattr(node, "hint", None) if getattr(node, "has_hint", lambda: False)() else None
        if hint is None:
            hint = _shape_env_hint(value)
        return None if hint is None else int(hint)
    return None


def _shape_env_hint(value: torch.SymInt) -> int | None:
    shape_env = getattr(value.node, "shape_env", None)
    if shape_env is None:
        return None
    try:
        # torch 2.13 renamed it and warns of the old name.
        ask = getattr(shape_env, "guarding_hint_or_throw", None) or shape_env.size_hint
        return int(ask(value.node.expr))
    except Exception:  # a symbol without a hint raises one of several private error types
        return None


def storage_bytes(tensor: torch.Tensor) -> int | None:
    """Bytes of a (fake) tensor's storage, by hint; None when a symbolic size has no hint."""
    return size_hint(tensor.untyped_storage().nbytes())


def storage_identity(tensor: torch.Tensor) -> int:
    """A number that tensors of the same storage share, for as long as one of them lives."""
    return int(tensor.untyped_storage()._cdata)


def tensor_bytes(tensor: torch.Tensor) -> int | None:
    """Bytes of a (fake) tensor's elements, by hint; None when a symbolic size has no hint."""
    total = tensor.element_size()
    for dim in tensor.shape:
        hint = size_hint(dim)
        if hint is None:
            return None
        total *= hint
    return total


def elements(tensor: torch.Tensor) -> int | None:
    """How many elements a (fake) tensor has, by hint; None when a symbolic size has no hint."""
    total = tensor_bytes(tensor)
    return None if total is None else total // tensor.element_size()


def size_symbols(value: object) -> frozenset[sympy.Symbol]:
    """The symbols in a symbolic number (size, float or bool); none in any other value."""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    # Of a tensor it would be those of its sizes and strides.
    return frozenset(free_symbols(value) if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else ())


def determined_symbol(size: int | torch.SymInt) -> sympy.Symbol | None:
    """The symbol whose value follows from a size: the only one in it, which it grows with; None otherwise.

    ``2 * ((s + 1) // 2)``, a padded size, is equal for several ``s``.
    """
    symbols = size_symbols(size)
    if len(symbols) != 1 or not isinstance(size, torch.SymInt):
        return None
    (symbol,) = symbols
    expr = size_expression(size)
    if not expr.is_polynomial(symbol) or not expr.has(symbol):
        return None
    return symbol if all(c > 0 for c in sympy.Poly(expr, symbol).coeffs()) else None


def is_known(condition: bool | torch.SymBool) -> bool:
    """Whether a condition holds for every size of the range; no guard is made, and no hint can make it true."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(condition))


def same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes are equal for the whole range; no guard is made."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return is_known(a == b) or _in_multiples(a - b) == 0


def is_multiple(size: int | torch.SymInt, of: int) -> bool:
    """Whether a size is a multiple of a number for the whole range; no guard is made."""
    if isinstance(size, int):
        return size % of == 0
    return is_known(size % of == 0) or _in_multiples(size % of) == 0


def _in_multiples(size: torch.SymInt) -> sympy.Expr:
    """The expression of a size in which every symbol stands for what it is known to be a multiple of.

    ``2 * (s // 2) - s`` with an even ``s`` is 0: torch itself does not see that.
    """
    expr = size_expression(size)
    put = {}
    for symbol in expr.free_symbols:
        period = divisor_of(size, symbol)
        if period > 1:
            put[symbol] = period * sympy.Symbol(f"{symbol}_{period}", integer=True, positive=True)
    return sympy.expand(expr.subs(put)) if put else sympy.expand(expr)


def same_sizes(a: Sequence[int | torch.SymInt], b: Sequence[int | torch.SymInt]) -> bool:
    """:func:`same_size` of every pair."""
    return len(a) == len(b) and all(map(same_size, a, b))


def is_dense_in(tensor: torch.Tensor, order: Sequence[int]) -> bool:
    """Whether a tensor fills a block of memory for every size, dimensions from the slowest to the fastest; no guard."""
    expected: int | torch.SymInt = 1
    for dim in reversed(order):
        size, stride = tensor.shape[dim], tensor.stride(dim)
        if not same_size(size, 1) and not same_size(stride, expected):
            return False
        expected = size * expected
    return True


def is_symbolic(tensor: torch.Tensor) -> bool:
    """Whether any size, stride or offset of a tensor is symbolic."""
    return any(isinstance(v, torch.SymInt) for v in (*tensor.shape, *tensor.stride(), tensor.storage_offset()))


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Whether a tensor is contiguous for every size of the range; no guard is made."""
    return is_dense_in(tensor, range(tensor.dim())) if is_symbolic(tensor) else tensor.is_contiguous()


def size_expression(value: torch.SymInt) -> sympy.Expr:
    """The expression of a symbolic size, as far as its shape environment simplifies it."""
    node = value.node
    expr = node.expr
    env = getattr(node, "shape_env", None)
    return expr if env is None else env.simplify(expr)


def size_key(value: int | torch.SymInt) -> Hashable:
    """What a size is known by in a table: sizes with one key are equal."""
    return value if isinstance(value, int) else size_expression(value)


def floor_division(expr: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr] | None:
    """(dividend, divisor) of an integer division that rounds down; None for any other expression."""
    from torch.utils._sympy.functions import FloorDiv

    return (expr.args[0], expr.args[1]) if isinstance(expr, FloorDiv) else None


def size_range(value: torch.SymInt, expr: sympy.Expr) -> tuple[int | None, int | None]:
    """Least and greatest value of an expression of the symbols of ``value``; None where it has no bound."""
    env = getattr(value.node, "shape_env", None)
    if env is None:
        return None, None
    bounds = env.bound_sympy(expr)
    return _finite(bounds.lower), _finite(bounds.upper)


def symbol_range(value: torch.SymInt, symbol: sympy.Symbol) -> tuple[int | None, int | None, int]:
    """Least and greatest value of a symbol of ``value``, and what divides it; guards of the graph hold.

    Torch makes guards such as ``s // 2 != 1``: the least values that a guard rules out are left out.
    """
    low, high = size_range(value, symbol)
    period = divisor_of(value, symbol)
    env = getattr(value.node, "shape_env", None)
    if low is None or env is None:
        return low, high, period
    low = -(-low // period) * period
    alone = [guard for guard in _guards(env) if guard.free_symbols == {symbol}]
    for _ in range(_RULED_OUT):
        if not any(guard.subs(symbol, low) == sympy.false for guard in alone):
            break
        low += period
    return low, high if high is None else high // period * period, period


def symbol_source(size: torch.SymInt) -> str:
    """What a symbol is in the program, e.g. ``L['x'].size()[0]``; "" where torch does not say, or for an expression.

    The name of the symbol itself may be another one when the function is compiled again.
    """
    env, expr = getattr(size.node, "shape_env", None), size_expression(size)
    sources = getattr(env, "var_to_sources", {}).get(expr) or ()
    for source in sources:
        # A method up to torch 2.11, a property since.
        return str(source.name() if callable(source.name) else source.name)
    return ""


def has_declared_bounds() -> bool:
    """Whether the program declares bounds of a size of what is compiled (``mark_dynamic(x, 0, min=1, max=64)``).

    Torch wants one graph for all sizes within them: a guard that rules out some of these is an error to it.
    """
    from torch._guards import TracingContext
    from torch.fx.experimental.symbolic_shapes import StrictMinMaxConstraint

    context = TracingContext.try_get()
    kinds = () if context is None else tuple(getattr(context, "tensor_to_context", {}).values())
    constraints = (c for kind in kinds for c in getattr(kind, "constraint_sizes", None) or ())
    return any(isinstance(c, StrictMinMaxConstraint) for c in constraints)


def keep_within(size: torch.SymInt, low: int, high: int, multiple: int) -> None:
    """Guard that a size is from ``low`` to ``high`` and a multiple of a number. Its hint must be."""
    if not (bool(size >= low) and bool(size <= high) and bool(size % multiple == 0)):
        raise ValueError(f"the example {size_hint(size)} is no multiple of {multiple} from {low} to {high}")


def keep_without(bounds: Sequence[tuple[torch.SymInt, int, int, int]]) -> None:
    """Guard that some of these sizes are not from a low to a high number, or no multiples. One hint must be none."""
    outside: Any = False
    for size, low, high, multiple in bounds:
        outside = (size < low) | (size > high) | (size % multiple != 0) | outside
    if not bool(outside):
        raise ValueError("the examples are within what is ruled out")


def shape_env_of(size: torch.SymInt) -> object:
    """The shape environment that a symbol belongs to; one per compilation."""
    return size.node.shape_env


def _finite(bound: object) -> int | None:
    return int(bound) if isinstance(bound, (int, sympy.Integer)) else None


def divisor_of(value: torch.SymInt, symbol: sympy.Symbol) -> int:
    """The largest number that is known to divide a symbol of ``value`` for the whole range; 1 when none is."""
    from torch.utils._sympy.functions import Mod

    env = getattr(value.node, "shape_env", None)
    if env is None:
        return 1
    remainders = {*env.divisible, *_zero_remainders(_guards(env))}
    found = 1
    for one in remainders:
        if isinstance(one, Mod) and one.args[0].free_symbols == {symbol} and one.args[1].is_Integer:
            found = math.lcm(found, _divides(one.args[0], symbol, int(one.args[1])))
    return found


def _guards(env: Any) -> list[sympy.Basic]:
    """What every call of the compiled code is checked for."""
    return [guard.expr for guard in env.guards]


def _zero_remainders(guards: Iterable[sympy.Basic]) -> Iterable[sympy.Expr]:
    for guard in guards:
        if isinstance(guard, sympy.Eq) and 0 in guard.args:
            yield next((side for side in guard.args if side != 0), guard)


def _divides(base: sympy.Expr, symbol: sympy.Symbol, divisor: int) -> int:
    """What divides a symbol when ``divisor`` divides ``factor * symbol + rest``."""
    factor, rest = base.coeff(symbol), base.subs(symbol, 0)
    if not (factor.is_Integer and rest.is_Integer) or base != factor * symbol + rest or int(rest) % divisor:
        return 1
    return divisor // math.gcd(divisor, int(factor))


def is_fake(tensor: object) -> bool:
    """Whether something is a tensor without data, as a compiler traces with."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def fake_mode_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """The fake tensor mode that made ``tensor``.

    Raises:
        TypeError: it is no fake tensor.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    if not isinstance(tensor, FakeTensor):
        raise TypeError(f"expected a fake tensor, got {type(tensor).__name__}")
    return tensor.fake_mode


@contextlib.contextmanager
def without_guards(tensor: torch.Tensor) -> Iterator[None]:
    """Fake tensors are computed without making guards: what torch asks about sizes meanwhile counts at their hints.

    Only for values whose shapes are given by expressions, in graphs that are proven for the whole range afterwards.
    """
    mode = fake_mode_of(tensor)
    env = getattr(mode, "shape_env", None)
    with mode, contextlib.nullcontext() if env is None else env.suppress_guards():
        yield


def example_result(node: torch.fx.Node) -> Any:
    """What a call gives for the example values of its inputs."""
    from torch._guards import detect_fake_mode

    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    mode = detect_fake_mode([n.meta["val"] for n in node.graph.nodes if "val" in n.meta])
    with mode or contextlib.nullcontext():
        return node.target(*args, **kwargs)  # type: ignore[operator]
