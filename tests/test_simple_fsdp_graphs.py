"""What the compiler sees of simple_fsdp, and what simple_fsdp refuses: one process, a fake process group."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.utils.checkpoint import checkpoint

from inductor_passes.simple_fsdp import MixedPrecisionPolicy, SimpleFSDPError, sharded_parameters, simple_fsdp
from tests.support.models import (
    Llama,
    LlamaConfig,
    MLPConfig,
    capture_graphs,
    collectives,
    llama,
    llama_batch,
    mlp,
    mlp_batch,
    tensor_parallel,
)
from tests.support.world import fake_world

LLAMA = LlamaConfig(layers=1)
#: One layer: four attention matrices, three feed-forward ones, two norms; plus embedding, last norm, output.
PARAMETERS = 12


@pytest.fixture(autouse=True)
def world(request: pytest.FixtureRequest) -> Iterator[None]:
    """A fake process group of four ranks, or of as many as the test says."""
    torch._dynamo.reset()
    with fake_world(getattr(request, "param", 4)):
        yield


def data_mesh(size: int = 4) -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))


def grid(first: str, second: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=(first, second))


def counts(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[Counter[str], Counter[str]]:
    """Collectives in the forward and in the backward graph."""
    graphs = capture_graphs(model, inputs)
    (forward,), (backward,) = graphs.forward, graphs.backward
    return Counter(collectives(forward)), Counter(collectives(backward))


# -- collectives in the graphs ----------------------------------------------------------------------------


def test_fully_shard_gathers_again_in_backward() -> None:
    forward, backward = counts(simple_fsdp(llama(LLAMA), data_mesh()), llama_batch(LLAMA)[:1])
    assert forward == {"all_gather_into_tensor": PARAMETERS}
    # Nothing in backward reads the embedding's weight.
    assert backward == {"all_gather_into_tensor": PARAMETERS - 1, "reduce_scatter_tensor": PARAMETERS}


def test_gathered_parameters_are_kept_on_request() -> None:
    model = simple_fsdp(llama(LLAMA), data_mesh(), reshard_after_forward=False)
    forward, backward = counts(model, llama_batch(LLAMA)[:1])
    assert forward == {"all_gather_into_tensor": PARAMETERS}
    assert backward == {"reduce_scatter_tensor": PARAMETERS}


def test_replicate_reduces_whole_gradients() -> None:
    forward, backward = counts(simple_fsdp(llama(LLAMA), data_mesh(), mode="replicate"), llama_batch(LLAMA)[:1])
    assert forward == {}
    assert backward == {"all_reduce": PARAMETERS}


def test_hybrid_shard_scatters_before_it_reduces() -> None:
    model = simple_fsdp(nn.Linear(8, 8, bias=False), grid("replicate", "shard"), mode="hybrid_shard")
    graphs = capture_graphs(model, (torch.randn(2, 8),))
    assert collectives(graphs.forward[0]) == ["all_gather_into_tensor"]
    assert collectives(graphs.backward[0]) == ["reduce_scatter_tensor", "all_reduce"]
    reduced = next(n for n in graphs.backward[0].graph.nodes if n.name.startswith("all_reduce"))
    # This rank's (4, 8), in the shape that says so.
    assert reduced.meta["val"].shape == (1, 1, 4 * 8)


def test_a_collective_travels_in_the_policys_dtype() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = simple_fsdp(nn.Linear(8, 8), data_mesh(), mp_policy=policy)
    graphs = capture_graphs(model, (torch.randn(2, 8),))
    dtypes = {
        name: {n.meta["val"].dtype for gm in graphs.forward + graphs.backward for n in gm.graph.nodes if name in n.name}
        for name in ("all_gather", "reduce_scatter")
    }
    assert dtypes == {"all_gather": {torch.bfloat16}, "reduce_scatter": {torch.float32}}


def test_frozen_parameters_are_gathered_and_not_reduced() -> None:
    """The frozen layer in the middle passes a gradient on, so backward needs its weight and the last one's."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    model[1].weight.requires_grad_(False)
    forward, backward = counts(simple_fsdp(model, data_mesh()), (torch.randn(2, 8),))
    assert forward == {"all_gather_into_tensor": 3}
    assert backward == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}


def test_a_shared_parameter_is_gathered_once() -> None:
    config = LlamaConfig(layers=1, tied=True)
    forward, backward = counts(simple_fsdp(llama(config), data_mesh()), llama_batch(config)[:1])
    assert forward == {"all_gather_into_tensor": PARAMETERS - 1}
    assert backward["all_gather_into_tensor"] == PARAMETERS - 1


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_dimensions(sequence_parallel: bool) -> None:
    """What data parallelism adds to a tensor-parallel graph is what it is alone.

    With sequence parallelism each of the three norms has seen a part of the sequence: alone, torch hands out their
    gradients as unreduced sums; a data-parallel parameter's gradient has the parameter's layout.
    """

    def build() -> Llama:
        return tensor_parallel(llama(LLAMA), mesh["tp"], sequence_parallel=sequence_parallel)

    mesh = grid("dp", "tp")
    inputs = llama_batch(LLAMA)[:1]
    alone_forward, alone_backward = counts(build(), inputs)
    torch._dynamo.reset()
    forward, backward = counts(simple_fsdp(build(), mesh["dp"]), inputs)
    assert forward - alone_forward == {"all_gather_into_tensor": PARAMETERS}
    expected = Counter({"all_gather_into_tensor": PARAMETERS - 1, "reduce_scatter_tensor": PARAMETERS})
    if sequence_parallel:
        expected["all_reduce"] = 3
    assert backward - alone_backward == expected


@pytest.mark.parametrize("world", [8], indirect=True)
def test_three_dimensions() -> None:
    """Hybrid sharding around tensor parallelism: one more reduction per parameter than tensor parallelism's six."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model = tensor_parallel(llama(LLAMA), mesh["tp"])
    simple_fsdp(model, mesh["replicate", "shard"], mode="hybrid_shard")
    forward, backward = counts(model, llama_batch(LLAMA)[:1])
    # The tensor-parallel output layer gathers the logits.
    assert forward["all_gather_into_tensor"] == PARAMETERS + 1
    assert backward["reduce_scatter_tensor"] == PARAMETERS
    assert backward["all_reduce"] == PARAMETERS + 6


class Holder(nn.Module):
    """Parameters in containers, behind another parametrization, and read several times."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(8, 8)) for _ in range(2)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.randn(8))})
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8, bias=False))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.listed:
            x = x @ weight
        x = self.normed(x + self.named["shift"])
        return self.attention(x, x, x, need_weights=False)[0]


def test_parameters_that_are_not_plain_attributes() -> None:
    """Three in containers, two of the weight norm, four of the attention (tested for None before use)."""
    graphs = capture_graphs(simple_fsdp(Holder(), data_mesh()), (torch.randn(2, 3, 8),))
    waits = [n for n in graphs.forward[0].graph.nodes if "wait_tensor" in str(n.target)]
    # From torch 2.15 on the attention also looks at a dtype: a gather that nobody reads, which R15 takes out.
    assert sum(bool(wait.users) for wait in waits) == 9
    (backward,) = graphs.backward
    assert sum("reduce_scatter_tensor" in str(n.target) for n in backward.graph.nodes) == 9


class Checkpointed(nn.Module):
    """Two linear layers, the second one under activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Sequential(nn.Linear(8, 16, bias=False), nn.GELU(), nn.Linear(16, 8, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.second, self.first(x).relu(), use_reentrant=False)


@pytest.mark.parametrize(("reshard", "again"), [(True, 2), (False, 2)])
def test_activation_checkpointing_composes(reshard: bool, again: int) -> None:
    """A checkpointed region gathers again in either case; the first weight's gradient needs no weight."""
    model = simple_fsdp(Checkpointed(), data_mesh(), reshard_after_forward=reshard)
    forward, backward = counts(model, (torch.randn(2, 8),))
    assert forward == {"all_gather_into_tensor": 3}
    assert backward == {"all_gather_into_tensor": again, "reduce_scatter_tensor": 3}


def test_many_equal_layers_compile_once() -> None:
    """Twelve layers of three shapes are three classes, one frame and no recompilation; a second step reuses it."""
    config = MLPConfig(layers=12)
    model = simple_fsdp(mlp(config), data_mesh())
    assert len({type(part) for part in model if isinstance(part, nn.Linear)}) == 3
    graphs = capture_graphs(model, mlp_batch(config)[:1])
    assert len(graphs.forward) == 1
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in (1, 2):
            compiled(*mlp_batch(config, seed)[:1])


def test_an_even_size_costs_no_padding() -> None:
    graphs = capture_graphs(simple_fsdp(nn.Linear(8, 8), data_mesh()), (torch.randn(2, 8),))
    names = " ".join(n.name for gm in graphs.forward + graphs.backward for n in gm.graph.nodes)
    assert "pad" not in names and "slice" not in names


def test_compiled_graphs_are_cached(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The AOTAutograd cache takes the graphs: every access is an operator, none an unknown function.

    One rank and no bias leave nothing that needs a C++ compiler.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    from torch._dynamo.utils import counters

    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("rest", "one"))
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        model = simple_fsdp(nn.Linear(8, 8, bias=False), mesh["one"])
        torch.compile(model, fullgraph=True)(torch.randn(2, 8)).sum().backward()
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1, dict(counters["aot_autograd"])


# -- parameters -------------------------------------------------------------------------------------------


def test_names_and_types_stay() -> None:
    reference = llama(LLAMA)
    model = simple_fsdp(copy.deepcopy(reference), data_mesh())
    assert isinstance(model, Llama) and isinstance(model.output, nn.Linear)
    assert list(model.state_dict()) == list(reference.state_dict())
    assert [n for n, _ in model.named_buffers()] == [n for n, _ in reference.named_buffers()]
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and parameter.shape == reference.get_parameter(name).shape


def test_initialisation_reaches_the_stored_parameters() -> None:
    """By ``reset_parameters``, by ``apply``, and by hand inside ``sharded_parameters``."""
    with torch.device("meta"):
        model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    simple_fsdp(model, data_mesh())
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    stored = dict(model.named_parameters())
    for parameter in stored.values():
        nn.init.constant_(parameter, 7.0)
    model[0].reset_parameters()
    assert stored["0.weight"].to_local().eq(1).all() and stored["0.bias"].to_local().eq(0).all()
    model.apply(lambda m: nn.init.constant_(m.weight, 3.0) if isinstance(m, nn.Linear) else None)
    assert stored["1.weight"].to_local().eq(3).all()
    with sharded_parameters():
        nn.init.constant_(model[1].bias, 4.0)
        assert model[1].bias is stored["1.bias"]
    assert stored["1.bias"].to_local().eq(4).all()
    assert not isinstance(model[1].bias, DTensor)


# -- refusals ---------------------------------------------------------------------------------------------


def refusal(module: nn.Module, mesh: object, **options: object) -> str:
    before = {name: id(p) for name, p in module.named_parameters()}
    with pytest.raises(SimpleFSDPError) as caught:
        simple_fsdp(module, mesh, **options)  # type: ignore[arg-type]
    assert {name: id(p) for name, p in module.named_parameters()} == before
    return str(caught.value)


def test_bad_arguments_name_value_and_allowed_values() -> None:
    linear = nn.Linear(8, 8)
    message = refusal(linear, data_mesh(), mode="zero3")
    assert "'zero3'" in message and "'hybrid_shard'" in message
    assert "2 dimension(s)" in refusal(linear, data_mesh(), mode="hybrid_shard")
    assert "1 dimension(s)" in refusal(linear, grid("a", "b"))
    assert "DeviceMesh" in refusal(linear, 4)
    assert "mp_policy=torch.bfloat16" in refusal(linear, data_mesh(), mp_policy=torch.bfloat16)
    policy = MixedPrecisionPolicy(param_dtype=torch.int8)
    assert "param_dtype=torch.int8" in refusal(linear, data_mesh(), mp_policy=policy)
    assert "reshard_after_forward=2" in refusal(linear, data_mesh(), reshard_after_forward=2)
    assert "shard_dim=-1" in refusal(linear, data_mesh(), shard_dim=-1)
    assert "uninitialized" in refusal(nn.LazyLinear(8), data_mesh())
    with pytest.raises(SimpleFSDPError, match=r"module=function"):
        simple_fsdp(refusal, data_mesh())  # type: ignore[arg-type]


def test_a_second_application_is_refused() -> None:
    model = simple_fsdp(mlp(MLPConfig()), data_mesh())
    assert "already applied" in refusal(model, data_mesh())
    assert "already applied" in refusal(model[0], data_mesh())
    assert "already applied" in refusal(copy.deepcopy(model)[0], data_mesh())


def test_parts_first_then_the_whole() -> None:
    model = mlp(MLPConfig())
    simple_fsdp(model[0], data_mesh(), mode="replicate")
    first = model[0].state_dict()["weight"]
    simple_fsdp(model, data_mesh())
    assert model.state_dict()["0.weight"].placements == first.placements
    forward, backward = counts(model, mlp_batch(MLPConfig())[:1])
    assert forward == {"all_gather_into_tensor": 2}
    assert backward["all_reduce"] == backward["reduce_scatter_tensor"] == 2


def test_a_parameter_shared_across_applications_is_refused() -> None:
    model = llama(LlamaConfig(layers=1, tied=True))
    simple_fsdp(model.embed, data_mesh())
    assert "output.weight is shared" in refusal(model, data_mesh())


def test_layouts_that_do_not_combine_are_refused() -> None:
    mesh = grid("dp", "tp")
    uneven = LlamaConfig(layers=1, vocab=6)
    model = tensor_parallel(llama(uneven), mesh["tp"])
    assert "4 does not divide 6" in refusal(model, mesh["dp"])
    model = tensor_parallel(llama(LLAMA), mesh["tp"])
    assert "cannot be combined" in refusal(model, mesh["tp"])
    linear = nn.Linear(8, 8)
    linear.weight = nn.Parameter(DTensor.from_local(torch.ones(8, 8), mesh["tp"], [Partial()]))
    assert "expected Shard or Replicate" in refusal(linear, mesh["dp"])


def test_a_replaced_parameter_is_an_error_and_not_a_silent_fallback() -> None:
    model = simple_fsdp(nn.Linear(8, 8), data_mesh())
    model.weight = nn.Parameter(torch.zeros(8, 8))
    with pytest.raises(TypeError, match="expected a DTensor"):
        model(torch.randn(2, 8))
