"""Models laid out over real ranks for the link benchmark: one small Llama (or its mixture of experts) per layout.

A layout says how many ranks it takes, what each rank trains on, and how the model is spread; ``native`` asks for
torch's own eager FSDP2 where that applies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from inductor_passes.models import DEMO, LanguageModel, LlamaConfig, language_batch, language_model, tensor_parallel
from inductor_passes.simple_fsdp import simple_fsdp
from tools.link.framework_models import HuggingFace, TorchTitan

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Laid:
    """A model on this rank.

    Attributes:
        model: (tokens, targets) -> loss.
        batch: number of the step -> this rank's tokens and targets.
        groups: process groups of the sizes that its collectives use, for calibration.
    """

    model: nn.Module
    batch: Callable[[int], Batch]
    groups: tuple[dist.ProcessGroup, ...]


@dataclass(frozen=True)
class Spread:
    """How parameters are sharded: ``native`` by torch's eager FSDP2; ``reshard`` as ``reshard_after_forward``.

    With ``checkpointed`` every block is computed again in backward, where the layout knows that.
    """

    native: bool = False
    reshard: bool | Literal["auto"] = True
    checkpointed: bool = False


class Checkpointed(nn.Module):
    """A block that saves its input alone. Nothing in it draws random numbers, so no state of a generator is kept."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.inner, *args, use_reentrant=False, preserve_rng_state=False)


@dataclass(frozen=True)
class Layout:
    """How a model is spread.

    Attributes:
        name: key on the command line.
        title: for tables.
        ranks: how many it takes.
        build: (config, spread) -> the model and its batches; collective.
        native: whether torch's eager FSDP2 can do the same.
        sharded: data parallelism shards every parameter over all ranks, so that the first gather and the last reduction
            are what no order hides, and the bytes of a step are known.
        config: fields of ``LlamaConfig`` that differ from ``DEMO``.
    """

    name: str
    title: str
    ranks: int
    build: Callable[[LlamaConfig, Spread], Laid]
    native: bool = False
    sharded: bool = False
    config: dict[str, Any] = field(default_factory=dict)

    def sized(self, sizes: dict[str, Any]) -> LlamaConfig:
        """The model's config with ``sizes`` on top."""
        return replace(DEMO, **{**self.config, **sizes})


@cache
def _mesh(*sizes: int, names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def _groups(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, ...]:
    """One process group per size among the mesh's dimensions."""
    return tuple({group.size(): group for group in mesh.get_all_groups()}.values())


def _batches(config: LlamaConfig, rank: int) -> Callable[[int], Batch]:
    """Four batches in turn, different ones for every ``rank`` of data parallelism."""
    return lambda step: language_batch(config, 1_000 * rank + step % 4)


def _native(model: LanguageModel | HuggingFace, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    whole: nn.Module = fully_shard(model, mesh=mesh)
    return whole


def _fsdp(config: LlamaConfig, spread: Spread) -> Laid:
    mesh = _mesh(dist.get_world_size(), names=("dp",))
    model = language_model(config)
    if spread.checkpointed:
        for i, layer in enumerate(model.layers):
            model.layers[i] = Checkpointed(layer)
    whole = _native(model, mesh) if spread.native else simple_fsdp(model, mesh, reshard_after_forward=spread.reshard)
    return Laid(whole, _batches(config, dist.get_rank()), _groups(mesh))


def _hugging_face(config: LlamaConfig, spread: Spread) -> Laid:
    mesh = _mesh(dist.get_world_size(), names=("dp",))
    model = HuggingFace(config)
    whole = _native(model, mesh) if spread.native else simple_fsdp(model, mesh, reshard_after_forward=spread.reshard)
    return Laid(whole, _batches(config, dist.get_rank()), _groups(mesh))


def _torchtitan(config: LlamaConfig, spread: Spread) -> Laid:
    mesh = _mesh(dist.get_world_size(), names=("dp",))
    model = TorchTitan(config)
    if spread.native:
        model.shard()
        whole: nn.Module = model
    else:
        whole = simple_fsdp(model, mesh, reshard_after_forward=spread.reshard)
    return Laid(whole, _batches(config, dist.get_rank()), _groups(mesh))


def _ddp(config: LlamaConfig, spread: Spread) -> Laid:
    mesh = _mesh(dist.get_world_size(), names=("dp",))
    model = language_model(config)
    if spread.native:
        whole: nn.Module = nn.parallel.DistributedDataParallel(model)
    else:
        whole = simple_fsdp(model, mesh, mode="replicate")
    return Laid(whole, _batches(config, dist.get_rank()), _groups(mesh))


def _hybrid(config: LlamaConfig, spread: Spread) -> Laid:
    mesh = _mesh(dist.get_world_size() // 2, 2, names=("replicate", "shard"))
    model = language_model(config)
    whole = _native(model, mesh) if spread.native else simple_fsdp(model, mesh, mode="hybrid_shard")
    return Laid(whole, _batches(config, dist.get_rank()), _groups(mesh))


def _tensor(sequence_parallel: bool) -> Callable[[LlamaConfig, Spread], Laid]:
    def build(config: LlamaConfig, spread: Spread) -> Laid:
        mesh = _mesh(dist.get_world_size(), names=("tp",))
        model = tensor_parallel(language_model(config), mesh, sequence_parallel=sequence_parallel)
        return Laid(model, _batches(config, 0), _groups(mesh))

    return build


def _fsdp_tensor(config: LlamaConfig, spread: Spread) -> Laid:
    mesh = _mesh(dist.get_world_size() // 2, 2, names=("dp", "tp"))
    model = tensor_parallel(language_model(config), mesh["tp"], sequence_parallel=True)
    whole = _native(model, mesh["dp"]) if spread.native else simple_fsdp(model, mesh["dp"])
    return Laid(whole, _batches(config, mesh["dp"].get_local_rank()), _groups(mesh))


def _experts(config: LlamaConfig, spread: Spread) -> Laid:
    """Experts stay with their rank; everything else is sharded over all ranks."""
    mesh = _mesh(dist.get_world_size(), names=("dp",))
    model = language_model(config, expert_group=mesh.get_group("dp"))
    for layer in model.layers:
        for part in (layer.attention_norm, layer.attention, layer.experts.norm, layer.experts.gate):
            simple_fsdp(part, mesh)
    for part in (model.embed, model.norm, model.output):
        simple_fsdp(part, mesh)
    return Laid(model, _batches(config, dist.get_rank()), _groups(mesh))


def _context(config: LlamaConfig, spread: Spread) -> Laid:
    """Every rank has a slice of the same sequences."""
    mesh = _mesh(dist.get_world_size(), names=("dp",))
    group = mesh.get_group("dp")
    model = simple_fsdp(language_model(config, sequence_group=group), mesh)
    whole = _batches(config, 0)

    def batch(step: int) -> Batch:
        tokens, targets = (t.chunk(group.size(), dim=1)[group.rank()].contiguous() for t in whole(step))
        return tokens, targets

    return Laid(model, batch, _groups(mesh))


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("fsdp", "FSDP", 2, _fsdp, native=True, sharded=True),
        Layout("hybrid", "hybrid shard 2x2", 4, _hybrid, native=True),
        Layout("tp", "TP", 2, _tensor(False)),
        Layout("tp_sp", "TP + SP", 2, _tensor(True)),
        Layout("fsdp_tp", "FSDP 2 x TP 2", 4, _fsdp_tensor, native=True),
        Layout("moe", "MoE", 2, _experts, config={"experts": 4, "capacity": 512, "hidden": 352}),
        Layout("context", "context parallel", 2, _context),
    )
}

#: Layouts of models that torch wrapped.
WRAPPED = {
    "fsdp": LAYOUTS["fsdp"],
    "fsdp_four_ranks": replace(LAYOUTS["fsdp"], name="fsdp_four_ranks", title="FSDP, four ranks", ranks=4),
    "ddp": Layout("ddp", "DDP", 2, _ddp, native=True),
    "ddp_four_ranks": Layout("ddp_four_ranks", "DDP, four ranks", 4, _ddp, native=True),
    "hugging_face": Layout("hugging_face", "FSDP, Llama of transformers", 2, _hugging_face, native=True, sharded=True),
    "torchtitan": Layout(
        "torchtitan", "torchtitan's Llama", 2, _torchtitan, native=True, sharded=True, config={"vocab": 2048}
    ),
}
ALL_LAYOUTS = {**LAYOUTS, **WRAPPED}
