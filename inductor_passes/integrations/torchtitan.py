"""torchtitan: a ``parallelize_fn`` that shards as before, then adopts and compiles the whole model.

    spec = dataclasses.replace(spec, parallelize_fn=adopting(spec.parallelize_fn))

torchtitan compiles block by block, so that no collective can overlap with another block. What is compiled here is the
model as one graph.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from inductor_passes.adoption import AdoptError
from inductor_passes.integrations.compiling import adopt_in_place


def adopting(parallelize_fn: Callable[..., nn.Module], **how: Any) -> Callable[..., nn.Module]:
    """A ``parallelize_fn`` whose result is adopted, and compiled as a whole where the configuration compiles the model.

    Args:
        parallelize_fn: of a ``ModelSpec``; called with everything but the compilation of the model's blocks.
        **how: arguments of ``torch.compile``; default: ``options=inductor_passes.options()``.

    Returns:
        A function with the same arguments. It raises AdoptError for pipeline parallelism, where the configuration does
        not compile the model, and for settings that only hooks can serve.
    """

    @functools.wraps(parallelize_fn)
    def parallelize(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        compile_config = kwargs.get("compile_config")
        if compile_config is None or not (compile_config.enable and "model" in compile_config.components):
            raise AdoptError("the model is not compiled: set compile.enable, with model among compile.components")
        if getattr(kwargs.get("parallel_dims"), "pp_enabled", False):
            raise AdoptError("pipeline_parallel_degree > 1: a schedule calls the parts, not the model; set it to 1")
        others = [one for one in compile_config.components if one != "model"]
        kwargs["compile_config"] = dataclasses.replace(compile_config, components=others)
        wrapped = parallelize_fn(model, *args, **kwargs)
        adopt_in_place(wrapped, None, how)
        return wrapped

    return parallelize
