"""Compiler passes for torch.compile that make distributed PyTorch graphs faster, verify the result and explain it.

    import inductor_passes
    step = torch.compile(model, options=inductor_passes.options())

See ``help(inductor_passes.options)``, ``help(inductor_passes.PassConfig)`` and the ``docs`` folder.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inductor_passes import config as config
    from inductor_passes.adoption import AdoptError as AdoptError
    from inductor_passes.adoption import adopt as adopt
    from inductor_passes.config import PassConfig as PassConfig
    from inductor_passes.emulation import link as emulated_link
    from inductor_passes.explanation import explain as explain
    from inductor_passes.plugin import compile_options as options
    from inductor_passes.redistribute.plan import plan_redistribution as plan_redistribution
    from inductor_passes.redistribute.prepare import prepare_groups as prepare_groups
    from inductor_passes.settings.errors import ConfigError as ConfigError
    from inductor_passes.simple_fsdp import add_feedback as add_feedback
    from inductor_passes.simple_fsdp import reset_feedback as reset_feedback
    from inductor_passes.simple_fsdp import simple_fsdp as simple_fsdp

__version__ = "0.1.0"

#: Public name -> where it lives. Looked up when used, so that the command line starts without importing torch.
_PUBLIC = {
    "AdoptError": ("inductor_passes.adoption", "AdoptError"),
    "ConfigError": ("inductor_passes.config", "ConfigError"),
    "PassConfig": ("inductor_passes.config", "PassConfig"),
    "add_feedback": ("inductor_passes.simple_fsdp", "add_feedback"),
    "adopt": ("inductor_passes.adoption", "adopt"),
    "config": ("inductor_passes.config", ""),
    "emulated_link": ("inductor_passes.emulation.link", ""),
    "explain": ("inductor_passes.explanation", "explain"),
    "options": ("inductor_passes.plugin", "compile_options"),
    "plan_redistribution": ("inductor_passes.redistribute.plan", "plan_redistribution"),
    "prepare_groups": ("inductor_passes.redistribute.prepare", "prepare_groups"),
    "reset_feedback": ("inductor_passes.simple_fsdp", "reset_feedback"),
    "simple_fsdp": ("inductor_passes.simple_fsdp", ""),
    "verify": ("inductor_passes.verify", ""),
}

__all__ = [
    "AdoptError",
    "ConfigError",
    "PassConfig",
    "add_feedback",
    "adopt",
    "config",
    "emulated_link",
    "explain",
    "options",
    "plan_redistribution",
    "prepare_groups",
    "reset_feedback",
    "simple_fsdp",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    found = importlib.import_module(module)
    value = getattr(found, attribute) if attribute else found
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
