"""Inductor's entry point for a compilation beside a running program.

Inductor takes the state of the process's random number generators when it begins to compile and puts it back when it is
done. That winds back what a program draws meanwhile on another thread: it would draw the same numbers again. The
compilation itself draws none, unless it measures kernels on made-up inputs, so it need not do this.

What is run here is a second instance of Inductor's module in which the helper does nothing. Torch's own is untouched.

Inductor sets attributes of its classes while it lowers a graph, and puts back what it found: two threads that do it at
one time leave them wrong. Dynamo's lock keeps compilations apart that dynamo begins. That of a backward graph begins
when it runs for the first time, without that lock.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

_NAME = "torch._inductor.compile_fx"
_HELPER = "preserve_rng_state"
_UNKNOWN = "how this torch keeps random numbers apart from a compilation is not known"
#: How often it is looked whether the program's compilation is over, in seconds.
_LOOK_S = 0.05


@contextlib.contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@functools.cache
def compile_fx_inner_apart() -> Callable[..., Any] | str:
    """Inductor's ``compile_fx_inner`` that leaves random number generators alone; else why there is none."""
    spec = importlib.util.find_spec(_NAME)
    loader: Any = None if spec is None else spec.loader
    source = "" if loader is None else loader.get_source(_NAME) or ""
    used = {found.group(1) for found in re.finditer(rf"([\w.]+\.)?\b{_HELPER}\(", source)}
    if spec is None or used != {"dynamo_utils."} or "set_rng" in source:
        return _UNKNOWN
    module = types.ModuleType(_NAME)
    module.__package__, module.__file__, module.__loader__ = _NAME.rpartition(".")[0], spec.origin, loader
    try:
        exec(loader.get_code(_NAME), vars(module))
    except Exception as error:
        return f"{_UNKNOWN}: {type(error).__name__}: {error}"
    own = types.SimpleNamespace(**vars(module.dynamo_utils))
    setattr(own, _HELPER, _as_it_is)
    module.dynamo_utils = own  # type: ignore[attr-defined]
    found: Callable[..., Any] = module.compile_fx_inner
    return found


@contextlib.contextmanager
def compiling_alone(look: Callable[[], None]) -> Iterator[None]:
    """While no other thread of the program compiles; a thread whose graph comes to our passes meanwhile waits.

    Args:
        look: called while this waits; may raise.
    """
    lock = _compile_lock()
    while not lock.acquire(timeout=_LOOK_S) or _others_compile(lock):
        look()
    try:
        yield
    finally:
        lock.release()


def wait_for_compilation_beside() -> None:
    """The program compiles a graph: wait until none is being compiled on a thread of ours."""
    with _compile_lock():
        pass


def _others_compile(lock: Any) -> bool:
    """Whether a thread besides this one is in Inductor; then the lock is given back, and this has waited a moment."""
    own, codes = threading.get_ident(), _codes_of_compilations()
    for thread, frame in sys._current_frames().items():
        one: types.FrameType | None = None if thread == own else frame
        while one is not None:
            if one.f_code in codes:
                lock.release()
                time.sleep(_LOOK_S)
                return True
            one = one.f_back
    return False


@functools.cache
def _codes_of_compilations() -> frozenset[types.CodeType]:
    """Of the functions of Inductor that are entered for as long as a graph is lowered."""
    from torch._inductor import compile_fx

    own = getattr(getattr(compile_fx, "_InProcessFxCompile", None), "codegen_and_compile", None)
    found = [own, getattr(compile_fx, "fx_codegen_and_compile", None)]
    codes = [getattr(inspect.unwrap(one), "__code__", None) for one in found if one is not None]
    return frozenset(one for one in codes if one is not None)


def _compile_lock() -> Any:
    from torch._dynamo import convert_frame

    return convert_frame.compile_lock
