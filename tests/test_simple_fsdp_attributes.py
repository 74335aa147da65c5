"""Attributes of managed modules outside of forward, on two real ranks: used by one alone, nothing gathers or hangs."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from inductor_passes.simple_fsdp import (
    MissingRanksError,
    ParameterHandle,
    ShardedValueError,
    SimpleFSDPError,
    arrival,
    gathered_parameters,
    sharded_parameters,
    simple_fsdp,
)
from tests.support.parity import whole
from tests.support.ranks import Ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def data_mesh(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))


class Model(nn.Module):
    """An embedding, a norm and a head that reads the embedding's weight; a buffer; the same values on every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.tensor([1.5, 2.0]))
        self.register_buffer("shift", torch.ones(4))

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.embed(tokens) + self.shift) * self.scale.sum()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(tokens))


TOKENS = torch.tensor([[0, 1, 2], [3, 4, 5]])


def build(world_size: int, **options: Any) -> Model:
    model = Model()
    simple_fsdp(model, data_mesh(world_size), **options)
    return model


def train_a_step(model: nn.Module) -> None:
    model(TOKENS).square().mean().backward()


def still_together() -> None:
    """Fails, hangs or aborts unless the ranks have issued the same collectives so far."""
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [dist.get_world_size()] * 3


# -- what one rank alone may do ---------------------------------------------------------------------------


def look(model: Model) -> None:
    """Everything that concerns the parameter and not its values."""
    weight, stored = model.head.weight, dict(model.named_parameters())["head.weight"]
    assert weight.shape == weight.size() == (6, 4) and weight.size(0) == len(weight) == 6
    assert weight.dtype is torch.float32 and weight.device.type == "cpu" and weight.layout is torch.strided
    assert weight.ndim == weight.dim() == 2 and weight.numel() == 24 and weight.stride() == (4, 1)
    assert weight.element_size() == 4 and weight.nbytes == 96 and weight.is_contiguous() and not weight.is_cuda
    assert weight.requires_grad and weight.is_leaf and weight.grad_fn is None
    assert weight.is_floating_point() and torch.is_floating_point(weight) and torch.is_tensor(weight)
    assert isinstance(weight, nn.Parameter) and isinstance(weight, torch.Tensor)
    assert "head" not in repr(model.head.bias) and "DTensor" in repr(weight) and "Linear.weight" in str(weight)
    assert "not gathered" in f"{weight}" and "Linear" in repr(model)
    with pytest.raises(ShardedValueError, match=r"was used by 'format \.3f' outside of forward"):
        f"{weight:.3f}"
    assert weight.data.shape == weight.detach().shape == (6, 4) and weight.data.dtype is torch.float32
    assert not weight.detach().requires_grad and not isinstance(weight.detach(), nn.Parameter)
    assert model.head.weight is weight and model.norm.weight is not weight
    assert weight.to_local().shape == (3, 4) and weight.placements == stored.placements
    assert weight.device_mesh == stored.device_mesh
    assert hasattr(model.head, "weight") and not hasattr(model.head, "weights") and model.norm.weight.shape == (4,)
    assert {weight: 1}[stored] == 1 and {stored, weight} == {weight}
    assert weight.data_ptr() not in (0, model.embed.weight.data_ptr())
    assert model.shift.sum().item() == 4
    assert model.get_parameter("head.weight").shape == (6, 4)


def look_at_the_gradient(model: Model) -> None:
    stored = dict(model.named_parameters())
    assert model.head.weight.grad is stored["head.weight"].grad is not None
    assert model.head.weight.grad.shape == (6, 4) and model.head.weight.grad.dtype is torch.float32
    model.head.weight.grad = None
    assert stored["head.weight"].grad is None and model.head.weight.grad is None


def save_and_copy(model: Model) -> None:
    """State dicts, copies, pickles: what each rank does with its shards."""
    state = model.state_dict()
    assert list(state) == list(Model().state_dict())
    twin = copy.deepcopy(model)
    twin.load_state_dict(state)
    assert type(twin.head) is type(model.head) and twin.head.weight.shape == (6, 4)
    assert twin.head.weight is not model.head.weight
    assert isinstance(copy.deepcopy(model.head.weight), DTensor)
    for loaded in (pickle.loads(pickle.dumps(model)), reloaded(model)):
        assert type(loaded.head) is type(model.head) and list(loaded.state_dict()) == list(state)
        assert torch.equal(loaded.head.weight.to_local(), model.head.weight.to_local())
    assert isinstance(pickle.loads(pickle.dumps(model.head.weight)), DTensor)
    assert len(list(model.parameters())) == len(list(Model().parameters()))


def reloaded(model: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def rebuild(model: Model) -> None:
    """Modules that are made from a managed one's class are ordinary ones."""
    layer = type(model.head)(4, 2)
    assert type(layer) is nn.Linear and type(layer(torch.ones(1, 4))) is torch.Tensor
    owner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert type(owner[:1]) is nn.Sequential


def change(model: Model) -> None:
    """Everything local that changes a parameter in place, or replaces it."""
    stored = dict(model.named_parameters())["head.weight"]
    nn.init.constant_(model.head.weight, 2.0)
    assert stored.to_local().eq(2).all()
    with torch.no_grad():
        model.head.weight.mul_(2).add_(1)
        model.head.weight += 1
        model.head.weight.data.mul_(2)
        model.head.weight.data *= 2
    assert stored.to_local().eq(24).all() and dict(model.named_parameters())["head.weight"] is stored
    nn.init.normal_(model.head.weight)
    nn.init.xavier_uniform_(model.head.weight)
    nn.init.kaiming_uniform_(model.head.weight, a=5**0.5)
    model.apply(lambda part: nn.init.zeros_(part.weight) if isinstance(part, nn.Linear) else None)
    assert stored.to_local().eq(0).all()
    model.head.weight.requires_grad = False
    assert not stored.requires_grad
    model.head.weight.requires_grad_(True)
    assert stored.requires_grad
    model.head.weight.wd = 0.1
    assert stored.wd == model.head.weight.wd == 0.1
    del model.head.weight.wd
    assert not hasattr(stored, "wd")
    removed = model.head.weight.register_hook(lambda gradient: gradient)
    removed.remove()
    model.double()
    assert model.head.weight.dtype is torch.float64 and model.shift.dtype is torch.float64
    model.to(torch.float32)
    assert model.head.weight.dtype is torch.float32 and model.head.weight.element_size() == 4


def tie(model: Model) -> None:
    model.head.weight = model.embed.weight
    stored = dict(model.named_parameters(remove_duplicate=False))
    assert stored["head.weight"] is stored["embed.weight"] and model.head.weight is model.embed.weight
    assert type(stored["head.weight"]) is DTensor
    elsewhere = nn.Linear(4, 6)
    elsewhere.weight = model.embed.weight
    assert elsewhere.weight is stored["embed.weight"]
    assert type(next(nn.ParameterList([model.embed.weight]).parameters())) is DTensor


ALONE: list[Callable[[Model], None]] = [look, look_at_the_gradient, save_and_copy, rebuild, change, tie]


def run_alone(rank: int, world_size: int, use: Callable[[Model], None], only: int, options: dict[str, Any]) -> None:
    model = build(world_size, **options)
    train_a_step(model)
    if only in (-1, rank):
        use(model)
    still_together()


@pytest.mark.parametrize("only", [0, 1, -1], ids=["rank0", "rank1", "all"])
@pytest.mark.parametrize("use", ALONE, ids=lambda use: use.__name__)
def test_nothing_gathers(pool: Ranks, use: Callable[[Model], None], only: int) -> None:
    pool.run(run_alone, use, only, {})


def test_nothing_gathers_in_the_other_layouts(pool: Ranks) -> None:
    pool.run(run_alone, save_and_copy, 0, {"mode": "replicate"})
    pool.run(run_alone, look_at_the_gradient, 1, {"shard_dim": 1, "reshard_after_forward": False})


def from_meta(rank: int, world_size: int) -> None:
    with torch.device("meta"):
        model = Model()
    simple_fsdp(model, data_mesh(world_size))
    if rank == 0:
        assert model.head.weight.is_meta and model.head.weight.shape == (6, 4)
    model.to_empty(device="cpu")
    if rank == 1:
        assert not model.head.weight.is_meta
        nn.init.ones_(model.head.weight)
    still_together()


def test_meta_device(pool: Ranks) -> None:
    pool.run(from_meta)


# -- values that are not here -----------------------------------------------------------------------------


VALUES: dict[str, Callable[[torch.Tensor], Any]] = {
    "arithmetic": lambda w: w * 2,
    "sum": lambda w: w.sum(),
    "item": lambda w: w.norm().item(),
    "linear": lambda w: functional.linear(torch.ones(2, 4), w),
    "matmul": lambda w: torch.ones(2, 4) @ w.T,
    "rmatmul": lambda w: torch.ones(2, 6) @ w,
    "index": lambda w: w[0],
    "iterate": lambda w: list(w),
    "tolist": lambda w: w.tolist(),
    "numpy": lambda w: w.detach().numpy(),
    "array": lambda w: __import__("numpy").asarray(w.detach()),
    "clone": lambda w: w.clone(),
    "data": lambda w: w.data.abs().max().item(),
    "double": lambda w: w.double(),
    "to": lambda w: w.to(torch.bfloat16),
    "cpu": lambda w: w.cpu(),
    "equal": lambda w: torch.equal(w, torch.ones(6, 4)),
    "same": lambda w: torch.equal(w, w),
    "allclose": lambda w: torch.allclose(w, torch.ones(6, 4)),
    "compare": lambda w: (w == torch.ones(6, 4)).all(),
    "argmax": lambda w: w.argmax(),
    "float": lambda w: float(w[0, 0]),
    "bool": lambda w: bool(w.any()),
    "stack": lambda w: torch.stack([w, w]),
    "out": lambda w: torch.add(w, 1, out=torch.empty(6, 4)),
    "into": lambda w: torch.zeros(6, 4).add_(w),
    "copy_from": lambda w: torch.zeros(6, 4).copy_(w),
    "copy_to": lambda w: w.data.copy_(torch.ones(6, 4)),
    "row": lambda w: w.data[0].zero_(),
    "set_row": lambda w: w.data.__setitem__(0, 1.0),
    "storage": lambda w: w.untyped_storage(),
    "autograd": lambda w: Doubled.apply(w),
    "regularise": lambda w: w.pow(2).sum() + torch.ones(()),
    "vector": lambda w: nn.utils.parameters_to_vector([w]),
}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.mul.Tensor(weight, 2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def use_values(rank: int, world_size: int, only: int) -> list[str]:
    """Expressions that did not raise what they should."""
    model = build(world_size)
    wrong = []
    for name, expression in VALUES.items():
        if only not in (-1, rank):
            continue
        try:
            result = expression(model.head.weight)
            wrong.append(f"{name}: {type(result)}")
        except ShardedValueError as error:
            text = str(error)
            for part in ("Linear.weight", "(6, 4)", "full_tensor", "gathered_parameters", "outside of forward"):
                assert part in text, text
        except Exception as error:
            wrong.append(f"{name}: {error!r}")
    still_together()
    return wrong


@pytest.mark.parametrize("only", [0, -1], ids=["rank0", "all"])
def test_values_outside_of_forward_are_an_error_that_says_so(pool: Ranks, only: int) -> None:
    assert pool.run(use_values, only) == [[], []]


def try_every_attribute(rank: int, world_size: int, names: list[str]) -> list[str]:
    """Rank 0 reads every attribute of ``torch.Tensor`` and calls it with nothing, a number and a tensor."""
    wrong = []
    if rank == 0:
        for name in names:
            for arguments in ((), (0,), (torch.ones(6, 4),)):
                weight = build_alone()
                try:
                    found = getattr(weight, name)
                    found = found(*arguments) if callable(found) else found
                except Exception:
                    continue
                new = name.startswith("new_")
                if isinstance(found, torch.Tensor) and not new and not isinstance(found, (ParameterHandle, DTensor)):
                    wrong.append(f"{name}{arguments} -> {found!r}")
                if isinstance(found, float):
                    wrong.append(f"{name}{arguments} -> {found}")
    still_together()
    return wrong


def build_alone() -> Any:
    """A handle of a fresh parameter, made without the other rank."""
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",), _init_backend=False)
    return ParameterHandle.of(nn.Parameter(DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)])), "Linear.weight")


@pytest.mark.parametrize("part", range(4))
def test_no_attribute_of_a_tensor_gathers_or_gives_values(pool: Ranks, part: int) -> None:
    names = sorted(dir(torch.Tensor))
    assert len(names) > 500
    assert pool.run(try_every_attribute, names[part::4]) == [[], []]


def gather_alone(rank: int, world_size: int, limit_s: float) -> list[str]:
    model = build(world_size)
    before, arrival.LIMIT_S = arrival.LIMIT_S, limit_s
    caught = []
    try:
        if rank == 0:
            for gather in (
                lambda: model.head.weight.full_tensor(),
                lambda: model.head.weight.redistribute(placements=[Replicate()]),
                lambda: gathered_parameters(model).__enter__(),
            ):
                with pytest.raises(MissingRanksError) as error:
                    gather()
                caught.append(str(error.value))
    finally:
        arrival.LIMIT_S = before
    still_together()
    # Who came too early is not taken for waiting: the ranks still find each other.
    assert torch.equal(model.head.weight.full_tensor(), Model().head.weight)
    return caught


def test_gathering_alone_is_an_error_that_says_so(pool: Ranks) -> None:
    caught, _ = pool.run(gather_alone, 0.5)
    for text, what in zip(caught, ("full_tensor() of Linear.weight", "redistribute()", "gathered_parameters")):
        assert what in text and "needs all ranks [0, 1]" in text and "for [1]" in text and "barrier" in text


def different_gathers(rank: int, world_size: int) -> None:
    """Each rank gathers something else: neither may go on as if the other had come."""
    model = build(world_size)
    before, arrival.LIMIT_S = arrival.LIMIT_S, 0.5
    try:
        with pytest.raises(MissingRanksError):
            (model.head if rank == 0 else model.embed).weight.full_tensor()
    finally:
        arrival.LIMIT_S = before
    still_together()


def test_ranks_that_gather_different_things_do_not_meet(pool: Ranks) -> None:
    pool.run(different_gathers)


# -- values that all ranks ask for ------------------------------------------------------------------------


def gather_together(rank: int, world_size: int) -> None:
    model, reference = build(world_size), Model()
    for _ in range(3):
        assert torch.equal(model.head.weight.full_tensor(), reference.head.weight)
    replicated = model.embed.weight.redistribute(placements=[Replicate()])
    assert torch.equal(replicated.to_local(), reference.embed.weight)
    with gathered_parameters(model):
        assert type(model.head.weight) is torch.Tensor and torch.equal(model.head.weight, reference.head.weight)
    assert isinstance(model.head.weight, ParameterHandle)
    with pytest.raises(SimpleFSDPError, match="no parameter of this Linear"):
        gathered_parameters(nn.Linear(2, 2)).__enter__()


def test_all_ranks_can_gather(pool: Ranks) -> None:
    pool.run(gather_together)


def tied_loss(model: Model, hidden: torch.Tensor) -> torch.Tensor:
    """The embedding as output layer, outside of any module."""
    return functional.linear(hidden, model.embed.weight).square().mean()


class TiedLoss(nn.Module):
    """The same inside a module of the user's own, which simple_fsdp has not seen."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return tied_loss(self.model, hidden)


def compute_loss(rank: int, world_size: int, way: str) -> None:
    model, reference = build(world_size), Model()
    hidden = torch.ones(2, 4)
    expected = tied_loss(reference, hidden)
    expected.backward()
    if way == "context":
        with gathered_parameters(model):
            loss = tied_loss(model, hidden)
    elif way == "module":
        loss = TiedLoss(model)(hidden)
    elif way == "direct":
        loss = TiedLoss(model).forward(hidden)
    else:
        loss = torch.compile(tied_loss, backend="aot_eager", fullgraph=True)(model, hidden)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(whole(model.embed.weight.grad), reference.embed.weight.grad)


@pytest.mark.parametrize("way", ["context", "module", "direct", "compiled"])
def test_a_loss_that_reads_a_parameter(pool: Ranks, way: str) -> None:
    pool.run(compute_loss, way)


class Recomputing(nn.Module):
    """Reads its parameter in a function that backward runs again, with no module on the stack."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: torch.sin(y @ self.weight), x, use_reentrant=self.reentrant)


def recompute(rank: int, world_size: int, reentrant: bool) -> None:
    reference, model = Recomputing(reentrant), Recomputing(reentrant)
    simple_fsdp(model, data_mesh(world_size))
    seen: list[tuple[int, ...]] = []
    # A hook in backward is outside of forward: here on one rank.
    if rank == 0:
        next(model.parameters()).register_hook(lambda _: seen.append(tuple(model.weight.shape)))
    for one in (reference, model):
        one(torch.ones(2, 4, requires_grad=True)).sum().backward()
    torch.testing.assert_close(whole(model.weight.grad), reference.weight.grad)
    assert seen == ([(4, 4)] if rank == 0 else [])


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_gathers_and_hooks_do_not(pool: Ranks, reentrant: bool) -> None:
    pool.run(recompute, reentrant)


def hook_forward(rank: int, world_size: int) -> None:
    """Hooks belong to the call of their module; a function that the compiler leaves alone belongs to its caller."""
    model = build(world_size)
    seen: list[Any] = []
    model.head.register_forward_pre_hook(lambda module, _: seen.append(type(module.weight)))
    model.register_forward_hook(lambda module, *_: seen.append(type(module.head.weight)))
    model(TOKENS)
    assert seen == [torch.Tensor, torch.Tensor]

    @torch.compiler.disable
    def left_alone(hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden, model.embed.weight)

    class Partly(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return left_alone(hidden * 2) + 1

    expected = functional.linear(torch.ones(2, 4) * 2, Model().embed.weight) + 1
    torch.testing.assert_close(torch.compile(Partly(), backend="aot_eager")(torch.ones(2, 4)), expected)


def test_hooks_and_graph_breaks_read_inside_forward(pool: Ranks) -> None:
    pool.run(hook_forward)


# -- optimizers and other libraries' ways -------------------------------------------------------------------


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}


def optimize(rank: int, world_size: int, name: str) -> None:
    """An optimizer over attributes does what one over ``parameters()`` does, bit for bit."""
    model, twin = build(world_size), build(world_size)
    optimizers = (
        OPTIMIZERS[name]([model.head.weight, model.head.bias, model.norm.weight]),
        OPTIMIZERS[name]([*twin.head.parameters(), next(twin.norm.parameters())]),
    )
    for _ in range(2):
        for one, optimizer in zip((model, twin), optimizers):
            train_a_step(one)
            optimizer.step()
            optimizer.zero_grad()
            one.zero_grad()
    for (key, mine), other in zip(model.named_parameters(), twin.parameters()):
        assert torch.equal(mine.to_local(), other.to_local()), key
    assert not torch.equal(model.head.weight.full_tensor(), Model().head.weight)
    with pytest.raises(ValueError, match="more than one parameter group"):
        torch.optim.SGD([{"params": [model.head.weight]}, {"params": list(model.parameters())}], lr=0.1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_over_attributes(pool: Ranks, name: str) -> None:
    pool.run(optimize, name)


def clip(rank: int, world_size: int) -> None:
    model, reference = build(world_size), Model()
    for one in (model, reference):
        train_a_step(one)
    expected = nn.utils.clip_grad_norm_([reference.head.weight, reference.embed.weight], 1e-3)
    actual = nn.utils.clip_grad_norm_([model.head.weight, model.embed.weight], 1e-3)
    torch.testing.assert_close(whole(actual), expected)
    torch.testing.assert_close(whole(model.head.weight.grad), reference.head.weight.grad)
    (gradient,) = torch.autograd.grad(model(TOKENS).square().mean(), [model.head.weight])
    (expected_gradient,) = torch.autograd.grad(reference(TOKENS).square().mean(), [reference.head.weight])
    torch.testing.assert_close(whole(gradient), expected_gradient)


def test_clipping_and_gradients_of_attributes(pool: Ranks) -> None:
    pool.run(clip)


def call_functionally(rank: int, world_size: int) -> None:
    model, reference = build(world_size), Model()
    values = {name: value * 2 for name, value in model.named_parameters()}
    expected = {name: value * 2 for name, value in reference.named_parameters()}
    actual = torch.func.functional_call(model, values, (TOKENS,))
    torch.testing.assert_close(actual, torch.func.functional_call(reference, expected, (TOKENS,)))
    assert type(dict(model.named_parameters())["head.weight"]) is DTensor
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), reference(TOKENS))
    with torch.inference_mode():
        torch.testing.assert_close(model(TOKENS), reference(TOKENS))
        assert model.head.weight.shape == (6, 4)


def test_functional_calls_and_evaluation(pool: Ranks) -> None:
    pool.run(call_functionally)


def train_a_copy(rank: int, world_size: int) -> None:
    """A copy made in the middle of training goes on as its original does; so does one that was saved and loaded."""
    model = build(world_size)
    train_a_step(model)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    for twin in (copy.deepcopy(model), reloaded(model), copy.copy(model)):
        twin.zero_grad()
        train_a_step(twin)
        mine = twin.head.weight.grad.full_tensor()
        twin.zero_grad()
        train_a_step(model)
        assert torch.equal(mine, model.head.weight.grad.full_tensor())
        model.zero_grad()


def test_copies_in_the_middle_of_training(pool: Ranks) -> None:
    pool.run(train_a_copy)


def average(rank: int, world_size: int) -> None:
    model, reference = build(world_size), Model()
    averages = [torch.optim.swa_utils.AveragedModel(one) for one in (model, reference)]
    for one, averaged in zip((model, reference), averages):
        averaged.update_parameters(one)
        train_a_step(one)
        torch.optim.SGD(one.parameters(), lr=0.1).step()
        averaged.update_parameters(one)
    assert rank == 0 or averages[0].module.head.weight.shape == (6, 4)
    torch.testing.assert_close(averages[0](TOKENS), averages[1](TOKENS))


def test_averaged_models(pool: Ranks) -> None:
    pool.run(average)


class TwoParents(nn.Module):
    """One layer under two names, one of them in a part that is managed first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(4, 4), self.first[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def nest(rank: int, world_size: int) -> None:
    model, reference = TwoParents(), TwoParents()
    simple_fsdp(model.first, data_mesh(world_size))
    simple_fsdp(model, data_mesh(world_size))
    if rank == 0:
        assert model.second[1].weight is model.first[0].weight and model.second[0].weight.shape == (4, 4)
    for one in (model, reference):
        one(torch.ones(2, 4)).sum().backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(whole(dict(model.named_parameters())[name].grad), parameter.grad)
    if rank == 1:
        assert model.first[0].weight.grad is not None
    still_together()


def test_shared_modules_and_nested_calls(pool: Ranks) -> None:
    pool.run(nest)


def parametrize(rank: int, world_size: int) -> None:
    """Applied before: the parametrization's own parameters are managed; what it makes of them is read in forward."""
    model, reference = nn.Linear(4, 4), nn.Linear(4, 4)
    reference.load_state_dict(model.state_dict())
    for one in (model, reference):
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.fill_(0.5)
        nn.utils.parametrizations.weight_norm(one)
    simple_fsdp(model, data_mesh(world_size))
    if rank == 0:
        assert model.parametrizations.weight.original0.shape == (4, 1)
        with pytest.raises(ShardedValueError, match=r"ParametrizationList\.original"):
            model.weight.sum()
    for one in (model, reference):
        one(torch.ones(2, 4)).sum().backward()
    gradient = model.parametrizations.weight.original1.grad
    torch.testing.assert_close(whole(gradient), reference.parametrizations.weight.original1.grad)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(torch.ones(2, 4)), model(torch.ones(2, 4)))
    still_together()


def test_parametrizations(pool: Ranks) -> None:
    pool.run(parametrize)


def parametrize_late(rank: int, world_size: int) -> None:
    """Applied after: it would compute with shards, so it is an error, on a rank alone, too."""
    model = build(world_size)
    if rank == 0:
        with pytest.raises(ShardedValueError, match=r"Linear\.weight"):
            nn.utils.parametrizations.weight_norm(model.head)
    still_together()


def test_a_parametrization_of_a_managed_parameter_is_refused(pool: Ranks) -> None:
    pool.run(parametrize_late)


def compile_with(rank: int, world_size: int) -> None:
    """A handle as an argument of compiled code."""
    model = build(world_size)
    step = torch.compile(lambda hidden, weight: hidden @ weight.t(), backend="aot_eager")
    if rank == 0:
        with pytest.raises(Exception, match=r"Linear\.weight of shape \(6, 4\), managed by simple_fsdp"):
            step(torch.ones(2, 4), model.head.weight)
    shape = torch.compile(lambda x: x * model.head.weight.shape[0], backend="aot_eager", fullgraph=True)
    assert shape(torch.ones(())).item() == 6


def test_handles_in_compiled_code(pool: Ranks) -> None:
    pool.run(compile_with)


def meet_in_a_grid(rank: int, world_size: int, only: list[int]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, reference = Model(), Model()
    simple_fsdp(model, mesh, mode="hybrid_shard")
    before, arrival.LIMIT_S = arrival.LIMIT_S, 0.5
    if rank in only:
        look(model)
        with pytest.raises(MissingRanksError):
            model.head.weight.full_tensor()
        with pytest.raises(MissingRanksError):
            gathered_parameters(model).__enter__()
    arrival.LIMIT_S = before
    still_together()
    for _ in range(3):
        assert torch.equal(model.head.weight.full_tensor(), reference.head.weight)
        with gathered_parameters(model):
            assert torch.equal(model.head.weight, reference.head.weight)


def test_two_dimensions() -> None:
    """Alone, a row, a column and all but one of a grid of ranks."""
    with Ranks(4) as four:
        for only in ([0], [0, 1], [1, 3], [1, 2, 3]):
            four.run(meet_in_a_grid, only)


def stay_stored(rank: int, world_size: int) -> None:
    model = build(world_size)
    with sharded_parameters():
        assert model.head.weight is dict(model.named_parameters())["head.weight"]
    assert not isinstance(model.head.weight, DTensor)
    handle = model.head.weight
    model.to_empty(device="cpu")
    nn.init.constant_(handle, 3.0)
    assert dict(model.named_parameters())["head.weight"].to_local().eq(3).all()


def test_handles_follow_what_is_stored(pool: Ranks) -> None:
    pool.run(stay_stored)
