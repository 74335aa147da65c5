"""Error feedback: what is kept is what a message loses, it is proven, and forgeries are found out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import torch.fx
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import inductor_passes
from inductor_passes import ConfigError, PassConfig, verify
from inductor_passes.compress.emit import exact
from inductor_passes.compress.emit import replace as narrow
from inductor_passes.compress.form import form_of
from inductor_passes.compress.pass_ import CompressPass
from inductor_passes.engine.pipeline import run_passes
from inductor_passes.ir.parameters import META_KEY, Carried
from inductor_passes.ir.view import GraphView
from inductor_passes.records import once
from inductor_passes.rewriting.emit import Emitter
from inductor_passes.simple_fsdp import SimpleFSDPError, residuals, simple_fsdp
from tests.support.bucket_graphs import Program, check_fakes, inputs_by_rank, run_all_ranks
from tests.support.graphs import aten
from tests.support.world import fake_world
from tests.test_compress import NAMES, config, link, run

SENT = torch.ops.inductor_passes.sent.default
KEPT = ("all_gather", "reduce_scatter", "all_to_all")


def compensated(p: Program, kind: str, group: str, *shape: int) -> list[torch.fx.Node]:
    """What simple_fsdp writes for one message: the residual and the gradient, what arrives, and what is kept."""
    residual, gradient = p.input(*shape), p.input(*shape)
    value = p.call(aten.add.Tensor, residual, gradient)
    brought = p.collective(kind, value, group)
    lost = p.call(aten.sub.Tensor, value, p.call(SENT, value))
    stored = p.call(aten.copy_.default, residual, p.call(aten.nan_to_num.default, lost, 0.0, 0.0, 0.0))
    return [p.call(aten.neg.default, brought), stored]


# -- settings ----------------------------------------------------------------------------------------------------


def test_feedback_needs_something_that_is_narrowed() -> None:
    assert not PassConfig().narrowing.feedback
    assert config("*=int8", compress_feedback="on").narrowing.feedback
    for compress in ("off", "dp=off"):
        with pytest.raises(ConfigError, match=r'compress_feedback=.*"off" beside compress='):
            PassConfig.from_mapping({"compress": compress, "compress_feedback": "on"})
    with pytest.raises(ConfigError, match=r'compress_feedback=.*"on" or "off"'):
        PassConfig.from_mapping({"compress": "auto", "compress_feedback": "yes"})


# -- what is kept ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("shape", [(16, 24), (8, 37)], ids=["whole", "padded"])
def test_what_arrives_and_what_is_kept_add_up(kind: str, name: str, shape: tuple[int, int]) -> None:
    """On every rank of four, under verify="strict"; what a block loses is far below what arrives of it."""
    world = 4
    with fake_world(world) as group:
        p = Program()
        gm = p.done(*compensated(p, kind, group, *shape))
        values = inputs_by_rank(gm, world)
        carried = [e + g for e, g in zip(*values, strict=True)]
        report = run(gm, config({"*": name}, compress_feedback="on"), link(world, 1.0))
        check_fakes(gm)
        arrived, kept = run_all_ranks(gm, values)
    assert "what it loses is added to the next one" in report.decisions[0].detail
    brought = [x - e for x, e in zip(carried, kept, strict=True)]
    rows = shape[0] // world
    pieces = [[x.split(rows)[rank] for x in brought] for rank in range(world)]
    expected = {
        "all_gather": [torch.cat(brought)] * world,
        "reduce_scatter": [torch.stack(own).sum(0) for own in pieces],
        "all_to_all": [torch.cat(own) for own in pieces],
    }[kind]
    for found, wanted in zip(arrived, expected, strict=True):
        torch.testing.assert_close(-found, wanted, rtol=1e-6, atol=1e-4)
    assert all(0 < float(e.abs().max()) <= float(form_of(name, 128).error) * 80 for e in kept)


@pytest.mark.parametrize(
    ("rules", "feedback", "error"), [({"*": "int8"}, "off", "0.08"), ({"*": "int8"}, "on", "0.001")]
)
def test_what_loses_nothing_keeps_nothing(rules: object, feedback: str, error: str) -> None:
    """Feedback that is switched off, and a message that stays as it is: what was kept is added once."""
    with fake_world(2) as group:
        p = Program()
        gm = p.done(*compensated(p, "reduce_scatter", group, 16, 32))
        values = inputs_by_rank(gm, 2)
        whole = [e + g for e, g in zip(*values, strict=True)]
        chosen = config(rules, error, compress_feedback=feedback)
        done = run_passes(gm.graph, [CompressPass(chosen.narrowing)], chosen, link(2, 1.0))
        gm.recompile()
        assert done.report.passes[0].changed
        assert not [n for n in gm.graph.nodes if n.target is SENT]
        arrived, kept = run_all_ranks(gm, values)
    assert all(torch.count_nonzero(one) == 0 for one in kept)
    if feedback == "on":
        assert all(torch.equal(-y, sum(whole).split(8)[rank]) for rank, y in enumerate(arrived))


@pytest.mark.parametrize(
    ("kind", "remembers"), [("reduce_scatter", False), ("reduce_scatter", True), ("all_gather", False)]
)
def test_a_model_that_remembers_nothing_is_warned_of(
    kind: str, remembers: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found: only the report said that nothing is kept. Activations have no memory and need none."""
    monkeypatch.setattr(once, "warned", set())
    for named in (True, False):
        with fake_world(2) as group:
            p = Program()
            value = p.input(64, 32)
            result = p.collective(kind, value, group)
            gm = p.done(result, p.call(SENT, value)) if remembers else p.done(result)
            if named:
                start = next(n for n in gm.graph.nodes if n.op == "call_function" and kind in str(n.target))
                start.meta[META_KEY] = (Carried("layers.0.weight", "layers.0", "Model", True),)
            chosen = config("*=int8", compress_feedback="on")
            assert run_passes(gm.graph, [CompressPass(chosen.narrowing)], chosen, link(2, 1.0)).narrowed
        said = [one.getMessage() for one in caplog.records if "keeps nothing" in one.getMessage()]
        assert bool(said) is (kind == "reduce_scatter" and not remembers and named)
        if said:
            assert "call inductor_passes.add_feedback(model)" in said[0]
        caplog.clear()


@pytest.mark.parametrize(("kind", "advised"), [("all_gather", False), ("reduce_scatter", True)])
def test_advice_where_nothing_is_kept(kind: str, advised: bool) -> None:
    """Of a gradient without residuals; weights are gathered, and have none."""
    with fake_world(2) as group:
        p = Program()
        gm = p.done(p.collective(kind, p.input(64, 32), group))
        chosen = config("*=int8", compress_feedback="on")
        done = run_passes(gm.graph, [CompressPass(chosen.narrowing)], chosen, link(2, 1.0))
    (note,) = [note for note in done.report.notes if note.startswith("compress:")]
    assert ("see inductor_passes.add_feedback" in note) is advised


def test_what_is_not_finite_is_not_kept() -> None:
    with fake_world(2) as group:
        p = Program()
        gm = p.done(*compensated(p, "reduce_scatter", group, 16, 32))
        values = inputs_by_rank(gm, 2)
        values[1][0][3, 5] = torch.inf
        run(gm, config({"*": "int8"}, compress_feedback="on"), link(2, 1.0))
        arrived, kept = run_all_ranks(gm, values)
    assert not bool(arrived[0].isfinite().all())
    assert all(bool(one.isfinite().all()) for one in kept)


def test_a_value_that_two_messages_carry_is_not_kept() -> None:
    """They may arrive in two forms."""
    with fake_world(2) as group:
        p = Program()
        outputs = compensated(p, "reduce_scatter", group, 16, 32)
        value = outputs[0].args[0].args[0].args[0]  # type: ignore[union-attr]
        again = p.collective("all_gather", value, group)  # type: ignore[arg-type]
        gm = p.done(*outputs, p.call(aten.neg.default, again))
        report = run(gm, config({"*": "int8"}, compress_feedback="on"), link(2, 1.0))
    assert report.metrics["narrowed"] == 2
    assert not any("added to the next one" in d.detail for d in report.decisions)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("again", ["all_gather", "all_reduce"])
def test_what_arrives_is_sent_on(again: str, name: str) -> None:
    """Narrow a second time. Found: undone, as the second message does not bring the codes of the first one."""
    with fake_world(4) as group:
        p = Program()
        outputs = compensated(p, "all_to_all", group, 16, 32)
        brought = outputs[0].args[0]
        gm = p.done(*outputs, p.call(aten.neg.default, p.collective(again, brought, group)))  # type: ignore[arg-type]
        values = inputs_by_rank(gm, 4)
        expected = run_all_ranks(gm, values)
        report = run(gm, config({"*": name}, compress_feedback="on"), link(4, 1.0))
        found = run_all_ranks(gm, values)
    assert report.rolled_back is None and report.metrics["narrowed"] == 2
    assert "what it loses is added to the next one" in report.decisions[0].detail
    for e, f in zip(expected[2], found[2], strict=True):
        assert 0 < float((e - f).abs().max()) <= 2.1 * float(form_of(name, 128).error) * 4 * 80


# -- forgeries ---------------------------------------------------------------------------------------------------


class Kept:
    """Two parameters' gradients with feedback, narrowed; what the graph was, and the certificates."""

    def __init__(self, group: str, kind: str = "reduce_scatter", form: str = "int8") -> None:
        p = Program()
        self.form = form_of(form, 64)
        outputs = [node for _ in range(2) for node in compensated(p, kind, group, 16, 32)]
        self.gm = p.done(*outputs)
        self.before = verify.snapshot(self.gm.graph)
        self.values = self.calls(aten.add.Tensor)
        self.subs = self.calls(aten.sub.Tensor)
        self.stores = self.calls(aten.copy_.default)
        sent = self.calls(SENT)
        view = GraphView(self.gm.graph)
        self.certificates = [
            narrow(self.gm.graph, one, self.form, sent=own).certificate
            for one, own in zip(view.collectives, sent, strict=True)
        ]

    def calls(self, target: object) -> list[torch.fx.Node]:
        return [node for node in self.gm.graph.nodes if node.target is target]

    def findings(self) -> list[str]:
        """What the verifier says, with every new node certified."""
        calls = [node.name for node in self.gm.graph.nodes if node.op == "call_function"]
        names = tuple(name for name in calls if name not in self.before.nodes)
        first, *others = self.certificates
        given = [replace(first, added=(*first.added, *names)), *others]
        found = verify.check(self.gm.graph, reference=self.before, certificates=given, rounding=Fraction(8, 100))
        return [str(f) for f in found]


def taken_off(made: Kept) -> None:
    """The residual is added with the wrong sign."""
    made.subs[0].args = made.subs[0].args[::-1]


def taken_off_before(made: Kept) -> None:
    made.values[0].target = aten.sub.Tensor


def of_another_parameter(made: Kept) -> None:
    made.values[0].update_arg(0, made.values[1].args[0])


def into_another_parameter(made: Kept) -> None:
    made.stores[0].update_arg(0, made.stores[1].args[0])


def not_stored(made: Kept) -> None:
    made.stores[0].replace_all_uses_with(made.stores[0].args[0])  # type: ignore[arg-type]
    made.gm.graph.erase_node(made.stores[0])


def added_twice(made: Kept) -> None:
    """The residual goes into the message two times."""
    value = made.values[0]
    residual = value.args[0]
    with made.gm.graph.inserting_after(value):
        more = made.gm.graph.call_function(aten.add.Tensor, (value, residual))
    more.meta["val"] = value.meta["val"]
    value.replace_all_uses_with(more, delete_user_cb=lambda user: user is not more)


def kept_twice(made: Kept) -> None:
    """What is lost is stored on top of what there was."""
    store, residual = made.stores[0], made.values[0].args[0]
    with made.gm.graph.inserting_before(store):
        more = made.gm.graph.call_function(aten.add.Tensor, (store.args[1], residual))
    more.meta["val"] = residual.meta["val"]  # type: ignore[union-attr]
    store.update_arg(1, more)


def kept_of_another_parameter(made: Kept) -> None:
    """Both losses go to the other's buffer."""
    first, second = made.stores
    second.prepend(first)
    for store, lost in zip((first, second), (second.args[1], first.args[1]), strict=True):
        store.update_arg(1, lost)


def not_added(made: Kept) -> None:
    made.values[0].replace_all_uses_with(made.values[0].args[1])  # type: ignore[arg-type]


def codes_of_another_message(made: Kept) -> None:
    made.subs[1].update_arg(1, made.subs[0].args[1])


def in_another_form(made: Kept) -> None:
    """The rank keeps what a message in another type would lose."""
    form = form_of("int8" if made.form.name == "e5m2" else "e5m2", 64)
    value, sub = made.values[0], made.subs[0]
    emit = Emitter(made.gm.graph, sub.prev)
    with emit.standing_for(sub):
        wide = form.widened(emit, form.narrowed(emit, emit.view(value, [8, 64])))
        sub.update_arg(1, emit.view(wide, [16, 32]))
    first, *others = made.certificates
    made.certificates = [_also(first, wide.name, form.error), *others]


def in_blocks_of_another_size(made: Kept) -> None:
    form = form_of("int8", 128)
    value, sub = made.values[0], made.subs[0]
    emit = Emitter(made.gm.graph, sub.prev)
    with emit.standing_for(sub):
        wide = form.widened(emit, form.narrowed(emit, emit.view(value, [4, 128])))
        sub.update_arg(1, emit.view(wide, [16, 32]))
    first, *others = made.certificates
    made.certificates = [_also(first, wide.name, form.error), *others]


def read_elsewhere(made: Kept) -> None:
    """What a rank keeps for itself is sent, rounded once more."""
    own = made.subs[0].args[1]
    made.subs[0].update_arg(0, own)


def twice(made: Kept) -> None:
    """A second reading that arrives, in the place of one that the rank keeps."""
    first, *others = made.certificates
    made.certificates = [replace(first, narrowed=tuple(replace(n, own=False) for n in first.narrowed)), *others]


def _also(given: verify.Certificate, read: str, error: Fraction) -> verify.Certificate:
    named = (*given.narrowed, verify.Narrowed(read, error, own=True))
    return replace(given, narrowed=named, added=(*given.added, read))


FORGERIES: list[Callable[[Kept], None]] = [
    taken_off,
    taken_off_before,
    of_another_parameter,
    into_another_parameter,
    not_stored,
    added_twice,
    kept_twice,
    kept_of_another_parameter,
    not_added,
    codes_of_another_message,
    in_another_form,
    in_blocks_of_another_size,
    read_elsewhere,
    twice,
]


@pytest.mark.parametrize("form", NAMES)
@pytest.mark.parametrize("kind", KEPT)
def test_forgeries_are_found_out(kind: str, form: str) -> None:
    accepted = []
    with fake_world(4) as group:
        assert Kept(group, kind, form).findings() == []
        for forge in FORGERIES:
            made = Kept(group, kind, form)
            forge(made)
            made.gm.graph.lint()
            if not made.findings():
                accepted.append(forge.__name__)
    assert accepted == []


def test_a_rounding_that_no_message_sends_is_found_out() -> None:
    """The message is exact; the rank keeps what a narrow one would lose."""
    form = form_of("int8", 64)
    with fake_world(4) as group:
        p = Program()
        gm = p.done(*compensated(p, "reduce_scatter", group, 16, 32))
        before = verify.snapshot(gm.graph)
        (sent,) = [n for n in gm.graph.nodes if n.target is SENT]
        value = sent.args[0]
        emit = Emitter(gm.graph, sent)
        with emit.standing_for(sent):
            wide = form.widened(emit, form.narrowed(emit, emit.view(value, [8, 64])))
            own = emit.view(wide, [16, 32])
        given = exact(gm.graph, sent)
        (sub,) = [n for n in gm.graph.nodes if n.target is aten.sub.Tensor and n.args[0] is value]
        sub.update_arg(1, own)
        added = tuple(n.name for n in emit.made)
        given = replace(given, added=added, narrowed=(verify.Narrowed(wide.name, form.error, own=True),))
        found = [str(f) for f in verify.check(gm.graph, reference=before, certificates=[given], rounding=form.error)]
    assert any("no message sends it so" in one for one in found), found


# -- state of a module -------------------------------------------------------------------------------------------


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 4, bias=False))


def taken(model: nn.Module) -> nn.Module:
    model[0].register_buffer("weight_residual", torch.zeros(1))
    return model


def test_buffers_of_a_module() -> None:
    """Whole gradients on each rank; DTensors over all ranks in what is saved."""
    with fake_world(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        model = simple_fsdp(small(), mesh)
        model[1].weight.requires_grad_(False)
        assert inductor_passes.add_feedback(model) is model
        found = {name: (tuple(b.shape), tuple(b.to_local().shape)) for name, b in model.named_buffers()}
        assert found == {"0.weight_residual": ((48, 8), (12, 8)), "0.bias_residual": ((48,), (12,))}
        assert set(found) <= set(model.state_dict())
        model[0].weight_residual.to_local().fill_(1.0)
        other = copy.deepcopy(model)
        inductor_passes.reset_feedback(model)
        assert float(model[0].weight_residual.to_local().abs().max()) == 0
        assert float(other[0].weight_residual.to_local().min()) == 1


def test_unequal_shards_have_none() -> None:
    """They are never narrowed, and reading a residual would make graphs of ranks differ in sizes."""
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "dp"))
        model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 3), nn.Linear(3, 8))
        inductor_passes.add_feedback(simple_fsdp(model, mesh, mode="hybrid_shard"))
        assert {name.partition("_")[0] for name, _ in model.named_buffers()} == {
            "0.weight", "0.bias", "2.weight", "2.bias"
        }


def test_what_was_frozen_is_added_later() -> None:
    with fake_world(2):
        model = simple_fsdp(small(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
        model[0].requires_grad_(False)
        inductor_passes.add_feedback(model)
        kept = model[1].weight_residual
        model[0].requires_grad_(True)
        inductor_passes.add_feedback(model)
        assert model[1].weight_residual is kept
        assert {name for name, _ in model.named_buffers()} == {
            "0.weight_residual", "0.bias_residual", "1.weight_residual"
        }


def test_a_part_of_a_model_alone() -> None:
    with fake_world(2):
        model = simple_fsdp(small(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
        inductor_passes.add_feedback(model[1])
        assert [name for name, _ in model.named_buffers()] == ["1.weight_residual"]


@pytest.mark.parametrize(("rows", "fits"), [(12, True), (13, False)])
def test_over_tensor_parallelism(rows: int, fits: bool) -> None:
    """Each rank of the inner dimension has its own; not where it has another size there."""
    with fake_world(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(nn.Linear(8, rows, bias=False), mesh["tp"], ColwiseParallel())
        if not fits:
            # Along the dimension that both split, simple_fsdp refuses it itself.
            simple_fsdp(model, mesh["dp"], shard_dim=1)
            with pytest.raises(SimpleFSDPError, match="split unevenly along dimension 0"):
                inductor_passes.add_feedback(model)
            return
        inductor_passes.add_feedback(simple_fsdp(model, mesh["dp"]))
        assert model.weight_residual.shape == (24, 8)
        assert model.weight_residual.to_local().shape == (6, 8)


def test_what_shares_a_parameter_shares_what_is_kept() -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        model[1].weight = model[0].weight
        simple_fsdp(model, mesh)
        inductor_passes.add_feedback(model)
        assert model[0].weight_residual is model[1].weight_residual


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda mesh: small(), "apply simple_fsdp or adopt first"),
        (lambda mesh: simple_fsdp(small().to("meta"), mesh), "meta device"),
        (lambda mesh: simple_fsdp(small().to(torch.bfloat16), mesh), "reduced in torch.bfloat16"),
        (
            lambda mesh: simple_fsdp(small(), mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
            "reduce_dtype=torch.float32",
        ),
        (lambda mesh: inductor_passes.add_feedback(simple_fsdp(small(), mesh)), "has residuals already"),
        (lambda mesh: taken(simple_fsdp(small(), mesh)), "has weight_residual already"),
    ],
)
def test_refusals_change_nothing(make: Callable[[object], nn.Module], says: str) -> None:
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        model = make(mesh)
        before = [name for name, _ in model.named_buffers()]
        with pytest.raises(SimpleFSDPError, match=says):
            inductor_passes.add_feedback(model)
        assert [name for name, _ in model.named_buffers()] == before
        if not any(residuals.names_of(part) for part in model.modules()):
            with pytest.raises(SimpleFSDPError, match="call add_feedback first"):
                inductor_passes.reset_feedback(model)
