"""``save_pretrained`` and ``from_pretrained`` of a managed model from ``transformers``, on two real ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from inductor_passes.simple_fsdp import MissingRanksError, ShardedValueError, arrival, simple_fsdp
from tests.support.hugging_face import tiny_llama
from tests.support.ranks import Ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def tiny(tied: bool) -> Any:
    return tiny_llama(tie_word_embeddings=tied)


def managed(world_size: int, tied: bool) -> Any:
    return simple_fsdp(tiny(tied), init_device_mesh("cpu", (world_size,)))


def assert_same_values(actual: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    state = actual.state_dict()
    assert list(state) == list(expected)
    for name, value in state.items():
        assert torch.equal(value, expected[name]), name


def save(rank: int, world_size: int, folder: str, tied: bool) -> None:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    model = managed(world_size, tied)
    tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(rank))
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.save_pretrained(folder)
    # The files are there on every rank's return, and say what they are of.
    assert json.loads(Path(folder, "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    assert not torch.equal(whole["lm_head.weight"], tiny(tied).lm_head.weight)
    for kind in (LlamaForCausalLM, AutoModelForCausalLM, type(model)):
        loaded = kind.from_pretrained(folder)
        assert type(loaded) is LlamaForCausalLM
        assert_same_values(loaded, whole)
    again = simple_fsdp(LlamaForCausalLM.from_pretrained(folder), init_device_mesh("cpu", (world_size,)))
    assert torch.equal(again(input_ids=tokens).logits, model(input_ids=tokens).logits)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_saved_model_is_whole_and_loads(pool: Ranks, tmp_path: Path, tied: bool) -> None:
    pool.run(save, str(tmp_path / "model"), tied, timeout=600)


def save_given(rank: int, world_size: int, folder: str) -> None:
    """With a state dict of the caller's, one rank alone can save, as with FSDP2; so can a part of the model."""
    model = managed(world_size, False)
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
    if rank == 0:
        model.save_pretrained(os.path.join(folder, "given"), state_dict=dict(whole))
        assert_same_values(type(model).from_pretrained(os.path.join(folder, "given")), whole)
    model.model.save_pretrained(os.path.join(folder, "part"), True)
    part = type(model.model).from_pretrained(os.path.join(folder, "part"))
    assert_same_values(part, {k.removeprefix("model."): v for k, v in whole.items() if k.startswith("model.")})


def test_given_values_and_parts_can_be_saved(pool: Ranks, tmp_path: Path) -> None:
    pool.run(save_given, str(tmp_path), timeout=600)


def save_alone(rank: int, world_size: int, folder: str) -> str:
    model = managed(world_size, False)
    caught = ""
    before, arrival.LIMIT_S = arrival.LIMIT_S, 0.5
    if rank == 0:
        with pytest.raises(MissingRanksError) as error:
            model.save_pretrained(folder)
        caught = str(error.value)
    arrival.LIMIT_S = before
    dist.barrier()
    model.save_pretrained(folder)
    assert_same_values(type(model).from_pretrained(folder), tiny(False).state_dict())
    return caught


def test_saving_on_one_rank_is_an_error_that_says_so(pool: Ranks, tmp_path: Path) -> None:
    text, _ = pool.run(save_alone, str(tmp_path / "model"), timeout=600)
    assert "save_pretrained of a LlamaForCausalLM needs all ranks [0, 1]" in text


def fail_to_save(rank: int, world_size: int, folder: str) -> None:
    """The writing rank's error does not leave the others waiting."""
    Path(folder, "model.safetensors").mkdir(parents=True, exist_ok=True)
    model = managed(world_size, False)
    if rank == 0:
        with pytest.raises(Exception, match=r"model\.safetensors|directory"):
            model.save_pretrained(folder)
    else:
        model.save_pretrained(folder)
    dist.barrier()


def test_an_error_of_the_writer_reaches_only_the_writer(pool: Ranks, tmp_path: Path) -> None:
    pool.run(fail_to_save, str(tmp_path / "model"), timeout=600)


def look(rank: int, world_size: int) -> None:
    """What libraries and users ask a model on one rank."""
    model, reference = managed(world_size, True), tiny(True)
    if rank == 0:
        assert model.dtype is torch.float32 and model.device.type == "cpu"
        assert model.num_parameters() == reference.num_parameters()
        assert model.get_input_embeddings().weight.shape == (64, 32)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        model.tie_weights()
        assert type(model).__name__ == "LlamaForCausalLM" and isinstance(model, type(reference))
        assert model.get_memory_footprint() > 0
        with pytest.raises(ShardedValueError, match=r"Embedding\.weight"):
            model.get_input_embeddings().weight.mean()
    dist.barrier()
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(model(input_ids=tokens).logits, reference(input_ids=tokens).logits)
    generated = model.generate(tokens, max_new_tokens=2, do_sample=False)
    assert torch.equal(generated, reference.generate(tokens, max_new_tokens=2, do_sample=False))


def test_a_model_answers_on_one_rank(pool: Ranks) -> None:
    pool.run(look, timeout=600)
