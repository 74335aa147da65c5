"""Our Triton kernels, assembled for GPUs that this machine lacks: what can be known about them without running them.

Each kernel is compiled as the package launches it, with ``ptxas`` down to the machine code of a generation. That shows
what a launch on such a device would be refused for (shared memory) or slowed down by (spilled registers, matmuls that
miss the tensor cores, narrow loads), and whether the flags between ranks are what the protocol needs.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from tools.shared.record import RESULTS, chosen, markdown_table, write

#: Compute capability -> bytes of shared memory that one block may have (CUDA C++ programming guide, "Technical
#: specifications per compute capability"), and what its tensor cores are called in PTX.
GENERATIONS = {80: (163 << 10, "mma.sync"), 90: (227 << 10, "wgmma.mma_async"), 100: (227 << 10, "tcgen05.mma")}
DEVICES = {80: "A100", 90: "H100", 100: "B200"}
HEADER = ("kernel", "for", "registers", "spilled B", "shared KiB", "of KiB", "tensor cores", "waits", "releases")
#: Ranks of a host.
WORLD = 8
_POINTERS = {"data": "*i64", "flags": "*i64", "counter": "*i32", "scale": "*fp32"}
_FLOATS = ("eps", "limit", "factor")


@dataclass(frozen=True)
class Launch:
    """A kernel as the package launches it.

    Attributes:
        name: for people.
        kernel: the function that Triton compiles.
        pointers: Triton's type of each argument that is a tensor of the program, e.g. ``*bf16``.
        constants: arguments known when it is compiled; a stride of 1 among them, as Triton specialises it.
        aligned: arguments that are multiples of 16.
        matmul: it multiplies matrices.
        messages: it waits for other ranks / it tells other ranks.
        oldest: compute capability from which on the hardware has the launch's types.
    """

    name: str
    kernel: Any
    pointers: Mapping[str, Any]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...]
    warps: int = 8
    stages: int = 3
    matmul: bool = False
    messages: tuple[bool, bool] = (False, False)
    oldest: int = 80


@dataclass(frozen=True)
class Assembled:
    """What came out.

    Attributes:
        registers: per thread.
        spilled: bytes per thread that did not fit into registers.
        shared: bytes per block.
        tensor_cores: instructions of the generation's tensor cores in the PTX.
        waits / releases: loads with acquire and stores or exchanges with release, both of system scope.
        first_wait: place in the PTX of the first of ``waits``, -1 without.
        ptx: the code.
    """

    name: str
    generation: int
    registers: int
    spilled: int
    shared: int
    tensor_cores: int
    waits: int
    releases: int
    first_wait: int
    ptx: str


def launches(generation: int) -> Iterator[Launch]:
    """All kernels of the package for a compute capability, with each path through them that is compiled apart."""
    for dtype, text in ((torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")):
        yield from _matmuls(dtype, text, GENERATIONS[generation][0])
    for text in ("bf16", "fp32"):
        yield from _norms(text)
    yield from _unpacks()


def _matmuls(dtype: torch.dtype, text: str, shared_bytes: int) -> Iterator[Launch]:
    from inductor_passes.kernels import gather_gemm, gemm_scatter
    from inductor_passes.kernels.tiles import tiles_for

    tiles = tiles_for(torch.device("cuda"), dtype, shared_bytes)
    cut = {"BLOCK_M": tiles.m, "BLOCK_N": tiles.n, "BLOCK_K": tiles.k, "GROUP": tiles.group, "PRECISION": "tf32"}
    cut |= {"WORLD": WORLD, "WIDEN": False}
    tensor, size = f"*{text}", {"warps": tiles.warps, "stages": tiles.stages}
    pages = ("data_page", "flag_page")
    yield Launch(
        f"push, {text}",
        gather_gemm._push,
        {"shard": tensor},
        {"CHUNK": tiles.m, "BLOCK": 64, "WORLD": WORLD},
        ("shard", "columns", *pages),
        warps=4,
        messages=(False, True),
    )
    for even, bias in ((True, False), (True, True), (False, False)):
        yield Launch(
            f"gather + matmul, {text}{', bias' if bias else ''}{'' if even else ', odd k'}",
            gather_gemm._gemm,
            dict.fromkeys(("right", "bias", "out"), tensor),
            cut | {"EVEN_K": even, "HAS_BIAS": bias, "right_n": 1},
            ("right", "bias", "out", "n", "right_k", *pages, *(("k",) if even else ())),
            matmul=True,
            messages=(True, False),
            **size,
        )
    for even in (True, False):
        yield Launch(
            f"matmul + scatter, {text}{'' if even else ', odd k'}",
            gemm_scatter._gemm,
            dict.fromkeys(("left", "right"), tensor),
            cut | {"EVEN_K": even, "left_k": 1, "right_n": 1},
            ("left", "right", "n", "right_k", *pages, *(("k", "left_m") if even else ())),
            matmul=True,
            messages=(False, True),
            **size,
        )
    yield Launch(
        f"reduce, {text}",
        gemm_scatter._reduce,
        {"out": tensor},
        {"WORLD": WORLD, "BLOCK_M": tiles.m, "BLOCK_N": tiles.n},
        ("out", "n", *pages),
        warps=tiles.warps,
        messages=(True, False),
    )


def _norms(text: str) -> Iterator[Launch]:
    from inductor_passes.kernels import reduce_norm

    tensor = f"*{text}"
    of_program = dict.fromkeys(("x", "residual", "weight", "hidden", "y"), tensor)
    for kernel, shot in ((reduce_norm._one_shot, "one shot"), (reduce_norm._two_shot, "two shots")):
        for columns in (4096, 8192):
            for quantise in (False, True):
                last = ("*fp8e4nv", "*fp32") if quantise else (tensor, tensor)
                yield Launch(
                    f"all-reduce + norm, {shot}, {columns} columns, {text}{', fp8' if quantise else ''}",
                    kernel,
                    of_program | dict(zip(("quantised", "scale"), last)),
                    {"WORLD": WORLD, "LANES": WORLD, "BLOCK": columns, "QUANTISE": quantise},
                    (*of_program, "columns", "data_page", "flag_page"),
                    warps=16 if columns >= 8192 else 8,
                    messages=(True, True),
                    oldest=89 if quantise else 80,
                )


def _unpacks() -> Iterator[Launch]:
    from inductor_passes.kernels import unpack

    for members in (2, unpack.MEMBERS):
        yield Launch(
            f"unpack, {members} members",
            unpack.take_apart,
            {
                "message": "*bf16",
                "outs": ("*bf16",) * members,
                **dict.fromkeys(("firsts", "widths"), ("i32",) * members),
            },
            {"block": unpack.BLOCK},
            ("message", "columns"),
            warps=4,
        )


def assembled(launch: Launch, generation: int) -> Assembled:
    """Compile a launch to machine code.

    Args:
        generation: compute capability, e.g. 90.

    Raises:
        RuntimeError: Triton or its assembler refuses.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = launch.kernel.arg_names
    signature = {name: _type(name, launch) for name in names}
    constants = {(names.index(name),): value for name, value in launch.constants.items()}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in launch.aligned}
    source = ASTSource(launch.kernel, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    done = triton.compile(source, target=GPUTarget("cuda", generation, 32), options=options)
    ptx, usage = done.asm["ptx"], _usage(done.asm["cubin"])
    waits = [at.start() for at in re.finditer(r"\.sys\.acquire|\.acquire\.sys", ptx)]
    releases = len(re.findall(r"\.sys\.release|\.release\.sys", ptx))
    cores = ptx.count(GENERATIONS[generation][1])
    return Assembled(
        launch.name,
        generation,
        usage["REG"],
        usage["LOCAL"] + usage["STACK"],
        done.metadata.shared,
        cores,
        len(waits),
        releases,
        waits[0] if waits else -1,
        ptx,
    )


def _type(name: str, launch: Launch) -> Any:
    if name in launch.constants:
        return "constexpr"
    if name in launch.pointers:
        return launch.pointers[name]
    return _POINTERS.get(name) or ("fp32" if name in _FLOATS else "i32")


def _usage(cubin: bytes) -> dict[str, int]:
    """What ``cuobjdump`` says of the registers and memory of the one function in a file of machine code."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    line = next(line for line in done.stdout.splitlines() if "REG:" in line)
    return {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", line)}


def _cells(one: Assembled, matmul: bool) -> list[str]:
    limit, _ = GENERATIONS[one.generation]
    cores = str(one.tensor_cores) if matmul else "-"
    counts = (str(one.registers), str(one.spilled), f"{one.shared / 1024:.1f}", str(limit >> 10))
    return [one.name, f"sm_{one.generation}", *counts, cores, str(one.waits), str(one.releases)]


def assemble(
    generation: Annotated[
        list[str] | None, typer.Option(help="Compute capabilities, e.g. 90; repeat it. Default: all known.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the page and its figures.")] = RESULTS,
) -> None:
    """Our kernels as machine code of GPUs that this machine lacks: registers, shared memory, tensor cores, flags."""
    if find_spec("triton") is None:
        typer.echo("skipped: Triton is not installed; nothing was written")
        return
    wanted = [int(one) for one in chosen(generation, [str(one) for one in GENERATIONS], "generation")]
    found = [
        (assembled(launch, one), launch.matmul) for one in wanted for launch in launches(one) if launch.oldest <= one
    ]
    rows = [_cells(one, matmul) for one, matmul in found]
    body = [
        f"Each kernel is compiled as the package launches it on {WORLD} ranks, by Triton and its assembler, for",
        f"{', '.join(DEVICES[one] for one in wanted)}. Nothing on this page was run on a GPU.",
        "",
        "`spilled`: bytes per thread that found no register. `of KiB`: what a block may have. `tensor cores`:",
        "instructions for them in the code. `waits`, `releases`: flags between ranks, with acquire and release at the",
        "scope of the system.",
        "",
        *markdown_table(HEADER, rows),
    ]
    data = [{key: value for key, value in asdict(one).items() if key not in ("ptx", "first_wait")} for one, _ in found]
    page = write("assembled", "Kernels, assembled for GPUs", body, data, folder=out)
    Console(width=120).print("\n".join(body), markup=False, highlight=False)
    typer.echo(f"wrote {page}")
