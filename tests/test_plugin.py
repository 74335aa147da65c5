"""All ways in lead to the same passes, forward and backward; what clashes is refused; what is none of ours is left."""

from __future__ import annotations

import gc
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import inductor_passes
from inductor_passes import ConfigError, config, plugin
from inductor_passes.engine import alike, garbage, options
from inductor_passes.engine.options import SIMPLE_OVERLAP
from inductor_passes.report import GraphReport
from inductor_passes.rewriting.contract import Outcome
from inductor_passes.trace import nothing
from inductor_passes.trace.collector import collect
from tests.support.models import WorldGather
from tests.support.processes import LIMIT_S
from tests.support.world import fake_world

WIDTH = 32


def model(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for weight in weights:
        x = x @ WorldGather.apply(weight)
    return x.sum()


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    torch._dynamo.reset()
    with fake_world(2):
        yield


def train(call: Callable[..., torch.Tensor]) -> list[GraphReport]:
    """Reports of one forward and backward."""
    weights = [torch.ones(WIDTH // 2, WIDTH, requires_grad=True) for _ in range(3)]
    with collect(what_if=False) as reports:
        call(torch.ones(64, WIDTH), weights).backward()
    assert all(w.grad is not None for w in weights)
    return reports


def check(reports: list[GraphReport], **expected: str) -> None:
    assert [r.phase for r in reports] == ["forward", "backward"]
    for report in reports:
        assert report.collectives
        for key, value in expected.items():
            assert report.config[key] == value


def test_options() -> None:
    reports = train(torch.compile(model, options=inductor_passes.options(memory_budget="+9%", verify="strict")))
    check(reports, memory_budget="+9%", verify="strict")
    assert [r.order_check for r in reports] == ["as planned"] * 2


def test_options_with_mode() -> None:
    ours = inductor_passes.options(mode="max-autotune-no-cudagraphs", verify="strict")
    assert ours["max_autotune"] is True
    check(train(torch.compile(model, options=ours)), verify="strict")


def test_backend_with_dotted_keys() -> None:
    own = {"inductor_passes.memory_budget": "2MiB", "inductor_passes.verify": "strict", "max_autotune": False}
    check(train(torch.compile(model, backend="inductor_passes", options=own)), memory_budget="2MiB", verify="strict")


def test_backend_with_mode() -> None:
    check(train(torch.compile(model, backend="inductor_passes", mode="max-autotune-no-cudagraphs")))


def test_backend_without_code_generation() -> None:
    own = {"inductor_passes.codegen": "aot_eager", "inductor_passes.verify": "strict"}
    reports = train(torch.compile(model, backend="inductor_passes", options=own))
    check(reports, codegen="aot_eager")
    assert all(s.level == "fx" for r in reports for s in r.schedules)


def test_without_code_generation_random_numbers_are_those_of_eager_execution() -> None:
    def drawn(backend: str, **options: Any) -> torch.Tensor:
        torch._dynamo.reset()
        torch.manual_seed(0)
        return torch.compile(lambda x: torch.nn.functional.dropout(x, 0.5), backend=backend, **options)(torch.ones(64))

    ours = drawn("inductor_passes", options={"inductor_passes.codegen": "aot_eager"})
    assert torch.equal(ours, drawn("aot_eager"))


def test_enabled_for_the_process() -> None:
    assert not train(torch.compile(model))
    torch._dynamo.reset()
    with config.patch(enabled=True, memory_budget="+3%"):
        check(train(torch.compile(model)), memory_budget="+3%")
        torch._dynamo.reset()
        # options of the user's own do not switch us off
        check(train(torch.compile(model, options={"max_autotune": False})), memory_budget="+3%")
    torch._dynamo.reset()
    assert not train(torch.compile(model))
    assert torch._inductor.config.post_grad_custom_post_pass is None
    assert torch._inductor.config.reorder_for_compute_comm_overlap is False


def test_the_users_own_passes_still_run() -> None:
    seen: list[int] = []

    def mine(graph: torch.fx.Graph) -> None:
        seen.append(len(graph.nodes))

    own = {"post_grad_custom_post_pass": mine}
    check(train(torch.compile(model, options=inductor_passes.options(inductor=own))))
    assert len(seen) == 2


SCRIPT = """
import torch
assert bool({enabled}) == ("inductor_passes" in __import__("sys").modules), "the variable decides"
import inductor_passes, torch._inductor.config
assert inductor_passes.config.enabled == {enabled}
assert torch._inductor.config.reorder_for_compute_comm_overlap == {enabled}
"""


@pytest.mark.parametrize(("value", "enabled"), [(None, False), ("0", False), ("1", True)])
def test_environment_variable(value: str | None, enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INDUCTOR_PASSES", raising=False)
    if value is not None:
        monkeypatch.setenv("INDUCTOR_PASSES", value)
    subprocess.run([sys.executable, "-c", SCRIPT.format(enabled=enabled)], check=True, timeout=LIMIT_S)


def test_a_bad_environment_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDUCTOR_PASSES", "banana")
    done = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, text=True, timeout=LIMIT_S)
    assert "INDUCTOR_PASSES='banana'" in done.stderr


@pytest.mark.parametrize(
    "clash",
    [
        {"bucket_all_gathers_fx": "all"},
        {"_micro_pipeline_tp": True},
        {"aten_distributed_optimizations.enable_overlap_scheduling": True},
        {"reorder_for_compute_comm_overlap": True, "reorder_for_compute_comm_overlap_passes": ["sink_waits"]},
    ],
)
def test_in_tree_passes_are_refused(clash: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="in-tree communication passes"):
        inductor_passes.options(inductor=clash)


def test_in_tree_passes_can_be_left_the_graph(caplog: pytest.LogCaptureFixture) -> None:
    from inductor_passes.engine import complain

    complain._warned.clear()
    ours = inductor_passes.options(in_tree_passes="warn", inductor={"bucket_all_gathers_fx": "all"})
    with caplog.at_level(logging.WARNING, "inductor_passes"):
        assert not train(torch.compile(model, options=ours))
    warnings = [r for r in caplog.records if "bucket_all_gathers_fx" in r.getMessage()]
    assert len(warnings) == 1, "one warning for forward and backward together"


def test_a_clash_that_comes_after_options_is_an_error() -> None:
    with (
        torch._inductor.config.patch({"bucket_all_gathers_fx": "all"}),
        pytest.raises(Exception, match="in-tree communication passes"),
    ):
        train(torch.compile(model, options={**inductor_passes.options(), "bucket_all_gathers_fx": "all"}))


def test_simple_overlap_is_off_where_it_exists() -> None:
    ours = inductor_passes.options()
    # Torch has it from some version on; an option that it does not know would be an error there.
    module, _, name = SIMPLE_OVERLAP.partition(".")
    exists = hasattr(getattr(torch._inductor.config, module, None), name)
    assert ours.get(SIMPLE_OVERLAP, "absent") is (False if exists else "absent")


def test_simple_overlap_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "has_simple_overlap", lambda: True)
    assert inductor_passes.options()[SIMPLE_OVERLAP] is False


def test_wrong_options_are_clear() -> None:
    with pytest.raises(ConfigError, match="mode='fastest'"):
        inductor_passes.options(mode="fastest")
    with pytest.raises(ConfigError, match="no_such_option"):
        inductor_passes.options(inductor={"no_such_option": 1})
    with pytest.raises(ConfigError, match="codegen"):
        inductor_passes.options(codegen="aot_eager")
    with pytest.raises(ConfigError, match=r"no/such/profile\.json"):
        inductor_passes.options(cost_profile="no/such/profile.json")
    with pytest.raises(Exception, match=r"options=\[1\].*inductor_passes\.memory_budget"):
        torch.compile(model, backend="inductor_passes", options=[1])(
            torch.ones(4, WIDTH), [torch.ones(WIDTH // 2, WIDTH)]
        )
    with pytest.raises(Exception, match=r"inductor_passes\.memory_bugdet"):
        torch.compile(model, backend="inductor_passes", options={"inductor_passes.memory_bugdet": "0"})(
            torch.ones(4, WIDTH), [torch.ones(WIDTH // 2, WIDTH)]
        )


def append_pass(options: dict[str, Any], last: Callable[[torch.fx.Graph], None]) -> None:
    """Run ``last`` behind our pass; torch before 2.12 takes one pass only."""
    ours = options["post_grad_custom_post_pass"]
    if isinstance(ours, list):
        ours.append(last)
        return

    def both(graph: torch.fx.Graph) -> None:
        ours(graph)
        last(graph)

    options["post_grad_custom_post_pass"] = both


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: inductor_passes.options("0"), "settings='0' is not allowed; expected a PassConfig, or fields"),
        (lambda: inductor_passes.options(inductor=5), "inductor=5 is not allowed; expected options of Inductor"),
        (lambda: inductor_passes.options(inductor={5: 1}), "inductor={5: 1} is not allowed; expected names of options"),
        (
            lambda: inductor_passes.options(inductor={"max_autotun": True}),
            "inductor={'max_autotun': True} is not allowed; expected names of options of Inductor, and 'max_autotun' "
            "is none (did you mean 'max_autotune'?); torch._inductor.list_options() gives all",
        ),
        (lambda: inductor_passes.options(mode=5), "mode=5 is not allowed; expected the name of a mode"),
        (lambda: inductor_passes.explain(_double, options=5), "options=5 is not allowed; expected our settings"),
        (
            lambda: inductor_passes.explain(_double, options={"inductor_passes.efort": "high"}),
            "unknown key='efort' is not allowed; expected one of .*did you mean 'effort'",
        ),
        (
            lambda: plugin.backend(None, [], options={"memory_budget": "0"}),
            "options={'memory_budget': '0'} is not allowed; expected \"inductor_passes.memory_budget\": a setting",
        ),
        (lambda: inductor_passes.prepare_groups(5), "mesh=5 is not allowed; expected a torch DeviceMesh"),
        (lambda: inductor_passes.prepare_groups(groups=5), "groups=5 is not allowed; expected a list"),
        (lambda: inductor_passes.prepare_groups(dims=5), "dims=5 is not allowed; expected a list"),
    ],
)
def test_arguments_of_another_type_name_key_value_and_what_is_allowed(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message).replace(r"\.\*", ".*")):
        call()


def _double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_a_graph_without_collectives_is_none_of_our_business(caplog: pytest.LogCaptureFixture) -> None:
    before: list[str] = []
    after: list[str] = []
    nothing.planned()  # else the first such graph of a process says why there is nothing to plan

    def record(into: list[str]) -> Callable[[torch.fx.Graph], None]:
        return lambda graph: into.append(str(graph))

    ours = inductor_passes.options(inductor={"post_grad_custom_post_pass": record(before)})
    append_pass(ours, record(after))
    with collect(what_if=False) as reports, caplog.at_level(logging.DEBUG, "inductor_passes"):
        torch.compile(lambda x: (x @ x).relu().sum(), options=ours)(torch.ones(8, 8))
    assert before == after and before
    assert not reports and not [r for r in caplog.records if r.name == "inductor_passes"]


def test_help_tells_units_and_errors() -> None:
    for name in inductor_passes.__all__:
        text = getattr(inductor_passes, name).__doc__
        assert text and len(text) > 40, name
    assert "Raises" in (inductor_passes.options.__doc__ or "")


def test_a_failing_pass_leaves_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    from inductor_passes.engine import complain
    from inductor_passes.report import PassReport, Reason

    class Vandal:
        name = "vandal"
        group_order = "kept"

        def run(self, graph: torch.fx.Graph, facts: Any) -> Outcome:
            waits = [n for n in graph.nodes if "wait_tensor" in str(n.target)]
            waits[0].replace_all_uses_with(waits[0].args[0])
            graph.erase_node(waits[0])
            raise RuntimeError("broke off in the middle")

    class Liar(Vandal):
        name = "liar"

        def run(self, graph: torch.fx.Graph, facts: Any) -> Outcome:
            waits = [n for n in graph.nodes if "wait_tensor" in str(n.target)]
            waits[0].replace_all_uses_with(waits[0].args[0])
            graph.erase_node(waits[0])
            return Outcome(PassReport(self.name, changed=True))

    complain._warned.clear()
    monkeypatch.setattr(alike, "passes_of", lambda settings, like=(): [Vandal(), Liar()])
    graphs: list[str] = []
    ours = inductor_passes.options(inductor={"post_grad_custom_post_pass": lambda g: graphs.append(str(g))})
    append_pass(ours, lambda graph: graphs.append(str(graph)))
    with caplog.at_level(logging.WARNING, "inductor_passes"):
        reports = train(torch.compile(model, options=ours))
    assert graphs[0] == graphs[1] and graphs[2] == graphs[3]
    for report in reports:
        assert [p.rolled_back for p in report.passes[:2]] == [Reason.EXCEPTION, Reason.VERIFIER]
    texts = [r.getMessage() for r in caplog.records]
    assert sum("'vandal' was undone in the forward graph" in t and "broke off" in t for t in texts) == 1
    assert sum("'liar' was undone in the forward graph" in t for t in texts) == 1

    torch._dynamo.reset()
    with pytest.raises(Exception, match="vandal"):
        train(torch.compile(model, options=inductor_passes.options(verify="strict")))


def test_the_garbage_collector_is_paused_and_comes_back() -> None:
    @garbage.paused()
    def fails() -> None:
        assert not gc.isenabled()
        with garbage.paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise KeyError

    assert gc.isenabled()
    with pytest.raises(KeyError):
        fails()
    assert gc.isenabled()
    gc.disable()
    try:
        with garbage.paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("wanted", "named"),
    [({"mode": "lite"}, "mode='lite'"), ({"inductor": {"use_post_grad_passes": False}}, "use_post_grad_passes=False")],
)
def test_options_with_which_no_pass_is_called_are_refused(wanted: dict[str, Any], named: str) -> None:
    """Found: nothing was planned, and nobody said so."""
    with pytest.raises(ConfigError, match=f"{named} is not allowed; expected .*use_post_grad_passes=True"):
        inductor_passes.options(**wanted)


def test_a_process_in_which_no_pass_is_called_is_told(caplog: pytest.LogCaptureFixture) -> None:
    given = inductor_passes.options()
    with caplog.at_level(logging.WARNING, "inductor_passes"), torch._inductor.config.patch(use_post_grad_passes=False):
        compiled = torch.compile(model, fullgraph=True, options=given)
        assert train(compiled) == []
    said = [r.getMessage() for r in caplog.records if "use_post_grad_passes=False" in r.getMessage()]
    assert len(said) == 1 and "nothing is planned" in said[0]


def test_an_option_that_nobody_knows_is_named_alone() -> None:
    compiled = torch.compile(model, backend="inductor_passes", options={"max_autotunex": True, "max_autotune": False})
    with pytest.raises(Exception, match=r"options=\{'max_autotunex': True\} is not allowed; expected names of options"):
        train(compiled)
