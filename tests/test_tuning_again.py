"""A graph that is planned and compiled again on another thread, without ranks and without kernels."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import inductor_passes
from inductor_passes import _torch, agreement
from inductor_passes._torch import observation
from inductor_passes.bucket.candidates import Candidate
from inductor_passes.bucket.pass_ import BucketPass
from inductor_passes.bucket.question import Partition, Question
from inductor_passes.cost.profile import CostProfile
from inductor_passes.engine import again as engine_again
from inductor_passes.engine import following, variants
from inductor_passes.engine.backup import Backup
from inductor_passes.engine.kept import Kept
from inductor_passes.engine.kernels import order_kernels
from inductor_passes.models import MLPConfig, mlp, mlp_batch
from inductor_passes.report import Timing
from inductor_passes.trace import collector
from inductor_passes.trace.collector import collect
from inductor_passes.tuning import again, files, measuring
from inductor_passes.tuning.again import New, UnfitError
from inductor_passes.verify.facts import operators
from tests.support.compiled import save_profile, without_kernels
from tests.support.world import fake_world

MODEL = MLPConfig(width=32, hidden=64, layers=2, batch=8)

NO_CACHE = {"fx_graph_cache": False}
TIMING = mock.create_autospec(Timing, instance=True)


@pytest.fixture
def profiles(tmp_path: Path) -> tuple[str, str]:
    """On one link messages cost nothing by themselves, on the other they do."""
    free, dear = (save_profile(tmp_path / f"{name}.json", ns, 10.0, 20_000, 0.1) for name, ns in (("a", 0), ("b", 2e6)))
    return free, dear


@contextlib.contextmanager
def compiled(profile: str, ranks: int = 2, **more: Any) -> Iterator[list[Kept | str]]:
    """What was kept of forward and backward of a model that was compiled for some ranks."""
    found: list[Kept | str] = []
    settings = {"cost_profile": profile, "tune": 2, "tune_swap": "on", "memory_budget": "unlimited", **more}
    if not settings["tune"]:
        del settings["tune"], settings["tune_swap"]
    with (
        fake_world(ranks),
        without_kernels(),
        mock.patch.object(again, "keep", lambda text, one: found.append(one)),
        # A group that moves nothing has nobody who could run something else.
        mock.patch.object(agreement, "nobody_to_ask", lambda: False),
    ):
        torch._dynamo.reset()
        # What other tests compiled counts for as long as it is not collected.
        gc.collect()
        model = inductor_passes.simple_fsdp(mlp(MODEL), init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)))
        step = torch.compile(model, options=inductor_passes.options(**settings), fullgraph=True)
        step(mlp_batch(MODEL)[0]).square().mean().backward()
        yield found


def written(kept: list[Kept | str], profile: str, path: Path) -> list[New]:
    """Second plans, in a file as those that stay are."""
    made = [on_a_thread(one, profile) for one in kept]
    assert all(isinstance(one, New) for one in made), made
    files.save_plans(path / "tuned.plan.json", [one.plan for one in made if isinstance(one, New)])
    return [one for one in made if isinstance(one, New)]


def small_graph() -> torch.fx.Graph:
    graph = torch.fx.symbolic_trace(lambda x: torch.relu(x) + 1).graph
    for node in graph.nodes:
        node.meta["val"] = torch.ones(2)
    return graph


def tried(graph: torch.fx.Graph) -> str:
    """The name of a node that is made and erased again."""
    with graph.inserting_before(next(iter(reversed(graph.nodes)))):
        node = graph.call_function(torch.relu, (next(iter(graph.nodes)),))
    graph.erase_node(node)
    return node.name


def test_names_do_not_tell_what_was_tried_before() -> None:
    """A plan file names what passes make: it would fit no graph for which less was tried."""
    graph = small_graph()
    copy = _torch.copied_module(graph)
    assert isinstance(copy, torch.fx.GraphModule)
    backup = Backup(graph)
    first = tried(graph)
    backup.restore()
    assert tried(graph) == first != tried(graph), "torch counts on where nobody puts back what was tried"
    gone = next(n for n in graph.nodes if n.target is torch.relu)
    gone.replace_all_uses_with(next(iter(graph.nodes)))
    graph.erase_node(gone)
    backup.restore()
    assert tried(graph) == first, "equal nodes took the place of those that were erased"
    assert tried(copy.graph) == first


def test_a_copy_knows_the_names_that_are_gone() -> None:
    graph = small_graph()
    tried(graph)
    copy = _torch.copied_module(graph)
    assert isinstance(copy, torch.fx.GraphModule) and tried(copy.graph) == tried(graph)


@pytest.mark.parametrize("narrowing", [{}, {"compress": "auto", "compress_dtypes": "int8", "inductor": NO_CACHE}])
def test_a_plan_that_stayed_is_followed_to_its_last_kernel(tmp_path: Path, narrowing: dict[str, Any]) -> None:
    """Whatever else was tried while it was found, and whatever the next compilation would have planned or narrowed."""
    ns = 0.01 if narrowing else 10.0
    free, dear = (save_profile(tmp_path / name, latency, ns, 20_000, 0.1) for name, latency in (("a", 0.0), ("b", 2e6)))
    with compiled(free, **narrowing) as kept:
        made = written(kept, dear, tmp_path)
    pinned = compiled("", plan=str(tmp_path / "tuned.plan.json"), tune=0, **narrowing)
    with collect(what_if=False) as reports, pinned:
        pass
    assert len(reports) == 2
    for new, report in zip(made, reports):
        assert any(note.startswith("pinned by") for note in report.notes), report.notes
        assert new.plan["order"] and new.plan["kernels"]
        for key in ("buckets", "order", "kernels"):
            assert report.plan[key] == new.plan[key], key


def on_a_thread(kept: Kept | str, profile: str) -> New | BaseException:
    assert isinstance(kept, Kept), kept
    done: list[New | BaseException] = []

    def run() -> None:
        try:
            done.append(kept.compile(CostProfile.load(profile)))
        except BaseException as error:
            done.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(300)
    return done[0]


def known_like(one: Kept) -> list[following.Variant]:
    """What a graph with the same collectives would send, whichever group is looked at."""
    assert one.about is not None and one.variant is not None
    (first, *others) = (variants._known[variants._key(one.about, kind)] for kind in one.variant.kinds.values())
    assert all(other == first for other in others)
    return first


def test_another_profile_gives_another_plan_and_code_for_it(profiles: tuple[str, str]) -> None:
    free, dear = profiles
    with compiled(free) as kept, collect(what_if=False) as reports:
        assert len(kept) == 2
        for one in kept:
            assert isinstance(one, Kept) and one.report is not None
            before = one.report.plan
            new = on_a_thread(one, dear)
            assert isinstance(new, New) and new.planned is not None, new
            longest = [max(map(len, plan.get("buckets") or ((),))) for plan in (before, new.plan)]
            assert longest[1] > longest[0], "where messages are dear more of them travel together"
            assert callable(new.module["call"]) and new.module["call"] is not None
            assert new.planned.about.profile_hash == CostProfile.load(dear).hash()
            assert known_like(one) == [one.variant]
            new.use(True)
            (now,) = known_like(one)
            assert now.sent != one.variant.sent and now.came == one.variant.came  # type: ignore[union-attr]
            new.use(False)
            assert known_like(one) == [one.variant]
        assert reports == [], "a second plan has no report of its own"


def alone_or_together(path: Path) -> tuple[str, str]:
    """Profiles: a message costs its bytes and nothing else; a message costs much by itself."""
    alone, dear = (save_profile(path / f"{ns}.json", ns, 0.01, 0, 0.0, ranks=3) for ns in (0, 2e6))
    return alone, dear


def sums_and_others(plan: dict[str, Any]) -> tuple[set[tuple[str, ...]], set[tuple[str, ...]]]:
    """The plan's buckets of sums, and its others."""
    buckets = {tuple(bucket) for bucket in plan.get("buckets") or ()}
    sums = {bucket for bucket in buckets if bucket[0].startswith("reduce_scatter")}
    return sums, buckets - sums


@pytest.mark.parametrize("dear_first", [False, True])
def test_sums_of_three_ranks_travel_as_they_did(tmp_path: Path, dear_first: bool) -> None:
    """Found: the second plan merged all_reduces of three ranks, and losses lost their last bits at the swap."""
    first, second = alone_or_together(tmp_path)[:: -1 if dear_first else 1]
    changed = 0
    with compiled(first, 3) as kept:
        assert len(kept) == 2
        for one in kept:
            assert isinstance(one, Kept) and one.report is not None
            before, others = sums_and_others(one.report.plan)
            assert bool(before) == (dear_first and one.report.phase == "backward")
            new = on_a_thread(one, second)
            assert isinstance(new, New), new
            after, now = sums_and_others(new.plan)
            assert after == before, "sums travel with others"
            changed += now != others
    assert changed, "gathers may travel with others"


def test_a_second_plan_that_adds_in_another_order_is_refused(tmp_path: Path) -> None:
    """The check does not trust the pass that was told to leave sums as they are."""
    first, second = alone_or_together(tmp_path)
    with compiled(first, 3) as kept, mock.patch("inductor_passes.bucket.pass_.same_sums", anything):
        found = [on_a_thread(one, second) for one in kept]
    assert isinstance(found[0], New), "forward adds nothing up"
    assert isinstance(found[1], UnfitError)
    assert str(found[1]) == "with the corrected profile it would add up in another order"


def test_sums_of_two_ranks_may_be_carried_out_in_another_way(tmp_path: Path) -> None:
    """Found: where the corrected profile preferred exchanges to reductions, a graph was not planned again."""
    plain = CostProfile.load(save_profile(tmp_path / "plain.json", 100_000, 10.0, 0, 0.0))
    (group,) = plain.groups
    slower = {"reduce_scatter": 5}
    costs = (replace(c, alpha_ns=c.alpha_ns * slower.get(c.kind, 1)) for c in group.costs)
    slow = replace(plain, groups=(replace(group, costs=tuple(costs)),))
    slow.save(tmp_path / "slow.json")
    with compiled(str(tmp_path / "plain.json")) as kept:
        found = on_a_thread(kept[1], str(tmp_path / "slow.json"))
    assert isinstance(found, New) and found.planned is not None, found
    assert "all_to_all" in {one.kind for one in found.planned.collectives}


def anything(question: Question, *, partition: Partition, before: object) -> list[list[Candidate]]:
    """In the place of a partition that leaves sums as they are."""
    return partition(question)


def test_the_second_plan_may_use_the_same_memory_again(profiles: tuple[str, str]) -> None:
    """Found: Inductor knows from the thread's notes what backward may overwrite, and on another thread knew of nothing.

    The second plan needed more memory, and a budget is relative to what is needed.
    """
    may_overwrite: list[set[str]] = []

    def noted(nodes: list[Any], *rest: Any) -> list[Any]:
        may_overwrite.append({*nodes[0].scheduler.name_to_donated_buffer})
        return order_kernels(nodes, *rest)

    with compiled(profiles[0]) as kept, mock.patch.object(engine_again, "order_kernels", noted):
        for one in kept:
            assert isinstance(on_a_thread(one, profiles[1]), New)
        donated = [one.lowering.donated for one in kept if isinstance(one, Kept) and one.lowering is not None]
    assert not donated[0] and donated[1], "forward has nothing that it may overwrite"
    assert [len(names) for names in may_overwrite] == [0, len(donated[1])]


def test_where_nothing_is_narrowed_a_graph_is_planned_again(tmp_path: Path) -> None:
    """Found: the setting alone kept first plans, with a reason that was not true."""
    links = {"free": (0.0, 0.01), "dear": (2e6, 0.01), "slow": (0.0, 10.0)}
    free, dear, slow = (save_profile(tmp_path / f"{name}.json", *link, 20_000, 0.1) for name, link in links.items())
    narrowing = {"compress": "auto", "compress_dtypes": "int8", "inductor": NO_CACHE}
    with compiled(free, **narrowing) as kept:
        assert len(kept) == 2
        plans = [on_a_thread(one, dear) for one in kept]
        assert all(isinstance(one, New) and one.planned is not None for one in plans), plans
    with compiled(free, **narrowing) as kept:
        said = {str(on_a_thread(one, slow)) for one in kept}
    assert said == {"with the corrected profile its messages would be narrowed"}, "numbers would change in the middle"
    with compiled(free) as others:
        wanted = [on_a_thread(one, dear) for one in others]
    for one, other in zip(plans, wanted, strict=True):
        assert isinstance(one, New) and isinstance(other, New)
        assert all(one.plan[key] == other.plan[key] for key in ("buckets", "order", "kernels"))


def test_the_program_draws_random_numbers_meanwhile(profiles: tuple[str, str]) -> None:
    """Inductor's own compilation puts the generators back: the program would draw the same numbers again."""
    free, dear = profiles
    real, drawn = order_kernels, []

    def draws(*args: Any) -> list[Any]:
        drawn.append(torch.rand(3).tolist())
        return real(*args)

    with compiled(free) as kept, mock.patch.object(engine_again, "order_kernels", draws):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        for one in kept:
            assert isinstance(on_a_thread(one, dear), New)
            drawn.append(torch.rand(3).tolist())
        torch.set_rng_state(before)
        assert drawn == [torch.rand(3).tolist() for _ in range(2 * len(kept))] and len(kept) == 2


def test_the_program_keeps_its_warnings_meanwhile(profiles: tuple[str, str]) -> None:
    """Filters of warnings are the process's: what the verifier tries on fake tensors would hide the program's own."""
    with compiled(profiles[0]) as kept:
        before, seen = warnings.filters, []

        def tried(*args: Any) -> Any:
            seen.append(warnings.filters is before)
            return on_meta(*args)

        on_meta = observation._on_meta
        # What the first plan's verification found out is kept for the process.
        operators._kept.clear()
        with mock.patch.object(observation, "_on_meta", tried):
            assert isinstance(on_a_thread(kept[0], profiles[1]), New)
            assert seen and all(seen)
            seen.clear()
            argument = observation.TensorArgument(torch.float32, (2,), (1,))
            observation.observe(torch.ops.aten.relu.default, [argument], {}, trusted=True)
        assert seen and not any(seen), "a compilation that the program waits for hides them"
    assert warnings.filters is before


def test_what_torch_logs_of_a_failing_fake_kernel_is_hidden_on_this_thread_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    with observation._silent():
        logger.error("of this thread")
        other = threading.Thread(target=lambda: logger.error("of another thread"))
        other.start()
        other.join()
    logger.error("afterwards")
    assert [one.getMessage() for one in caplog.records] == ["of another thread", "afterwards"]


def test_under_a_budget_below_the_peak_there_is_no_plan_file(profiles: tuple[str, str]) -> None:
    """The next run would refuse it."""
    with compiled(profiles[0], memory_budget="-20%") as kept:
        # One of them is planned as before, the other one anew.
        for one, profile in zip(kept, profiles, strict=True):
            made = on_a_thread(one, profile)
            assert isinstance(made, New) and made.unwritten == (
                'no plan file: memory_budget="-20%" takes none, because it would not say what is computed again'
            )


def test_a_compilation_of_its_own_leaves_torch_as_it_is() -> None:
    from torch._dynamo import utils
    from torch._inductor import compile_fx

    apart = _torch.compile_fx_inner_apart()
    assert not isinstance(apart, str) and apart is not compile_fx.compile_fx_inner
    assert compile_fx.dynamo_utils is utils and apart is _torch.compile_fx_inner_apart()
    assert utils.preserve_rng_state.__module__ == utils.__name__


def test_the_same_profile_gives_the_same_plan_and_no_code(profiles: tuple[str, str]) -> None:
    with compiled(profiles[1]) as kept:
        for one in kept:
            new = on_a_thread(one, profiles[1])
            assert isinstance(new, New) and new.planned is None


def test_the_program_may_compile_meanwhile(profiles: tuple[str, str]) -> None:
    """Torch's lock keeps the two apart, and neither sees the other's settings."""
    with compiled(profiles[0]) as kept:
        assert isinstance(kept[0], Kept)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(on_a_thread(kept[0], profiles[1])))
        thread.start()
        for size in range(3, 8):
            function = torch.compile(lambda x: (x.sin() + x.cos()).sum(), fullgraph=True, dynamic=False)
            function(torch.ones(size))
            assert torch._inductor.config.pattern_matcher is True
            assert torch._inductor.config.post_grad_custom_post_pass is None
        thread.join(300)
        assert isinstance(found[0], New) and found[0].planned is not None


def test_a_backward_that_the_program_compiles_at_its_first_run_waits(profiles: tuple[str, str]) -> None:
    """Inductor changes attributes of its own classes while it lowers a graph: torch's lock has to be held then, too."""
    free, dear = profiles
    happened: list[str] = []
    real, planned = order_kernels, threading.Event()

    def in_inductor() -> bool:
        stack = traceback.walk_stack(sys._current_frames().get(program.ident or 0))
        return any("_inductor" in frame.f_code.co_filename for frame, _ in stack)

    with compiled(free) as kept:
        step = torch.compile(
            lambda x: x.sin().square().mean(), options=inductor_passes.options(inductor=NO_CACHE), fullgraph=True
        )
        x = torch.ones(7, requires_grad=True)
        loss = step(x)

        def backward() -> None:
            loss.backward()
            happened.append("backward ran")

        program = threading.Thread(target=backward)

        def begins(*args: Any) -> list[Any]:
            if threading.current_thread() is not program and not planned.is_set():
                planned.set()
                program.start()
                # It comes as far as Inductor, and is held there.
                until = time.monotonic() + 60
                while not in_inductor() and time.monotonic() < until:
                    program.join(0.05)
                program.join(1.0)
                assert program.is_alive() and in_inductor()
                happened.append("the second plan was compiled")
            return real(*args)

        with mock.patch.object(engine_again, "order_kernels", begins):
            made = on_a_thread(kept[0], dear)
            program.join(300)
    assert isinstance(made, New) and made.planned is not None
    assert happened == ["the second plan was compiled", "backward ran"]


def test_a_pass_that_fails_ends_it_and_warns_of_nothing(
    profiles: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    free, dear = profiles
    with compiled(free) as kept, mock.patch.object(BucketPass, "run", side_effect=ZeroDivisionError("gone")):
        failed = on_a_thread(kept[0], dear)
    assert isinstance(failed, Exception) and "VerificationError" in str(failed) and "gone" in str(failed)
    assert not [r for r in caplog.records if "was undone" in r.getMessage()]


def test_without_its_process_groups_a_graph_is_not_planned_again(
    profiles: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """A program that has ended its work, or begins a second life, destroys them while a plan is made."""
    free, dear = profiles
    with compiled(free) as kept:
        pass
    with fake_world(2):
        for one in kept:
            over = on_a_thread(one, dear)
            assert isinstance(over, UnfitError) and str(over) == "its process groups were destroyed"
    assert not [r for r in caplog.records if r.name == "inductor_passes"]


def test_what_is_measured_goes_to_the_graph_that_was_compiled_last(profiles: tuple[str, str]) -> None:
    """After a reset graphs have the digests and numbers of those before."""
    with collect(what_if=False) as reports:
        for _ in range(2):
            with compiled(profiles[0]):
                pass
    first, second = reports[0], reports[2]
    assert (first.digest, first.compile_id) == (second.digest, second.compile_id)
    collector.amend(second.digest, second.compile_id, TIMING)
    assert second.timing is TIMING and first.timing is None


def test_explaining_times_nothing() -> None:
    with fake_world(2), mock.patch.object(measuring, "statement", side_effect=AssertionError):
        model = inductor_passes.simple_fsdp(mlp(MODEL), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
        found = inductor_passes.explain(model, mlp_batch(MODEL)[0], options={"tune": 3})
    assert all(any("explain() runs no step" in note for note in one.notes) for one in found.reports)


def test_the_program_keeps_its_garbage_collector(profiles: tuple[str, str]) -> None:
    """It is switched off for compilations that the program waits for only."""
    free, dear = profiles
    seen: list[bool] = []
    with compiled(free) as kept:
        original = BucketPass.run

        def run(self: BucketPass, *args: Any) -> Any:
            seen.append(gc.isenabled())
            gc.disable()
            return original(self, *args)

        try:
            with mock.patch.object(BucketPass, "run", run):
                assert isinstance(on_a_thread(kept[0], dear), New)
            assert seen[0] and not gc.isenabled()
        finally:
            gc.enable()


def test_a_graph_that_comes_out_differently_is_refused(profiles: tuple[str, str]) -> None:
    with compiled(profiles[0]) as kept:
        first, second = kept
        assert isinstance(first, Kept) and isinstance(second, Kept) and first.lowering is not None
        first.lines[-1] += " "
        found = on_a_thread(first, profiles[1])
        assert isinstance(found, UnfitError) and str(found) == "traced again it is another graph"
        assert second.lowering is not None
        second.lowering = replace(second.lowering, outputs=("elsewhere",), compile_context=None)
        found = on_a_thread(second, profiles[1])
        assert isinstance(found, UnfitError) and "lie differently in memory" in str(found)


def test_what_sends_the_same_is_not_replaced(profiles: tuple[str, str]) -> None:
    with compiled(profiles[0]) as kept:
        first, second = kept
        assert isinstance(first, Kept) and isinstance(second, Kept)
        assert first.conflict() == second.conflict() == ""
        other = variants.About("[7/0]", "inference", "others")
        assert first.variant is not None
        variants.note(other, first.variant.kinds)
        assert first.conflict().startswith("another graph sends the same messages") and second.conflict() == ""


def loaded_module() -> dict[str, Any]:
    made: dict[str, Any] = {}
    exec("class Runner:\n    def call(self, args):\n        return args\ncall = Runner().call\n", made)
    return made


def test_a_graph_of_before_a_reset_counts_for_as_long_as_it_may_be_called() -> None:
    variants._forget()
    about, came = variants.About("0/0", "forward", "settings"), ("a gather",)
    one = Kept.__new__(Kept)
    one.about, one.variant = about, following.Variant(came, came, ())
    kind = one.variant.kinds
    before, after = loaded_module(), loaded_module()
    callers = [before["call"], after["call"]]
    variants.note(about, kind)
    variants.note(about, kind, before)
    assert one.conflict() == "" and variants.graphs_of(about, kind) == (1, 0), "compiled and loaded it is one graph"
    # Numbers begin again.
    variants.note(about, kind)
    assert one.conflict().startswith("a graph of before torch._dynamo.reset() may still be called")
    variants.note(about, kind, after)
    assert variants.graphs_of(about, kind) == (2, 1)
    forgotten = mock.Mock()
    with mock.patch.object(variants._torch, "forget_loaded_module", forgotten):
        del callers[0]
        assert one.conflict() == "" and variants.graphs_of(about, kind) == (1, 0)
    forgotten.assert_called_once_with(before)
    variants.note(replace(about, compile_id="7/0"), kind, before)
    assert one.conflict() == "", "nobody calls it"
    callers.append(before["call"])
    variants.note(replace(about, compile_id="7/0"), kind, before)
    assert one.conflict().startswith("another graph sends the same messages")
    variants._forget()


def test_one_reset_does_not_end_swapping(profiles: tuple[str, str]) -> None:
    with compiled(profiles[0]) as kept:
        first = list(kept)
        torch._dynamo.reset()
        step = torch.compile(
            inductor_passes.simple_fsdp(mlp(MODEL), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))),
            options=inductor_passes.options(
                cost_profile=profiles[0], tune=2, tune_swap="on", memory_budget="unlimited", inductor=NO_CACHE
            ),
            fullgraph=True,
        )
        real = variants.earlier
        # The ranks' answer about an equal graph is that which they had: it has to send what the first one sent.
        again_asked = mock.patch.object(variants, "earlier", lambda *a, **k: real(*a, **{**k, "together": False}))
        with again_asked, torch._functorch.config.patch(enable_autograd_cache=False):
            loss = step(mlp_batch(MODEL)[0]).square().mean()
            loss.backward()
        del loss
        assert len(kept) == 4
        for old, new in zip(first, kept[2:]):
            assert isinstance(old, Kept) and isinstance(new, Kept), new
            assert old.about.compile_id == new.about.compile_id  # type: ignore[union-attr]
            gc.collect()
            assert new.conflict() == ""
        made = on_a_thread(kept[2], profiles[1])
        assert isinstance(made, New) and made.planned is not None


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"compress": "int8"}, "its messages are narrowed"),
        ({"dynamic": True}, "the graph holds for several sizes"),
        (
            {"inductor": {**NO_CACHE, "max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN"}},
            "Inductor's max_autotune_gemm measures kernels on random inputs, which the program's generators would draw",
        ),
    ],
)
def test_what_cannot_be_planned_again_says_why(profiles: tuple[str, str], more: dict[str, Any], why: str) -> None:
    real = torch.compile
    dynamic = more.pop("dynamic", None)
    patched = mock.patch.object(torch, "compile", lambda *a, **k: real(*a, **k, dynamic=dynamic))
    with patched, compiled(profiles[0], **more) as kept:
        assert why in kept, kept


def test_what_was_kept_is_taken_once_and_does_not_pile_up() -> None:
    again.keep("a graph", "why not")
    assert again.take("a graph") == "why not"
    assert "came out of a cache" in str(again.take("a graph"))
    for number in range(3 * again._MOST):
        again.keep(str(number), "why not")
    assert len(again._kept) == again._MOST
    again._kept.clear()


def test_modules_are_collected_on_the_thread_that_asks() -> None:
    planned: Any = "a plan"
    assert not again.catches({}, planned)
    with again.caught() as found:
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(again.catches({}, planned)))
        thread.start()
        thread.join()
        assert seen == [False] and again.catches({"key": 1}, planned)
    assert found == [({"key": 1}, planned)] and not again.catches({}, planned)
