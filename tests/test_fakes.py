"""Results that are remembered are what torch returns, and in the memory that torch returns them in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from inductor_passes import _torch
from inductor_passes.rewriting.unpack_op import unfilled

aten = torch.ops.aten


def remembered(x: torch.Tensor, target: Any, args: Any, kwargs: Any, meaning: Any = None) -> tuple[Any, bool]:
    """What is returned, and whether torch was asked for it."""
    asked = []

    def ask() -> Any:
        asked.append(True)
        with _torch.fake_mode_of(x):
            return (meaning or target)(*args, **kwargs)

    return _torch.fake_result(x, args, kwargs, target, ask), bool(asked)


def seen(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Everything about a result that a pass, the verifier or Inductor may look at."""
    if isinstance(value, list):
        return [seen(one, tensors) for one in value]
    assert isinstance(value, torch.Tensor)
    storage = value.untyped_storage()
    owners = [k for k, t in enumerate(tensors) if t.untyped_storage()._cdata == storage._cdata]
    place = (value.storage_offset(), storage.nbytes(), owners)
    return type(value), value.dtype, value.device, value.shape, value.stride(), place, value.requires_grad


CALLS: dict[str, Any] = {
    "view": lambda x, y: (aten.view.default, (x, [4, 2, 6]), {}),
    "slice": lambda x, y: (aten.slice.Tensor, (x, 1, 3, 9), {}),
    "select": lambda x, y: (aten.select.int, (x, 0, 3), {}),
    "permute": lambda x, y: (aten.permute.default, (x, [1, 0]), {}),
    "dtype view": lambda x, y: (aten.view.dtype, (x, torch.uint8), {}),
    "clone": lambda x, y: (aten.clone.default, (y,), {"memory_format": torch.contiguous_format}),
    "kept clone": lambda x, y: (aten.clone.default, (y,), {}),
    "cat": lambda x, y: (aten.cat.default, ([x, y], 0), {}),
    "cast": lambda x, y: (torch.ops.prims.convert_element_type.default, (y, torch.bfloat16), {}),
    "full": lambda x, y: (aten.full.default, ([3, 2], 0), {"dtype": torch.uint8, "device": x.device}),
    "mm": lambda x, y: (aten.mm.default, (x, aten.permute.default(y, [1, 0])), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_remembered_is_what_torch_returns(name: str) -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        x = torch.empty(8, 6)
        y = torch.empty(6, 9)[:, 1:7].t()
        pairs = [(x, y), (x, torch.empty(6, 9)[:, 1:7].t())]
        calls = [CALLS[name](*pair) for pair in pairs]
    results = []
    for (a, b), (target, args, kwargs) in zip(pairs, calls):
        found, asked = remembered(x, target, args, kwargs)
        with mode:
            expected = target(*args, **kwargs)
        assert seen(found, [a, b]) == seen(expected, [a, b])
        results.append((found, asked))
    assert [asked for _, asked in results] == [True, False]
    (first, _), (second, _) = results
    assert first is not second
    own = not seen(first, [x, y])[-2][-1]
    assert not own or first.untyped_storage()._cdata != second.untyped_storage()._cdata


def test_a_list_is_remembered() -> None:
    mode = FakeTensorMode()
    with mode:
        message = torch.empty(4, 16)
    target = torch.ops.inductor_passes.unpack.default
    first, asked = remembered(message, target, (message, [0, 8], [8, 8]), {}, unfilled)
    second, again = remembered(message, target, (message, [0, 8], [8, 8]), {}, unfilled)
    assert asked and not again and seen(first, [message]) == seen(second, [message])
    assert second[0].untyped_storage()._cdata != second[1].untyped_storage()._cdata


def test_literals_sizes_dtypes_and_offsets_are_told_apart() -> None:
    mode = FakeTensorMode()
    with mode:
        x, z = torch.empty(8, 6), torch.empty(8, 6, dtype=torch.int64)
        calls = [
            (aten.add.Tensor, (z, 1)),
            (aten.add.Tensor, (z, 1.0)),
            (aten.add.Tensor, (z, True)),
            (aten.add.Tensor, (x, 1)),
            (aten.slice.Tensor, (x[:4], 0, 1, 2)),
            (aten.slice.Tensor, (x[4:], 0, 1, 2)),
        ]
    for target, args in calls:
        found, asked = remembered(x, target, args, {})
        with mode:
            assert asked and seen(found, [*args[:1]]) == seen(target(*args), [*args[:1]])


def test_whose_memory_a_result_has_is_not_taken_from_arguments_that_share_theirs() -> None:
    mode = FakeTensorMode()
    with mode:
        x, other = torch.empty(8, 6), torch.empty(8, 6)
    target = aten.expand_as.default
    _, first = remembered(x, target, (x, x.detach()), {})
    found, second = remembered(x, target, (x, other), {})
    assert first and seen(found, [x, other])[-2] == (0, 8 * 6 * 4, [0])
    assert second


def test_what_depends_on_more_is_asked_for_every_time() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    size = mode.shape_env.create_unbacked_symint() if mode.shape_env is not None else 0
    with mode:
        x, symbolic = torch.empty(8, 6), torch.empty(size, 6)
    for target, args in [
        (aten.neg.default, (symbolic,)),
        (aten.add_.Tensor, (x, 1)),  # writes
        (aten.topk.default, (x, 2)),  # several results
        (aten.expand.default, (x, [size, 8, 6])),
    ]:
        assert [remembered(x, target, args, {})[1] for _ in range(2)] == [True, True], target
