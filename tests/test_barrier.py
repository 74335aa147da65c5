"""Nothing of ours fails a compilation: every function that runs behind a hook of ours raises once.

The functions are those that a compilation enters, found by watching it; no list names them. What may raise is named
below, with the reason.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx
from torch._inductor.utils import IndentedBuffer
from torch._inductor.virtualized import V
from torch.distributed._functional_collectives import all_gather_tensor

import inductor_passes
from inductor_passes import verify
from inductor_passes.config import PassConfig
from inductor_passes.engine import pipeline
from inductor_passes.engine.graph import META_KEY
from inductor_passes.engine.hooks import GraphPass, SchedulerHook
from inductor_passes.schedule import local_search
from inductor_passes.schedule import plan as planner
from inductor_passes.trace.collector import collect
from tests.support.async_tp_programs import run_ranks
from tests.support.bucket_graphs import assert_same_bits
from tests.support.compiled import without_kernels
from tests.support.graphs import GraphBuilder, aten, c10d
from tests.support.world import fake_world

PACKAGE = str(Path(inductor_passes.__file__).parent)
Function = tuple[str, int, str]
#: Outside of the barrier: the hooks themselves, and the barrier.
OUTSIDE = {
    "GraphPass.__call__": "the hook that Inductor calls",
    "SchedulerHook.__call__": "the hook that Inductor calls",
    "when_generated.<locals>._Witness.codegen": "the line that Inductor generates",
    "_watch.<locals>.generated": "what it calls, a row of guarded steps",
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
        # Not isinstance: it asks a weak proxy for its class, and what that stood for may be gone.
        if type(one) is types.FunctionType and (key := _key(one.__code__)) in found:
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

    def lazy(*args: Any, **kwargs: Any) -> Any:
        yield "fail".__call__()  # type: ignore[attr-defined]

    code = (lazy if original.co_flags & inspect.CO_GENERATOR else stub).__code__
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
    other = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    output = other.graph.graph_copy(gm.graph, {})
    other.graph.output(output)
    hook = GraphPass(settings)
    with collect():
        seen = watched(lambda: hook(other.graph, True))
    return other, seen


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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
            victims = objects_of([f for f in entered if f not in done and f[2] not in OUTSIDE])
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


def result_of_broken(call: Callable[[], Any], victim: Function, functions: Sequence[types.FunctionType]) -> Any:
    """What a call returns during which a function raises."""
    found: list[Any] = []
    broken(lambda: found.append(call()), victim, functions)
    return found[0]


class Experiment(SchedulerHook):
    """In the place of the scheduler hook: each function that ordering one graph's kernels enters raises once.

    Then the same while the code is generated.
    """

    def __init__(self, hook: SchedulerHook) -> None:
        super().__init__(hook.settings)
        self.hook = hook
        self.done: set[Function] = set()
        self.raised: list[str] = []
        self.illegal: list[str] = []

    def __call__(self, nodes: list[Any]) -> list[Any]:
        module, lines = V.graph.module, V.graph.wrapper_code.lines
        handed_on = module.meta[META_KEY]

        def ordered() -> list[Any]:
            fresh = dataclasses.replace(handed_on, report=copy.deepcopy(handed_on.report))
            module.meta[META_KEY] = fresh
            return self.hook(list(nodes))

        def attempt(call: Callable[[], Any]) -> None:
            length = len(lines)
            found = call()
            del lines[length:]
            if found is not None and verify.check_snodes(found, nodes):
                self.illegal.append(f"{[n.get_name() for n in found]}")

        self._all(ordered, attempt)
        found = ordered()
        (witness,) = [line for line in lines if type(line).__name__ == "_Witness"]
        generate = witness.codegen

        def generated(text: Any) -> None:
            self._all(lambda: generate(IndentedBuffer()), lambda call: call())
            generate(text)

        witness.codegen = generated
        return found

    def _all(self, call: Callable[[], Any], attempt: Callable[[Callable[[], Any]], None]) -> None:
        entered: list[Function] = []
        attempt(lambda: entered.extend(functions_of(call)))
        victims = objects_of([f for f in entered if f not in self.done and f[2] not in OUTSIDE])
        for victim, functions in victims.items():
            self.done.add(victim)
            trial = functools.partial(result_of_broken, call, victim, functions)
            try:
                attempt(trial)
            except Exception as error:
                self.raised.append(f"{victim[2]} ({victim[0]}:{victim[1]}): {type(error).__name__}: {error}")


def test_whatever_fails_while_kernels_are_ordered_the_order_is_legal(quiet: None) -> None:
    torch._dynamo.reset()
    with fake_world(2) as group, without_kernels(), collect():
        options = inductor_passes.options(rank_check="warn")
        name = "reorder_for_compute_comm_overlap_passes"
        (hook,) = options[name]
        experiment = Experiment(hook)
        options[name] = [experiment]

        def program(x: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
            for shard in shards:
                x = (x @ all_gather_tensor(shard, 0, group)).relu()
            return x

        inputs = torch.randn(8, 8), *(torch.randn(4, 8) for _ in range(3))
        with torch._inductor.config.patch(force_disable_caches=True):
            torch.compile(program, fullgraph=True, options=options)(*inputs)
    assert not experiment.raised and not experiment.illegal, "\n".join([*experiment.raised, *experiment.illegal])
    assert len(experiment.done) > 150
