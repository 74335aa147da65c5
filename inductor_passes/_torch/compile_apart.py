"""Inductor's entry point for a compilation beside a running program.

Inductor takes the state of the process's random number generators when it begins to compile and puts it back when it is
done. That winds back what a program draws meanwhile on another thread: it would draw the same numbers again. The
compilation itself draws none, unless it measures kernels on made-up inputs, so it need not do this.

What is run here is a second instance of Inductor's module in which the helper does nothing. Torch's own is untouched.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import types
from collections.abc import Callable
from typing import Any

_NAME = "torch._inductor.compile_fx"
_HELPER = "preserve_rng_state"
_UNKNOWN = "how this torch keeps random numbers apart from a compilation is not known"


@functools.cache
def compile_fx_inner_apart() -> Callable[..., Any] | str:
    """Inductor's ``compile_fx_inner`` that leaves random number generators alone; else why there is none."""
    try:
        return _made()
    except Exception as error:  # a torch without its source, or whose module cannot be run twice
        return f"{_UNKNOWN}: {type(error).__name__}: {error}"


def _made() -> Callable[..., Any] | str:
    spec: Any = importlib.util.find_spec(_NAME)
    source = spec.loader.get_source(_NAME)
    used = {found.group(1) for found in re.finditer(rf"([\w.]+\.)?\b{_HELPER}\(", source)}
    if used != {"dynamo_utils."} or "set_rng" in source:
        return _UNKNOWN
    module: Any = types.ModuleType(_NAME)
    module.__package__, module.__file__, module.__loader__ = _NAME.rpartition(".")[0], spec.origin, spec.loader
    exec(spec.loader.get_code(_NAME), vars(module))
    own = types.SimpleNamespace(**vars(module.dynamo_utils))
    setattr(own, _HELPER, contextlib.nullcontext)
    module.dynamo_utils = own
    found: Callable[..., Any] = module.compile_fx_inner
    return found
