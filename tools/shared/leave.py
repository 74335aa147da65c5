"""How a rank of a tool ends."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

import torch.distributed as dist


def leave(status: int = 0) -> NoReturn:
    """Destroy the process groups (unless something failed) and end the process, without finalising the interpreter.

    The default group outlives ``destroy_process_group`` with gloo's threads: ``torch.distributed.nn`` binds it as a
    default argument when it is imported after the group was made, and compiling keeps it even when not. A thread that
    lets go of the last collective's tensor while the interpreter is finalised aborts the process: "terminate called
    without an active exception" (https://github.com/pytorch/pytorch/issues/190489), the sooner the busier the machine.
    """
    # After a failure another rank may be gone, and a group that waits for it would keep this one.
    if status == 0:
        dist.destroy_process_group()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
