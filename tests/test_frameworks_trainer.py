"""The Trainer of ``transformers`` with our callback trains a tiny Llama as it does alone. Two gloo ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from inductor_passes import AdoptError
from inductor_passes.adoption import AdoptedDDP, AdoptedModule
from tests.support import frameworks
from tests.support.hugging_face import tiny_llama
from tests.support.ranks import Ranks

pytest.importorskip("accelerate", "1.12")
pytestmark = [pytest.mark.ranks, pytest.mark.slow]

#: FSDP2 through Accelerate, DDP, and FSDP2 that ``from_pretrained`` applied.
KINDS = ["fsdp2", "ddp", "loaded"]


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    """Ranks of their own: Accelerate keeps state in the process and in its environment."""
    with Ranks(2) as ranks:
        yield ranks


def model_of(kind: str, folder: str) -> Any:
    """The same weights in all ways."""
    if kind != "loaded":
        return tiny_llama()
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    path = Path(folder, "clean")
    if dist.get_rank() == 0 and not path.exists():
        tiny_llama().save_pretrained(path)
    dist.barrier()
    return LlamaForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(fsdp_size=2))


def trainer_of(kind: str, mode: str | None, folder: str, model: Any = None, **settings: Any) -> Any:
    """A Trainer as users write it; with the callback unless ``mode`` is None."""
    from transformers import Trainer, TrainingArguments

    from inductor_passes.integrations.transformers import AdoptCallback

    settings = {"max_steps": 4, "save_strategy": "no", "ddp_find_unused_parameters": False, **settings}
    if kind == "fsdp2":
        # See forget_accelerate: FSDP on CPUs.
        frameworks.forget_accelerate(fsdp=True)
        settings["accelerator_config"] = {"use_configured_state": True}
        settings["fsdp"] = True
        settings["fsdp_config"] = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    else:
        frameworks.forget_accelerate(fsdp=False)
    args = TrainingArguments(
        output_dir=str(Path(folder, f"{kind}-{mode}")),
        use_cpu=True,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    trainer = Trainer(model or model_of(kind, folder), args, train_dataset=frameworks.documents(32))
    if mode is not None:
        trainer.add_callback(AdoptCallback(trainer, **frameworks.how(mode)))
    return trainer


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def values(trainer: Any) -> dict[str, torch.Tensor]:
    return frameworks.whole(trainer.accelerator.unwrap_model(trainer.model).state_dict())


def compare(rank: int, world_size: int, kind: str, mode: str, folder: str, accumulate: int = 1) -> tuple[float, float]:
    """The largest differences of (losses, parameters) between the Trainer alone and with the callback."""
    frameworks.as_launched(rank, world_size)
    plain = trainer_of(kind, None, folder, gradient_accumulation_steps=accumulate)
    plain.train()
    trainer = trainer_of(kind, mode, folder, gradient_accumulation_steps=accumulate)
    with frameworks.planned(mode):
        trainer.train()
    assert isinstance(trainer.model_wrapped, AdoptedDDP if kind == "ddp" else AdoptedModule)
    assert len(losses(trainer)) == 4
    worst = frameworks.off(values(plain), values(trainer))
    assert trainer.evaluate(frameworks.documents(4))["eval_loss"] > 0
    return max(abs(a - b) for a, b in zip(losses(plain), losses(trainer))), worst


@pytest.mark.parametrize(("kind", "accumulate"), [*((kind, 2) for kind in KINDS), ("fsdp2", 1), ("loaded", 1)])
def test_trains_bit_for_bit_as_the_trainer_alone(pool: Ranks, tmp_path: Path, kind: str, accumulate: int) -> None:
    # The Trainer no longer sees that a model was sharded by from_pretrained: it reduces every batch.
    rounding = 1e-6 if kind == "loaded" and accumulate > 1 else 0.0
    assert all(max(found) <= rounding for found in pool.run(compare, kind, "off", str(tmp_path), accumulate))


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_with_planned_collectives(pool: Ranks, tmp_path: Path, kind: str) -> None:
    for found in pool.run(compare, kind, "planned", str(tmp_path)):
        assert max(found) <= 1e-4


def resume(rank: int, world_size: int, kind: str, folder: str) -> None:
    """A run that stops and resumes ends as one that did not; its checkpoint also resumes without us."""
    frameworks.as_launched(rank, world_size)
    through = trainer_of(kind, "off", folder, save_strategy="steps", save_steps=2)
    through.train()
    checkpoint = str(Path(folder, f"{kind}-off", "checkpoint-2"))
    for mode in ("off", None):
        again = trainer_of(kind, mode, folder)
        again.train(resume_from_checkpoint=checkpoint)
        assert losses(again) == losses(through)
        assert frameworks.off(values(again), values(through)) == 0


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_resume(pool: Ranks, tmp_path: Path, kind: str) -> None:
    pool.run(resume, kind, str(tmp_path))


def save(rank: int, world_size: int, kind: str, folder: str) -> None:
    """``save_model`` writes whole values; a second ``train()`` goes on with the adopted model."""
    from transformers import LlamaForCausalLM

    frameworks.as_launched(rank, world_size)
    trainer = trainer_of(kind, "off", folder)
    trainer.train()
    trainer.save_model()
    dist.barrier()
    loaded = LlamaForCausalLM.from_pretrained(trainer.args.output_dir)
    assert frameworks.off(values(trainer), dict(loaded.state_dict())) == 0
    before = values(trainer)
    trainer.train()
    assert frameworks.off(values(trainer), before) > 0


@pytest.mark.parametrize("kind", ["fsdp2", "loaded"])
def test_save_model_and_train_again(pool: Ranks, tmp_path: Path, kind: str) -> None:
    pool.run(save, kind, str(tmp_path))


def refused(rank: int, world_size: int, folder: str) -> None:
    frameworks.as_launched(rank, world_size)
    for settings, text in (
        ({"torch_compile_backend": "aot_eager"}, "leave it, torch_compile_backend"),
        ({"ddp_find_unused_parameters": None}, "set ddp_find_unused_parameters=False"),
        ({"ddp_find_unused_parameters": True}, "find_unused_parameters=True"),
    ):
        with pytest.raises(AdoptError, match=text):
            trainer_of("ddp", "off", folder, **settings).train()


def test_misuse_is_named(pool: Ranks, tmp_path: Path) -> None:
    pool.run(refused, str(tmp_path))


def tensor_parallel(rank: int, world_size: int, folder: str) -> None:
    """``tp_plan`` of ``transformers``: its collectives are in the graph, without adoption."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    frameworks.as_launched(rank, world_size)
    path = Path(folder, "clean")
    if rank == 0:
        tiny_llama().save_pretrained(path)
    dist.barrier()
    reference = LlamaForCausalLM.from_pretrained(path)
    model = LlamaForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(tp_plan="auto"))
    step = torch.compile(model, **frameworks.how("planned"))
    tokens = torch.stack([one["input_ids"] for one in frameworks.documents(2)])
    for called, its in ((reference, reference), (step, model)):
        optimizer = torch.optim.SGD(its.parameters(), lr=0.5)
        with frameworks.planned("planned" if called is step else "off"):
            for _ in range(3):
                called(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    assert frameworks.off(dict(reference.state_dict()), frameworks.whole(model.state_dict())) <= 1e-4
    model.save_pretrained(Path(folder, "trained"))
    dist.barrier()
    loaded = nn.Module.state_dict(LlamaForCausalLM.from_pretrained(Path(folder, "trained")))
    assert frameworks.off(frameworks.whole(model.state_dict()), loaded) == 0


def test_tensor_parallel_plan(pool: Ranks, tmp_path: Path) -> None:
    pool.run(tensor_parallel, str(tmp_path))
