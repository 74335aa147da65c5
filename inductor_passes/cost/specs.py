"""What devices and their links can do: the constants that the cost model falls back on when nothing was
measured.

Every constant says where it comes from. ``datasheet`` values are the vendor's peak figures (dense, without
structured sparsity); ``fitted`` values are rounded from measurements and say on what. A calibration profile
overrides them.

Units: FLOP/s, bytes/s, ns. Link bandwidths are per rank and per direction.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Tag = Literal["datasheet", "fitted"]


@dataclass(frozen=True)
class Constant:
    """A number with its origin.

    Attributes:
        value: in the unit that the field holding it names.
        tag: ``datasheet`` (vendor's figure) or ``fitted`` (from measurements).
        source: document or measurement it comes from.
    """

    value: float
    tag: Tag
    source: str


@dataclass(frozen=True)
class LinkSpec:
    """One kind of link as a rank sees it.

    Attributes:
        latency_ns: cost of one message (hop) on the link.
        bytes_per_s: what one rank can send in one direction.
    """

    latency_ns: Constant
    bytes_per_s: Constant


@dataclass(frozen=True)
class DeviceSpec:
    """A device, and the links that usually join several of them.

    Attributes:
        name: for people and for profiles.
        match: lower-case pieces of the names under which drivers report it.
        device_type: torch's device type (``cuda``, ``xpu``, ``cpu``).
        flops: peak FLOP/s of a matmul by dtype name (``float32``, ``bfloat16``, ``tf32`` ...).
        matmul_efficiency: share of the peak that large matmuls reach.
        memory_bytes_per_s: device memory bandwidth.
        memory_efficiency: share of it that streaming kernels reach.
        kernel_ns: fixed cost of one kernel: launch gap and ramp.
        issue_ns: host time to issue one collective.
        collective_ns: fixed cost of one collective besides its hops.
        intra / inter: links between ranks of one host, and of different hosts.
        ranks_per_host: usual number of devices in a host.
    """

    name: str
    match: tuple[str, ...]
    device_type: str
    flops: Mapping[str, Constant]
    matmul_efficiency: Constant
    memory_bytes_per_s: Constant
    memory_efficiency: Constant
    kernel_ns: Constant
    issue_ns: Constant
    collective_ns: Constant
    intra: LinkSpec
    inter: LinkSpec
    ranks_per_host: int

    def peak_flops(self, dtype: str) -> float:
        """Peak FLOP/s for ``dtype`` (``torch.`` prefix allowed); an unlisted dtype counts as float32."""
        name = dtype.removeprefix("torch.")
        if name.startswith("float8"):
            name = "float8"
        return self.flops.get(name, self.flops["float32"]).value

    def constants(self) -> dict[str, Constant]:
        """All constants by dotted field name, in a fixed order."""
        result = {f"flops.{dtype}": constant for dtype, constant in self.flops.items()}
        for name in (
            "matmul_efficiency",
            "memory_bytes_per_s",
            "memory_efficiency",
            "kernel_ns",
            "issue_ns",
            "collective_ns",
        ):
            result[name] = getattr(self, name)
        for side in ("intra", "inter"):
            link: LinkSpec = getattr(self, side)
            result[f"{side}.latency_ns"] = link.latency_ns
            result[f"{side}.bytes_per_s"] = link.bytes_per_s
        return result


def _sheet(source: str, values: Mapping[str, float]) -> dict[str, Constant]:
    return {name: Constant(value, "datasheet", source) for name, value in values.items()}


_H100 = "NVIDIA H100 Tensor Core GPU datasheet, SXM5; figures with sparsity halved"
_H200 = "NVIDIA H200 Tensor Core GPU datasheet, SXM; figures with sparsity halved"
_B200 = "NVIDIA DGX B200 datasheet, one eighth; figures with sparsity halved"
_A100 = "NVIDIA A100 80GB datasheet, SXM4"
_MI300X = "AMD Instinct MI300X data sheet"
_MAX1550 = "Intel Data Center GPU Max 1550 product page and XMX peak at 1.6 GHz"
_NIC400 = "400 Gbit/s InfiniBand NDR, one port per device"
_NIC200 = "200 Gbit/s InfiniBand HDR, one port per device"
_NCCL = "NCCL src/graph/tuning.cc, ring with the Simple protocol"
_NCCL_BASE = "NCCL src/graph/tuning.cc, base latency of the ring with the Simple protocol"

_GEMM = Constant(0.7, "fitted", "share of peak of 8192-cubed bf16 matmuls commonly reported for cuBLAS and hipBLASLt")
_STREAM = Constant(0.85, "fitted", "share of peak of STREAM-like copies commonly reported for HBM devices")
_KERNEL = Constant(3_000.0, "fitted", "gap between dependent kernels of one stream, CUDA 12, back to back launches")
_ISSUE = Constant(20_000.0, "fitted", "host time of one functional collective issued from a compiled wrapper")
_COLLECTIVE = Constant(8_400.0, "fitted", _NCCL_BASE)


def _nvidia(
    name: str,
    match: tuple[str, ...],
    source: str,
    flops: Mapping[str, float],
    memory_bytes_per_s: float,
    nvlink_bytes_per_s: float,
    nic: tuple[float, str],
) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        match=match,
        device_type="cuda",
        flops=_sheet(source, flops),
        matmul_efficiency=_GEMM,
        memory_bytes_per_s=Constant(memory_bytes_per_s, "datasheet", source),
        memory_efficiency=_STREAM,
        kernel_ns=_KERNEL,
        issue_ns=_ISSUE,
        collective_ns=_COLLECTIVE,
        intra=LinkSpec(Constant(3_400.0, "fitted", _NCCL), Constant(nvlink_bytes_per_s, "datasheet", source)),
        inter=LinkSpec(Constant(14_000.0, "fitted", _NCCL), Constant(nic[0], "datasheet", nic[1])),
        ranks_per_host=8,
    )


_HOPPER_FLOPS = {
    "float64": 67e12,
    "float32": 67e12,
    "tf32": 494.7e12,
    "bfloat16": 989.4e12,
    "float16": 989.4e12,
    "float8": 1978.9e12,
    "int8": 1978.9e12,
}

H100_SXM = _nvidia("NVIDIA H100 SXM", ("h100",), _H100, _HOPPER_FLOPS, 3.35e12, 450e9, (50e9, _NIC400))
H200_SXM = _nvidia("NVIDIA H200 SXM", ("h200",), _H200, _HOPPER_FLOPS, 4.8e12, 450e9, (50e9, _NIC400))
B200 = _nvidia(
    "NVIDIA B200",
    ("b200",),
    _B200,
    {
        "float64": 37e12,
        "float32": 75e12,
        "tf32": 1125e12,
        "bfloat16": 2250e12,
        "float16": 2250e12,
        "float8": 4500e12,
        "int8": 4500e12,
    },
    8e12,
    900e9,
    (50e9, _NIC400),
)
A100_SXM = _nvidia(
    "NVIDIA A100 SXM",
    ("a100",),
    _A100,
    {"float64": 19.5e12, "float32": 19.5e12, "tf32": 156e12, "bfloat16": 312e12, "float16": 312e12, "int8": 624e12},
    2.039e12,
    300e9,
    (25e9, _NIC200),
)
MI300X = DeviceSpec(
    name="AMD Instinct MI300X",
    match=("mi300x",),
    device_type="cuda",
    flops=_sheet(
        _MI300X,
        {
            "float64": 163.4e12,
            "float32": 163.4e12,
            "tf32": 653.7e12,
            "bfloat16": 1307.4e12,
            "float16": 1307.4e12,
            "float8": 2614.9e12,
            "int8": 2614.9e12,
        },
    ),
    matmul_efficiency=Constant(0.55, "fitted", "share of peak of large bf16 matmuls commonly reported for hipBLASLt"),
    memory_bytes_per_s=Constant(5.3e12, "datasheet", _MI300X),
    memory_efficiency=_STREAM,
    kernel_ns=Constant(5_000.0, "fitted", "gap between dependent kernels of one HIP stream"),
    issue_ns=_ISSUE,
    collective_ns=_COLLECTIVE,
    intra=LinkSpec(
        Constant(5_000.0, "fitted", _NCCL + ", PCI row"),
        Constant(448e9, "datasheet", _MI300X + ": 7 Infinity Fabric links of 64 GB/s per direction"),
    ),
    inter=LinkSpec(Constant(14_000.0, "fitted", _NCCL), Constant(50e9, "datasheet", _NIC400)),
    ranks_per_host=8,
)
MAX_1550 = DeviceSpec(
    name="Intel Data Center GPU Max 1550",
    match=("max 1550",),
    device_type="xpu",
    flops=_sheet(
        _MAX1550,
        {
            "float64": 52.4e12,
            "float32": 52.4e12,
            "tf32": 419e12,
            "bfloat16": 839e12,
            "float16": 839e12,
            "int8": 1678e12,
        },
    ),
    matmul_efficiency=Constant(0.55, "fitted", "share of peak of large bf16 matmuls commonly reported for oneMKL"),
    memory_bytes_per_s=Constant(3.2768e12, "datasheet", _MAX1550),
    memory_efficiency=Constant(0.7, "fitted", "share of peak of STREAM-like copies commonly reported"),
    kernel_ns=Constant(6_000.0, "fitted", "gap between dependent SYCL kernels of one in-order queue"),
    issue_ns=Constant(30_000.0, "fitted", "host time of one oneCCL collective"),
    collective_ns=Constant(15_000.0, "fitted", "small oneCCL all-reduce within a host"),
    intra=LinkSpec(
        Constant(6_000.0, "fitted", "small oneCCL all-reduce within a host, per hop"),
        Constant(212e9, "datasheet", _MAX1550 + ": 16 Xe links of 26.5 GB/s, one direction counted as half"),
    ),
    inter=LinkSpec(
        Constant(14_000.0, "fitted", _NCCL), Constant(25e9, "datasheet", "200 Gbit/s Slingshot 11, one port per device")
    ),
    ranks_per_host=8,
)
_CPU_RUN = "torch 2.13 CPU, 2 cores of an AVX-512 server, one thread per rank"
CPU = DeviceSpec(
    name="CPU",
    match=("cpu",),
    device_type="cpu",
    flops={
        "float64": Constant(70e9, "fitted", _CPU_RUN),
        "float32": Constant(140e9, "fitted", _CPU_RUN),
        "bfloat16": Constant(140e9, "fitted", "as float32; several times more with matrix instructions"),
        "float16": Constant(140e9, "fitted", "as float32"),
    },
    matmul_efficiency=Constant(1.0, "fitted", "the rates are achieved ones"),
    memory_bytes_per_s=Constant(15e9, "fitted", _CPU_RUN + ", half of what an 8 MiB stream reaches"),
    memory_efficiency=Constant(1.0, "fitted", "the rate is an achieved one"),
    kernel_ns=Constant(2_000.0, "fitted", _CPU_RUN),
    issue_ns=Constant(120_000.0, "fitted", "one gloo collective issued from a compiled wrapper"),
    collective_ns=Constant(100_000.0, "fitted", "smallest gloo collective on loopback"),
    intra=LinkSpec(
        Constant(50_000.0, "fitted", "gloo on loopback, per hop"), Constant(1.0e9, "fitted", "gloo on loopback")
    ),
    inter=LinkSpec(
        Constant(100_000.0, "fitted", "gloo over TCP, per hop"),
        Constant(1.25e9, "datasheet", "10 Gbit/s Ethernet, one port per host"),
    ),
    ranks_per_host=1,
)

SPECS: tuple[DeviceSpec, ...] = (H100_SXM, H200_SXM, B200, A100_SXM, MI300X, MAX_1550, CPU)
_DEFAULTS = {"cuda": H100_SXM, "xpu": MAX_1550, "cpu": CPU}


@functools.lru_cache(maxsize=64)
def lookup(device_name: str, device_type: str = "cpu") -> DeviceSpec:
    """The spec whose ``match`` occurs in ``device_name`` (as drivers report it), or a device type's default.

    Unknown names get the default of ``device_type``: a wrong device never makes a plan illegal, only less good.
    """
    wanted = device_name.lower()
    for spec in SPECS:
        if spec.name.lower() == wanted or any(piece in wanted for piece in spec.match):
            return spec
    return _DEFAULTS.get(wanted) or _DEFAULTS.get(device_type, CPU)
