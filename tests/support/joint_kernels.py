"""Inductor's C++ kernels compiled together: a file for all that are needed at once, instead of one for each.

Compiling a small kernel takes three quarters of a second of a processor, nearly all of it the same for every file; a
model has sixty. Sources and flags are Inductor's own, so what a kernel computes is the same, and so is the code that
calls it. All ranks work like this (``ranks``), and tests of whole models; elsewhere Inductor is left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache, PyCodeCache
from torch._inductor.exc import CppCompileError
from torch._inductor.runtime.cache_dir_utils import cache_dir

#: What generated wrappers pass besides pointers.
_NUMBERS = {"int64_t": ctypes.c_int64, "long": ctypes.c_int64, "float": ctypes.c_float, "uintptr_t": ctypes.c_size_t}


class _Kernel:
    """A kernel that is compiled when one is called, with all others that were asked for until then."""

    def __init__(self, pending: dict[str, _Kernel], types: list[str], source: str) -> None:
        self.source = source
        self.name = f"kernel_{hashlib.sha256(source.encode()).hexdigest()[:24]}"
        self.function: Callable[..., Any] | None = None
        self._types = [t.replace("const ", "").strip() for t in types]
        self._pending = pending

    def __call__(self, *arguments: Any) -> None:
        if self.function is None:
            _compile(self._pending)
            assert self.function is not None
        self.function(*(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments))

    def load(self, library: str) -> None:
        """Take the function from a library that has it."""
        self.function = getattr(_opened(library), self.name)
        self.function.argtypes = [ctypes.c_void_p if t.endswith("*") else _NUMBERS[t] for t in self._types]  # type: ignore[attr-defined]
        self.function.restype = None  # type: ignore[attr-defined]


@functools.cache
def _opened(library: str) -> ctypes.CDLL:
    return ctypes.CDLL(library)


def _compile(pending: dict[str, _Kernel]) -> None:
    """Load all that is pending; what neither this process nor another has compiled yet, as one file."""
    wanted = list(pending.values())
    pending.clear()
    missing = []
    for kernel in wanted:
        if (known := _place(kernel)).exists():
            kernel.load(json.loads(known.read_text()))
        else:
            missing.append(kernel)
    if not missing:
        return
    try:
        _compile_together(missing)
    except CppCompileError:
        # Kernels from templates have functions of their own, which may have one name in two of them.
        if len(missing) == 1:
            raise
        for kernel in missing:
            _compile_together([kernel])


def _compile_together(missing: list[_Kernel]) -> None:
    """One file and one library."""
    # Ranks with equal kernels make equal files, whatever the order in which they came to need them.
    sources = [f"#define kernel {k.name}\n{k.source}\n#undef kernel\n" for k in sorted(missing, key=lambda k: k.name)]
    whole = "\n".join([*sources, 'extern "C" void kernel() {}\n'])
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(folder().parent)):
        entry = CppPythonBindingsCodeCache.load_pybinding([], whole)
    library = entry.__self__.__file__
    for kernel in missing:
        kernel.load(library)
        place = _place(kernel)
        # Never half written: another rank may look.
        temporary = place.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(library))
        temporary.replace(place)


def folder() -> Path:
    """Where it is kept which library has a kernel.

    One place for the whole run, wherever a test keeps torch's caches: a file is known by all of its source, so another
    place would have the same kernels, compiled once more.
    """
    return Path(os.environ.get("PASSES_TEST_CACHE") or cache_dir(), "joint_kernels")


def _place(kernel: _Kernel) -> Path:
    """The file that names the library of a kernel."""
    place = folder()
    place.mkdir(parents=True, exist_ok=True)
    return place / kernel.name


@contextlib.contextmanager
def kernels_together() -> Iterator[None]:
    """What is compiled inside has its C++ kernels compiled together, at the first call of one of them."""
    pending: dict[str, _Kernel] = {}

    def asked(self: AsyncCompile, types: list[str], source: str) -> _Kernel:
        kernel = _Kernel(pending, types, source)
        return pending.setdefault(kernel.name, kernel)

    with mock.patch.object(AsyncCompile, "cpp_pybinding", asked):
        try:
            yield
        finally:
            # Loaded wrappers are known by their text; equal ones elsewhere have kernels of Inductor's.
            PyCodeCache.cache_clear()
