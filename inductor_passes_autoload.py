"""Entry point that torch runs when it is imported (group ``torch.backends``).

Does nothing unless ``INDUCTOR_PASSES`` is set, and imports nothing before it has looked.
"""

import os


def autoload() -> None:
    """Enable the plugin when ``INDUCTOR_PASSES=1``."""
    value = os.environ.get("INDUCTOR_PASSES", "0").strip().lower()
    if value in ("", "0", "false", "off", "no"):
        return
    if value not in ("1", "true", "on", "yes"):
        raise ValueError(f"INDUCTOR_PASSES={value!r} is not allowed; expected 0 or 1")
    from inductor_passes import config

    config.enabled = True
