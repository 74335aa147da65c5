"""What users do with an adopted model besides training it, and what is refused before anything changes."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

import inductor_passes
from inductor_passes import AdoptError, adopt
from inductor_passes.simple_fsdp import MissingRanksError, ShardedValueError, arrival, simple_fsdp
from tests.support import wrapped
from tests.support.ranks import Ranks
from tests.support.world import fake_world
from tests.support.wrapped import Net, batch, mesh_of, sharded, train, whole

# -- refusals: the module is as it was --------------------------------------------------------------------


def offloading(model: Any) -> nn.Module:
    return sharded(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def with_hook(model: Any) -> nn.Module:
    model = sharded(model)
    model.set_all_reduce_hook(lambda _: None)
    return model


def unused(model: Any) -> nn.Module:
    model = sharded(model)
    model.set_reduce_scatter_unused_params(True)
    return model


def own_gather(model: Any) -> nn.Module:
    model = sharded(model)

    class Own(type(model._get_fsdp_state()._fsdp_param_groups[0]._all_gather_comm)):  # type: ignore[misc]
        pass

    model.set_custom_all_gather(Own())
    return model


def sparse(model: Any) -> nn.Module:
    model.table = nn.Embedding(8, 4, sparse=True)
    return sharded(model)


def both(model: Any) -> nn.Module:
    sharded(model)
    model.extra = simple_fsdp(nn.Linear(4, 4), mesh_of(dist.get_world_size()))
    return model


def ddp_with_hook(model: Any) -> nn.Module:
    found = wrapped.ddp(model)
    found.register_comm_hook(None, lambda state, bucket: None)  # type: ignore[operator]
    return found


def ddp_unused(model: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


def captured(model: Any) -> nn.Module:
    model.weights = {"last": [model.out.weight]}
    return wrapped.ddp(model)


def part_is_ddp(model: Any) -> nn.Module:
    return nn.Sequential(wrapped.ddp(model))


def fsdp1(model: Any) -> nn.Module:
    """Not set up: that needs an accelerator."""
    found = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(found)
    found._fsdp_wrapped_module = model
    return found


def hooked_replicate(model: Any) -> nn.Module:
    from torch.distributed._composable import replicate

    return replicate(model)


def plain(model: Any) -> nn.Module:
    return model


REFUSED = [
    (offloading, r"offload_policy=CPUOffloadPolicy\(\) cannot be taken over: leave it out"),
    (with_hook, "set_all_reduce_hook"),
    (unused, "set_reduce_scatter_unused_params.True. .* set it to False"),
    (own_gather, "set_custom_all_gather"),
    (sparse, r"table \(Embedding\) has sparse gradients: make it with sparse=False"),
    (both, r"simple_fsdp was applied to extra"),
    (ddp_unused, r"adopt\(model, find_unused_parameters=False\)"),
    (captured, r"weights \(Net\) holds parameters by itself"),
    (part_is_ddp, "a part of Sequential is a DistributedDataParallel: adopt that part"),
    (hooked_replicate, "replicate_with_fsdp"),
    (fsdp1, r"FSDP1.*fully_shard"),
    (plain, r"nothing to adopt in this Net: call torch.distributed.fsdp.fully_shard"),
]


@pytest.mark.parametrize(("wrap", "message"), REFUSED, ids=[wrap.__name__ for wrap, _ in REFUSED])
def test_what_only_hooks_can_serve_is_refused_before_anything_changes(wrap: Any, message: str) -> None:
    with fake_world(2, 0):
        model = wrap(Net())
        before = [(type(part), dict(part.__dict__), dict(part._parameters)) for part in model.modules()]
        with pytest.raises(AdoptError, match=message):
            adopt(model)
        after = [(type(part), dict(part.__dict__), dict(part._parameters)) for part in model.modules()]
        for (cls, own, parameters), (cls_after, own_after, parameters_after) in zip(before, after):
            assert cls is cls_after and own.keys() == own_after.keys()
            assert all(parameters[name] is parameters_after[name] for name in parameters)


@pytest.mark.parametrize("value", [5, None, "model"])
def test_what_is_no_module(value: Any) -> None:
    with pytest.raises(AdoptError, match="expected a torch"):
        adopt(value)


def test_twice_is_once_too_often() -> None:
    with fake_world(2, 0):
        model = adopt(sharded(Net()))
        with pytest.raises(AdoptError, match="adopted before"):
            adopt(model)


# -- the hooks are gone, the module is what it was --------------------------------------------------------


def test_nothing_of_fsdp_is_left() -> None:
    with fake_world(2, 0):
        clean = Net()
        model: Any = adopt(sharded(Net()))
        for part, other in zip(model.modules(), clean.modules()):
            assert isinstance(part, type(other))
            for kind in ("forward_pre_hooks", "forward_hooks", "state_dict_pre_hooks", "load_state_dict_post_hooks"):
                assert not getattr(part, f"_{kind}"), (type(part), kind)
            assert set(part.__dict__) - set(other.__dict__) <= {"_adoption"}
        assert isinstance(model, FSDPModule) and isinstance(model.blocks[0], FSDPModule)


def test_reads_outside_of_forward_do_not_gather() -> None:
    with fake_world(2, 0):
        model: Any = adopt(sharded(Net()))
        assert model.out.weight.shape == (3, 7)
        with pytest.raises(ShardedValueError, match="full_tensor"):
            model.out.weight.sum()


def test_a_list_of_modules_is_indexed_as_before() -> None:
    with fake_world(2, 0):
        model: Any = adopt(fully_shard(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), mesh=mesh_of(2)))
        assert [type(part).__name__ for part in model[1:]] == ["ReLU", "SimpleFSDPLinear"]


def test_a_registered_forward_method_gathers() -> None:
    class WithEncode(Net):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.into.weight

    with fake_world(2, 0):
        model: Any = sharded(WithEncode())
        register_fsdp_forward_method(model, "encode")
        adopt(model)
        assert model.encode(torch.ones(2, 7)).shape == (2, 7)


def test_settings_of_hooks_do_nothing_and_replacements_of_them_are_refused() -> None:
    with fake_world(2, 0):
        model: Any = adopt(sharded(Net()))
        model.set_modules_to_forward_prefetch([model.blocks[0]])
        model.set_is_last_backward(True)
        for call in (
            lambda: model.set_all_reduce_hook(print),
            lambda: model.set_reduce_scatter_unused_params(True),
            lambda: model._get_fsdp_state(),
        ):
            with pytest.raises(AdoptError):
                call()


# -- methods with a meaning ---------------------------------------------------------------------------------


def unshard_and_reshard(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    clean = Net()
    model: Any = adopt(sharded(copy.deepcopy(clean)))
    model.unshard()
    assert torch.equal(model.out.weight, clean.out.weight)
    with pytest.raises(ShardedValueError):
        model.blocks[0].up.weight.sum()
    model.reshard()
    with pytest.raises(ShardedValueError):
        model.out.weight.sum()
    handle = model.blocks[0].unshard(async_op=True)
    handle.wait()
    assert torch.equal(model.blocks[0].up.weight, clean.blocks[0].up.weight)


def failed_step(rank: int, world_size: int) -> None:
    """Gradients of a step that failed do not come back."""
    model: Any = adopt(sharded(Net()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_requires_gradient_sync(False)
    model(batch(0, 0)[0]).sum().backward()
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    model(torch.zeros(5, wrapped.WIDTH)).mul(0).sum().backward()
    assert all(whole(p.grad).abs().max() == 0 for p in model.parameters())
    optimizer.step()


def sync_of_a_part(rank: int, world_size: int) -> None:
    """Without ``recurse`` the setting concerns one call of ``fully_shard``."""
    model: Any = adopt(sharded(Net()))
    model.set_requires_gradient_sync(False, recurse=False)
    model(batch(0, 0)[0]).sum().backward()
    assert model.into._parameters["weight"].grad is None
    assert model.blocks[0].up._parameters["weight"].grad is not None


class Choice(Net):
    """Uses the block that it is told to, or the last layer."""

    def forward(self, x: torch.Tensor, block: int | None = None) -> torch.Tensor:
        return self.out(x) if block is None else self.blocks[block](x)


def unequal_use(rank: int, world_size: int) -> None:
    """Held gradients are reduced together also where one rank alone has some."""
    model: Any = adopt(wrapped.ddp(Choice()))
    with model.no_sync():
        model(batch(0, 0)[0], rank).sum().backward()
    blocks = model.module.blocks
    expected = [parameter.grad.clone() for parameter in blocks[rank].parameters()]
    model(batch(0, 1)[0]).sum().backward()
    for parameter, gradient in zip(blocks[rank].parameters(), expected):
        assert torch.allclose(parameter.grad, gradient / 2)
    assert all(parameter.grad is not None for parameter in blocks.parameters())


def one_rank_alone(rank: int, world_size: int) -> None:
    """As with DDP: the wrapped module alone is local, and a rank may skip a backward pass inside of ``no_sync``."""
    model: Any = adopt(wrapped.ddp(Net()))
    x, _ = batch(0, 0)
    if rank == 0:
        model.module(x).sum().backward()
        model.zero_grad()
    for skipped in (False, True):
        with model.no_sync():
            loss = model(x).sum()
            if not (skipped and rank == 1):
                loss.backward()
        assert_reduced(model, x)


def mixed_forwards(rank: int, world_size: int) -> None:
    """One backward pass through forward passes with and without a reduction; the flag is set in between."""
    torch.manual_seed(0)
    clean = Net()
    for wrap in (sharded, wrapped.ddp):
        found = []
        for taken in (False, True):
            model: Any = wrap(copy.deepcopy(clean))
            if taken:
                adopt(model)
            x, _ = batch(0, 0)
            if wrap is wrapped.ddp:
                with model.no_sync():
                    first = model(x)
            else:
                model.set_requires_gradient_sync(False)
                first = model(x)
                model.set_requires_gradient_sync(True)
            loss = first.sum() if wrap is sharded else (first * model(x + 1)).sum()
            loss.backward()
            found.append([whole(parameter.grad) for parameter in model.parameters()])
        assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*found))


def functional(rank: int, world_size: int) -> None:
    """``functional_call`` with values made of what forward reads."""

    class Doubled(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            values = {"weight": self.into.weight * 2, "bias": self.into.bias}
            return super().forward(torch.func.functional_call(self.into, values, (x,)))

    torch.manual_seed(0)
    clean = Doubled()
    x, _ = batch(0, 0)
    for wrap in (sharded, wrapped.ddp):
        models: list[Any] = [wrap(copy.deepcopy(clean)) for _ in range(2)]
        adopt(models[1])
        for model in models:
            model(x).sum().backward()
        for one, other in zip(models[0].parameters(), models[1].parameters()):
            assert torch.allclose(whole(one.grad), whole(other.grad), atol=1e-6)


def pending(rank: int, world_size: int) -> None:
    """Gradients of ``no_sync`` that wait are not forgotten."""
    model: Any = wrapped.ddp(Net())
    with model.no_sync():
        model(batch(0, 0)[0]).sum().backward()
    with pytest.raises(AdoptError, match="finish the accumulation"):
        adopt(model)


def held_on_one_rank(rank: int, world_size: int) -> None:
    """An error names the ranks that did not come; a hang would not."""
    model: Any = adopt(wrapped.ddp(Net()))
    x, _ = batch(0, 0)
    with mock.patch.object(arrival, "LIMIT_S", 2.0):
        if rank == 0:
            with model.no_sync():
                model(x).sum().backward()
            with pytest.raises(MissingRanksError, match="gradients that were held"):
                model(x).sum().backward()


def assert_reduced(model: Any, x: torch.Tensor) -> None:
    """All ranks get the same gradients."""
    model(x).sum().backward()
    for parameter in model.parameters():
        gradient = whole(parameter.grad)
        everyone = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, gradient)
        assert torch.equal(everyone[0], everyone[1])
    model.zero_grad()


def all_reduced_later(rank: int, world_size: int) -> None:
    """Hybrid: groups that replicate each other are summed by the last batch; also where adoption comes in between."""
    torch.manual_seed(0)
    clean = Net()
    found = []
    for taken in ("no", "before", "between"):
        model: Any = wrapped.hybrid(copy.deepcopy(clean))
        if taken == "before":
            adopt(model)
        model.set_requires_all_reduce(False)
        if taken == "between":
            adopt(model)
        model(batch(0, 0)[0]).sum().backward()
        model.set_requires_all_reduce(True)
        model(batch(0, 1)[0]).sum().backward()
        found.append([whole(parameter.grad) for parameter in model.parameters()])
    for others in found[1:]:
        assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found[0], others))


def compiled_before(rank: int, world_size: int) -> None:
    """What ``torch.compile`` returned is taken for the module inside; nothing was compiled with hooks yet."""
    torch.manual_seed(0)
    clean = Net()
    for wrap in (sharded, wrapped.ddp):
        plain, model = wrap(copy.deepcopy(clean)), wrap(copy.deepcopy(clean))
        compiled: Any = torch.compile(model, backend="aot_eager")
        assert adopt(compiled) is compiled
        losses = []
        for module, called in ((plain, plain), (model, compiled)):
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            losses.append([train(module, called, optimizer, step) for step in range(2)])
        assert losses[0] == losses[1]


def assigned(rank: int, world_size: int) -> None:
    """Weights that were loaded in place of the parameters that ``fully_shard`` made, before any forward pass."""
    torch.manual_seed(0)
    models: list[Any] = [sharded(Net()) for _ in range(2)]
    values = {name: value.clone() for name, value in models[0].state_dict().items()}
    models[1].load_state_dict(values, assign=True)
    adopt(models[1])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    for step in range(2):
        first, second = (train(model, model, optimizer, step) for model, optimizer in zip(models, optimizers))
        assert first == second
    for one, other in zip(*(model.parameters() for model in models)):
        assert torch.equal(whole(one), whole(other))


def compiled_copies(rank: int, world_size: int) -> None:
    """What was compiled in place can be pickled and copied, as any module; the copy is not compiled."""
    for wrap in (sharded, wrapped.ddp):
        model: Any = adopt(wrap(Net()))
        model.compile(backend="eager")
        x, _ = batch(0, 0)
        expected = model(x)
        copied = copy.deepcopy(model)
        assert torch.equal(copied(x), expected)
        if wrap is wrapped.ddp:
            stored = io.BytesIO()
            torch.save(model, stored)
            stored.seek(0)
            assert torch.equal(torch.load(stored, weights_only=False)(x), expected)


def copies(rank: int, world_size: int) -> None:
    """A copy computes what its original does, and has its own parameters."""
    for wrap in (sharded, wrapped.ddp):
        model: Any = adopt(wrap(Net()))
        x, _ = batch(0, 0)
        expected = model(x)
        copied = copy.deepcopy(model)
        assert torch.equal(copied(x), expected)
        assert_reduced(copied, x)
        if wrap is wrapped.ddp:
            stored = io.BytesIO()
            torch.save(model, stored)
            stored.seek(0)
            assert_reduced(torch.load(stored, weights_only=False), x)
        assert not {id(p) for p in copied.parameters()} & {id(p) for p in model.parameters()}
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.5)
        train(copied, copied, optimizer, 0)
        assert torch.equal(model(x), expected) and not torch.equal(copied(x), expected)


def recurrent(rank: int, world_size: int, how: str) -> None:
    """Recurrent layers keep a list of their weights: it must not be the old ones."""
    torch.manual_seed(0)
    clean = nn.LSTM(4, 6, num_layers=2)
    model: Any = copy.deepcopy(clean)
    if how == "simple_fsdp":
        simple_fsdp(model, mesh_of(world_size))
    else:
        model = adopt(fully_shard(model, mesh=mesh_of(world_size)) if how == "fsdp" else wrapped.ddp(model))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (clean, model)]
    x = torch.ones(3, 2, 4)
    for _ in range(2):
        for part, optimizer in zip((clean, model), optimizers):
            part(x)[0].pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(clean.parameters(), model.parameters()):
        assert torch.allclose(one, whole(other), atol=1e-6)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "check",
    [unshard_and_reshard, failed_step, sync_of_a_part, unequal_use, one_rank_alone, mixed_forwards, functional, pending]
    + [held_on_one_rank, copies, compiled_before, assigned, compiled_copies],
)
def test_methods(two_ranks: Ranks, check: Any) -> None:
    two_ranks.run(check)


@pytest.mark.ranks
def test_a_later_all_reduce(four_ranks: Ranks) -> None:
    four_ranks.run(all_reduced_later)


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["simple_fsdp", "fsdp", "ddp"])
def test_recurrent_layers(two_ranks: Ranks, how: str) -> None:
    two_ranks.run(recurrent, how)


# -- checkpoints --------------------------------------------------------------------------------------------


def saved_and_loaded(rank: int, world_size: int, folder: str, adopted_first: bool) -> None:
    """A checkpoint of a wrapped model loads into an adopted one and the other way round, with the optimizer's state."""
    torch.manual_seed(0)
    source, target = sharded(Net()), sharded(Net())
    for model in (source, target):
        if (model is source) == adopted_first:
            adopt(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (source, target)]
    train(source, source, optimizers[0], 0)
    model_state, optimizer_state = get_state_dict(source, optimizers[0])
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    model_state, optimizer_state = get_state_dict(target, optimizers[1])
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(target, optimizers[1], model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert train(source, source, optimizers[0], 1) == train(target, target, optimizers[1], 1)


def saved(rank: int, world_size: int, folder: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = adopt(sharded(Net()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, model, optimizer, 0)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    return _everything(model, optimizer)


def loaded(rank: int, world_size: int, folder: str) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = adopt(sharded(Net()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return _everything(model, optimizer)


def _everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    kept = [optimizer.state[parameter]["exp_avg_sq"] for parameter in model.parameters()]
    return [whole(value) for value in [*model.parameters(), *kept]]


def plain_states(rank: int, world_size: int) -> None:
    """``state_dict`` and ``load_state_dict`` of sharded and of whole values; pickles."""
    torch.manual_seed(rank)
    source, target = adopt(sharded(Net())), sharded(Net())
    assert all(isinstance(value, DTensor) for value in source.state_dict().values())
    target.load_state_dict(source.state_dict())
    adopt(target)
    x, _ = batch(0, 0)
    assert torch.equal(source(x), target(x))
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    full = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True))
    alone = Net()
    alone.load_state_dict(full)
    assert torch.allclose(alone(x), source(x), atol=1e-6)
    stored = io.BytesIO()
    torch.save(source.state_dict(), stored)
    pickle.dumps(wrapped.Block())


@pytest.mark.ranks
@pytest.mark.parametrize("adopted_first", [True, False])
def test_checkpoints(two_ranks: Ranks, tmp_path: Path, adopted_first: bool) -> None:
    two_ranks.run(saved_and_loaded, str(tmp_path), adopted_first)


@pytest.mark.ranks
@pytest.mark.parametrize("grows", [True, False])
def test_checkpoints_across_world_sizes(two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, grows: bool) -> None:
    first, second = (two_ranks, four_ranks) if grows else (four_ranks, two_ranks)
    before = first.run(saved, str(tmp_path))[0]
    for values in second.run(loaded, str(tmp_path)):
        assert all(torch.equal(one, other) for one, other in zip(before, values))


@pytest.mark.ranks
def test_states(two_ranks: Ranks) -> None:
    two_ranks.run(plain_states)


def meta(rank: int, world_size: int) -> None:
    """Adopted without memory, then given it."""
    with torch.device("meta"):
        model: Any = Net()
    adopt(sharded(model))
    model.to_empty(device="cpu")
    with inductor_passes.simple_fsdp.sharded_parameters():
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.1)
    assert model(batch(0, 0)[0]).shape == (5, 3)


@pytest.mark.ranks
def test_meta_init(two_ranks: Ranks) -> None:
    two_ranks.run(meta)
