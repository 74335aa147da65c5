"""Compiler passes for torch.compile that make distributed PyTorch graphs faster, verify the result and explain it.

    import inductor_passes
    step = torch.compile(model, options=inductor_passes.options())

See ``help(inductor_passes.options)``, ``help(inductor_passes.PassConfig)`` and the ``docs`` folder.
"""

from inductor_passes import config
from inductor_passes.config import ConfigError, PassConfig
from inductor_passes.plugin import compile_options as options
from inductor_passes.simple_fsdp import simple_fsdp

__version__ = "0.1.0"

__all__ = ["ConfigError", "PassConfig", "config", "options", "simple_fsdp"]
