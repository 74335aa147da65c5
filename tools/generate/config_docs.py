#!/usr/bin/env python3
"""Writes docs/configuration.md from the fields of ``PassConfig``.

``tools/gen config_docs`` writes the page; ``--check`` only says whether it is current.
"""

from __future__ import annotations

import sys

from inductor_passes.config import ENV, FIELDS, PREFIX, allowed_values
from tools.shared.launch import ROOT

PAGE = ROOT / "docs" / "configuration.md"

HEAD = f"""# Configuration

After this page you know every setting and can set it in any of four ways. [Tuning](tuning.md) says which ones to try.

An unknown name or a bad value raises an error that names it and says what is allowed. Settings are part of the cache
key.

| way | form |
|---|---|
| options of one `torch.compile` | `torch.compile(model, options=inductor_passes.options(memory_budget="+5%"))` |
| backend with options | `torch.compile(model, backend="inductor_passes", options={{"{PREFIX}replay": "on"}})` |
| every later compilation | `inductor_passes.config.enabled = True`, `inductor_passes.config.memory_budget = "+5%"` |
| environment | `{ENV}=1` enables, `{ENV}_MEMORY_BUDGET=+5%` sets |

`{ENV}` takes 0 or 1 (also off/on, false/true, no/yes) and is read by `import torch`. Any other value leaves the passes
off: `import torch` succeeds and warns on stderr, and using this package raises an error. Programs that set
`TORCH_DEVICE_BACKEND_AUTOLOAD=0` must import `inductor_passes.config` for the variable to take effect.

The planner's inner loops are compiled when they are first needed. `INDUCTOR_PASSES_NATIVE=0` keeps them in Python; the
plans are the same ([how](inside/planner.md#the-compiled-core)).

Enabling costs almost no import time, because the passes are imported at the first compilation.

This page is generated from the fields of `PassConfig` by `tools/gen config_docs`.
"""


def page() -> str:
    """The page's text."""
    parts = [HEAD]
    for name, field in FIELDS.items():
        default = "none" if field.default is None else f'`"{field.default}"`'
        variable = "none (a function cannot come as text)" if name == "estimator" else f"`{ENV}_{name.upper()}`"
        parts.append(
            f"## `{name}`\n\n{field.metadata['doc']}\n\n"
            "| | |\n|---|---|\n"
            f"| default | {default} |\n"
            f"| allowed | {allowed_values(name)} |\n"
            f"| option | `{PREFIX}{name}` |\n"
            f"| environment | {variable} |\n"
        )
    return "\n".join(parts)


def main() -> int:
    text = page()
    current = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    if "--check" in sys.argv:
        if text != current:
            print("docs/configuration.md is not current; run tools/gen config_docs")
        return int(text != current)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
