"""Accelerate prepares a model; adopted, it trains as it does with Accelerate alone. FSDP2 and DDP, two gloo ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from inductor_passes import AdoptError
from tests.support import frameworks
from tests.support.hugging_face import tiny_llama
from tests.support.ranks import Ranks
from tests.support.wrapped import Net

pytest.importorskip("accelerate", "1.12")
pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Ranks of their own: Accelerate keeps state in the process and in its environment."""
    with Ranks(2) as ranks:
        yield ranks


def accelerator_of(kind: str, accumulate: int = 1, layer: str = "Block", **settings: Any) -> Any:
    """An Accelerator for FSDP2 or DDP on CPUs."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    frameworks.forget_accelerate(fsdp=kind == "fsdp2")
    if kind == "fsdp2":
        settings["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[layer],
            cpu_ram_efficient_loading=False,
            state_dict_type="SHARDED_STATE_DICT",
        )
    made = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **settings)
    assert made.is_fsdp2 == (kind == "fsdp2")
    return made


def prepared(
    kind: str, mode: str | None, accumulate: int = 1, blocks: int = 2, **settings: Any
) -> tuple[Any, Any, Any, Any]:
    """(accelerator, model, optimizer, batches); adopted unless ``mode`` is None."""
    from inductor_passes.integrations.accelerate import adopt_prepared

    accelerator = accelerator_of(kind, accumulate, **settings)
    torch.manual_seed(0)
    model: Any = Net(blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(frameworks.pairs(32), batch_size=4)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if mode is not None:
        assert adopt_prepared(accelerator, model, **frameworks.how(mode)) is model
    return accelerator, model, optimizer, loader


def steps(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> list[float]:
    """The loop of Accelerate's documentation; the losses."""
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(rank: int, world_size: int, kind: str, mode: str, accumulate: int, precision: str = "no") -> Any:
    """The largest differences of (losses, parameters) between Accelerate alone and adopted."""
    frameworks.as_launched(rank, world_size)
    # Inductor compiles each kernel: one block is enough for it.
    blocks = 1 if mode == "inductor" else 2
    plain = prepared(kind, None, accumulate, blocks, mixed_precision=precision)
    expected = steps(*plain)
    accelerator, model, optimizer, loader = prepared(kind, mode, accumulate, blocks, mixed_precision=precision)
    with frameworks.planned(mode):
        losses = steps(accelerator, model, optimizer, loader)
    return frameworks.differences(expected, losses, plain[1], model)


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_trains_bit_for_bit_as_accelerate_alone(pool: Ranks, kind: str, accumulate: int) -> None:
    frameworks.near(pool.run(compare, kind, "aot_eager", accumulate), "aot_eager")


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_mixed_precision(pool: Ranks, kind: str) -> None:
    frameworks.near(pool.run(compare, kind, "off", 2, "bf16"), "off")


@pytest.mark.parametrize(("kind", "accumulate"), [("fsdp2", 2), ("ddp", 1)])
def test_with_planned_collectives(pool: Ranks, kind: str, accumulate: int) -> None:
    frameworks.near(pool.run(compare, kind, "planned", accumulate), "planned")


@pytest.mark.slow
def test_compiled_by_inductor(pool: Ranks) -> None:
    frameworks.near(pool.run(compare, "ddp", "inductor", 1), "inductor")


def resume(rank: int, world_size: int, kind: str, folder: str) -> None:
    """``save_state`` of an adopted model loads into an adopted and into a plain one, which go on as the first."""
    frameworks.as_launched(rank, world_size)
    accelerator, model, optimizer, loader = prepared(kind, "off")
    steps(accelerator, model, optimizer, loader)
    accelerator.save_state(folder)
    expected = steps(accelerator, model, optimizer, loader)
    for mode in ("off", None):
        again = prepared(kind, mode)
        again[0].load_state(folder)
        assert steps(*again) == expected
        assert frameworks.off(frameworks.whole(model.state_dict()), frameworks.whole(again[1].state_dict())) == 0


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_checkpoints(pool: Ranks, tmp_path: Path, kind: str) -> None:
    pool.run(resume, kind, str(tmp_path / "state"))


def save(rank: int, world_size: int, kind: str, folder: str) -> None:
    """The two lines of Accelerate's documentation that save a model of ``transformers``."""
    from inductor_passes.integrations.accelerate import adopt_prepared

    frameworks.as_launched(rank, world_size)
    accelerator = accelerator_of(kind, layer="LlamaDecoderLayer")
    model: Any = tiny_llama()
    clean = {k: v.clone() for k, v in model.state_dict().items()}
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    adopt_prepared(accelerator, model, disable=True)
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        folder, is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
    )
    accelerator.wait_for_everyone()
    loaded = type(tiny_llama()).from_pretrained(folder)
    assert frameworks.off(clean, loaded.state_dict()) == 0


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_save_pretrained(pool: Ranks, tmp_path: Path, kind: str) -> None:
    pool.run(save, kind, str(tmp_path / "model"))


def refused(rank: int, world_size: int) -> None:
    from accelerate.utils import DistributedDataParallelKwargs

    from inductor_passes.integrations.accelerate import adopt_prepared

    frameworks.as_launched(rank, world_size)
    accelerator = accelerator_of("ddp", dynamo_backend="aot_eager")
    with pytest.raises(AdoptError, match=r"dynamo_backend=aot_eager .* leave dynamo_backend"):
        adopt_prepared(accelerator, accelerator.prepare(Net()))
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = accelerator_of("ddp", kwargs_handlers=[unused])
    model = accelerator.prepare(Net())
    with pytest.raises(AdoptError, match="find_unused_parameters=False"):
        adopt_prepared(accelerator, model, disable=True)
    adopt_prepared(accelerator, model, find_unused_parameters=False, disable=True)
    # Called once more, it does nothing.
    adopt_prepared(accelerator, model)
    model = accelerator_of("ddp").prepare(Net())
    model.module.blocks[0].compile(backend="eager")
    with pytest.raises(AdoptError, match=r"module\.blocks\.0 was compiled before"):
        adopt_prepared(accelerator_of("ddp"), model)


def test_misuse_is_named(pool: Ranks) -> None:
    pool.run(refused)
