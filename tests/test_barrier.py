"""Nothing of ours fails a compilation: every function that runs behind a hook of ours raises once.

The functions are those that a compilation enters, found by watching it; no list names them. What may raise is named
below, with the reason.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx

import inductor_passes
from inductor_passes.config import PassConfig
from inductor_passes.engine import pipeline
from inductor_passes.engine.hooks import GraphPass
from inductor_passes.schedule import local_search
from inductor_passes.schedule import plan as planner
from inductor_passes.trace.collector import collect
from tests.support.async_tp_programs import run_ranks
from tests.support.bucket_graphs import assert_same_bits
from tests.support.graphs import GraphBuilder, aten, c10d
from tests.support.world import fake_world

PACKAGE = str(Path(inductor_passes.__file__).parent)
Function = tuple[str, int, str]
#: Outside of the barrier: the hooks themselves, and the barrier.
OUTSIDE = {
    "GraphPass.__call__": "the hook that Inductor calls",
    "unharmed": "the barrier",
    "guarded": "the barrier",
}


#: Code that is no function: it raises where its owner does.
PIECES = {"<module>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}


class Injected(RuntimeError):
    """Raised in the place of a function of ours."""


def _key(code: types.CodeType) -> Function:
    return code.co_filename, code.co_firstlineno, code.co_qualname if hasattr(code, "co_qualname") else code.co_name


def functions_of(call: Callable[[], Any]) -> list[Function]:
    """Functions of ours that a call enters, in order of the first time."""
    found: dict[Function, None] = {}

    def watch(frame: types.FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name not in PIECES:
            found.setdefault(_key(code))

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(found)


def objects_of(victims: Collection[Function]) -> dict[Function, list[types.FunctionType]]:
    """The function objects behind keys."""
    found: dict[Function, list[types.FunctionType]] = {victim: [] for victim in victims}
    for one in gc.get_objects():
        if isinstance(one, types.FunctionType) and (key := _key(one.__code__)) in found:
            found[key].append(one)
    return found


def broken(call: Callable[[], Any], victim: Function, functions: Sequence[types.FunctionType]) -> bool:
    """Make a call during which a function raises the first time that it is entered; whether it was entered.

    Its code is replaced; a function that its owner makes anew at every call has to be watched for, which is slower.
    """
    if not functions or "<locals>" in victim[2]:
        return _broken_by_watching(call, victim)
    original, hit = functions[0].__code__, False

    def restore() -> None:
        for function in functions:
            function.__code__ = original

    def fail() -> None:
        nonlocal hit
        hit = True
        restore()
        raise Injected(victim[2])

    for function in functions:
        function.__code__ = _calling(fail, original)
    try:
        call()
    finally:
        restore()
    return hit


def _calling(fail: Callable[[], None], original: types.CodeType) -> types.CodeType:
    """Code that takes any arguments and calls ``fail``, to stand in for ``original``."""

    def stub(*args: Any, **kwargs: Any) -> Any:
        return "fail".__call__()  # type: ignore[attr-defined]

    code = stub.__code__
    constants = tuple(fail if one == "fail" else one for one in code.co_consts)
    return code.replace(co_consts=constants, co_freevars=original.co_freevars)


def _broken_by_watching(call: Callable[[], Any], victim: Function) -> bool:
    """:func:`broken` for a function that is made anew whenever its owner runs. Slower: it looks at every call."""
    hit = False

    def watch(frame: types.FrameType, event: str, _: Any) -> None:
        nonlocal hit
        if event == "call" and not hit and _key(frame.f_code) == victim:
            hit = True
            sys.setprofile(None)
            raise Injected(victim[2])

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return hit


def layers(group: str, ranks: int) -> torch.fx.GraphModule:
    """Gathers to merge, one twice, a cast that can move, a gradient to reduce."""
    b = GraphBuilder(source="model.py")
    x = b.placeholder("x", 8, 8)
    shards = [b.placeholder(f"w{i}", 8 // ranks, 8) for i in range(3)]

    def gathered(shard: torch.fx.Node) -> torch.fx.Node:
        return b.call(c10d.wait_tensor.default, b.call(c10d.all_gather_into_tensor.default, shard, ranks, group))

    for shard in (*shards, shards[0]):
        x = b.call(aten.relu.default, b.call(aten.mm.default, x, gathered(shard)))
    cast = b.call(torch.ops.prims.convert_element_type.default, gathered(shards[1]), torch.bfloat16)
    start = b.call(c10d.reduce_scatter_tensor.default, x, "sum", ranks, group)
    b.graph.output((b.call(c10d.wait_tensor.default, start), cast))
    return torch.fx.GraphModule(torch.nn.Module(), b.graph)


OFF = {"redistribute": "off", "bucket": "off", "schedule": "off"}
#: Each one for the functions that those before it do not enter; the cheap ones first. The number is of
#: ``ALTERNATIVES_NODES``: whether other combinations of passes are tried.
SETTINGS = (
    (PassConfig(**OFF), 0),
    (PassConfig(**{**OFF, "redistribute": "reassociate"}), 0),
    (PassConfig(**{**OFF, "schedule": "on"}), 0),
    (PassConfig(**{**OFF, "schedule": "on", "bucket": "on"}), 0),
    (PassConfig(redistribute="reassociate", rank_check="warn"), 0),
    (PassConfig(**{**OFF, "async_tp": "force"}), 0),
    (PassConfig(redistribute="reassociate", rank_check="warn"), 800),
)


@pytest.fixture(autouse=True)
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a better order is looked for changes no way that an error can take."""
    monkeypatch.setattr(planner, "_STATES", 1)
    monkeypatch.setattr(planner, "_STATES_PER_TASK", 1)
    monkeypatch.setattr(local_search, "WHOLE_WIDTH", 10)


def planned(
    gm: torch.fx.GraphModule, settings: PassConfig, watched: Callable[[Callable[[], Any]], Any]
) -> tuple[torch.fx.GraphModule, Any]:
    """A planned copy, and what ``watched`` returns for the call that Inductor would make."""
    copy = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    output = copy.graph.graph_copy(gm.graph, {})
    copy.graph.output(output)
    hook = GraphPass(settings)
    with collect():
        seen = watched(lambda: hook(copy.graph, True))
    return copy, seen


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _is_outside(victim: Function) -> bool:
    return victim[2].partition(".<locals>")[0] in OUTSIDE


def test_whatever_fails_while_a_graph_is_planned_the_graph_is_right(
    quiet: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: set[Function] = set()
    raised, wrong, missed = [], [], 0
    with fake_world(2) as group:
        gm = layers(group, 2)
        inputs = [[torch.randn(n.meta["val"].shape) for n in gm.graph.nodes if n.op == "placeholder"] for _ in range(2)]
        gm.recompile()
        expected = run_ranks(gm, inputs)
        right = {str(gm.graph)}
        for settings, alternatives in SETTINGS:
            monkeypatch.setattr(pipeline, "ALTERNATIVES_NODES", alternatives)
            _, entered = planned(gm, settings, functions_of)
            victims = objects_of([f for f in entered if f not in done and not _is_outside(f)])
            for victim, functions in victims.items():
                done.add(victim)
                try:
                    found, hit = planned(gm, settings, functools.partial(broken, victim=victim, functions=functions))
                except Exception as error:
                    raised.append(f"{victim[2]} ({victim[0]}:{victim[1]}): {type(error).__name__}: {error}")
                    continue
                missed += not hit
                if str(found.graph) in right:
                    continue
                found.graph.lint()
                found.recompile()
                try:
                    assert_same_bits(expected, run_ranks(found, inputs))
                    right.add(str(found.graph))
                except AssertionError:
                    wrong.append(victim[2])
    assert not raised and not wrong, "\n".join([*raised, "wrong:", *wrong])
    assert len(done) > 800
    assert missed < len(done) / 10, "caches may spare a function its second call, not many"
