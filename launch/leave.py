"""The end of a process that has been one of several ranks."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def exit_process(code: int) -> NoReturn:
    """End at once, without the interpreter's teardown.

    Destroying a gloo group, or what holds it, may hang or abort: its destructor waits, with the interpreter's lock
    held, for a thread that needs the lock to release the last message's tensors (seen with torch 2.13). Call it when
    all ranks are done: after a barrier.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
