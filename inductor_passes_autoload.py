"""Entry point that torch runs at the end of ``import torch`` (group ``torch.backends``).

Does nothing unless ``INDUCTOR_PASSES`` is set, and imports nothing before it has looked. What goes wrong here is
logged: raised, it would make torch's import fail.
"""

import os


def autoload() -> None:
    """Switch the plugin on when ``INDUCTOR_PASSES=1``; no pass and nothing of Inductor is imported by that."""
    if os.environ.get("INDUCTOR_PASSES", "").strip() in ("", "0"):
        return
    try:
        from inductor_passes import switch

        switch.follow_environment()
    except Exception as error:
        import logging

        logging.getLogger("inductor_passes").warning("inductor_passes stays off: %s: %s", type(error).__name__, error)
