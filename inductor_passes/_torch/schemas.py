"""What an operator's schema says about memory: which arguments it writes to, which of them a result may be.

torch's objects for a schema leave out the alias sets of lists (``Tensor(a)[]``, ``Tensor(a!)[]``); its text has them.
Some operators alias or write without a word in their schema. They are listed here, and a test holds the list against
what the operators do.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: ``a``, ``a|b``, ``a!``, ``a -> *``, ``a! -> a|b``, ``*``; ``a2!`` where torch made the schema from a Python function.
_SET = r"(?:\*|[a-z]\d*(?:\|[a-z]\d*)*)"
_ANNOTATION = re.compile(rf"\(({_SET})(!)?(?: -> ({_SET}))?\)")

#: Operators whose results are memory of these arguments, against their schema.
_SILENT_VIEWS: dict[str, tuple[str, ...]] = {
    "aten::_unsafe_view": ("self",),
    "aten::unsafe_split": ("self",),
    "aten::unsafe_split_with_sizes": ("self",),
    "aten::unsafe_chunk": ("self",),
    "aten::lift": ("self",),
    "aten::data": ("self",),
    "aten::_remove_batch_dim": ("self",),
    "aten::atleast_1d": ("self", "tensors"),
    "aten::atleast_2d": ("self", "tensors"),
    "aten::atleast_3d": ("self", "tensors"),
    "aten::broadcast_tensors": ("tensors",),
    "aten::meshgrid": ("tensors",),
    "aten::set": ("source",),
    "aten::set_": ("source",),
    "inductor::_alloc_from_pool": ("self",),
    "inductor::_reinterpret_tensor": ("self",),
}
#: Operators whose results may be memory of these arguments, or a copy, against their schema.
_SILENT_ALIASES: dict[str, tuple[str, ...]] = {
    "aten::_functional_assert_async": ("dep_token",),
    "aten::_functional_sym_constrain_range": ("dep_token",),
    "aten::_functional_sym_constrain_range_for_size": ("dep_token",),
    "aten::dropout": ("input",),
    "aten::native_dropout": ("input",),
    "aten::alpha_dropout": ("input",),
    "aten::feature_dropout": ("input",),
    "aten::feature_alpha_dropout": ("input",),
    "aten::channel_shuffle": ("self",),
    "aten::native_channel_shuffle": ("self",),
    "aten::conj_physical": ("self",),
    "aten::sum_to_size": ("self",),
    "aten::to_dense": ("self",),
    "aten::to_dense_backward": ("grad",),
    "aten::to_mkldnn_backward": ("grad",),
    "aten::type_as": ("self",),
    "aten::_cudnn_rnn": ("weight_buf",),
    "inductor::accumulate_grad_": ("variable_grad", "new_grad"),
    "aten::_test_parallel_materialize": ("self",),
    "aten::_test_string_default": ("dummy",),
    **{f"aten::_cast_{k}": ("self",) for k in ("Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")},
}
#: Operators that write to these arguments, against their schema.
_SILENT_WRITES: dict[str, tuple[str, ...]] = {
    "inductor::resize_storage_bytes_": ("variable",),
    "inductor::accumulate_grad_": ("variable_grad",),
    **{
        f"aten::{name}": ("running_mean", "running_var")
        for name in (
            *("batch_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
            *("_batch_norm_impl_index", "instance_norm"),
        )
    },
}


@dataclass(frozen=True)
class MemoryUse:
    """What a call to an operator overload does to memory, by schema and the lists above.

    Attributes:
        written: names of the arguments that it writes to.
        results: per return the names of the arguments whose memory it may be; for a return that is a list, that each of
            its elements may be.
        views: every result is such memory, and nothing is written to. (Some copy after all: ``ir.memory.MAY_COPY``.)
    """

    written: tuple[str, ...]
    results: tuple[tuple[str, ...], ...]
    views: bool

    @property
    def aliased(self) -> tuple[str, ...]:
        """Names of the arguments that some result may share memory with."""
        return tuple(dict.fromkeys(name for names in self.results for name in names))


@functools.cache
def memory_use(target: Any) -> MemoryUse | None:
    """The :class:`MemoryUse` of an operator overload; None when its schema does not say (``prim::Print(...)``)."""
    schema = target._schema
    names = [argument.name for argument in schema.arguments]
    try:
        arguments, returns = (_split(part) for part in _sides(str(schema)))
    except ValueError:
        return None
    # A lone ``*`` separates arguments by keyword.
    sets = [_alias_set(text) for text in arguments if text != "*"]
    if len(sets) != len(names) or len(returns) != len(schema.returns) or "..." in (*arguments, *returns):
        return None
    written = {name for name, (_, writes) in zip(names, sets) if writes}
    written.update(_SILENT_WRITES.get(schema.name, ()))
    sometimes = _SILENT_ALIASES.get(schema.name, ())
    silent = (*sometimes, *_SILENT_VIEWS.get(schema.name, ()))
    results = []
    for text in returns:
        letters, _ = _alias_set(text)
        declared = {name for name, (own, _) in zip(names, sets) if own & letters}
        results.append(tuple(name for name in names if name in declared or name in silent))
    views = not written and not sometimes and bool(results) and all(results)
    return MemoryUse(tuple(name for name in names if name in written), tuple(results), views)


def mutated_argument_names(target: Any) -> tuple[str, ...]:
    """Names of the arguments that an operator overload writes to, all of them when its schema does not say."""
    use = memory_use(target)
    return tuple(a.name for a in target._schema.arguments) if use is None else use.written


def _alias_set(text: str) -> tuple[set[str], bool]:
    """(letters of a type's alias sets, before and after; whether the call writes to it)."""
    letters: set[str] = set()
    writes = False
    for before, mark, after in _ANNOTATION.findall(_type(text)):
        letters.update(before.split("|"), after.split("|") if after else ())
        writes = writes or bool(mark)
    return letters, writes


def _type(text: str) -> str:
    """The type of ``type name=default``."""
    # No type holds quotes or an equals sign, so that nothing of a default is taken for an annotation.
    return re.split(r"[='\"]", text, maxsplit=1)[0]


def _sides(text: str) -> tuple[str, str]:
    """What stands between the parentheses of ``name(arguments) -> returns``, and the returns."""
    head = text.index("(")
    end = _closing(text, head)
    returns = text[end + 1 :].partition("->")[2].strip()
    if returns.startswith("(") and _closing(returns, 0) == len(returns) - 1:
        returns = returns[1:-1]
    return text[head + 1 : end], returns


def _closing(text: str, opening: int) -> int:
    """Position of the parenthesis that closes the one at ``opening``.

    Raises:
        ValueError: there is none.
    """
    for position, depth in _depths(text, opening):
        if depth == 0 and text[position] in ")]":
            return position
    raise ValueError(f"the schema text {text!r} has unbalanced parentheses")


def _split(text: str) -> list[str]:
    """Parts between commas that are in no parentheses, brackets or quotes."""
    commas = [position for position, depth in _depths(text, 0) if depth == 0 and text[position] == ","]
    parts = [text[a:b].strip() for a, b in zip([0, *(c + 1 for c in commas)], [*commas, len(text)])]
    return [part for part in parts if part]


def _depths(text: str, begin: int) -> Iterator[tuple[int, int]]:
    """(position, depth of parentheses behind it) of every character from ``begin`` on that is not quoted."""
    depth, quote, escaped = 0, "", False
    for position in range(begin, len(text)):
        character = text[position]
        if quote:
            if not escaped and character == quote:
                quote = ""
            escaped = not escaped and character == "\\"
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "([") - (character in ")]")
            yield position, depth
