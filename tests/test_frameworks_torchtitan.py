"""torchtitan's Llama, sharded by its own ``parallelize_llama`` and adopted, trains as without us. Two gloo ranks.

torchtitan's Trainer needs GPUs, its tokenizers and data sets. What runs here is its model, its parallelization and its
configuration, in the order in which its Trainer uses them; the loop stands in for the Trainer's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from inductor_passes import AdoptError
from inductor_passes.adoption import AdoptedModule
from tests.support import frameworks
from tests.support.ranks import Ranks

pytest.importorskip("torchtitan.models.llama3")
pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Ranks of their own: torchtitan changes settings of Dynamo."""
    with Ranks(2) as ranks:
        yield ranks


def spec_of() -> Any:
    """torchtitan's smallest Llama with one layer, and with the attention that runs on CPUs."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:1]
    spec.model.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def built(spec: Any, **compilation: Any) -> Any:
    """A model as ``torchtitan.trainer.Trainer.__init__`` builds it, on CPUs."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims

    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    with mock.patch.object(parallel_dims, "device_type", "cpu"):
        dims = ParallelDims.from_config(parallelism, 2)
        with torch.device("meta"):
            model = spec.model.build()
        model = spec.parallelize_fn(
            model,
            parallel_dims=dims,
            training=TrainingConfig(mixed_precision_param="float32", seq_len=16),
            parallelism=parallelism,
            compile_config=CompileConfig(**compilation),
            ac_config=None,
            dump_folder="",
        )
    for part in model.modules():
        if isinstance(part, FSDPModule):
            # Gloo has no sum that multiplies before.
            part.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model.train()


def steps(model: Any, rank: int) -> list[float]:
    """Sums over tokens, divided by the number of all tokens; FSDP2 does not divide."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    drawn = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(3):
        tokens = torch.randint(2048, (2, 17), generator=drawn)
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum") / 64
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(rank: int, world_size: int, mode: str) -> tuple[float, float]:
    """The largest differences of (losses, parameters) between torchtitan alone and adopted."""
    from inductor_passes.integrations.torchtitan import adopting

    plain = built(spec_of())
    expected = steps(plain, rank)
    spec = spec_of()
    spec = dataclasses.replace(spec, parallelize_fn=adopting(spec.parallelize_fn, **frameworks.how(mode)))
    model = built(spec, enable=True)
    assert isinstance(model, AdoptedModule)
    with frameworks.planned(mode):
        losses = steps(model, rank)
    worst = frameworks.off(frameworks.whole(plain.state_dict()), frameworks.whole(model.state_dict()))
    return max(abs(a - b) for a, b in zip(expected, losses)), worst


@pytest.mark.parametrize("mode", ["off", "planned"])
def test_trains_as_torchtitan_alone(pool: Ranks, mode: str) -> None:
    for found in pool.run(compare, mode):
        assert max(found) <= {"off": 0.0, "planned": 1e-4}[mode], found


def refused(rank: int, world_size: int) -> None:
    from inductor_passes.integrations.torchtitan import adopting

    spec = spec_of()
    spec = dataclasses.replace(spec, parallelize_fn=adopting(spec.parallelize_fn))
    with pytest.raises(AdoptError, match=r"set compile\.enable"):
        built(spec)
    with pytest.raises(AdoptError, match=r"with model among compile\.components"):
        built(spec, enable=True, components=["loss"])


def test_misuse_is_named(pool: Ranks) -> None:
    pool.run(refused)
