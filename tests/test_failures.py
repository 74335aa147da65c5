"""What can go wrong around a compilation: the result stays right and there is one clear message, or the user's own
error comes through untouched.

Most cases compile without code generation (``codegen="aot_eager"``) in a fake world: same graphs, same passes. Where
code generation is the point, the model is as small as it can be.
"""

from __future__ import annotations

import base64
import concurrent.futures
import gc
import json
import logging
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.utils import checkpoint as checkpointing

import inductor_passes
from inductor_passes import ConfigError
from inductor_passes.config import PassConfig
from inductor_passes.cost.profile import MAX_FILE_BYTES, CostProfile, ProfileError
from inductor_passes.engine import alike, complain, identity
from inductor_passes.engine import graph as engine_graph
from inductor_passes.report import GraphReport, Reason
from inductor_passes.trace import artifacts, cached
from inductor_passes.trace.collector import collect
from tests.support.models import WorldGather
from tests.support.scripts import run_script
from tests.support.world import fake_world

WIDTH = 16
Make = Callable[[], tuple[torch.Tensor, list[torch.Tensor]]]


def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ WorldGather.apply(weight))


def model(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    for weight in weights:
        x = layer(x, weight)
    return x.sum()


def make(rows: int = 8, layers: int = 3) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Integer-valued inputs, so that no order of additions changes the sums."""
    generator = torch.Generator().manual_seed(rows * 100 + layers)
    draw = [torch.randint(-2, 3, (n, WIDTH), generator=generator).float() for n in [rows] + [WIDTH // 2] * layers]
    return draw[0], [w.requires_grad_() for w in draw[1:]]


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    complain._warned.clear()
    monkeypatch.setattr(artifacts, "_warned", False)
    # From a warm cache no pass would run and nothing would be said.
    uncached = torch._functorch.config.patch(enable_autograd_cache=False)
    with fake_world(2), torch._inductor.config.patch(fx_graph_cache=False), uncached:
        yield
    torch._dynamo.reset()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What we have logged at warning level or above so far."""
    with caplog.at_level(logging.WARNING, "inductor_passes"):
        yield lambda: [r.getMessage() for r in caplog.records if r.name == "inductor_passes"]


def eager_codegen(**settings: Any) -> dict[str, Any]:
    """Arguments of ``torch.compile``: our passes without code generation."""
    values = {"codegen": "aot_eager", **settings}
    return {"backend": "inductor_passes", "options": {f"inductor_passes.{k}": v for k, v in values.items()}}


def step(call: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, list[torch.Tensor]]) -> list[torch.Tensor]:
    """The result of one step and the gradients."""
    x, weights = inputs
    out = call(x, weights)
    if out.requires_grad:
        out.sum().backward()
    return [out.detach(), *(w.grad for w in weights if w.grad is not None)]


def same_as_eager(
    function: Callable[..., torch.Tensor], inputs: Make = make, graphs: int = 2, **compile_args: Any
) -> list[GraphReport]:
    """One step compiled and not: equal bits and ``graphs`` graphs planned; returns their reports."""
    expected = step(function, inputs())
    with collect(what_if=False) as reports:
        found = step(torch.compile(function, **(compile_args or eager_codegen())), inputs())
    assert len(expected) == len(found) and any(bool(e.any()) for e in expected)
    for e, f in zip(expected, found, strict=True):
        assert torch.equal(e, f)
    assert len(reports) == graphs, [r.phase for r in reports]
    return reports


# -- files -------------------------------------------------------------------------------------------------------------

GOOD = CostProfile.default("cpu").to_json()
HOSTILE = {
    "empty": b"",
    "binary": bytes(range(256)) * 8,
    "pickle": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",
    "deep": b"[" * 200_000,
    "digits": b'{"schema_version": ' + b"9" * 6000 + b"}",
    "list": b"[1, 2, 3]",
    "version": json.dumps({**GOOD, "schema_version": 99}).encode(),
    "unknown key": json.dumps({**GOOD, "__class__": "os.system"}).encode(),
    "not a number": json.dumps({**GOOD, "memory_bytes_per_s": float("nan")}).encode(),
    "infinite": json.dumps({**GOOD, "kernel_ns": float("inf")}).encode(),
    "no such device": json.dumps({**GOOD, "ranks_per_host": -1}).encode(),
    "truncated": json.dumps(GOOD).encode()[:-20],
    "oversized": b" " * (MAX_FILE_BYTES + 1),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_bad_cost_profile_is_one_error_that_names_the_file(content: bytes, tmp_path: Path) -> None:
    """Going on with defaults would be worse: a rank with another profile makes other plans and the job hangs."""
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError, match=r"profile\.json: "):
        inductor_passes.options(cost_profile=str(path))
    with pytest.raises(Exception, match=r"profile\.json: "):
        torch.compile(model, **eager_codegen(cost_profile=str(path)))(*make())


@pytest.mark.parametrize("path", ["", "missing.json", "/dev/zero"])
def test_a_cost_profile_that_is_no_file(path: str, tmp_path: Path) -> None:
    name = path if path.startswith("/") else str(tmp_path / path)
    with pytest.raises(ConfigError, match="cost_profile="):
        inductor_passes.options(cost_profile=name)


def test_a_cost_profile_that_breaks_after_the_options_were_made(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    CostProfile.default("cpu").save(path)
    ours = eager_codegen(cost_profile=str(path))
    same_as_eager(model, **ours)
    torch._dynamo.reset()
    path.write_text("{")
    with pytest.raises(Exception, match=r"profile\.json: "):
        torch.compile(model, **ours)(*make())


def test_a_problem_directory_that_cannot_be_made(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    ours = {"options": inductor_passes.options(dump_problem=str(blocked / "below"), memory_budget="unlimited")}
    reports = same_as_eager(model, **ours)
    assert [r.order_check for r in reports] == ["as planned"] * 2
    assert len(said()) == 1 and f"dump_problem={blocked / 'below'}" in said()[0]


def test_a_trace_that_cannot_be_written(said: Callable[[], list[str]]) -> None:
    """A full disk, a directory that went away: torch's handler raises, the compilation goes on."""

    class Full(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "inductor_passes_" in str(getattr(record, "metadata", "")):
                raise OSError(28, "No space left on device")

    handler, logger = Full(), logging.getLogger("torch.__trace")
    logger.addHandler(handler)
    try:
        same_as_eager(model)
    finally:
        logger.removeHandler(handler)
    assert len(said()) == 1 and "No space left on device" in said()[0] and "TORCH_TRACE" in said()[0]


SCRIPT = """
import torch
from tests.test_failures import eager_codegen, fake_world, make, model
with fake_world(2):
    torch.compile(model, **eager_codegen())(*make()).backward()
"""


def test_a_trace_directory_that_cannot_be_made(tmp_path: Path) -> None:
    """Torch itself stops at the first record that it cannot write: its error comes through, none of ours."""
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    done = run_script(SCRIPT, TORCH_TRACE=str(blocked / "below"))
    last = done.output.strip().splitlines()[-1]
    assert "NotADirectoryError" in last and str(blocked) in last
    assert "could not write a trace artifact" not in done.output and "inductor_passes:" not in done.output


@pytest.mark.parametrize(
    "packed",
    [
        "",
        "not base 85 \n",
        base64.b85encode(b"not compressed").decode(),
        base64.b85encode(zlib.compress(b"[1, 2]")).decode(),
        base64.b85encode(zlib.compress(b'{"report": {"phase": 7}, "problem": {}, "order": []}')).decode(),
        base64.b85encode(
            zlib.compress(json.dumps({"report": {"phase": "forward", "graph_index": 0, "schema_version": 99}}).encode())
        ).decode(),
        base64.b85encode(zlib.compress(b"[" * 200_000)).decode(),
        base64.b85encode(zlib.compress(b" " * (2**28 + 1))).decode(),
    ],
    ids=["empty", "text", "bytes", "list", "no report", "other version", "deep", "bomb"],
)
def test_a_stored_report_that_is_none(packed: str, said: Callable[[], list[str]]) -> None:
    with collect(what_if=False) as reports:
        cached.loaded("0" * 16, packed)
    assert not reports
    assert len(said()) == 1 and "cannot replay a stored report" in said()[0]


def test_another_version_never_meets_an_old_cache_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this package, of torch, of the settings, the costs or the groups: another key each."""
    settings, profile = PassConfig(), CostProfile.default("cpu")
    seen = {identity.cache_key(settings, profile)}
    seen.add(identity.cache_key(PassConfig(memory_budget="0"), profile))
    seen.add(identity.cache_key(settings, CostProfile.default("cuda")))
    dist.new_group([0])
    seen.add(identity.cache_key(settings, profile))
    monkeypatch.setattr(identity, "source_hash", lambda: "another version")
    seen.add(identity.cache_key(settings, profile))
    monkeypatch.setattr(torch, "__version__", "99.0")
    seen.add(identity.cache_key(settings, profile))
    assert len(seen) == 6 and None not in seen


# -- passes ------------------------------------------------------------------------------------------------------------


class Fails:
    """A pass that breaks off half way, and the exception that it breaks off with."""

    name = "fails"
    group_order = "kept"

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def run(self, graph: torch.fx.Graph, context: Any) -> Any:
        next(iter(graph.find_nodes(op="output"))).prepend(next(iter(graph.nodes)))
        raise self.error


@pytest.mark.parametrize(
    "error", [RecursionError("too deep"), MemoryError("none left"), AssertionError(), KeyError("x"), ValueError("{%s")]
)
def test_an_exception_in_a_pass(
    error: Exception, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    before = alike.passes_of
    monkeypatch.setattr(alike, "passes_of", lambda settings, like=(): [Fails(error), *before(settings, like)])
    for report in same_as_eager(model):
        assert report.passes[0].rolled_back is Reason.EXCEPTION
        assert all(p.rolled_back is None for p in report.passes[1:])
    assert len(said()) == 2 and all(type(error).__name__ in text for text in said())


def test_an_interrupt_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alike, "passes_of", lambda settings, like=(): [Fails(KeyboardInterrupt())])
    with pytest.raises(KeyboardInterrupt):
        torch.compile(model, **eager_codegen())(*make())


def test_the_users_own_error_is_untouched() -> None:
    def wrong(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        return model(x, weights) + torch.ones(3) @ torch.ones(4)

    with pytest.raises(Exception) as plain:
        torch.compile(wrong, backend="aot_eager")(*make())
    torch._dynamo.reset()
    with pytest.raises(type(plain.value)) as ours:
        torch.compile(wrong, **eager_codegen())(*make())
    assert str(ours.value).splitlines()[0] == str(plain.value).splitlines()[0]
    assert "inductor_passes" not in str(ours.value)


# -- graphs ------------------------------------------------------------------------------------------------------------


def test_sizes_without_hints(said: Callable[[], list[str]]) -> None:
    """Sizes that depend on data: left in input order, with that reason."""

    def selected(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        kept = x[x[:, 0] > 0]
        for weight in weights:
            kept = layer(kept, weight)
        return funcol.all_reduce(kept.sum(), "sum", dist.group.WORLD)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        reports = same_as_eager(selected, lambda: (make()[0], [w.detach() for w in make()[1]]), 1)
    decisions = [d for p in reports[0].passes for d in p.decisions]
    assert {d.reason for d in decisions} == {Reason.NO_HINT} and len(decisions) >= 4
    assert not any(p.changed for p in reports[0].passes) and not said()


def test_dynamic_shapes_are_planned_by_their_hints() -> None:
    compiled = torch.compile(model, dynamic=True, **eager_codegen(verify="strict"))
    with collect(what_if=False) as reports:
        for rows in (10, 12, 20):
            expected, found = step(model, make(rows)), step(compiled, make(rows))
            assert all(torch.equal(e, f) for e, f in zip(expected, found, strict=True))
    assert [r.phase for r in reports] == ["forward", "backward"]
    assert all(r.schedules for r in reports)


def test_recompilation() -> None:
    compiled = torch.compile(model, dynamic=False, **eager_codegen(verify="strict"))
    with collect(what_if=False) as reports:
        for rows, layers in ((8, 3), (12, 3), (8, 2), (12, 3)):
            expected, found = step(model, make(rows, layers)), step(compiled, make(rows, layers))
            assert all(torch.equal(e, f) for e, f in zip(expected, found, strict=True))
    assert [r.phase for r in reports] == ["forward", "backward"] * 3
    assert len({r.compile_id for r in reports}) == 3


def test_graph_breaks() -> None:
    def broken(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        x = layer(x, weights[0])
        torch._dynamo.graph_break()
        return model(x, weights[1:])

    same_as_eager(broken, graphs=4)


class Module(torch.nn.Module):
    """Two layers and something between them that no compiler follows."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([w.detach() for w in make()[1]])
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = layer(x, self.weights[0])
        self.seen.append(x.sum().item())
        return model(x, list(self.weights[1:]))


def test_graph_breaks_in_a_module() -> None:
    plain, ours = Module(), Module()
    ours.compile(fullgraph=False, **eager_codegen(verify="strict"))
    with collect(what_if=False) as reports:
        for module in (plain, ours):
            module(make()[0]).backward()
    assert plain.seen == ours.seen and len(reports) >= 4
    for p, o in zip(plain.parameters(), ours.parameters()):
        assert torch.equal(p.grad, o.grad)


def test_layers_compiled_one_by_one() -> None:
    """Regions with eager code between them; equal layers share what was compiled."""

    class Layer(torch.nn.Module):
        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(weight.detach().clone())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return layer(x, self.weight)

    plain, ours = (torch.nn.Sequential(*map(Layer, make()[1])) for _ in range(2))
    for one in ours:
        one.compile(fullgraph=False, **eager_codegen(verify="strict"))
    with collect(what_if=False) as reports:
        for modules in (plain, ours):
            modules(make()[0].requires_grad_()).sum().backward()
    assert [r.phase for r in reports] and {r.phase for r in reports} == {"forward", "backward"}
    for p, o in zip(plain.parameters(), ours.parameters()):
        assert torch.equal(p.grad, o.grad)


def test_inference() -> None:
    for context in (torch.no_grad(), torch.inference_mode()):
        torch._dynamo.reset()
        with context:
            assert [r.phase for r in same_as_eager(model, graphs=1)] == ["inference"]


def test_activation_checkpointing() -> None:
    def saved(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        for weight in weights:
            x = checkpointing.checkpoint(layer, x, weight, use_reentrant=False)
        return x.sum()

    reports = same_as_eager(saved)
    again = [c for c in reports[1].collectives if "gather" in c.kind]
    assert again, "gathered again in backward"


def test_selective_activation_checkpointing() -> None:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        kept = op is torch.ops.aten.mm.default
        return checkpointing.CheckpointPolicy.MUST_SAVE if kept else checkpointing.CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return checkpointing.create_selective_checkpoint_contexts(policy)

    def saved(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        for weight in weights:
            x = checkpointing.checkpoint(layer, x, weight, use_reentrant=False, context_fn=contexts)
        return x.sum()

    same_as_eager(saved)


def no_gradients() -> tuple[torch.Tensor, list[torch.Tensor]]:
    x, weights = make()
    return x, [w.detach() for w in weights]


def branches(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Collectives around a branch, none inside."""
    x = layer(x, weights[0])
    x = torch.cond(x.sum() > 0, lambda x: x.sin() * 0 + x, lambda x: x.neg(), (x,))
    return model(x, weights[1:])


def gathers_in_a_branch(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Collectives around a branch, and another one inside of each side."""
    x = layer(x, weights[0])

    def taken(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ funcol.all_gather_tensor(weight, 0, dist.group.WORLD)

    def other(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ funcol.all_gather_tensor(weight * 2, 0, dist.group.WORLD)

    return model(torch.cond(x.sum() > 0, taken, other, (x, weights[1])), weights[2:])


def loops(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Collectives around a loop whose length depends on data."""
    x = layer(x, weights[0])
    count = torch.zeros((), dtype=torch.int64)
    _, x = torch.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x + x), (count, x))
    return model(x, weights[1:])


@pytest.mark.parametrize("nested", [branches, gathers_in_a_branch, loops])
def test_nested_graphs(nested: Callable[..., torch.Tensor], said: Callable[[], list[str]]) -> None:
    reports = same_as_eager(nested, no_gradients, 1, **eager_codegen(verify="strict", memory_budget="+5%"))
    assert len(reports[0].collectives) >= 2 and not said()


@pytest.mark.parametrize("nested", [branches, gathers_in_a_branch])
def test_nested_graphs_in_generated_code(nested: Callable[..., torch.Tensor]) -> None:
    ours = {"options": inductor_passes.options(verify="strict")}
    inside = 2 if nested is gathers_in_a_branch else 0
    reports = same_as_eager(nested, no_gradients, 1 + inside, **ours)
    assert all(r.order_check.startswith(("as planned", "unchecked")) for r in reports)


def test_flex_attention() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def attention(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        q, k, v = (layer(x, w).view(1, 1, 8, WIDTH) for w in weights)
        scored = flex_attention(q * 0, k, v, score_mod=lambda score, b, h, i, j: score * 0)
        return model(scored.view(8, WIDTH).round(), weights[:1])

    same_as_eager(attention, no_gradients, 1, **eager_codegen(verify="strict"))


def test_compiled_autograd() -> None:
    def train() -> list[torch.Tensor]:
        return step(model, make())

    expected = train()
    x, weights = make()
    with collect(what_if=False) as reports, torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(model, **eager_codegen(verify="strict"))

        @torch.compile(**eager_codegen(verify="strict"))
        def whole(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
            out = compiled(x, weights)
            out.backward()
            return out

        found = [whole(x, weights).detach(), *(w.grad for w in weights)]
    assert all(torch.equal(e, f) for e, f in zip(expected, found, strict=True))
    assert {c.kind for r in reports for c in r.collectives} == {"all_gather", "reduce_scatter"}


def test_two_threads_compile_at_once() -> None:
    """Each thread has its own model; reports and results do not mix."""
    barrier = threading.Barrier(2)

    def work(layers: int) -> bool:
        def own(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
            return model(x, weights) * layers

        expected = step(own, make(8, layers))
        compiled = torch.compile(own, **eager_codegen(verify="strict", memory_budget=f"+{layers}%"))
        barrier.wait(60)
        found = step(compiled, make(8, layers))
        return all(torch.equal(e, f) for e, f in zip(expected, found, strict=True))

    with collect(what_if=False) as reports, concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, (2, 4))) == [True, True]
    for layers in (2, 4):
        mine = [r for r in reports if r.config["memory_budget"] == f"+{layers}%"]
        assert [r.phase for r in mine] == ["forward", "backward"]
        assert 0 < len(mine[0].collectives) <= layers


def test_a_group_that_is_gone() -> None:
    """Whatever torch does without us when a group was destroyed before compilation, it does with us."""
    ranks = dist.new_group([0, 1])

    def reduced(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        return funcol.all_reduce(model(x, weights), "sum", ranks)

    dist.destroy_process_group(ranks)
    with pytest.raises(Exception) as plain:
        torch.compile(reduced, backend="aot_eager")(*make())
    torch._dynamo.reset()
    with pytest.raises(Exception) as ours:
        torch.compile(reduced, **eager_codegen())(*make())
    assert type(ours.value) is type(plain.value)
    assert str(ours.value).splitlines()[0] == str(plain.value).splitlines()[0]


def test_a_group_that_goes_between_forward_and_backward() -> None:
    """Backward is compiled when it is first needed: whatever torch says then, it says with us."""

    def said(**compile_args: Any) -> tuple[type[BaseException] | None, str]:
        torch._dynamo.reset()
        ranks = dist.new_group([0, 1])

        class GatherThere(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
                return funcol.all_gather_tensor(weight, 0, ranks)

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                return funcol.reduce_scatter_tensor(gradient, "sum", 0, ranks)

        def function(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
            return (x @ GatherThere.apply(weights[0])).sum()

        out = torch.compile(function, **compile_args)(*make())
        dist.destroy_process_group(ranks)
        try:
            out.backward()
        except Exception as error:
            return type(error), str(error).splitlines()[0]
        return None, ""

    plain, ours = said(backend="aot_eager"), said(**eager_codegen())
    assert plain[0] is ours[0]
    assert "inductor_passes" not in ours[1]


# -- Inductor's modes --------------------------------------------------------------------------------------------------


def test_deterministic_mode(said: Callable[[], list[str]]) -> None:
    reports = same_as_eager(model, options=inductor_passes.options(inductor={"deterministic": True}))
    assert all("deterministic mode" in r.notes[-1] for r in reports)
    assert all(s.level == "fx" for r in reports for s in r.schedules)
    assert len(said()) == 1 and "deterministic mode" in said()[0]


@pytest.mark.parametrize("how", [{"mode": "reduce-overhead"}, {"inductor": {"triton.cudagraphs": True}}])
def test_cuda_graph_flags(how: dict[str, Any]) -> None:
    reports = same_as_eager(model, options=inductor_passes.options(verify="strict", memory_budget="unlimited", **how))
    assert [r.order_check for r in reports] == ["as planned"] * 2


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codegen", ["aot_eager", "inductor"])
def test_no_graph_is_kept_alive(codegen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[weakref.ref[Any]] = []
    contexts: list[weakref.ref[Any]] = []
    inner = engine_graph.compile_graph

    def run(graph: torch.fx.Graph, *args: Any) -> Any:
        context = inner(graph, *args)
        graphs.append(weakref.ref(graph))
        graphs.append(weakref.ref(graph.owning_module))
        contexts.append(weakref.ref(context))
        return context

    monkeypatch.setattr(engine_graph, "compile_graph", run)
    ours = eager_codegen() if codegen == "aot_eager" else {"options": inductor_passes.options()}
    step(torch.compile(model, **ours), make())
    assert len(graphs) == 4 and len(contexts) == 2
    if codegen == "inductor":
        gc.collect()
        assert not any(c() for c in contexts), "a context holds the graph, and outlives the compilation"
    torch._dynamo.reset()
    gc.collect()
    assert not any(g() for g in graphs)
