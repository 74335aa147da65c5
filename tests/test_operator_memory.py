"""What operators do to memory: the passes' derivation, the verifier's, and real memory, held against each other.

Every difference is named here with its reason. All go one way: whoever says more makes more order binding than needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives

from inductor_passes import _torch

NAMESPACES = ("aten", "prims", "inductor", "inductor_prims", "inductor_passes", "_c10d_functional")
#: Overloads that take generated arguments, of those that take tensors at all.
AT_LEAST_CALLED = 2200

_ONLY_ON_REAL_DATA = "the kernel without data does not write; torch's reading of the schema (SchemaInfo) says it does"
_OUT = "the schema's list is by name; with a buffer for the result nothing but the buffer is returned"
_COPY = "the same dtype returns the argument, and only float32 is generated; listed for every one of them"
_NO_DATA = "no result of these arguments; it may return either"
_PRIMS = "the kernel without data makes a new tensor where the schema promises a view or the argument"

#: kind of difference -> overload -> reason
KNOWN: dict[str, dict[str, str]] = {
    "writes without a new version": {
        **dict.fromkeys(
            (
                *("aten._amp_foreach_non_finite_check_and_unscale.out", "aten._amp_update_scale.out"),
                *("aten._amp_foreach_non_finite_check_and_unscale_.default", "aten._amp_update_scale_.default"),
                *("aten._batch_norm_impl_index.default", "aten._batch_norm_with_update.default"),
                *("aten._flash_attention_forward_no_dropout_inplace.default", "aten._fused_adam.out"),
                *("aten._fused_adam_.default", "aten._fused_adamw.out", "aten._fused_adamw_.default"),
                *("aten._fused_moving_avg_obs_fq_helper.default", "aten._fused_moving_avg_obs_fq_helper.out"),
                *("aten._native_batch_norm_legit.default", "aten.batch_norm.default", "aten.cudnn_batch_norm.default"),
                *("aten.cudnn_batch_norm.out", "aten.fft_ihfft2.out", "aten.fft_ihfftn.out", "aten.empty.out"),
                *("aten.fused_moving_avg_obs_fake_quant.default", "aten.instance_norm.default"),
                *("aten.miopen_batch_norm.default", "aten.miopen_batch_norm.out", "aten.native_batch_norm.default"),
                *("aten.native_batch_norm.out", "aten.rrelu_with_noise.default", "aten.rrelu_with_noise.out"),
                *("aten.rrelu_with_noise_.default", "prims.as_strided.default", "prims.copy_to.default"),
                "prims.resize.default",
            ),
            _ONLY_ON_REAL_DATA,
        ),
        **dict.fromkeys(
            ("aten.detach_.default", "aten.requires_grad_.default", "aten.resize_.default", "aten.resize_as_.default"),
            "it changes what the tensor is and none of its elements",
        ),
        "aten.set_data.default": "it changes whose memory the tensor is: a fence for both",
    },
    "writes less than its schema says": {
        "inductor.resize_storage_bytes_.default": "its schema says nothing; listed, and a fence for both",
        "inductor.accumulate_grad_.default": "its schema says nothing; listed: a gradient that is there is added to",
    },
    "aliases less than its schema says": {
        **{f"aten._cast_{k}.default": _COPY for k in ("Byte", "Char", "Double", "Half", "Int", "Long", "Short")},
        **dict.fromkeys(
            (
                *("aten._unsafe_view.out", "aten.channel_shuffle.out", "aten.conj_physical.out", "aten.lift.out"),
                *("aten.native_dropout.out", "aten.set.source_Tensor_out", "aten._cudnn_rnn.out"),
            ),
            _OUT,
        ),
        **dict.fromkeys(
            (
                *("aten.linalg_matrix_rank.atol_rtol_float_out", "aten.linalg_matrix_rank.atol_rtol_tensor_out"),
                *("aten.linalg_matrix_rank.out", "aten.linalg_matrix_rank.out_tol_tensor"),
                *("prims._unsafe_index_put_.default", "prims.imag.default", "prims.real.default"),
            ),
            _PRIMS,
        ),
        "aten._cudnn_rnn.default": "one of its five results, and the list is for all of them",
        "aten.native_dropout.default": "one of its two results, and the list is for both",
        "inductor.accumulate_grad_.default": _NO_DATA,
    },
    "changes shape": {"aten.addr_.default": "a vector that is added to as a matrix, which a program cannot do"},
    "roles": {
        **dict.fromkeys(
            (
                *("aten._cast_Float.default", "aten._test_parallel_materialize.default"),
                *("aten._test_string_default.default", "aten.channel_shuffle.default", "aten.conj_physical.default"),
                *("aten.native_channel_shuffle.default", "aten.sum_to_size.default", "aten.to_dense.default"),
                *("aten.to_dense_backward.default", "aten.to_mkldnn_backward.default", "aten.type_as.default"),
                "inductor.accumulate_grad_.default",
            ),
            "returns its argument for the arguments at hand, a view; for others it computes, which the passes count",
        ),
        **dict.fromkeys(
            (
                *("aten._thnn_differentiable_lstm_cell_backward.default", "aten._unpack_dual.default"),
                *("aten._thnn_fused_lstm_cell_backward.default", "aten._thnn_fused_lstm_cell_backward_impl.default"),
            ),
            "returns nothing for these arguments",
        ),
        "aten.one_hot.default": "waits for data with some arguments only; a fence for the passes with all",
        **dict.fromkeys(
            ("prims.imag.default", "prims.real.default", "aten.to.dtype_layout"),
            "may be a view by its schema, copies for the arguments at hand",
        ),
        "aten._fused_sdp_choice.default": "a number, which draws nothing",
    },
}


@pytest.fixture(scope="module")
def scanned() -> list[dict[str, Any]]:
    """One record per overload; see ``operator_scan``."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.operator_scan", *NAMESPACES], capture_output=True, text=True, check=False
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"at {lines[-1:]}: {done.stderr[-2000:]}"
    return [line for line in lines if "op" in line]


def test_both_derivations_agree_on_every_operator_but_for_named_differences(scanned) -> None:
    found: dict[str, set[str]] = {}
    for record in scanned:
        for kind in record.keys() - {"op", "calls", "tensors"}:
            found.setdefault(kind, set()).add(record["op"])
    unnamed = {kind: sorted(ops - KNOWN.get(kind, {}).keys()) for kind, ops in found.items()}
    assert not any(unnamed.values()), f"differences without a reason: {unnamed}"


def test_no_difference_is_named_in_vain(scanned) -> None:
    by_op = {record["op"]: record for record in scanned}
    gone = {(kind, op) for kind, ops in KNOWN.items() for op in ops if op in by_op and kind not in by_op[op]}
    assert not gone


def test_most_operators_can_be_called(scanned) -> None:
    takes_tensors = [record for record in scanned if record.get("tensors")]
    called = [record for record in takes_tensors if record["calls"]]
    assert len(called) >= AT_LEAST_CALLED, f"{len(called)} of {len(takes_tensors)}"


def test_real_memory_agrees_with_both() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.operator_recording", "1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *differences, counts = map(json.loads, done.stdout.splitlines())
    assert differences == []
    assert counts["overloads"] >= 500, counts


def _op(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    return _torch.registered_op(namespace, base, overload)


@pytest.mark.parametrize(
    ("name", "written", "results"),
    [
        ("aten::split.Tensor", (), (("self",),)),
        ("aten::split_with_sizes", (), (("self",),)),
        ("aten::chunk", (), (("self",),)),
        ("aten::unbind.int", (), (("self",),)),
        ("aten::tensor_split.sections", (), (("self",),)),
        ("aten::unsafe_split.Tensor", (), (("self",),)),
        ("aten::_unsafe_view", (), (("self",),)),
        ("aten::set_.source_Tensor", ("self",), (("self", "source"),)),
        ("aten::expand", (), (("self",),)),
        ("aten::as_strided", (), (("self",),)),
        ("aten::view_as_real", (), (("self",),)),
        ("aten::_reshape_alias", (), (("self",),)),
        ("aten::lift_fresh", (), (("self",),)),
        ("aten::detach_", ("self",), (("self",),)),
        ("aten::_to_copy", (), ((),)),
        ("aten::to.dtype", (), (("self",),)),
        ("aten::resize_", ("self",), (("self",),)),
        ("aten::copy_", ("self",), (("self",),)),
        ("aten::index_put_", ("self",), (("self",),)),
        ("aten::max.dim_max", ("max", "max_values"), (("max",), ("max_values",))),
        ("aten::_foreach_add_.List", ("self",), ()),
        ("aten::split_with_sizes_copy.out", ("out",), ()),
        ("aten::_fused_adamw_", ("self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"), ()),
        ("aten::native_batch_norm", ("running_mean", "running_var"), ((), (), ())),
        ("aten::_native_batch_norm_legit", ("running_mean", "running_var"), ((), (), ())),
        ("_c10d_functional::all_reduce_", ("input",), (("input",),)),
        ("_c10d_functional::all_reduce_coalesced_", ("inputs",), (("inputs",),)),
        ("_c10d_functional::all_gather_into_tensor", (), ((),)),
    ],
)
def test_what_a_schema_says(name: str, written: tuple[str, ...], results: tuple[tuple[str, ...], ...]) -> None:
    use = _torch.memory_use(_op(name))
    assert use is not None and (use.written, use.results) == (written, results)


def test_schemas_that_say_nothing() -> None:
    assert _torch.memory_use(_op("prim::Print")) is None
    assert _torch.memory_use(_op("aten::_test_string_default")) is not None, "quotes in a default value"


def test_writes_of_operators_that_are_python_functions() -> None:
    """Torch names their alias sets by place (``Tensor(a1!)``)."""

    @torch.library.custom_op("inductor_passes_tests::fill", mutates_args=("out", "more"))
    def fill(x: torch.Tensor, out: torch.Tensor, more: Sequence[torch.Tensor], value: float) -> None:
        raise AssertionError("nobody calls it")

    use = _torch.memory_use(torch.ops.inductor_passes_tests.fill.default)
    assert use is not None and use.written == ("out", "more") and not use.views


def test_every_collective_is_what_its_name_says() -> None:
    """The verifier tells collectives by name: none may be left out, and each does to memory what its form says."""
    import inductor_passes._torch.gather_op  # noqa: F401  ours
    from inductor_passes.ir.ops import COLLECTIVES
    from inductor_passes.verify.facts import communication

    seen = set()
    for name in torch._C._dispatch_get_all_op_names():
        base = name.partition(".")[0]
        form = communication.form_of(base)
        if form is None or base in seen:
            continue
        seen.add(base)
        use = _torch.memory_use(_op(base))
        assert use is not None and COLLECTIVES[base] == form.kind
        assert form.in_place == (use.written != () and "out" not in use.written)
        assert form.out == ("out" in use.written)
        assert communication.takes_a_group(_op(base))
    assert seen == COLLECTIVES.keys()
