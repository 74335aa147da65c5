#!/usr/bin/env python3
"""Writes docs/configuration.md from the fields of ``PassConfig``.

``python tools/gen_config_docs.py`` writes the page; ``--check`` only says whether it is current.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from inductor_passes.config import ENV, FIELDS, PREFIX, allowed_values  # noqa: E402

PAGE = ROOT / "docs" / "configuration.md"

HEAD = f"""# Configuration

All settings, whichever way they come in. They end in one frozen `PassConfig`; an unknown name or a bad value raises an
error that names it and says what is allowed. Settings are part of the compile cache's key.

| way | form |
|---|---|
| options of one `torch.compile` | `torch.compile(model, options=inductor_passes.options(memory_budget="+5%"))` |
| backend with options | `torch.compile(model, backend="inductor_passes", options={{"{PREFIX}replay": "on"}})` |
| every later compilation | `inductor_passes.config.enabled = True`, `inductor_passes.config.memory_budget = "+5%"` |
| environment | `{ENV}=1` enables, `{ENV}_MEMORY_BUDGET=+5%` sets |

This page is generated from the fields of `PassConfig` by `tools/gen_config_docs.py`.
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
            print("docs/configuration.md is not current; run python tools/gen_config_docs.py")
        return int(text != current)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
