"""The example models: reproducible, and the same model however it is spread."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from inductor_passes.models import (
    DEMO,
    LlamaConfig,
    cross_entropy,
    language_batch,
    language_model,
    llama,
    llama_batch,
)
from tests.support.world import fake_world
from tools.link.models import LAYOUTS, Spread

EXPERTS = LlamaConfig(layers=2, experts=4, capacity=16)


def test_weights_depend_on_the_seed_only() -> None:
    first, second, other = llama(LlamaConfig()), llama(LlamaConfig()), llama(LlamaConfig(seed=1))
    for a, b in zip(first.parameters(), second.parameters()):
        assert torch.equal(a, b)
    assert not torch.equal(first.embed.weight, other.embed.weight)


def test_the_language_model_is_the_model_with_its_loss() -> None:
    config = LlamaConfig()
    tokens, targets = llama_batch(config)
    assert torch.equal(language_model(config)(tokens, targets), cross_entropy(llama(config)(tokens), targets))


def test_experts_train_and_layers_differ() -> None:
    model = language_model(EXPERTS)
    model(*language_batch(EXPERTS)).backward()
    first, second = (layer.experts for layer in model.layers)
    assert first.w1.grad is not None and bool(first.w1.grad.abs().sum() > 0)
    assert not torch.equal(first.w1, second.w1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_holds_its_share_of_the_same_experts(rank: int) -> None:
    whole = llama(EXPERTS)
    with fake_world(2, rank):
        part = llama(EXPERTS, expert_group=dist.group.WORLD)
    for mine, all_of_them in zip(part.layers, whole.layers):
        assert torch.equal(mine.experts.w1, all_of_them.experts.w1.chunk(2)[rank])
        assert torch.equal(mine.attention.wq.weight, all_of_them.attention.wq.weight)


def test_the_made_up_language_can_be_learned() -> None:
    tokens, targets = language_batch(DEMO, seed=3)
    assert torch.equal(targets[:, :-1], tokens[:, 1:])
    # Every other token follows from the one before it.
    assert torch.equal(targets[:, ::2], (tokens[:, ::2] * 3 + 7) % DEMO.vocab)
    assert not torch.equal(tokens, language_batch(DEMO, seed=4)[0])


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_every_layout_of_the_link_benchmark_builds(name: str) -> None:
    layout = LAYOUTS[name]
    config = replace(layout.sized({"layers": 1}), vocab=64, dim=32, hidden=48, batch=2, seq=16)
    with fake_world(layout.ranks):
        laid = layout.build(config, Spread())
        tokens, targets = laid.batch(0)
        assert tokens.shape == targets.shape and len(tokens) == config.batch
        assert {group.size() for group in laid.groups} <= {2, layout.ranks}
        assert sum(p.requires_grad for p in laid.model.parameters()) > 0
